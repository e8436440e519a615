"""Figures of several subjects, side by side: what was measured, its spread, the ratios, and the goals.

Rules of this file: pure, but for the table and the files. A subject is who was measured ("trioleg", "vllm",
"floor"), and a figure is the median of its runs, with the smallest and the largest beside it. Runs alternate
between the subjects, so a ratio is made of runs with the same number, which had the same weather, and only then
the median is taken.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from .machine import Machine

__all__ = ["OURS", "Chart", "Report", "Series", "Spread", "show_report", "write_report"]

OURS = "trioleg"
_NOTHING = "–"
_FILE = "report.json"
# A file of the report's own folder, and of no other.
_PLOT = re.compile(r"[\w-]+\.svg")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, the smallest, and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread | None:
        """None without a figure."""
        known = list(figures)
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(self.low)}–{_short(self.high)})"

    def summary(self) -> dict[str, float]:
        """For JSON."""
        return {"median": self.median, "min": self.low, "max": self.high}


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot that several series of one unit share: ``name`` is its file's, ``x`` what ``Series.at`` counts.

    ``stacked``: series with a ``layer`` lie on one another; those without are drawn as points over them. ``names``:
    what subjects are called in it, where that is not their own name.
    """

    name: str
    title: str
    x: str = ""
    stacked: bool = False
    names: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        """In the folder of the report."""
        return f"{self.name}.svg"


@dataclass(slots=True)
class Series:
    """One figure of every subject. ``runs``: by subject, a figure for each alternating run, in ``unit``.

    ``goal``: what ``trioleg / against`` is to be, at most, or at least where more is better. ``chart``: where it
    is drawn, at ``at`` on the axis below (None: a bar beside the others); without one, it is not drawn. ``layer``: what
    it is called there, if not by its subject.
    """

    what: str
    unit: str
    goal: float | None = None
    against: str | None = None
    less_is_better: bool = True
    runs: dict[str, list[float]] = field(default_factory=dict)
    chart: Chart | None = None
    at: float | None = None
    layer: str = ""

    def note(self, subject: str, figure: float) -> None:
        """Add a run."""
        self.runs.setdefault(subject, []).append(figure)

    def spread(self, subject: str) -> Spread | None:
        """None for a subject without runs."""
        return Spread.of(self.runs.get(subject, ()))

    def ratio(self, peer: str) -> Spread | None:
        """Ours by ``peer``'s, run by run; None where either has none, or the peer's are 0."""
        # A last round may have been cut short.
        pairs = zip(self.runs.get(OURS, ()), self.runs.get(peer, ()), strict=False)
        return Spread.of(ours / theirs for ours, theirs in pairs if theirs)

    @property
    def is_met(self) -> bool | None:
        """Whether the median of the ratios reaches the goal; None where there is no goal, or no ratio."""
        ratio = self.ratio(self.against) if self.against is not None else None
        if ratio is None or self.goal is None:
            return None
        return ratio.median <= self.goal if self.less_is_better else ratio.median >= self.goal

    def summary(self) -> dict[str, Any]:
        """For JSON: every run, and what they come to."""
        ratio = self.ratio(self.against) if self.against is not None else None
        spreads = {subject: Spread.of(runs) for subject, runs in self.runs.items()}
        return {
            "what": self.what,
            "unit": self.unit,
            "less_is_better": self.less_is_better,
            "plot": None if self.chart is None else self.chart.file_name,
            "at": self.at,
            "subjects": {name: one.summary() for name, one in spreads.items() if one is not None},
            "against": self.against,
            "ratio": None if ratio is None else ratio.summary(),
            "goal": self.goal,
            "is_met": self.is_met,
            "runs": self.runs,
        }


@dataclass(slots=True)
class Report:
    """``settings``: what the bench was asked for. ``notes``: sentences that belong beside the figures."""

    title: str
    settings: dict[str, Any]
    machine: Machine
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def subjects(self) -> list[str]:
        """Everybody who has a figure, in the order in which they appear."""
        return list(dict.fromkeys(name for one in self.series for name in one.runs))

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            "settings": self.settings,
            "machine": self.machine.summary(),
            "series": [one.summary() for one in self.series],
            "notes": self.notes,
        }


def show_report(report: Report, console: Console) -> None:
    """Print it, for people."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=report.title)
    table.title_justify = "left"
    table.add_column("figure")
    table.add_column("unit")
    for name in (*report.subjects, "ratio", "goal", "met"):
        table.add_column(name, justify="right")
    for one in report.series:
        spreads = (one.spread(subject) for subject in report.subjects)
        table.add_row(one.what, one.unit, *map(_shown, spreads), *_judgement(one))
    console.print(table)
    console.print("Medians, with the smallest and the largest of the runs.", highlight=False)
    for line in (*report.notes, report.machine.line()):
        console.print(line, highlight=False, soft_wrap=True)


def _judgement(one: Series) -> tuple[str, str, str]:
    """What stands in the last three columns."""
    if one.against is None:
        return "", "", ""
    ratio = f"{_shown(one.ratio(one.against))} of {one.against}"
    if one.goal is None:
        return ratio, "", ""
    goal = f"{'≤' if one.less_is_better else '≥'} {one.goal:g}"
    return ratio, goal, {True: "yes", False: "no", None: _NOTHING}[one.is_met]


def _shown(spread: Spread | None) -> str:
    return _NOTHING if spread is None else str(spread)


def _short(figure: float) -> str:
    """Three digits that count, and never an exponent."""
    size = abs(figure)
    digits = next((after for bound, after in _DIGITS if size >= bound), 3)
    return f"{figure:,.{digits}f}"


# From so much on: so many digits behind the point.
_DIGITS = ((100, 0), (10, 1), (1, 2))


def write_report(report: Report, folder: Path) -> None:
    """Write report.json and the plots into ``folder``, which is made if it is not there. Plots of the report that was
    there are removed; anything else is left alone.

    Raises ``TriolegError`` without matplotlib, and ``OSError``.
    """
    from .plots import write_plots

    folder.mkdir(parents=True, exist_ok=True)
    for name in _earlier_plots(folder / _FILE):
        (folder / name).unlink(missing_ok=True)
    summary = msgspec.json.format(msgspec.json.encode(report.summary()), indent=2)
    (folder / _FILE).write_bytes(summary + b"\n")
    write_plots(report, folder)


def _earlier_plots(path: Path) -> set[str]:
    """Of the report at ``path``, if it is one of ours."""
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=_Earlier)
    except (FileNotFoundError, msgspec.DecodeError):
        return set()
    plots = {one.plot for one in earlier.series if one.plot is not None}
    return {plot for plot in plots if _PLOT.fullmatch(plot)}


class _EarlierSeries(msgspec.Struct):
    plot: str | None = None


class _Earlier(msgspec.Struct):
    """As much of a report.json as is needed to clear up behind it."""

    series: list[_EarlierSeries]
