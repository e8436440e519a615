"""One client's connection: a stream, the task that reads it, the writes of its apps, and its end.

- Only the connection's task reads, recycles and closes. An app's task writes, and otherwise sets a
  flag and wakes the connection (``hang_up``), which is synchronous: a cancelled app cannot leave it
  half done.
- A write goes straight to the descriptor. Only what the kernel does not take at once waits, for as
  long as there is progress, and can be cancelled. A write cut in the middle ends the connection:
  nothing is sent on it again. Under TLS (``client_stream.py``) each write is encrypted first, and the
  rest holds likewise.
- A client that closes its sending side is gone. ``close`` and ``shutdown(SHUT_WR)`` look the same from
  here, and an answer that nobody wants costs an engine's time.
- What an app leaves unread of a long body is not read from the client either (that is the
  back-pressure), and so its leaving is not seen behind it. Apps should read bodies, or answer.
- A response is complete when the app has sent ``more_body=False``. An app that returns or raises
  before that has its connection closed without the end of the body, so that a cut stream cannot be
  taken for a whole one. (A client of HTTP/1.0 sees the difference under TLS alone, where only a whole
  answer ends with a close_notify.)
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIFramework,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    LifespanState,
    Scope,
)
from hypercorn.utils import parse_socket_addr

from .app_call import AppCall
from .client_stream import ClientStream, HandshakeFailed, PlainStream, TlsStream
from .http1 import DIRECT_BODY, Http1

__all__ = ["ClientConnection", "ConnectionLimits", "RunningRequests", "Shared"]

_logger = logging.getLogger(__name__)

LINGER_SIZE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """What one connection may take, and how many there may be. Seconds and bytes; raises ``ValueError`` for a
    negative one."""

    # Between two requests, and for the whole head of one. Client pools keep connections for 60 to
    # 75 s; a server that closes first makes them see a reset.
    keep_alive_timeout: float = 75.0
    # TLS: two round trips, with time for three lost packets in a row (sent again after 1, 2 and 4 s).
    handshake_timeout: float = 10.0
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
    linger_timeout: float = 5.0
    max_linger_bytes: int = 2**26
    # Beyond it a client gets a 503. None: what the system's limit on open files leaves room for.
    max_connections: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 0:
                raise ValueError(f"{field.name} is {value!r}; allowed: a number of at least 0")


class RunningRequests:
    """The requests that the app is at, on all connections."""

    def __init__(self) -> None:
        self._running: set[object] = set()
        self._ends = trio.lowlevel.ParkingLot()

    def add(self, request: object) -> None:
        """It begins."""
        self._running.add(request)

    def remove(self, request: object) -> None:
        """It has ended."""
        self._running.remove(request)
        self._ends.unpark_all()

    async def wait_for_those_of_now(self) -> None:
        """Returns when all have ended that are running now; those that come meanwhile are not waited for, or probes
        and refusals would never let it end. Cancel-safe."""
        begun = set(self._running)
        while begun & self._running:
            await self._ends.park()
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all connections of a server have in common."""

    app: ASGIFramework
    # As Hypercorn's code hands it round.
    wrapped_app: AppWrapper
    config: Config
    limits: ConnectionLimits
    context: WorkerContext
    lifespan_state: LifespanState
    running: RunningRequests


