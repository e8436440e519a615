"""One client's connection: a socket, the task that reads it, the writes of its apps, and its end.

- Only the connection's task reads, recycles and closes. An app's task writes, and otherwise sets a
  flag and wakes the connection (``hang_up``), which is synchronous: a cancelled app cannot leave it
  half done.
- A write goes straight to the descriptor. Only what the kernel does not take at once waits, for as
  long as there is progress, and can be cancelled. A write cut in the middle ends the connection:
  nothing is sent on it again.
- A client that closes its sending side is gone. ``close`` and ``shutdown(SHUT_WR)`` look the same from
  here, and an answer that nobody wants costs an engine's time.
- What an app leaves unread of a long body is not read from the client either (that is the
  back-pressure), and so its leaving is not seen behind it. Apps should read bodies, or answer.
- A response is complete when the app has sent ``more_body=False``. An app that returns or raises
  before that has its connection closed without the end of the body, so that a cut stream cannot be
  taken for a whole one. (A client of HTTP/1.0 has no way to see the difference.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    LifespanState,
    Scope,
)
from hypercorn.utils import parse_socket_addr

from .http1 import Http1

__all__ = ["ClientConnection", "ConnectionLimits", "Shared"]

_logger = logging.getLogger(__name__)

RECEIVE_SIZE = 2**16  # Hypercorn's and Trio's own choice


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """What one connection may take. Seconds and bytes; raises ``ValueError`` for a negative one."""

    # Between two requests, and for the whole head of one. Client pools keep connections for 60 to
    # 75 s; a server that closes first makes them see a reset.
    keep_alive_timeout: float = 75.0
    # After the shutdown is asked for: requests that are still running are then cut.
    graceful_timeout: float = 3.0
    # One write without any progress: the client has stopped reading.
    write_timeout: float = 30.0
    # Read while a request is running. Beyond what is read and what the kernel holds, the end of the
    # client's input cannot be seen; a client that pipelines a megabyte is no client of ours.
    max_read_ahead: int = 2**20
    # Request line and headers. h11's and Hypercorn's 16 KiB are one long cookie; Node allows 80 KiB.
    max_head_bytes: int = 2**16
    # After an early answer the rest of a request's body is read and dropped, for closing over unread
    # input resets the connection, and the answer may be lost. nginx lingers as long.
    drain_timeout: float = 5.0
    max_drain_bytes: int = 2**26

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"{field.name} is {value!r}; allowed: a number of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all connections of a server have in common."""

    app: AppWrapper
    config: Config
    limits: ConnectionLimits
    context: WorkerContext
    lifespan_state: LifespanState


