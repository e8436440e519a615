"""``Mailbox``: one slot per request, between the link that fills it and the task that reads it.

``put`` never waits and never queues: what the reader has not taken yet is merged into one output
(``output/merge.py``), so a client that stops reading can neither stop the link nor grow its memory
beyond ``max_bytes``, and all readers together have a bound, too (``unread.py``). A reader that waits is
woken by the first ``put`` and finds, when it runs, everything that came meanwhile.

A reader may lend an ``outlet``. While it waits, an output is offered to that first, and the reader sleeps on if it
is taken: to wake a task for each token costs more than what the task then does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from ..output.merge import OutputMerger
from ..outputs import PoolingRequestOutput, RequestOutput

__all__ = ["Mailbox", "MailboxStatistics", "Tally"]

# A mailbox counts among all from here on, and again each time that it has grown by so much: about 8,000 tokens.
_COUNTED_STEP = 2**16


class Tally(Protocol):
    """Where mailboxes are counted together."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """``num_merges``: outputs that met an unread one. ``num_bytes``: unread now, estimated;
    ``max_num_bytes``: the most that ever was. ``reader_waits``: a task is parked here."""

    num_merges: int
    num_bytes: int
    max_num_bytes: int
    reader_waits: bool


class Mailbox:
    """Single reader, any number of writers, all in one Trio thread."""

    __slots__ = (
        "_count_from",
        "_max_bytes",
        "_max_num_bytes",
        "_merger",
        "_reader",
        "_tally",
        "num_counted",
        "outlet",
    )

    def __init__(self, *, aggregate: bool, max_bytes: int, tally: Tally | None = None) -> None:
        self._merger = OutputMerger(aggregate=aggregate)
        self._max_bytes = max_bytes
        self._max_num_bytes = 0
        self._tally = tally
        # Of ours in ``tally``: 0 for a reader that keeps up.
        self.num_counted = 0
        self._count_from = _COUNTED_STEP
        self._reader: trio.lowlevel.Task | None = None
        # False: not taken. It neither waits nor keeps what it has not taken.
        self.outlet: Callable[[Any], bool] | None = None

    @property
    def num_bytes(self) -> int:
        """Unread now, estimated."""
        return self._merger.num_bytes

    def put(self, output: RequestOutput | PoolingRequestOutput) -> bool:
        """Merge the output in and wake the reader. False: unread output is over the bound now.

        Even then the output is kept: nothing that was decoded is lost.
        """
        # Nothing is unread while the reader waits, so what the outlet takes is next.
        if self.outlet is not None and self._reader is not None and self.outlet(output):
            return True
        self._merger.put(output)
        num_bytes = self._merger.num_bytes
        if num_bytes > self._max_num_bytes:
            self._max_num_bytes = num_bytes
        if num_bytes >= self._count_from:
            self._count(num_bytes)
        self.wake()
        return num_bytes <= self._max_bytes

    def take(self) -> Any:
        """What has come since the last ``take``, or None; never waits. See ``OutputMerger.take``."""
        if self.num_counted:
            self._count(0)
        return self._merger.take()

    def _count(self, num_bytes: int) -> None:
        if self._tally is not None:
            self._tally.num_bytes += num_bytes - self.num_counted
            self.num_counted = num_bytes
            self._count_from = num_bytes + _COUNTED_STEP

    def stop_counting(self) -> None:
        """What is unread here is nobody else's trouble any more. Idempotent."""
        self._count(0)
        self._tally = None

    def wake(self) -> None:
        """Let the reader look again: something came, or the request ended."""
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    async def wait(self) -> None:
        """Park until ``wake``. A cancel takes nothing away. A second reader gets BusyResourceError."""
        if self._reader is not None:
            raise trio.BusyResourceError("another task is already receiving from this stream")
        self._reader = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def statistics(self) -> MailboxStatistics:
        return MailboxStatistics(
            self._merger.num_merges,
            self.num_bytes,
            self._max_num_bytes,
            self._reader is not None,
        )
