"""HTTP/1.1 on one connection: Hypercorn's ``H11Protocol``, with the parts replaced that could not stay.

Hypercorn reads requests, builds ASGI scopes, and turns an app's messages into HTTP events. What is
ours here:

- what follows a request is read ahead instead of stopping the reader, so that the client's leaving
  is seen (h11's PAUSED never reaches Hypercorn), and stray line ends between requests are skipped;
- chunks of a stream are framed by hand (measured: 0.2 µs; as an ``h11.Data`` event 2.5 µs);
- HTTP/2, WebSockets and CONNECT are refused, ``Upgrade: h2c`` is ignored;
- what no app gets to see (``refusals.py``) is answered in the form of the API's other errors; and every
  response names this server, since Hypercorn is not who answers;
- the end of a response only sets ``answered``. What comes next is for the connection's own task:
  Hypercorn's Trio worker decides it in the app's task, which quart-trio cancels at that very moment.

Rules of this file: no sockets, no tasks. Whoever owns the protocol (``Owner``) does both. Of Hypercorn's
internals it uses those that ``tests/server/test_connection_pins.py`` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from http.client import responses
from typing import Any, Protocol, TypeVar

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import AppWrapper, ConnectionState, H11SendableEvent, WorkerContext
from hypercorn.utils import suppress_body

from .protocol import error_body
from .refusals import RequestRefused, check_request, unreadable

__all__ = ["DIRECT_BODY", "SERVER", "DirectBody", "Http1", "Owner"]

# A write that succeeds at once passes no checkpoint; every 16th does, so that an app whose client
# reads as fast as it writes cannot keep all others from running.
WRITES_PER_CHECKPOINT = 16

# Between requests an empty line is noise that RFC 9112 (2.2) asks servers to skip.
LINE_END = b"\r\n"

# Whom the header names: behind a proxy one wants to know whose 503 it is. No version, which would
# only tell strangers what to try.
SERVER = b"trioleg"

# In the scope's extensions, where the answer may be written through a ``DirectBody``: {"body": that,
# "cancel_at_disconnect": see ``AppCall``}.
DIRECT_BODY = "trioleg.direct_body"

_Head = TypeVar("_Head", h11.Response, h11.InformationalResponse)

# The client has sent all of its request, or nothing of the next one.
_NOTHING_TO_COME = frozenset({h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED})


class Owner(Protocol):
    """The connection, as its protocol sees it."""

    async def write(self, data: bytes) -> None:
        """Return when the kernel has the bytes, or when nobody will ever read them."""

    # ``write_at_once`` may be called: nothing is being written, and nobody has left.
    is_free: bool
    # Nothing is sent any more.
    gone: bool

    def write_at_once(self, data: bytes) -> None:
        """Give the kernel the bytes. What it does not take now follows before all that is written later."""

    def hang_up(self) -> None:
        """Tell the running app ``http.disconnect``, and wake the connection's own task."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Any, send: Callable[..., Awaitable[None]]
    ) -> Callable[..., Awaitable[None]]:
        """Start the app on one request, and return how to put messages into its ``receive``."""


class _H11Connection(h11.Connection):
    """h11 that keeps what follows a request until the next cycle, instead of saying PAUSED, and
    remembers what it disliked, of which Hypercorn passes the status on."""

    complaint = ""

    def next_event(self) -> Any:
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA  # more input from a client that said it was the last is no error
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.complaint = str(error)
            raise
        return h11.NEED_DATA if event is h11.PAUSED else event

    @property
    def unread(self) -> bytes:
        return self.trailing_data[0]

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        """Hypercorn would ask for the body before the app has seen the head: see ``Http1.ask_for_body``."""
        return False

    @property
    def waits_to_be_asked(self) -> bool:
        return self.client_is_waiting_for_100_continue and self.our_state is h11.SEND_RESPONSE


