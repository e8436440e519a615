"""``serve_stream``: one request's outputs, written to its client as they come.

The order matters. The stream is opened and its first output awaited *before* the status is sent, so
that whatever fails until then gets a real status. One cancel scope then holds the whole loop of
receiving and writing: when the request ends badly, the write in progress ends too. After the scope
come the last frames, within a bound. Leaving ``open_stream`` is the abort.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import trio

from ..errors import RequestEnded
from ..outputs import EndingKind
from ..runtime.llm import LLM
from ..runtime.request_stream import RequestStream
from .protocol import ChatCompletionRequest, error_of
from .sse import DONE, ChatCompletionFramer, error_event

__all__ = ["SSE_HEADERS", "Send", "serve_stream"]

Send: TypeAlias = Callable[[Any], Awaitable[None]]

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and its kin buffer what a proxied server answers, unless told otherwise.
    "X-Accel-Buffering": "no",
}

# A client that has stopped reading gets this long to take the last frames in.
_LAST_FRAMES_TIMEOUT = 2.0


async def serve_stream(
    llm: LLM,
    request: ChatCompletionRequest,
    model: str,
    start: Callable[[], Awaitable[None]],
    send: Send,
) -> None:
    """Answer ``request`` with a stream of events: ``start`` sends the status, ``send`` is ASGI's,
    ``model`` the name that the client sees.

    Raises what ``open_stream`` and the first ``receive`` raise; nothing has been sent then. Any other
    end is told to the client: in order, or with an error event, and ``[DONE]``. A cancel (the client
    left) passes through and aborts the request.
    """
    async with llm.open_stream(request.messages, request.params) as stream:
        framer = ChatCompletionFramer(
            stream.request_id,
            created=int(time.time()),
            model=model,
            include_usage=request.include_usage,
        )
        first = framer.frames(await stream.receive())
        await start()
        with stream.serving():
            await _write_outputs(stream, framer, first, send)
        with trio.move_on_after(_LAST_FRAMES_TIMEOUT):
            await _write(send, _last_frames(stream, framer))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write_outputs(
    stream: RequestStream, framer: ChatCompletionFramer, frames: bytes, send: Send
) -> None:
    with suppress(trio.EndOfChannel, RequestEnded):
        while True:
            if frames:
                await _write(send, frames)
            frames = framer.frames(await stream.receive())


async def _write(send: Send, frames: bytes) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": True})


def _last_frames(stream: RequestStream, framer: ChatCompletionFramer) -> bytes:
    """What is unread after a bad end, then how the request ended, and ``[DONE]``."""
    unread = stream.receive_nowait()
    frames = framer.frames(unread) if unread is not None else b""
    ending = stream.ending
    assert ending is not None, "the loop ends when the request has ended"
    error = ending.error()
    if error is None:
        return frames + framer.last_frames()
    if ending.kind is EndingKind.ABORTED:
        return frames + framer.abort_frames() + framer.last_frames()
    return frames + error_event(error_of(error)[1]) + DONE
