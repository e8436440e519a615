"""``serve_stream``: one request's outputs, written to its client as they come.

The order matters. The stream is opened and its first output awaited *before* the status is sent, so
that whatever fails until then gets a real status; only a keep-alive comment, where they are asked
for, sends it earlier. One cancel scope then holds the whole loop of receiving and writing: when the
request ends badly, the write in progress ends too. After the scope come the last frames, within a
bound. Leaving ``open_stream`` is the abort.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import trio

from ..errors import RequestAborted, RequestEnded
from ..outputs import Ending, EndingKind, RequestOutput
from ..runtime.llm import LLM
from ..runtime.request_stream import RequestStream
from ..runtime.tracer import Tracer
from .incoming import FromHeaders, request_options
from .logprobs import listed_logprobs
from .protocol import ChatCompletionRequest, error_of
from .sse import DONE, KEEP_ALIVE, ChatCompletionFramer, error_event

__all__ = ["SSE_HEADERS", "Send", "serve_stream"]

Send: TypeAlias = Callable[[Any], Awaitable[None]]

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
    *,
    keep_alive_interval: float | None = None,
    arrival: FromHeaders | None = None,
) -> None:
    """Answer ``request`` with a stream of events: ``start`` sends the status, ``send`` is ASGI's,
    ``model`` the name that the client sees. ``keep_alive_interval``: a comment is written after each
    silence of so many seconds. ``arrival``: of the request, None: now.

    Raises what ``open_stream`` and the first ``receive`` raise, but for ``RequestAborted``; nothing has been
    sent then. Any other end is told to the client: in order, or with an error event, and ``[DONE]``. A cancel (the client
    left) passes through and aborts the request.
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
        events = _Events(stream, framer, send, keep_alive_interval, llm.tracer)
        first = await events.first()
        await start()
        with stream.serving(), suppress(trio.EndOfChannel, RequestEnded):
            await events.write_from(first)
        with trio.move_on_after(_last_frames_timeout(stream.ending)):
            await events.write(events.last())
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Events:
    """The outputs of one stream as frames, one piece after the other."""

    def __init__(
        self,
        stream: RequestStream,
        framer: ChatCompletionFramer,
        send: Send,
        keep_alive_interval: float | None,
        tracer: Tracer | None,
    ) -> None:
        self._stream = stream
        self._framer = framer
        self._send = send
        self._keep_alive_interval = keep_alive_interval or math.inf
        self._receive: Callable[[], Awaitable[RequestOutput | None]] = (
            stream.receive if keep_alive_interval is None else self._receive_or_remark
        )
        self._tracer = tracer
        self._unwritten = b""

    async def write_from(self, frames: bytes) -> None:
        """Write, receive, write … until ``receive`` raises or the request has ended badly.

        By then the scope round this is cancelled, and the frames in hand are for ``last``.
        """
        receive, stream = self._receive, self._stream
        while True:
            if stream.ending is not None and stream.ending.error() is not None:
                self._unwritten = frames
                return
            if frames:
                await self.write(frames)
            output = await receive()
            frames = KEEP_ALIVE if output is None else self._framed(output)

    async def first(self) -> bytes:
        """The first frames, or, after a silence, a keep-alive comment. Raises as ``receive`` does, but an
        abort is no error: it has nothing before its finish chunks."""
        frames = b""
        with suppress(RequestAborted):
            while not frames:
                output = await self._receive()
                frames = KEEP_ALIVE if output is None else self._framed(output)
        return frames

    async def write(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        if self._tracer is not None:
            self._tracer.on_written()

    async def _receive_or_remark(self) -> RequestOutput | None:
        """The next output; None: there was a silence, and a comment is due."""
        # Where something is unread, as under load, there is no cancel scope to pay for.
        unread = self._stream.receive_nowait()
        if unread is not None:
            return unread
        with trio.move_on_after(self._keep_alive_interval):
            return await self._stream.receive()
        return None

    def _framed(self, output: RequestOutput) -> bytes:
        frames = self._framer.frames(output)
        if self._tracer is not None:
            self._tracer.on_frames(output, frames)
        return frames

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
