"""Cancel an operation at every point where it can be cancelled: at its first yield, its second, …

    for cut in cuts():
        with cut.made():
            await operation()

goes on until the operation ends before its cancel comes. After each cut: if the task was thrown a
``Cancelled``, the scope that was cancelled must have caught it, and no other; and no task may be left.
A point is every time that a task gives way to Trio's scheduler, which is more than its checkpoints: the
yields of a shielded one count, too.

``Task._next_send`` is Trio's own, and the one place to see that a ``Cancelled`` was really thrown: if it
moves, the instrument fails, Trio drops it, and ``made`` raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import outcome
import trio

__all__ = ["HOW", "Cut", "cuts"]

# A call of ``cancel``, a deadline, the outer one of two scopes, and both of them.
HOW = ("call", "deadline", "outer", "both")

_REASON = "cancelled everywhere"


class Cut(trio.abc.Instrument):
    """One cancel, at the task's yield number ``point``; 0: before it begins. ``of_all``: yields of every
    task count, so a cancel finds the owner waiting and its children in the middle of something."""

    def __init__(self, point: int, how: str, *, of_all: bool = False) -> None:
        self.point = point
        self.struck = False
        self._how = how
        self._of_all = of_all
        self._yields = 0
        self._was_thrown = False
        self._is_over = False
        self._outer, self._inner = trio.CancelScope(), trio.CancelScope()

    @contextmanager
    def made(self) -> Iterator[None]:
        """The block is cancelled there. To be used once."""
        self._task = trio.lowlevel.current_task()
        tasks = trio.lowlevel.current_statistics().tasks_living
        trio.lowlevel.add_instrument(self)
        try:
            with self._outer, self._inner:
                if self.point == 0:
                    self._strike()
                yield
        finally:
            trio.lowlevel.remove_instrument(self)
        assert trio.lowlevel.current_statistics().tasks_living == tasks, self
        self._is_over = True

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        sent = task._next_send
        if task is self._task and isinstance(sent, outcome.Error):
            error = sent.error
            is_ours = isinstance(error, trio.Cancelled) and (
                error.reason == _REASON or error.source == "deadline"
            )
            self._was_thrown = self._was_thrown or (self.struck and is_ours)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task or self._of_all:
            self._yields += 1
            if self._yields == self.point:
                self._strike()

    def _strike(self) -> None:
        self.struck = True
        if self._how == "deadline":
            self._inner.deadline = trio.current_time()
        if self._how in ("call", "both"):
            self._inner.cancel(_REASON)
        if self._how in ("outer", "both"):
            self._outer.cancel(_REASON)

    def check(self) -> None:
        """The cancel was not swallowed, and went no further than to its scope."""
        assert self._is_over, "the block was not run to its end"
        scope, other = self._inner, self._outer
        if self._how in ("outer", "both"):
            scope, other = other, scope
        assert scope.cancelled_caught or not self._was_thrown, f"swallowed: {self}"
        assert self.struck or not scope.cancelled_caught, self
        assert not other.cancelled_caught, self

    def __str__(self) -> str:
        return f"a cancel ({self._how}) at yield {self.point}"


def cuts(how: str = "call", *, of_all: bool = False) -> Iterator[Cut]:
    """One for each point, until the block's end comes first: that cut has not ``struck``."""
    for point in itertools.count():
        cut = Cut(point, how, of_all=of_all)
        yield cut
        cut.check()
        if not cut.struck:
            return
