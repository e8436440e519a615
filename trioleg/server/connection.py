"""``serve_connections``: an ASGI app over HTTP/1.1 on listeners that are open already.

It stands where Hypercorn's ``trio/run.py`` and ``trio/tcp_server.py`` would, for what a stream of tokens
needs: a client that leaves is noticed at once, whatever it sent before; a client that stops reading
holds up nobody, and no shutdown; a write costs one system call; no exception leaves its connection.

The tasks::

    serve_connections: nursery
    ├─ the app's lifespan
    └─ nursery of all connections
       ├─ nursery: one accepting task a listener
       └─ connection (client_connection.py): reads, closes. Idle, it is the only task
          └─ nursery: the app, one task a request

``http1.py`` is the protocol between the two. HTTP/2, WebSockets and TLS are not served.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app

from .client_connection import ClientConnection, ConnectionLimits, Shared

__all__ = ["ConnectionLimits", "serve_connections"]


async def serve_connections(
    app: ASGIFramework,
    config: Config,
    listeners: Sequence[trio.SocketListener],
    *,
    shutdown: trio.Event,
    limits: ConnectionLimits | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI app over HTTP/1.1 on open listeners until ``shutdown`` is set.

    Of ``config`` Hypercorn's protocol code uses headers, log and lifespan timeouts; its limits are
    replaced by ``limits``, and its addresses are not looked at.

    The app's lifespan starts first, then ``task_status.started()``. After ``shutdown`` the listeners
    close, idle connections close at once, running requests have ``limits.graceful_timeout``; then the
    rest is cancelled: a request without an answer gets a 500, a running stream is cut. The lifespan's
    shutdown comes last. An app that shields itself from the cancel holds this function up, nothing
    else does.

    To the app: ``send`` returns when the kernel has the bytes. Once the client has gone, or a write was
    cut (by the app's own cancel, or by ``limits.write_timeout``), ``receive`` says ``http.disconnect``
    and ``send`` does nothing. Returning before ``more_body=False`` closes the connection without the
    end of the body: the way to end a stream that must not look complete.

    Resources: the listeners are closed in any case. Cancel-safe: a cancel closes everything at once.
    Raises, in an exception group: ``LifespanFailureError`` or ``LifespanTimeoutError`` (Hypercorn's)
    when the app does not start or stop, ``OSError`` when a listener breaks.
    """
    shared = _share(app, config, limits or ConnectionLimits())
    lifespan = Lifespan(shared.app, shared.config, shared.lifespan_state)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            # Closed: the app has left its lifespan without a word, and so has none.
            with suppress(trio.ClosedResourceError):
                await lifespan.wait_for_startup()
            async with _accepting(listeners, shared):
                task_status.started()
                await shutdown.wait()
            with suppress(trio.ClosedResourceError):
                await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel("the server has stopped")
    finally:
        for listener in listeners:
            listener.socket.close()


def _share(app: ASGIFramework, config: Config, limits: ConnectionLimits) -> Shared:
    config = copy.copy(config)
    config.h11_max_incomplete_size = limits.max_head_bytes
    # Every request gets a fresh h11.Connection: there is nothing that would pile up.
    config.keep_alive_max_requests = sys.maxsize
    return Shared(
        app=wrap_app(app, 0, "asgi"),
        config=config,
        limits=limits,
        context=WorkerContext(None),
        lifespan_state={},
    )


@asynccontextmanager
async def _accepting(
    listeners: Sequence[trio.SocketListener], shared: Shared
) -> AsyncIterator[None]:
    """Accept while the body runs, then end what is open, at the latest by cancelling it."""
    live: set[ClientConnection] = set()
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            serve = partial(trio.serve_listeners, handler_nursery=connections)
            await accepting.start(serve, partial(_serve_stream, shared, live), list(listeners))
            yield
            accepting.cancel_scope.cancel("the server is stopping")
        for connection in live:
            connection.stop()
        connections.cancel_scope.deadline = trio.current_time() + shared.limits.graceful_timeout


async def _serve_stream(
    shared: Shared, live: set[ClientConnection], stream: trio.SocketStream
) -> None:
    try:
        connection = ClientConnection(shared, stream)
    except OSError:
        return  # the client left before we could ask for its address
    live.add(connection)
    try:
        await connection.run()
    finally:
        live.discard(connection)
