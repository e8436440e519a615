"""The stream of a chat completion: an async generator over another one, ``LLM.generate``'s.

When a client leaves, the task that iterates is cancelled. Where that task waits for the next output, the cancel goes
through both generators; where it waits for the client, this one is closed, and the inner one is dropped with its frame:
asyncio's hook for that makes a task of its own to close it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from ...outputs import RequestOutput
from ...server.sse import ChatCompletionFramer
from ..asyncio_common.answers import error_frames

__all__ = ["chat_completion_stream"]

_log = logging.getLogger("trioleg.compare.asyncio_twin")


async def chat_completion_stream(
    outputs: AsyncGenerator[RequestOutput, None], framer: ChatCompletionFramer
) -> AsyncGenerator[bytes, None]:
    """``outputs`` as frames. The status has been sent, so an error is an event, and then the stream ends in order."""
    try:
        async for output in outputs:
            frames = framer.frames(output)
            if frames:
                yield frames
        yield framer.last_frames()
    except Exception as error:
        _log.exception("a stream failed")
        yield error_frames(error)
