"""``Deadlines``: one timer for all requests that have one.

The timer ends the request wherever its reader is: waiting, busy with a stream, or stuck in a write. A
cancel scope for each request would cost more and reach only the first of these.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import trio

from ..outputs import Ending, EndingKind
from ..timeouts import Timeouts
from .request_stream import RequestStream

__all__ = ["Deadlines", "overdue", "until"]

# Below this nobody minds deadlines of requests that have ended.
_MIN_SWEEP = 1000


@dataclass(order=True, slots=True)
class _Deadline:
    at: float
    number: int
    stream: RequestStream = field(compare=False)
    cause: str = field(compare=False)
    first_token: bool = field(compare=False)

    @property
    def is_over(self) -> bool:
        """Nothing is left for it to do."""
        if self.stream.ending is not None:
            return True
        return self.first_token and self.stream.num_output_tokens > 0


class Deadlines:
    """``run`` is its task; ``add`` is synchronous. Times are Trio's clock."""

    def __init__(self) -> None:
        self._heap: list[_Deadline] = []
        self._numbers = itertools.count()
        self._sleeping = trio.CancelScope()
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        """Deadlines that are kept, some of requests that have ended included: at most twice the others,
        and a thousand."""
        return len(self._heap)

    def add(self, stream: RequestStream, timeouts: Timeouts, since: float) -> None:
        """End ``stream`` when its time, from ``since`` on, is over."""
        for seconds, first_token in ((timeouts.first_token, True), (timeouts.total, False)):
            if seconds is not None:
                cause = overdue(seconds, first_token=first_token)
                at = since + seconds
                self._add(_Deadline(at, next(self._numbers), stream, cause, first_token))

    def _add(self, deadline: _Deadline) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [one for one in self._heap if not one.is_over]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, deadline)
        if self._heap[0] is deadline:
            self._sleeping.cancel(reason="an earlier deadline was added")

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """End what is overdue, for ever."""
        while True:
            now = trio.current_time()
            while self._heap and self._heap[0].at <= now:
                due = heapq.heappop(self._heap)
                if not due.is_over:
                    due.stream.end(Ending(EndingKind.DEADLINE, due.cause))
            next_at = self._heap[0].at if self._heap else math.inf
            with trio.CancelScope(deadline=next_at) as self._sleeping:
                await trio.sleep_forever()


def overdue(seconds: float, *, first_token: bool) -> str:
    """The sentence about a deadline that has passed."""
    if first_token:
        return f"the request had no first token after {seconds:g} s, its deadline"
    return f"the request was not complete after {seconds:g} s, its deadline"


def until(timeouts: Timeouts, since: float) -> tuple[float, str]:
    """The first of the deadlines of a request that has no token yet, and what to say when it passes."""
    first, total = timeouts.first_token, timeouts.total
    if first is not None and (total is None or first <= total):
        return since + first, overdue(first, first_token=True)
    if total is not None:
        return since + total, overdue(total, first_token=False)
    return math.inf, ""
