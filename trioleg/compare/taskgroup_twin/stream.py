"""``serve_stream``: one request's outputs, written to its client as they come.

As ``server/stream.py``: the first output is awaited before the status is sent; one block then holds the loop of receiving
and writing; behind it come the last frames, within a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ...errors import RequestAborted, RequestEnded
from ...outputs import Ending, EndingKind
from ...server.sse import ChatCompletionFramer
from ..asyncio_common.answers import SSE_HEADERS, error_frames
from .request_stream import RequestStream

__all__ = ["ClientStalled", "Send", "serve_stream"]

Send: TypeAlias = Callable[[Any], Awaitable[None]]

# After a bad end, a client that has stopped reading gets this long to take the last frames in.
_LAST_FRAMES_S = 2.0
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]


class ClientStalled(Exception):
    """The client has not taken in what was written to it for too long."""


async def serve_stream(
    stream: RequestStream,
    framer: ChatCompletionFramer,
    send: Send,
    *,
    write_timeout: float | None = None,
) -> None:
    """Write ``stream``. ``send``: ASGI's. ``write_timeout``: seconds for one write, None: no bound.

    Raises what the first ``receive`` raises, but for ``RequestAborted``; nothing has been sent then. Later ends are told
    to the client. Raises ``ClientStalled``.
    """
    frames = await _first_frames(stream, framer)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    async with stream.serving():
        await _write_all(stream, framer, send, frames, write_timeout)
    async with asyncio.timeout(_last_frames_s(stream.ending)):
        await _write(send, _last_frames(stream, framer))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first_frames(stream: RequestStream, framer: ChatCompletionFramer) -> bytes:
    try:
        while (output := await stream.receive()) is not None:
            frames = framer.frames(output)
            if frames:
                return frames
    except RequestAborted:
        pass  # it has its finish chunks even before its first token
    return b""


async def _write_all(
    stream: RequestStream,
    framer: ChatCompletionFramer,
    send: Send,
    frames: bytes,
    write_timeout: float | None,
) -> None:
    """Until the request has ended. What a write that is cut had in hand lies in asyncio's buffer by then."""
    while True:  # noqa: ASYNC913 - what is unread came from the loop, which reads one message a turn
        if frames:
            await _write_within(send, frames, write_timeout)
        try:
            output = await stream.receive()
        except RequestEnded:
            return
        if output is None:
            return
        frames = framer.frames(output)


async def _write_within(send: Send, frames: bytes, seconds: float | None) -> None:
    if seconds is None:
        await _write(send, frames)
        return
    try:
        async with asyncio.timeout(seconds):
            await _write(send, frames)
    except TimeoutError as error:
        raise ClientStalled(f"the client has not read for {seconds:g} s") from error


async def _write(send: Send, frames: bytes) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": True})


def _last_frames_s(ending: Ending | None) -> float | None:
    return None if ending is None or ending.error() is None else _LAST_FRAMES_S


def _last_frames(stream: RequestStream, framer: ChatCompletionFramer) -> bytes:
    """What is unread after a bad end, then how the request ended, and ``[DONE]``."""
    assert stream.ending is not None, "the loop ends when the request has ended"
    unread = stream.receive_nowait()
    frames = b"" if unread is None else framer.frames(unread)
    error = stream.ending.error()
    if error is None:
        return frames + framer.last_frames()
    if stream.ending.kind is EndingKind.ABORTED:
        return frames + framer.abort_frames() + framer.last_frames()
    return frames + error_frames(error)
