"""``Measure``: a figure of several runs against one leg, and by which rule it is worse than another leg's.

Rules of this file: pure. All times of an ``Outcome`` are less the better; a figure that a scenario names itself says
by its unit, the last word of its name that is one, in which direction it is better. What has no such word is shown,
and judged by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..bench.report import Spread
from .outcome import Outcome

__all__ = ["GONE", "TOLD", "Measure", "measures_of", "shown_seconds"]

TOLD, GONE = "engine told after", "gone after"

# Two runs on a machine that is shared differ by less.
_RATIO = 1.25
# A tick of the scheduler: what differs by less in a single reaction is weather; unless it does so in every run of some.
_MARGIN_S = 0.001
_RUNS_TO_BE_SURE = 3
_SURE = 0.1
# A resident set grows by pages and by an allocator's arenas.
_MARGIN_KB = 256.0

_MORE_IS_BETTER = re.compile(
    r"\b(?:tokens|requests|answers|streams|steps|frames)(?:/| a | per )s(?:econd)?\b"
)
# A means of many, as processor time a token is, has no margin: None stands for a unit of no direction.
_MARGINS = {
    "s": _MARGIN_S,
    "seconds": _MARGIN_S,
    "ms": _MARGIN_S * 1000,
    **dict.fromkeys(("µs", "us", "ns", "bytes", "kb", "kib", "mb", "mib"), 0.0),
    **dict.fromkeys(("ups", "wakeups", "steps", "tasks", "threads", "descriptors", "lost"), 0.0),
}
# With what an apostrophe joins: the s of "client's" is no second.
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")


@dataclass(frozen=True, slots=True)
class Measure:
    """``what``: its name, as a row is headed. ``in_seconds``: it is shown in s or ms, whichever reads better.
    ``less_is_better``: None where neither is. ``runs``: how many had it."""

    what: str
    spread: Spread
    less_is_better: bool | None
    runs: int
    margin: float = 0.0
    in_seconds: bool = False

    def is_worse_than(self, other: Measure) -> bool:
        """By more than what runs of one leg differ by: see ``_RATIO`` and the margins."""
        if self.less_is_better is None:
            return False
        ours, theirs = self.spread.median, other.spread.median
        if not self.less_is_better:
            ours, theirs = theirs, ours
        margin = self.margin * (_SURE if self._is_apart_from(other) else 1)
        return ours > _RATIO * theirs and ours - theirs > margin

    def _is_apart_from(self, other: Measure) -> bool:
        """No run of one comes near a run of the other."""
        if min(self.runs, other.runs) < _RUNS_TO_BE_SURE:
            return False
        return self.spread.low > other.spread.high or other.spread.low > self.spread.high

    def __str__(self) -> str:
        return shown_seconds(self.spread) if self.in_seconds else str(self.spread)

    @property
    def median(self) -> str:
        """Without the spread."""
        middle = Spread(*[self.spread.median] * 3)
        return shown_seconds(middle) if self.in_seconds else str(middle)


def shown_seconds(spread: Spread) -> str:
    """ "1.20 ms (1.00–1.50)", or in seconds from one on."""
    if spread.median >= 1:
        return _with_unit(spread, "s")
    scaled = Spread(*(1000 * one for one in (spread.median, spread.low, spread.high)))
    return _with_unit(scaled, "ms")


def _with_unit(spread: Spread, unit: str) -> str:
    median, _, rest = str(spread).partition(" ")
    return f"{median} {unit} {rest}".rstrip()


def measures_of(outcomes: Sequence[Outcome]) -> dict[str, Measure]:
    """Of the runs of one scenario against one leg, by name, in the order in which a table shows them."""
    found: dict[str, list[float]] = {}
    kinds: dict[str, tuple[bool | None, float, bool]] = {}
    for one in outcomes:
        for what, figure, kind in _figures(one):
            found.setdefault(what, []).append(figure)
            kinds[what] = kind
    made = {}
    for what, figures in found.items():
        spread = Spread.of(figures)
        assert spread is not None, "what is named has a figure"
        less_is_better, margin, in_seconds = kinds[what]
        made[what] = Measure(what, spread, less_is_better, len(figures), margin, in_seconds)
    return made


_TIME = (True, _MARGIN_S, True)


def _figures(one: Outcome) -> Iterator[tuple[str, float, tuple[bool | None, float, bool]]]:
    if one.told_engine_s is not None:
        yield TOLD, one.told_engine_s, _TIME
    for who, seconds in one.noticed_s.items():
        yield f"{who} noticed after", seconds, _TIME
    if one.exit_s is not None:
        yield GONE, one.exit_s, _TIME
    if one.memory_kb is not None:
        yield "memory that stays, KB", one.memory_kb, (True, _MARGIN_KB, False)
    for name, figure in one.figures.items():
        yield name, figure, _kind(name)


def _kind(name: str) -> tuple[bool | None, float, bool]:
    """Of a figure that a scenario names: by its unit."""
    if _MORE_IS_BETTER.search(name):
        return False, 0.0, False
    units = [word for word in map(str.lower, _WORD.findall(name)) if word in _MARGINS]
    return (True, _MARGINS[units[-1]], False) if units else (None, 0.0, False)
