"""``serve``: the server inside your own program.

It listens, runs the connections, and ends in order. When it is told to shut down it drains: new requests are
refused, while it goes on listening, so that clients and probes hear why; running ones have their time; then live
streams are ended (each client gets its last frames), and the connections close. When the engine has died there
is nothing to wait for. The engine is not its business: ``open_llm`` wraps it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import trio
from hypercorn import Config

from ..config import ServerConfig
from ..runtime.llm import LLM
from ..runtime.unwrap import unwrapped
from .accepting import Listener, TlsListener
from .app import create_app
from .binding import BACKLOG, Binding, bind_all, bind_sockets
from .connection import ConnectionLimits, Connections, serve_connections
from .hypercorn_config import HypercornSettings

__all__ = ["Address", "BoundServer", "bind_sockets", "serve"]

_log = logging.getLogger("trioleg.server")

_CAUSE = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Address:
    """Where clients find the server. ``host``: as it was asked for, "" for a Unix socket, whose file ``path`` is.
    ``port``: the one that was really taken. ``root_path``: what every path begins with."""

    host: str
    port: int
    path: str | None = None
    is_tls: bool = False
    root_path: str = ""

    @property
    def url(self) -> str:
        """For a Unix socket, what a client that knows the file asks for."""
        scheme = "https" if self.is_tls else "http"
        if self.path is not None:
            return f"{scheme}://localhost{self.root_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.root_path}"


@dataclass(frozen=True, slots=True)
class BoundServer:
    """Where the server listens: ``host``, ``port`` and ``url`` are of the first of ``addresses``."""

    addresses: tuple[Address, ...]

    @property
    def host(self) -> str:
        return self.addresses[0].host

    @property
    def port(self) -> int:
        return self.addresses[0].port

    @property
    def url(self) -> str:
        return self.addresses[0].url


async def serve(  # noqa: ASYNC128 - ``_serve`` does
    llm: LLM,
    config: ServerConfig | None = None,
    *,
    hypercorn_config: Config | HypercornSettings | None = None,
    sockets: Sequence[trio.socket.SocketType | Binding] | None = None,
    shutdown: trio.Event | None = None,
    task_status: trio.TaskStatus[BoundServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``llm`` until ``shutdown`` is set or the engine has died; starts with a ``BoundServer``.

    After ``shutdown`` requests that are running, your program's own among them, may go on for ``config.drain_timeout``
    seconds; ``LLM.shut_down`` ends that wait, and them. New ones are refused with a 503, idle connections closed. The
    LLM takes no more requests afterwards.
    After the engine's death it goes on for ``config.engine_death_linger`` seconds, answering 503, so
    that health probes see why. ``hypercorn_config``: what was set in it goes before ``config`` (its ``bind`` before
    host and port, say); its defaults do not count. ``sockets``: from ``bind_sockets`` or ``bind_all``, in place of
    all addresses; closed here. Under TLS all are spoken to that do not say otherwise themselves. A cancel ends
    everything at once, without last frames. Raises ``TriolegError`` if an address cannot be had, and
    ``InvalidRequestError`` for a setting that is not served.
    """
    config = config or ServerConfig()
    shutdown = trio.Event() if shutdown is None else shutdown
    with ExitStack() as at_the_end:
        for given in sockets or ():
            at_the_end.callback(given.close)
        settings = _settings(hypercorn_config)
        at_the_end.enter_context(settings.logging())
        if sockets is None:
            sockets = await bind_all(config, settings)
        bindings = [_binding(one, config, settings) for one in sockets]
        for one in bindings:
            at_the_end.callback(one.close)
        await _serve(llm, config, settings, bindings, shutdown, task_status.started)


def _settings(given: Config | HypercornSettings | None) -> HypercornSettings:
    return given if isinstance(given, HypercornSettings) else HypercornSettings.of(given)


def _binding(
    one: trio.socket.SocketType | Binding, config: ServerConfig, settings: HypercornSettings
) -> Binding:
    if isinstance(one, Binding):
        return one
    return replace(Binding.of(one), host=config.host, is_tls=settings.tls is not None)


async def _serve(
    llm: LLM,
    config: ServerConfig,
    settings: HypercornSettings,
    bindings: Sequence[Binding],
    shutdown: trio.Event,
    started: Callable[[BoundServer], None],
) -> None:
    # A name with several addresses is one address to clients.
    bound = BoundServer(tuple(dict.fromkeys(_address(one, settings) for one in bindings)))
    closing = trio.Event()
    limits = ConnectionLimits(
        keep_alive_timeout=config.keep_alive_timeout,
        graceful_timeout=config.graceful_timeout,
        write_timeout=config.write_timeout,
        max_connections=config.max_connections,
    )
    run = partial(
        serve_connections,
        create_app(llm, config),
        settings.protocol,
        [_listener(one, settings) for one in bindings],
        shutdown=closing,
        limits=replace(limits, **settings.limits),
    )
    with unwrapped():
        async with trio.open_nursery() as watchers:
            async with trio.open_nursery() as server:
                connections: Connections = await server.start(run)
                drain = partial(_drain, llm, connections, config.drain_timeout)
                watchers.start_soon(_close_when_told, shutdown, drain, closing)
                watchers.start_soon(
                    _close_after_death, llm, config.engine_death_linger, shutdown, closing
                )
                started(bound)
            watchers.cancel_scope.cancel(reason="the server has closed")


def _address(one: Binding, settings: HypercornSettings) -> Address:
    root_path = settings.protocol.root_path
    return Address(one.host, one.port or 0, one.path, one.is_tls, root_path)


def _listener(one: Binding, settings: HypercornSettings) -> Listener:
    one.socket.listen(settings.backlog or BACKLOG)
    listener = trio.SocketListener(one.socket)
    if settings.tls is None or not one.is_tls:
        return listener
    return TlsListener(listener, settings.tls)


async def _close_when_told(
    shutdown: trio.Event, drain: Callable[[], Awaitable[None]], closing: trio.Event
) -> None:
    await shutdown.wait()
    await drain()
    closing.set()


async def _drain(llm: LLM, connections: Connections, seconds: float) -> None:
    """Refuse what comes, wait for what is running, and end the rest."""
    llm.drain(_CAUSE)
    connections.drain()
    running = llm.statistics().num_inflight_requests
    if running:
        _log.info("draining: up to %g s for what is running (requests: %d)", seconds, running)
    with trio.move_on_after(seconds):
        # Those of HTTP, until their answers are out; then the program's own.
        await connections.wait_idle()
        await llm.wait_idle()
    llm.shut_down(_CAUSE)


async def _close_after_death(
    llm: LLM, linger: float, shutdown: trio.Event, closing: trio.Event
) -> None:
    try:
        await llm.wait_dead()
    except trio.ClosedResourceError:
        # The block of the LLM has been left before the server has ended: there is nothing to serve.
        closing.set()
        return
    if not shutdown.is_set():
        _log.warning("the server answers 503 for %g s, then it ends", linger)
    await trio.sleep(linger)
    closing.set()