class ClientConnection:
    """One client's connection. ``run`` is its life; all else is called by its protocol and apps.

    ``gone``: nothing is sent any more, for the client has left, or a write was cut, or we close.
    """

    __slots__ = (
        "_app",
        "_backlog",
        "_call",
        "_idle_since",
        "_leaves",
        "_limits",
        "_nursery",
        "_protocol",
        "_reading",
        "_running",
        "_stream",
        "_writing",
        "gone",
        "is_free",
    )

    def __init__(
        self, shared: Shared, stream: trio.SocketStream, tls: ssl.SSLContext | None = None
    ) -> None:
        socket = stream.socket
        self._limits = shared.limits
        self._running = shared.running
        self._app = shared.app
        self._stream: ClientStream = PlainStream(stream) if tls is None else TlsStream(stream, tls)
        self._nursery: trio.Nursery
        self._reading = trio.CancelScope()
        # Made when a write has to wait, which in most connections none does.
        self._writing: trio.Lock | None = None
        # Of ``write_at_once``: what the kernel did not take.
        self._backlog = b""
        # A write may begin without a wait: see ``_note_free``. Never so under TLS, where encrypting passes checkpoints.
        self.is_free = not self._stream.is_tls
        # The latest.
        self._call: AppCall | None = None
        self._idle_since = trio.current_time()
        # Closes as soon as it has nothing to do.
        self._leaves = False
        self.gone = False
        self._protocol = Http1(
            shared.wrapped_app,
            shared.config,
            shared.context,
            self,
            ConnectionState(shared.lifespan_state.copy()),
            (
                parse_socket_addr(socket.family, socket.getpeername()),
                parse_socket_addr(socket.family, socket.getsockname()),
            ),
            is_tls=tls is not None,
        )

    async def run(self) -> None:
        """Serve until either side closes. An exception, of the protocol's say, ends only this one."""
        try:
            async with trio.open_nursery() as self._nursery:
                if await self._shake_hands():
                    await self._converse()
                await self._close(lingers=self._protocol.expects_input)
        except* Exception:
            _logger.exception("a connection failed and was closed")
        finally:
            try:
                if not self.gone:
                    await self._say_last_words()  # noqa: ASYNC102 - it waits for nothing
            except Exception:
                _logger.exception("a connection failed at its end")
            finally:
                self._stream.close()

    def expect_one_request(self) -> None:
        """Close after the next answer, or the one that is under way."""
        self._protocol.last = True

    def drain(self) -> None:
        """Close at once if idle, else after the running request, or the one that has begun to come."""
        self._leaves = True
        self.expect_one_request()
        self._reading.cancel("the server is draining")

    def stop(self) -> None:
        """Close at once if no request is running, else after it."""
        self.expect_one_request()
        if self._protocol.idle:
            self._protocol.closing = True
        self._reading.cancel("the server is stopping")

    # Reading: the connection's task

    async def _shake_hands(self) -> bool:
        """False: the connection is to be closed. Until then it is an idle one, that a drain closes."""
        self._reading.deadline = self._idle_since + self._limits.handshake_timeout
        try:
            with self._reading:
                await self._stream.shake_hands()
                self._idle_since = trio.current_time()
                return True
        except HandshakeFailed as failure:
            if not failure.left:
                _logger.info("a TLS handshake failed: %s", failure)
                await self._close(lingers=True)
        return False

    async def _converse(self) -> None:
        protocol = self._protocol
        while True:
            if protocol.answered and not self.gone:
                self._idle_since = trio.current_time()
                await protocol.start_next_request()
            if self.gone or protocol.closing:
                return
            data = await self._receive()
            if data is not None:
                await self._take(data)
            # In a stream the next of it may be a long time in coming.
            del data

    async def _take(self, data: bytes) -> None:
        if data:
            await self._protocol.feed(data)
            if self._protocol.read_ahead > self._limits.max_read_ahead:
                self._lose()
        else:
            if self._protocol.idle:
                await self._protocol.feed(b"")
            self._lose()

    async def _receive(self) -> bytes | None:
        """What the client sent, ``b""`` at its end, None when there may be something else to do."""
        idle = self._protocol.idle
        if self._leaves and idle and not self._protocol.read_ahead:
            return await self._receive_now()
        deadline = self._idle_since + self._limits.keep_alive_timeout if idle else float("inf")
        with trio.CancelScope(deadline=deadline) as self._reading:
            return await self._stream.receive()
        if trio.current_time() >= deadline:
            self._leaves = self._protocol.last = True
            self._protocol.closing = bool(self._protocol.read_ahead)
        return None

    async def _receive_now(self) -> bytes | None:
        """What came in the moment in which we were about to close: an answer is kinder than a reset."""
        try:
            return await self._stream.receive_now()
        except trio.WouldBlock:
            self._protocol.closing = True
            return None

    def hang_up(self) -> None:
        """The app's ``receive`` says ``http.disconnect`` from now on; the connection's task looks up."""
        if self._call is not None:
            self._call.close()
        self._reading.cancel("the response is complete, or the client has gone")

    def _lose(self) -> None:
        self.gone = True
        self._note_free()
        self.hang_up()

    async def _close(self, *, lingers: bool) -> None:
        """Close, in a way that lets the client read what it was sent. Apps may still be running.

        ``lingers``: the client is probably sending still.
        """
        was_gone = self.gone
        # Also of a connection that is gone: an app may have been started since.
        self._lose()
        if not was_gone:
            with suppress(OSError):
                await self._finish()
                if lingers:
                    with trio.move_on_after(self._limits.linger_timeout):
                        await self._linger()
        self._stream.close()

    async def _finish(self) -> None:
        """What was sent is all. A cut answer must not look whole: it ends without the word for that."""
        if self._protocol.is_cut or self._backlog or self._is_writing:
            self._stream.socket.shutdown(trio.socket.SHUT_WR)
        else:
            await self._stream.finish()

    async def _linger(self) -> None:
        dropped = 0
        while dropped <= self._limits.max_linger_bytes:
            # Under the stream, which has ended: nobody looks at what comes now.
            data = await self._stream.socket.recv(LINGER_SIZE)
            if not data:
                return
            dropped += len(data)

    async def _say_last_words(self) -> None:
        """What the kernel takes at once, in a connection that has failed or was cancelled."""
        words = self._protocol.last_words()
        with trio.CancelScope() as at_once, suppress(OSError):
            at_once.cancel("nobody waits any more")
            sent = self._stream.write_now(words)
            if sent < len(words):
                sent = await self._stream.write_some(memoryview(words))
            if sent == len(words):
                await self._finish()

    # Writing: whoever answers, mostly an app's task

    async def write(self, data: bytes) -> None:
        """Return when the kernel has all of ``data``, or when the connection is ``gone``.

        Usually passes no checkpoint. A cancel in the middle makes the connection ``gone``.
        """
        if self.gone:
            await trio.lowlevel.checkpoint()
            return
        try:
            sent = self._stream.write_now(data) if self.is_free else 0
        except OSError:
            self._lose()
            return
        if sent < len(data):
            await self._write_rest(data[sent:])

    def _note_free(self) -> None:
        """A plain attribute, and not a question that each token asks anew."""
        is_waiting = bool(self._backlog) or self._is_writing
        self.is_free = not (is_waiting or self.gone or self._stream.is_tls)

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and self._writing.locked()

    def write_at_once(self, data: bytes) -> None:
        """As ``write``, but synchronous: what the kernel does not take is written by a task of the connection's,
        before all that is written later. Raises nothing; a client that has left makes the connection ``gone``."""
        if self.gone:
            return
        try:
            sent = self._stream.write_now(data) if self.is_free else 0
        except OSError:
            self._lose()
            return
        if sent < len(data):
            if not self._backlog:
                self._nursery.start_soon(self._write_rest, b"")
            self._backlog += data[sent:]
            self._note_free()

    async def _write_rest(self, data: bytes) -> None:
        """The backlog, then ``data``, waiting for the client."""
        rest = memoryview(data)
        try:
            async with self._turn_to_write():
                rest = memoryview(self._take_backlog() + data)
                while rest and not self.gone:
                    with trio.fail_after(self._limits.write_timeout):
                        rest = rest[await self._stream.write_some(rest) :]
        except (OSError, trio.ClosedResourceError):
            pass  # what is left says it
        except trio.TooSlowError:
            _logger.info("closing a connection: its client reads nothing any more")
        finally:
            if rest or self._backlog:
                self._lose()

    def _take_backlog(self) -> bytes:
        backlog, self._backlog = self._backlog, b""
        return backlog

    @asynccontextmanager
    async def _turn_to_write(self) -> AsyncIterator[None]:
        """As the lock itself, but without a checkpoint where it is free: a cancel that comes then is none
        in the middle of an answer."""
        lock = self._writing = self._writing or trio.Lock()
        if lock.locked():
            await lock.acquire()
        else:
            lock.acquire_nowait()
        try:
            self._note_free()
            yield
        finally:
            lock.release()
            self._note_free()

    # Apps

    async def spawn_app(
        self,
        app: AppWrapper,  # noqa: ARG002 - ours, in Hypercorn's wrapping
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Hypercorn's way to start an app on a request; what it returns feeds the app's ``receive``."""
        call = self._call = AppCall(self._protocol, send, config.max_app_queue_size)
        if scope["type"] == "http":
            scope["extensions"][DIRECT_BODY] = {
                "body": self._protocol.direct_body(),
                "cancel_at_disconnect": call.cancel_at_disconnect,
            }
        self._nursery.start_soon(self._run_app, scope, call, name="app")
        return call.put

    async def _run_app(self, scope: Any, call: AppCall) -> None:
        self._running.add(call)
        try:
            await self._app(scope, call.receive, call.send)
        except* Exception:
            _logger.exception("the app failed on %s %s", scope["method"], scope["path"])
        finally:
            self._running.remove(call)
            call.close()
        await self._protocol.app_returned(call.stream)