class Http1(H11Protocol):
    """The protocol of one connection. Its owner's task alone feeds it; an app's task only answers.

    ``answered``: the response is complete, ``start_next_request`` is due. ``closing``: the
    connection is to be closed as soon as its task runs. ``last`` (set by the owner): no request is
    taken after the running one.
    """

    connection: _H11Connection

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        owner: Owner,
        state: ConnectionState,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        *,
        is_tls: bool = False,
    ) -> None:
        client, server = addresses
        owner_: Any = owner  # Hypercorn asks for a whole TaskGroup and calls spawn_app alone
        super().__init__(
            app, config, context, owner_, state, is_tls, client, server, self._on_event
        )
        # Of h11's PAUSED, which never gets to Hypercorn here.
        del self.can_read
        self.owner = owner
        self.connection = self._new_connection()
        self.answered = False
        self.closing = False
        self.last = False
        self._method = b""
        # The stream whose head is out, and whose body goes in chunks that are framed here.
        self.chunked: Any = None
        self._writes = 0

    def _new_connection(self) -> _H11Connection:
        limit = self.config.h11_max_incomplete_size
        return _H11Connection(h11.SERVER, max_incomplete_event_size=limit)

    @property
    def idle(self) -> bool:
        """True between requests, before the first one, and after a refused one."""
        return self.stream is None

    @property
    def read_ahead(self) -> int:
        """How many bytes were read that belong to no request yet."""
        return len(self.connection.unread)

    @property
    def expects_input(self) -> bool:
        """True if the client is probably still sending, so that closing at once would reset it."""
        return self.connection.their_state not in _NOTHING_TO_COME

    @property
    def is_cut(self) -> bool:
        """True within a response's body: a connection that ends now has not said all."""
        return self.connection.our_state is h11.SEND_BODY

    async def feed(self, data: bytes) -> None:
        """Take what the client sent; ``b""`` is the end of its input."""
        if self.connection.their_state is h11.IDLE and not self.connection.unread:
            stripped = data.lstrip(LINE_END)
            if data and not stripped:
                return
            data = stripped
        try:
            await self.handle(RawData(data))
        except RequestRefused as refusal:
            await self.owner.write(self._whole_response(refusal))
            self.closing = True

    async def start_next_request(self) -> None:
        """After ``answered``: take up what was read ahead, or decide to close."""
        self.answered = False
        await self._close_stream()
        states = {self.connection.our_state, self.connection.their_state}
        if self.last or states != {h11.DONE}:
            self.closing = True
            return
        unread = self.connection.unread
        self.connection = self._new_connection()
        self._method = b""
        if unread:
            await self.feed(unread)

    async def ask_for_body(self) -> None:
        """The app wants to receive. A client that waits to be asked for its body (``Expect: 100-continue``) is asked
        only now: a request that is refused by its head needs none."""
        if self.connection.waits_to_be_asked:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def app_returned(self, stream: Any) -> None:
        """The app that served ``stream`` has returned or failed.

        Without any answer it gets a 500; with half an answer the connection is closed, and the
        missing end tells the client that something is missing.
        """
        if stream is not self.stream or self.answered:
            return
        if self.connection.our_state is h11.SEND_RESPONSE:
            await self.owner.write(self._failure("the server failed to answer; its log says why"))
        await self.send(Closed())

    def last_words(self) -> bytes:
        """A 500 for a request that waits for its answer while the server must leave, else ``b""``."""
        if self.connection.our_state is not h11.SEND_RESPONSE:
            return b""
        return self._failure("the server stopped before it could answer")

    async def stream_send(self, event: StreamEvent) -> None:
        """What the app's messages became. Called in the app's task."""
        if isinstance(event, Body):
            await self._send_body(event)
        elif isinstance(event, StreamClosed):
            self.answered = True
            self.owner.hang_up()
        elif isinstance(event, Response):
            await self._send_response(event)
            self.chunked = self.stream if self._frames_by_hand(event) else None
        else:
            await super().stream_send(event)
            self.chunked = None
            if isinstance(event, EndBody):
                self.closing = self.connection.our_state is not h11.DONE

    async def _send_body(self, event: Body) -> None:
        if self.chunked is not None and self.connection.our_state is h11.SEND_BODY:
            await self.owner.write(_chunk(event.data))
        else:
            await super().stream_send(event)
        # Only here, and after the bytes: a cancel must not part HTTPStream's state from h11's.
        self._writes += 1
        if self._writes % WRITES_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()

    def direct_body(self) -> DirectBody:
        """For the request that begins now: a shorter way for its answer."""
        return DirectBody(self, self.stream)

    def _frames_by_hand(self, event: Response) -> bool:
        """True where h11 would frame the body in chunks, too."""
        if self.connection.their_http_version != b"1.1":
            return False
        # Hypercorn drops the body of such a response; a ``DirectBody`` asks only here.
        if suppress_body(self._method.decode(), event.status_code):
            return False
        return all(name.lower() != b"content-length" for name, _ in event.headers)

    async def _send_response(self, event: Response) -> None:
        """The head, announcing that the connection ends with it where that is known already."""
        headers = [*event.headers, *self._own_headers()]
        if self.last or self.connection.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))
        await self._send_h11_event(_head(h11.Response, event.status_code, headers))

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if isinstance(event, h11.InformationalResponse):
            # 100 Continue. What Hypercorn puts in is said by the response itself.
            event = _head(h11.InformationalResponse, event.status_code, [])
        await super()._send_h11_event(event)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Those that Hypercorn's configuration asks for: date and server."""
        headers = self.config.response_headers("h11")
        return [(name, SERVER if name == b"server" else value) for name, value in headers]

    async def _check_protocol(self, event: h11.Request) -> None:
        self._method = event.method
        check_request(event, self.config.h11_max_incomplete_size, self.config.server_names)

    async def _send_error_response(self, status_code: int) -> None:
        """Hypercorn's way to answer what h11 could not read."""
        limit = self.config.h11_max_incomplete_size
        refusal = unreadable(HTTPStatus(status_code), self.connection.complaint, limit)
        await self.owner.write(self._whole_response(refusal))

    def _failure(self, text: str) -> bytes:
        return self._whole_response(RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, text))

    def _whole_response(self, refusal: RequestRefused) -> bytes:
        """Head, body and the connection's end. Only a failure of ours is worth another try."""
        is_ours = refusal.status is HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "server_error" if is_ours else "invalid_request_error"
        error = {"message": str(refusal), "type": kind, "param": None, "code": None}
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self._own_headers(),
        ]
        if not is_ours:
            headers.append((b"x-should-retry", b"false"))
        events: list[Any] = [_head(h11.Response, refusal.status, headers)]
        if self._method != b"HEAD":
            events.append(h11.Data(data=body))
        events.append(h11.EndOfMessage())
        return b"".join(self.connection.send(event) or b"" for event in events)

    async def _on_event(self, event: Event) -> None:
        """What Hypercorn asks of the transport. ``Updated`` says what ``idle`` says."""
        if isinstance(event, RawData):
            await self.owner.write(event.data)
        elif isinstance(event, Closed):
            self.closing = True
            self.owner.hang_up()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class DirectBody:
    """The body of one answer, for whoever has a piece of it ready and may not wait: not by ASGI's ``send``, but
    straight to the connection. The app finds it in the scope's extensions, and may mix both ways."""

    __slots__ = ("_owner", "_protocol", "_stream")

    def __init__(self, protocol: Http1, stream: Any) -> None:
        self._protocol = protocol
        self._owner = protocol.owner
        self._stream = stream

    @property
    def is_free(self) -> bool:
        """A piece that is written now follows what was sent before, and the kernel has all of that."""
        return self._owner.is_free and self._protocol.chunked is self._stream

    def write(self, data: bytes) -> None:
        """Write a piece, where ``is_free`` was true since the last checkpoint. Never waits and never raises."""
        self._owner.write_at_once(_chunk(data))


def _head(kind: type[_Head], status: int, headers: list[tuple[bytes, bytes]]) -> _Head:
    """With a reason phrase, which may be empty by RFC 9112; but h2load then sees no status at all."""
    reason = responses.get(status, "Unknown").encode()
    return kind(status_code=status, headers=headers, reason=reason)
