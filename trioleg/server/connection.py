"""``serve_connections``: an ASGI app over HTTP/1.1 on listeners that are open already.

It stands where Hypercorn's ``trio/run.py`` and ``trio/tcp_server.py`` would, for what a stream of tokens
needs: a client that leaves is noticed at once, whatever it sent before; a client that stops reading
holds up nobody, and no shutdown; a write costs one system call; no exception leaves its connection.

The tasks::

    serve_connections: nursery
    ├─ the app's lifespan
    └─ nursery of all connections
       ├─ nursery: one accepting task a listener (accepting.py)
       └─ connection (client_connection.py): reads, closes. Idle, it is the only task
          └─ nursery: the app, one task a request

``http1.py`` is the protocol between the two, ``client_stream.py`` what TLS changes under them. HTTP/2 and
WebSockets are not served.

The end has two steps, of which the first may be left out: a drain, in which what is running goes on, clients who
come are still answered, and every connection ends with its answer; and the shutdown.
"""

from __future__ import annotations

import copy
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app

from .accepting import Acceptor, Listener, TlsListener, connections_within_limits
from .client_connection import ClientConnection, ConnectionLimits, RunningRequests, Shared

__all__ = ["ConnectionLimits", "Connections", "TlsListener", "serve_connections"]


class Connections:
    """All connections of one server; what ``serve_connections`` starts with."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._live: set[ClientConnection] = set()
        self._is_draining = self._is_stopping = False
        most = shared.limits.max_connections
        self._most = connections_within_limits() if most is None else most

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_room(self) -> bool:
        """Whether there may be one more."""
        return len(self._live) < self._most

    def drain(self) -> None:
        """Idle connections close at once, all others with the answer that they are at, or that they bring a
        request for. It is for the app to refuse those. Synchronous, idempotent."""
        self._is_draining = True
        for connection in self._live:
            connection.drain()

    async def wait_idle(self) -> None:
        """Wait until the requests that are running now have ended. Cancel-safe."""
        await self._shared.running.wait_for_those_of_now()

    def stop(self) -> None:
        """As ``drain``, and what is only half a request is closed, too."""
        self.drain()
        self._is_stopping = True
        for connection in self._live:
            connection.stop()

    async def serve(self, stream: trio.SocketStream, tls: ssl.SSLContext | None = None) -> None:
        """One connection, from here to its end."""
        try:
            connection = ClientConnection(self._shared, stream, tls)
        except OSError:
            stream.socket.close()
            return  # the client left before we could ask for its address
        self._live.add(connection)
        if self._is_stopping:
            connection.drain()
        elif self._is_draining:
            connection.expect_one_request()
        try:
            await connection.run()
        finally:
            self._live.discard(connection)


async def serve_connections(
    app: ASGIFramework,
    config: Config,
    listeners: Sequence[Listener],
    *,
    shutdown: trio.Event,
    limits: ConnectionLimits | None = None,
    task_status: trio.TaskStatus[Connections] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI app over HTTP/1.1 on open listeners until ``shutdown`` is set; starts with ``Connections``.

    Of ``config`` Hypercorn's protocol code uses headers, log and lifespan timeouts; its limits are
    replaced by ``limits``, and its addresses are not looked at.

    The app's lifespan starts first, then this. After ``shutdown`` the listeners
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
    lifespan = Lifespan(shared.wrapped_app, shared.config, shared.lifespan_state)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            # Closed: the app has left its lifespan without a word, and so has none.
            with suppress(trio.ClosedResourceError):
                await lifespan.wait_for_startup()
            async with _accepting(listeners, shared) as connections:
                task_status.started(connections)
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
        app=app,
        wrapped_app=wrap_app(app, 0, "asgi"),
        config=config,
        limits=limits,
        context=WorkerContext(None),
        lifespan_state={},
        running=RunningRequests(),
    )


@asynccontextmanager
async def _accepting(listeners: Sequence[Listener], shared: Shared) -> AsyncIterator[Connections]:
    """Accept while the body runs, then end what is open, at the latest by cancelling it."""
    connections = Connections(shared)
    acceptor = Acceptor(connections.serve, lambda: connections.has_room)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(acceptor.run, listener, nursery)
            yield connections
            accepting.cancel_scope.cancel("the server is stopping")
        connections.stop()
        nursery.cancel_scope.deadline = trio.current_time() + shared.limits.graceful_timeout
