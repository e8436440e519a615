"""The lives of a leg's tasks round the cause of a scenario, chosen from what ``inside/lanes.py`` wrote.

Rules of this file: pure. A lane is a task; lanes stand in the order of birth, each below its parent. The picture begins
shortly before the cause, and ends when a chain of marks (cancels, errors, ends) has come to rest: what comes behind
that, as the server's own end, is another story. A task to which nothing happens meanwhile is left out. A cancel is drawn
as it travels: from the nearest ancestor that had its own before, else from a child that had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from ..errors import TriolegError

__all__ = ["Event", "Lane", "Mark", "Timeline", "choose_lanes", "read_lanes"]

_What: TypeAlias = Literal["spawned", "resumed", "parked", "cancelled", "raised", "ended"]
_MARKS = ("cancelled", "raised", "ended")
# Reactions to one cause follow each other faster than this; what a scenario does next comes later.
_REST_S = 0.1
# Of a picture in which nothing is marked.
_QUIET_S = 0.05
# So much of its width is empty at both sides, and no less than this.
_ASIDE, _ASIDE_S = 0.08, 0.0005
# More do not fit beside their names.
_MOST_LANES = 32


class Event(msgspec.Struct, frozen=True):
    """One line of the file. ``at``: seconds of the monotonic clock."""

    at: float
    task: int
    name: str
    parent: int | None
    event: _What
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a task. ``at``: seconds from the cause on; ``row``: of its lane, from 0."""

    at: float
    row: int
    event: str
    detail: str


@dataclass(slots=True)
class Lane:
    """A task. ``depth``: of its parents, so many are shown. ``runs``: from when to when it ran, and ``begin`` to
    ``end`` is its life within the picture, all in seconds from the cause on."""

    name: str
    depth: int
    begin: float
    end: float
    runs: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """``travels``: from which mark to which a cancel went. ``left_out``: tasks that had no room."""

    begin: float
    end: float
    lanes: list[Lane]
    marks: list[Mark]
    travels: list[tuple[Mark, Mark]]
    left_out: int = 0


def read_lanes(path: Path) -> list[Event]:
    """The events of ``path``, in order. Raises ``TriolegError`` if there is none, or it is something else."""
    try:
        events: list[Event] = msgspec.json.Decoder(list[Event]).decode(
            b"[" + b",".join(path.read_bytes().splitlines()) + b"]"
        )
    except (OSError, msgspec.DecodeError) as error:
        raise TriolegError(f"{path.name} holds no lives of tasks: {error}") from error
    if not events:
        raise TriolegError(f"{path.name} holds no lives of tasks: it is empty")
    return sorted(events, key=lambda one: one.at)


def choose_lanes(events: Sequence[Event], cause_at: float | None) -> Timeline:
    """What a picture shows of ``events``, which are in order and not empty. ``cause_at``: None is the first mark."""
    marked = [one for one in events if one.event in _MARKS]
    cause = cause_at if cause_at is not None else (marked or events)[0].at
    end = _rest(cause, marked)
    aside = max(_ASIDE_S, _ASIDE * (end - cause))
    begin, end = cause - aside, end + aside
    within = [one for one in events if begin <= one.at <= end]
    chosen, left_out = _chosen(within)
    rows = _ordered(events, chosen)
    lanes = [_lane(task, depth, events, cause, begin, end) for task, depth in rows]
    numbers = {task: row for row, (task, _) in enumerate(rows)}
    shown = [
        (one, Mark(one.at - cause, numbers[one.task], one.event, one.detail))
        for one in within
        if one.task in numbers and one.event in _MARKS
    ]
    travels = list(_travels(shown, _parents(events)))
    marks = [mark for _, mark in shown]
    return Timeline(begin - cause, end - cause, lanes, marks, travels, left_out)


def _rest(cause: float, marked: Iterable[Event]) -> float:
    """When the marks that the first one behind the cause began have come to rest."""
    behind = [one.at for one in marked if one.at >= cause]
    if not behind:
        return cause + _QUIET_S
    last = behind[0]
    for at in behind:
        if at - last > _REST_S:
            break
        last = at
    return last


def _chosen(within: Iterable[Event]) -> tuple[set[int], int]:
    """Tasks to which something happens, those with marks first; and how many of them have no room."""
    marked: dict[int, bool] = {}
    for one in within:
        marked[one.task] = marked.get(one.task, False) or one.event in _MARKS
    tasks = sorted(marked, key=lambda task: (not marked[task], task))
    return set(tasks[:_MOST_LANES]), max(0, len(tasks) - _MOST_LANES)


def _parents(events: Iterable[Event]) -> dict[int, int | None]:
    return {one.task: one.parent for one in events}


def _ordered(events: Sequence[Event], chosen: set[int]) -> list[tuple[int, int]]:
    """Each with its depth: by birth, which is by number, and each below its nearest ancestor that is shown."""
    parents = _parents(events)
    children: dict[int | None, list[int]] = {}
    for task in sorted(chosen):
        above = next((one for one in _ancestors(task, parents) if one in chosen), None)
        children.setdefault(above, []).append(task)
    ordered: list[tuple[int, int]] = []
    waiting = [(task, 0) for task in reversed(children.get(None, []))]
    while waiting:
        task, depth = waiting.pop()
        ordered.append((task, depth))
        waiting.extend((child, depth + 1) for child in reversed(children.get(task, [])))
    return ordered


def _ancestors(task: int, parents: dict[int, int | None]) -> Iterator[int]:
    above = parents.get(task)
    seen = {task}
    while above is not None and above not in seen:
        yield above
        seen.add(above)
        above = parents.get(above)


def _lane(
    task: int, depth: int, events: Sequence[Event], cause: float, begin: float, end: float
) -> Lane:
    own = [one for one in events if one.task == task]
    born = own[0].at if own[0].event == "spawned" else begin
    gone = own[-1].at if own[-1].event in ("ended", "raised") else end
    lane = Lane(own[-1].name, depth, max(born, begin) - cause, min(gone, end) - cause)
    since: float | None = None
    for one in own:
        if one.event == "resumed":
            since = one.at
        elif since is not None and one.event in ("parked", "ended", "raised"):
            if since <= end and one.at >= begin:
                lane.runs.append((max(since, begin) - cause, min(one.at, end) - cause))
            since = None
    return lane


def _travels(
    shown: Sequence[tuple[Event, Mark]], parents: dict[int, int | None]
) -> Iterator[tuple[Mark, Mark]]:
    """In the order of delivery."""
    had: dict[int, Mark] = {}
    for event, mark in shown:
        if event.event != "cancelled":
            continue
        near = [*_ancestors(event.task, parents)]
        near += [task for task in reversed(had) if parents.get(task) == event.task]
        source = next((had[task] for task in near if task in had), None)
        if source is not None:
            yield source, mark
        had[event.task] = mark