class ClientConnection:
    """One client's connection. ``run`` is its life; all else is called by its protocol and apps.

    ``gone``: nothing is sent any more, for the client has left, or a write was cut, or we close.
    """

    def __init__(self, shared: Shared, stream: trio.SocketStream) -> None:
        socket = stream.socket
        self._limits = shared.limits
        self._stream = stream
        self._socket = socket
        self._nursery: trio.Nursery
        self._reading = trio.CancelScope()
        self._writing = trio.Lock()
        self._to_app: trio.MemorySendChannel[ASGIReceiveEvent] | None = None
        self._idle_since = trio.current_time()
        self.gone = False
        self._protocol = Http1(
            shared.app,
            shared.config,
            shared.context,
            self,
            ConnectionState(shared.lifespan_state.copy()),
            (
                parse_socket_addr(socket.family, socket.getpeername()),
                parse_socket_addr(socket.family, socket.getsockname()),
            ),
        )

    async def run(self) -> None:
        """Serve until either side closes. An exception, of the protocol's say, ends only this one."""
        try:
            async with trio.open_nursery() as self._nursery:
                await self._converse()
                await self._close()
        except* Exception:
            _logger.exception("a connection failed and was closed")
        finally:
            if not self.gone:
                self._write_now(self._protocol.last_words())
            self._socket.close()

    def stop(self) -> None:
        """Close at once if idle, else after the running request."""
        self._protocol.last = True
        self._reading.cancel("the server is stopping")

    # Reading: the connection's task

    async def _converse(self) -> None:
        protocol = self._protocol
        while True:
            if protocol.answered:
                self._idle_since = trio.current_time()
                await protocol.start_next_request()
            if self.gone or protocol.closing or (protocol.last and protocol.idle):
                return
            data = await self._receive()
            if data:
                await protocol.feed(data)
                if protocol.read_ahead > self._limits.max_read_ahead:
                    self._lose()
            elif data is not None:
                if protocol.idle:
                    await protocol.feed(b"")
                self._lose()

    async def _receive(self) -> bytes | None:
        """What the client sent, ``b""`` at its end, None when there may be something else to do."""
        idle = self._protocol.idle
        deadline = self._idle_since + self._limits.keep_alive_timeout if idle else float("inf")
        with trio.CancelScope(deadline=deadline) as self._reading:
            try:
                return await self._stream.receive_some(RECEIVE_SIZE)
            except trio.BrokenResourceError:
                return b""
        if trio.current_time() >= deadline:
            self._protocol.closing = True
        return None

    def hang_up(self) -> None:
        """The app's ``receive`` says ``http.disconnect`` from now on; the connection's task looks up."""
        if self._to_app is not None:
            self._to_app.close()
        self._reading.cancel("the response is complete, or the client has gone")

    def _lose(self) -> None:
        self.gone = True
        self.hang_up()

    async def _close(self) -> None:
        """Close, in a way that lets the client read what it was sent. Apps may still be running."""
        drain = self._protocol.expects_input and not self.gone
        self._lose()
        if drain:
            with suppress(OSError, trio.BrokenResourceError):
                self._socket.shutdown(trio.socket.SHUT_WR)
                with trio.move_on_after(self._limits.drain_timeout):
                    await self._drain()
        self._socket.close()

    async def _drain(self) -> None:
        drained = 0
        while drained <= self._limits.max_drain_bytes:
            data = await self._stream.receive_some(RECEIVE_SIZE)
            if not data:
                return
            drained += len(data)

    # Writing: whoever answers, mostly an app's task

    async def write(self, data: bytes) -> None:
        """Return when the kernel has all of ``data``, or when the connection is ``gone``.

        Usually passes no checkpoint. A cancel in the middle makes the connection ``gone``.
        """
        if self.gone:
            await trio.lowlevel.checkpoint()
            return
        sent = 0 if self._writing.locked() else self._write_now(data)
        if sent < len(data):
            await self._write_rest(memoryview(data)[sent:])

    def _write_now(self, data: bytes) -> int:
        """How many bytes the kernel took. A closed socket's descriptor is -1, never another's."""
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._lose()
            return 0

    async def _write_rest(self, rest: memoryview) -> None:
        try:
            async with self._writing:
                while rest and not self.gone:
                    with trio.fail_after(self._limits.write_timeout):
                        rest = rest[await self._socket.send(rest) :]
        except (OSError, trio.ClosedResourceError):
            pass  # what is left says it
        except trio.TooSlowError:
            _logger.info("closing a connection: its client reads nothing any more")
        finally:
            if rest:
                self._lose()

    # Apps

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Hypercorn's way to start an app on a request; what it returns feeds the app's ``receive``."""
        to_app, from_client = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)
        self._to_app = to_app
        stream = self._protocol.stream
        self._nursery.start_soon(self._run_app, app, scope, from_client, send, stream)
        return partial(self._put, to_app)

    async def _put(
        self, to_app: trio.MemorySendChannel[ASGIReceiveEvent], message: ASGIReceiveEvent
    ) -> None:
        if message["type"] == "http.disconnect":
            to_app.close()
            return
        # The app has returned, or the answer is out: nobody wants the rest of the body.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await to_app.send(message)

    async def _run_app(
        self,
        app: AppWrapper,
        scope: Any,
        from_client: trio.MemoryReceiveChannel[ASGIReceiveEvent],
        app_send: Callable[[ASGISendEvent], Awaitable[None]],
        stream: Any,
    ) -> None:
        async def receive() -> ASGIReceiveEvent:
            try:
                return await from_client.receive()
            except trio.EndOfChannel:
                # An app that asks in a loop must not keep the others from running.
                await trio.lowlevel.checkpoint()
                return {"type": "http.disconnect"}

        async def send(message: ASGISendEvent) -> None:
            if self.gone:
                await trio.lowlevel.checkpoint()
            else:
                await app_send(message)

        try:
            with from_client:
                await app(scope, receive, send, trio.to_thread.run_sync, trio.from_thread.run)
        except* Exception:
            _logger.exception("the app failed on %s %s", scope["method"], scope["path"])
        await self._protocol.app_returned(stream)
