"""The figures of the bench of the leg, as they come: a series each, or one for each peer that it has a goal against.

Pure. A series is named by what it says and by where on its axis it stands.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from .leg_streams import Ended, Window
from .leg_subjects import FLOOR, VLLM
from .report import Chart, Series

__all__ = [
    "Figures",
    "note_cost",
    "note_idle",
    "note_length",
    "note_saturation",
    "note_start",
    "of_streams",
]

# What is drawn.
_COST = Chart("cost", "Processor time of the server for a token", x="streams")
_GAP = Chart("gap", "Gap between two frames of a stream, beyond the step: p99", x="streams")
_FIRST = Chart("first", "Time to the first frame of a stream: p50", x="streams")
_LENGTH = Chart(
    "length", "Processor time of the server for a token, by where it is", x="tokens before it"
)
_IDLE = Chart("idle", "Memory of an open stream that says nothing", x="streams")

# What ours is to be of theirs; None: the ratio alone.
_COST_GOALS = {16: 0.33, 64: 0.33, 256: 0.25}
_FLOOR_GOAL = 1.5
_GAP_GOALS = {256: 1.0}
_SATURATION_GOAL = 2.5
_MEMORY_GOAL = 0.2
_START_GOAL = 0.25
_IDLE_GOALS = {1000: 1.0, 4000: 1.0}


class Figures:
    """``peers``: who is measured beside us; a goal against anybody else is left out."""

    def __init__(self, peers: Sequence[str]) -> None:
        self._peers = peers
        self._series: dict[str, list[Series]] = {}

    def note(
        self,
        subject: str,
        what: str,
        unit: str,
        figure: float,
        *,
        goals: Mapping[str, float | None] | None = None,
        less_is_better: bool = True,
        chart: Chart | None = None,
        at: float | None = None,
    ) -> None:
        """A run's figure. ``goals``: by peer, what ours is to be of theirs; None where only the ratio is wanted.
        All but the first two are what they were when ``what`` was noted first."""
        if what not in self._series:
            wanted = [(peer, goal) for peer, goal in (goals or {}).items() if peer in self._peers]
            runs: dict[str, list[float]] = {}
            self._series[what] = [
                Series(
                    what, unit, goal, peer, less_is_better, runs, chart if not place else None, at
                )
                for place, (peer, goal) in enumerate(wanted or [(None, None)])
            ]
        # The runs are the same for all of them.
        self._series[what][0].note(subject, figure)

    @property
    def series(self) -> list[Series]:
        """All of them, in the order in which they came up."""
        return [one for group in self._series.values() for one in group]


def of_streams(streams: int) -> str:
    """So many, in words."""
    return f"{streams} stream{'s' if streams > 1 else ''}"


def note_cost(
    figures: Figures,
    subject: str,
    streams: int,
    first: tuple[float, float],
    window: Window,
    memory_mb: float,
    ended: Ended,
) -> None:
    """A run with so many streams. ``first``: median and p99 of the seconds to the first frame."""
    of = of_streams(streams)
    note = functools.partial(figures.note, subject, at=streams)
    goals = {VLLM: _COST_GOALS.get(streams), FLOOR: _FLOOR_GOAL}
    note(f"processor a token, {of}", "µs", window.cost_us, goals=goals, chart=_COST)
    gap_goals = {VLLM: _GAP_GOALS.get(streams), FLOOR: None}
    note(f"gap beyond the step, p50, {of}", "ms", window.gap_p50 * 1e3)
    p99 = window.gap_p99 * 1e3
    note(f"gap beyond the step, p99, {of}", "ms", p99, goals=gap_goals, chart=_GAP)
    note(f"first frame, p50, {of}", "ms", first[0] * 1e3, goals={VLLM: None}, chart=_FIRST)
    note(f"first frame, p99, {of}", "ms", first[1] * 1e3, goals={VLLM: None})
    note(f"memory, {of}", "MB", memory_mb)
    alone = 100 * ended.frames_of_tokens
    note(f"frames of tokens, {of}", "%", alone, less_is_better=False)
    note(f"steps that the engine made late, {of}", "%", 100 * ended.late_steps)


def note_saturation(figures: Figures, subject: str, streams: int, tokens: float) -> None:
    """Tokens a second, of so many streams."""
    goals = {VLLM: _SATURATION_GOAL, FLOOR: None}
    what = f"saturated, {streams} streams"
    figures.note(subject, what, "tokens/s", tokens, goals=goals, less_is_better=False)


def note_start(figures: Figures, subject: str, seconds: float, memory_mb: float) -> None:
    """A server that has just become ready."""
    goals = {VLLM: _START_GOAL, FLOOR: None}
    figures.note(subject, "start to ready, with an engine that is up", "s", seconds, goals=goals)
    goals = {VLLM: _MEMORY_GOAL, FLOOR: None}
    figures.note(subject, "memory, ready", "MB", memory_mb, goals=goals)


def note_idle(figures: Figures, subject: str, streams: int, each_mb: float) -> None:
    """So many open streams that say nothing."""
    goals = {VLLM: _IDLE_GOALS.get(streams), FLOOR: None}
    what = f"an idle stream of {streams}"
    each_kb = each_mb * 1024
    figures.note(subject, what, "KB", each_kb, goals=goals, chart=_IDLE, at=streams)


def note_length(figures: Figures, subject: str, length: int, window: Window) -> None:
    """From that many tokens of each stream on."""
    goals = {VLLM: None, FLOOR: None}
    what = f"processor a token, from token {length:,} on"
    figures.note(subject, what, "µs", window.cost_us, goals=goals, chart=_LENGTH, at=length)
