"""``Mailbox``: as ``runtime/mailbox.py``, for a reader of asyncio's.

Rules of this file: ``put`` and ``wake`` are synchronous and of the loop's own thread. What is unread is merged by the
shared core. A wait that is cancelled takes nothing away: the output is taken by whoever runs next, after the wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...output.merge import OutputMerger
from ...outputs import PoolingRequestOutput, RequestOutput

__all__ = ["Mailbox"]


class Mailbox:
    """Single reader, any number of writers. ``max_bytes``: of unread output, estimated."""

    __slots__ = ("_max_bytes", "_merger", "_reader")

    def __init__(self, *, aggregate: bool, max_bytes: int) -> None:
        self._merger = OutputMerger(aggregate=aggregate)
        self._max_bytes = max_bytes
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput) -> bool:
        """Merge the output in and wake the reader. False: unread output is over the bound now."""
        self._merger.put(output)
        self.wake()
        return self._merger.num_bytes <= self._max_bytes

    def take(self) -> Any:
        """What has come since the last ``take``, or None; never waits."""
        return self._merger.take()

    def wake(self) -> None:
        """Let the reader look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Until ``wake``. Raises ``RuntimeError`` for a second reader."""
        if self._reader is not None:
            raise RuntimeError("another task is already receiving from this stream")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None
