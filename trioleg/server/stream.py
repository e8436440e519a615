"""``serve_stream``: one request's outputs, written to its client as they come.

The order matters. The stream is opened and its first output awaited *before* the status is sent, so
that whatever fails until then gets a real status; only a keep-alive comment, where they are asked
for, sends it earlier. One cancel scope then holds the whole loop of receiving and writing: when the
request ends badly, the write in progress ends too. After the scope come the last frames, within a
bound. Leaving ``open_stream`` is the abort.

In a stream that its client reads, that loop waits all the time. Where the server has a direct way to the connection
(``DirectBody``), outputs go past it: framed in the link's own step, and written together with those of all other
streams (``runtime/burst.py``). The loop wakes up for what this cannot do: an end, and a client that does not read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import trio

from ..errors import RequestAborted, RequestEnded
from ..outputs import Ending, EndingKind, RequestOutput
from ..runtime.burst import Burst
from ..runtime.llm import LLM
from ..runtime.request_stream import RequestStream
from ..runtime.tracer import Tracer
from .incoming import FromHeaders, request_options
from .logprobs import listed_logprobs
from .protocol import ChatCompletionRequest, error_of
from .sse import DONE, KEEP_ALIVE, ChatCompletionFramer, error_event

__all__ = ["SSE_HEADERS", "DirectBody", "Send", "serve_stream"]

_log = logging.getLogger("trioleg.server")

Send: TypeAlias = Callable[[Any], Awaitable[None]]


class DirectBody(Protocol):
    """A way to the connection without a wait (``http1.DirectBody``)."""

    @property
    def is_free(self) -> bool:
        """``write`` may be called, until the next checkpoint."""

    def write(self, data: bytes) -> None:
        """Write a piece of the answer's body."""


SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and its kin buffer what a proxied server answers, unless told otherwise.
    "X-Accel-Buffering": "no",
}

# After a bad end, a client that has stopped reading gets this long to take the last frames in.
_LAST_FRAMES_TIMEOUT = 2.0


