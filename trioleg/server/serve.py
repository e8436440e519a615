"""``serve``: the server inside your own program.

It listens, runs the connections, and ends in order: when it is told to shut down, or when the engine
has died, new requests are refused, live streams are ended (each client gets its last frames), and
then the connections close. The engine is not its business: ``open_llm`` wraps it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import trio
from hypercorn import Config

from ..config import ServerConfig
from ..errors import TriolegError
from ..runtime.llm import LLM
from ..runtime.unwrap import unwrapped
from .app import create_app
from .connection import ConnectionLimits, serve_connections

__all__ = ["BoundServer", "bind_sockets", "serve"]

_log = logging.getLogger("trioleg.server")

# Linux takes less if net.core.somaxconn says so. A burst of clients should wait, not be refused.
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class BoundServer:
    """Where the server listens, with the port that was really taken."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


async def bind_sockets(config: ServerConfig) -> list[trio.socket.SocketType]:
    """Take the address before anything slow starts; ``serve`` listens on it. Until then connections
    are refused. The caller closes them, unless ``serve`` has got them.

    Raises ``TriolegError`` if the address cannot be had. Cancel-safe: nothing is left open then.
    """
    sockets: list[trio.socket.SocketType] = []
    port = config.port
    with ExitStack() as unless_all_are_bound:
        try:
            found = await trio.socket.getaddrinfo(
                config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, proto, _, address in found:
                one = unless_all_are_bound.enter_context(trio.socket.socket(family, kind, proto))
                sockets.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                await one.bind((address[0], port, *address[2:]))
                # A name with several addresses gets one port on all of them.
                port = one.getsockname()[1]
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise TriolegError(f"cannot listen on {where}: {error.strerror or error}") from None
        unless_all_are_bound.pop_all()
    return sockets


async def serve(
    llm: LLM,
    config: ServerConfig | None = None,
    *,
    sockets: Sequence[trio.socket.SocketType] | None = None,
    shutdown: trio.Event | None = None,
    task_status: trio.TaskStatus[BoundServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``llm`` until ``shutdown`` is set or the engine has died; starts with a ``BoundServer``.

    After the engine's death it goes on for ``config.engine_death_linger`` seconds, answering 503, so
    that health probes see why. ``sockets``: from ``bind_sockets``; closed here. A cancel ends
    everything at once, without last frames. Raises ``TriolegError`` if the address cannot be had.
    """
    config = config or ServerConfig()
    shutdown = trio.Event() if shutdown is None else shutdown
    sockets = await bind_sockets(config) if sockets is None else sockets
    listeners = [_listener(one) for one in sockets]
    host, port = config.host, sockets[0].getsockname()[1]
    closing = trio.Event()
    limits = ConnectionLimits(
        keep_alive_timeout=config.keep_alive_timeout,
        graceful_timeout=config.graceful_timeout,
        write_timeout=config.write_timeout,
    )
    run = partial(
        serve_connections,
        create_app(llm, config),
        Config(),
        listeners,
        shutdown=closing,
        limits=limits,
    )
    with unwrapped():
        async with trio.open_nursery() as watchers:
            watchers.start_soon(_close_when_told, llm, shutdown, closing)
            watchers.start_soon(_close_after_death, llm, config.engine_death_linger, closing)
            async with trio.open_nursery() as connections:
                await connections.start(run)
                task_status.started(BoundServer(host, port))
            watchers.cancel_scope.cancel(reason="the server has closed")


def _listener(one: trio.socket.SocketType) -> trio.SocketListener:
    one.listen(_BACKLOG)
    return trio.SocketListener(one)


async def _close_when_told(llm: LLM, shutdown: trio.Event, closing: trio.Event) -> None:
    await shutdown.wait()
    llm.shut_down("the server is shutting down")
    closing.set()


async def _close_after_death(llm: LLM, linger: float, closing: trio.Event) -> None:
    try:
        await llm.wait_dead()
    except trio.ClosedResourceError:
        # The block of the LLM has been left before the server has ended: there is nothing to serve.
        closing.set()
        return
    _log.warning("the server answers 503 for %g s, then it ends", linger)
    await trio.sleep(linger)
    closing.set()
