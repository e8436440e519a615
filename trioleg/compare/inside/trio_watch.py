"""``TrioWatch``: what the tasks of a Trio run do.

Plan: a census walks the tree from the root task, nursery by nursery; there are no other tasks. Steps and lanes come by
Trio's own hooks (``trio.abc.Instrument``): of lanes from the run's beginning, of steps from when somebody asks.

Not pretty: Trio has no hook for a cancel that is delivered, nor for a task's error. The first stands in ``_next_send``
of a task about to be resumed, the second is the last of its nursery's ``_pending_excs``. Both are private, read in one
place each, and tests say so if they move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import outcome
import trio

from ...runtime.unwrap import errors_in
from .lanes import Lane, Lanes

__all__ = ["TrioWatch"]


class TrioWatch(trio.abc.Instrument):
    """Made before the run, and among its ``instruments`` if there are ``lanes``. ``requests``: how many live ones the
    front end holds. ``census``, ``write_lanes`` and ``steps`` are for ``Probe.attach``, and for the run's thread."""

    def __init__(self, requests: Callable[[], int], lanes: Lanes | None = None) -> None:
        self._requests = requests
        self._lanes = lanes
        self._lane_of: dict[trio.lowlevel.Task, Lane] = {}
        self._num_errors = 0
        self._counter: _Counter | None = None

    def census(self) -> dict[str, Any]:
        """See ``probe.py``. Trio's own three are among them."""
        root = trio.lowlevel.current_root_task()
        assert root is not None
        names = Counter(_name(task) for task in _tree(root))
        return {"tasks": names.total(), "names": dict(names), "requests": self._requests()}

    def write_lanes(self) -> int:
        """See ``Lanes.write``. Raises ``ValueError`` if nothing is recorded."""
        if self._lanes is None:
            raise ValueError("nothing is recorded without --lanes")
        return self._lanes.write()

    def steps(self) -> int:
        """Since the first call."""
        if self._counter is None:
            self._counter = _Counter()
            trio.lowlevel.add_instrument(self._counter)
        return self._counter.steps

    # ------------------------------------------------------------------ Trio calls

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """It has been made."""
        assert self._lanes is not None
        nursery = task.parent_nursery
        parent = None if nursery is None else self._lane_of.get(nursery.parent_task)
        self._lane_of[task] = self._lanes.lane(_name(task), parent)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """It is about to be resumed."""
        assert self._lanes is not None
        lane = self._lane_of[task]
        cancel = _cancel_delivered(task)
        if cancel is not None:
            self._lanes.note(lane, "cancelled", str(cancel))
        self._lanes.note(lane, "resumed")
        self._num_errors = len(_errors_beside(task))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """It waits, unless it has ended."""
        assert self._lanes is not None
        lane = self._lane_of.get(task)
        if lane is not None:
            self._lanes.note(lane, "parked")

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Its nursery has been told."""
        assert self._lanes is not None
        lane = self._lane_of.pop(task)
        # Within one step no other task can have ended.
        error = next(iter(_errors_beside(task)[self._num_errors :]), None)
        if error is None:
            self._lanes.note(lane, "ended")
        elif not errors_in(error):
            self._lanes.note(lane, "ended", "cancelled")
        else:
            self._lanes.note(lane, "raised", repr(error))


class _Counter(trio.abc.Instrument):
    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - Trio's signature
        self.steps += 1


def _tree(root: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    waiting = [root]
    while waiting:
        task = waiting.pop()
        yield task
        waiting.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)


def _name(task: trio.lowlevel.Task) -> str:
    """Without the module, which Trio puts before the name of a function."""
    code = str(getattr(task.coro, "__qualname__", task.name))
    return code if task.name.endswith(f".{code}") else task.name


def _cancel_delivered(task: trio.lowlevel.Task) -> trio.Cancelled | None:
    send = task._next_send
    error = send.error if isinstance(send, outcome.Error) else None
    return error if isinstance(error, trio.Cancelled) else None


def _errors_beside(task: trio.lowlevel.Task) -> list[BaseException]:
    nursery = task.parent_nursery
    return [] if nursery is None else nursery._pending_excs