async def serve_stream(
    llm: LLM,
    request: ChatCompletionRequest,
    model: str,
    start: Callable[[], Awaitable[None]],
    send: Send,
    direct: DirectBody | None = None,
    *,
    keep_alive_interval: float | None = None,
    arrival: FromHeaders | None = None,
) -> None:
    """Answer ``request`` with a stream of events: ``start`` sends the status, ``send`` is ASGI's,
    ``model`` the name that the client sees. ``direct``: None, if the server has no such way.
    ``keep_alive_interval``: a comment is written after each silence of so many seconds. ``arrival``: of the
    request, None: now.

    Raises what ``open_stream`` and the first ``receive`` raise, but for ``RequestAborted``; nothing has been
    sent then. Any other end is told to the client: in order, or with an error event, and ``[DONE]``. A
    cancel (the client left) passes through and aborts the request.
    """
    async with llm.open_stream(
        request.messages, request.params, **request_options(request, arrival)
    ) as stream:
        framer = ChatCompletionFramer(
            stream.request_id,
            created=int(time.time()),
            model=model,
            prompt_token_ids=stream.prompt_token_ids,
            n=request.params.n,
            top_logprobs=listed_logprobs(request.params),
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            return_token_ids=request.return_token_ids,
        )
        # A stream may be long, and there are many: what it does not need is let go.
        del request, arrival
        events = _Events(stream, framer, send, keep_alive_interval, llm, direct)
        await events.wait_first()
        await start()
        del start
        with stream.serving(None if direct is None else events.deliver):
            await events.write_all()
        with trio.move_on_after(_last_frames_timeout(stream.ending)):
            await events.write(events.last())
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Events:
    """The outputs of one stream as frames, one piece after the other."""

    __slots__ = (
        "_burst",
        "_delivered_at",
        "_direct",
        "_failure",
        "_framer",
        "_keep_alive_interval",
        "_send",
        "_stream",
        "_tracer",
        "_unwritten",
    )

    def __init__(
        self,
        stream: RequestStream,
        framer: ChatCompletionFramer,
        send: Send,
        keep_alive_interval: float | None,
        llm: LLM,
        direct: DirectBody | None,
    ) -> None:
        self._stream = stream
        self._framer = framer
        self._send = send
        self._keep_alive_interval = keep_alive_interval
        self._tracer: Tracer | None = llm.tracer
        self._burst: Burst = llm.burst
        self._direct = direct
        self._unwritten = b""
        # When the last frames went past the loop; None: no comments are asked for, and nobody wants to know.
        self._delivered_at = None if keep_alive_interval is None else -math.inf
        self._failure: Exception | None = None

    async def write_all(self) -> None:
        """Write, receive, write … until the request has ended. If that was badly, the scope round this is cancelled
        by then, and the frames in hand are for ``last``."""
        stream = self._stream
        while stream.ending is None or stream.ending.error() is None:
            frames, self._unwritten = self._unwritten, b""
            if frames:
                await self.write(frames)
                del frames
            try:
                output = await self._receive()
            except (trio.EndOfChannel, RequestEnded):
                return
            self._unwritten = self._framed(output)
            del output

    def _receive(self) -> Awaitable[RequestOutput | None]:
        if self._keep_alive_interval is None:
            return self._stream.receive()
        return self._receive_or_remark(self._keep_alive_interval)

    def deliver(self, output: RequestOutput) -> bool:
        """The stream's outlet: an output that comes while the loop waits is written past it; False if not.

        The last one is for the loop, which has to wake up for it anyway. A tracer sees that way alone.
        """
        direct, burst = self._direct, self._burst
        if direct is None or not (burst.is_open and direct.is_free):
            return False
        if output.finished or self._tracer is not None:
            return False
        try:
            frames = self._framer.frames(output)
        except Exception as failure:  # noqa: BLE001 - it is the loop's to deal with
            self._failure = failure
            return False
        if frames:
            burst.add(direct.write, frames)
            if self._delivered_at is not None:
                self._delivered_at = trio.current_time()
        return True

    async def wait_first(self) -> None:
        """Have the first frames, or, after a silence, a keep-alive comment. Raises as ``receive`` does, but an
        abort is no error: it has nothing before its finish chunks."""
        with suppress(RequestAborted):
            while not self._unwritten:
                self._unwritten = self._framed(await self._receive())

    async def write(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        if self._tracer is not None:
            self._tracer.on_written()

    async def _receive_or_remark(self, interval: float) -> RequestOutput | None:
        """The next output; None: there was a silence, and a comment is due."""
        # Where something is unread, as under load, there is no cancel scope to pay for.
        unread = self._stream.receive_nowait()
        if unread is not None:
            return unread
        silent_since = trio.current_time()
        while True:
            with trio.move_on_at(silent_since + interval):
                return await self._stream.receive()
            if self._delivered_at is None or self._delivered_at <= silent_since:
                return None
            silent_since = self._delivered_at

    def _framed(self, output: RequestOutput | None) -> bytes:
        if output is None:
            return KEEP_ALIVE
        try:
            if self._failure is not None:
                raise self._failure
            frames = self._framer.frames(output)
        except Exception as failure:  # noqa: BLE001 - a bug ends this request, and its client is told
            self._fail(failure)
            return b""
        if self._tracer is not None:
            self._tracer.on_frames(output, frames)
        return frames

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        if self._stream.ending is None:
            _log.error("request %s: no frames", self._stream.request_id, exc_info=failure)
            cause = "the server has failed to write its output down; its log says why"
            self._stream.end(Ending(EndingKind.OUTPUT_ERROR, cause))

    def last(self) -> bytes:
        """What is unwritten or unread after a bad end, then how the request ended, and ``[DONE]``."""
        unread = self._stream.receive_nowait()
        frames = b"" if unread is None else self._framed(unread)
        last = _how_it_ended(self._stream.ending, self._framer)
        if self._tracer is not None:
            self._tracer.on_frames(None, last)
        return self._unwritten + frames + last


def _last_frames_timeout(ending: Ending | None) -> float:
    """A whole answer is worth waiting for: its reader is bounded by the connection, as ever."""
    return math.inf if ending is None or ending.error() is None else _LAST_FRAMES_TIMEOUT


def _how_it_ended(ending: Ending | None, framer: ChatCompletionFramer) -> bytes:
    assert ending is not None, "the loop ends when the request has ended"
    error = ending.error()
    if error is None:
        return framer.last_frames()
    if ending.kind is EndingKind.ABORTED:
        return framer.abort_frames() + framer.last_frames()
    return error_event(error_of(error)[1]) + DONE
