"""``Lanes``: the lives of a loop's tasks, event by event, for a picture with one lane a task.

Standard library alone. One JSON object a line:

    {"at": seconds, "task": number, "name": str, "parent": number or null, "event": EVENT, "detail": str}

``at`` is the monotonic clock's. Events: ``spawned``; ``resumed`` and ``parked``, round each step; ``cancelled``: a
cancel was delivered to the task (detail: what it says of itself); ``raised``: it ended with this error; ``ended``.
The parent is the task that owns the nursery, or, where tasks have no owner, the one that created it. A task whose cancel went through has ``ended``, with
"cancelled" for detail.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from typing import NamedTuple

__all__ = ["Lane", "Lanes"]

# Some seconds of a few streams, a few MB: what a picture is about is the end.
_EVENTS_KEPT = 20_000


class Lane:
    """One task's. ``name`` may be set later: some are named after they are made."""

    __slots__ = ("name", "number", "parent")

    def __init__(self, number: int, name: str, parent: int | None) -> None:
        self.number = number
        self.name = name
        self.parent = parent


class _Event(NamedTuple):
    at: float
    lane: Lane
    event: str
    detail: str


class Lanes:
    """Keeps the last events, and writes them to ``path``. For one thread, the loop's."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._events: deque[_Event] = deque(maxlen=_EVENTS_KEPT)

    def lane(self, name: str, parent: Lane | None) -> Lane:
        """For a task that has just been spawned."""
        lane = Lane(next(self._numbers), name, None if parent is None else parent.number)
        self.note(lane, "spawned")
        return lane

    def note(self, lane: Lane, event: str, detail: str = "") -> None:
        """It happened now."""
        self._events.append(_Event(time.monotonic(), lane, event, detail))

    def write(self) -> int:
        """All events kept so far, in place of what was written before; how many. Raises ``OSError``."""
        with open(self._path, "w", encoding="utf-8") as file:
            for at, lane, event, detail in self._events:
                line = {"at": at, "task": lane.number, "name": lane.name, "parent": lane.parent}
                file.write(json.dumps({**line, "event": event, "detail": detail}) + "\n")
        return len(self._events)
