"""``Mailbox``: one request's unread output, in one slot, beside an event.

The slot holds an output, into which later ones are merged, or an error, which takes the place of any output and is
raised by whoever takes it. Errors travel here since the task that met one has no other way to whom it concerns.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...output.merge import OutputMerger
from ...outputs import PoolingRequestOutput, RequestOutput
from ...sampling_params import RequestOutputKind

__all__ = ["Mailbox"]


class Mailbox:
    """For one reader. ``put`` is synchronous and knows no bound: a request's outputs merge into one."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._merger = OutputMerger(aggregate=output_kind is RequestOutputKind.DELTA)
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> bool:
        """Take it over, and wake the reader. Always True: there is no bound."""
        if isinstance(output, Exception):
            self._error = output
            self._merger.take()
        elif self._error is None:
            self._merger.put(output)
        self._ready.set()
        return True

    async def get(self) -> RequestOutput:
        """The next output. Raises the error that is there. A cancel takes nothing away."""
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        """The same without waiting; None: nothing is unread."""
        self._ready.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        output: Any = self._merger.take()
        return output  # type: ignore[no-any-return]
