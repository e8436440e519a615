"""A report's plots, as SVG: medians, with a bar from the smallest to the largest of the runs.

Only what belongs to a chart is drawn: figures that merely share a unit have no axis in common.
matplotlib is imported only here, and only when a plot is asked for: it takes a second and 60 MB. Files are the
same for the same figures (ids from a fixed salt, no date), with text left as text, so that they stay small and
a change of one is a change of figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TriolegError
from .report import Chart, Report, Series, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_lines", "require_matplotlib", "write_plots"]

# Inches: as wide as a column of text.
_WIDTH = 7.5
_HEIGHT = 4.2
_ROW_HEIGHT = 0.32
# The axis below is logarithmic if its last place is so many times its first; that of the figures, which then does not
# begin at 0, only where small ones could not be read.
_LOG_FROM = 8
_LOG_FIGURES_FROM = 30
# A logarithmic axis of figures begins at that share of the smallest median: a run that came out near 0, or below,
# would else take all of its room.
_LOG_FLOOR = 0.5
# A white ground, so that they can be read on a dark page, too.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "trioleg",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
}


def require_matplotlib(extra: str = "bench") -> None:
    """Raises ``TriolegError``, with what to do about it (``extra`` brings it), if it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TriolegError(f"plots need matplotlib: pip install 'trioleg[{extra}]'") from error


def write_plots(report: Report, folder: Path) -> list[Path]:
    """One file for each chart of the report's series; returns their paths. Raises as ``require_matplotlib``."""
    require_matplotlib()
    return [_write(chart, series, folder) for chart, series in _charts(report).items()]


def _charts(report: Report) -> dict[Chart, list[Series]]:
    charts: dict[Chart, list[Series]] = {}
    for one in report.series:
        if one.chart is not None:
            charts.setdefault(one.chart, []).append(one)
    return charts


def _write(chart: Chart, series: list[Series], folder: Path) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = folder / chart.file_name
    is_line = all(one.at is not None for one in series)
    with rc_context(_STYLE):
        rows = sum(len(one.runs) for one in series)
        height = _HEIGHT if is_line else 1 + _ROW_HEIGHT * rows
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title, loc="left")
        if is_line:
            draw = _draw_stack if chart.stacked else draw_lines
            draw(axes, chart, series)
        else:
            _draw_bars(axes, series)
        handles, labels = axes.get_legend_handles_labels()
        if is_line and chart.stacked:
            # From top to bottom, as the layers lie.
            handles, labels = handles[::-1], labels[::-1]
        # Beside the axes, where it covers no figure.
        figure.legend(handles, labels, frameon=False, loc="outside right upper")
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def draw_lines(axes: Axes, chart: Chart, series: Sequence[Series]) -> None:
    """A line over ``at`` for each subject, and for each layer."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for one in series:
        for subject in one.runs:
            spread = one.spread(subject)
            if spread is not None and one.at is not None:
                name = one.layer or dict(chart.names).get(subject, subject)
                lines.setdefault(name, []).append((one.at, spread))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        places, spreads = zip(*points, strict=True)
        medians = [one.median for one in spreads]
        axes.errorbar(places, medians, _errors(spreads), label=name, marker="o", ms=4, capsize=3)
    ticks = sorted({one.at for one in series if one.at is not None})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= _LOG_FROM:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    _scale_figures(axes, [one.median for points in lines.values() for _, one in points])
    axes.set_xlabel(chart.x)
    axes.set_ylabel(series[0].unit)


def _scale_figures(axes: Axes, medians: Sequence[float]) -> None:
    if min(medians) > 0 and max(medians) / min(medians) >= _LOG_FIGURES_FROM:
        axes.set_yscale("log")
        axes.set_ylim(bottom=_LOG_FLOOR * min(medians))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, series: Sequence[Series]) -> None:
    """A bar for each figure of each subject, those of a subject in one colour."""
    subjects = list(dict.fromkeys(name for one in series for name in one.runs))
    bars = [(one, subject, one.spread(subject)) for one in series for subject in one.runs]
    rows = [(one, subject, spread) for one, subject, spread in bars if spread is not None]
    for number, subject in enumerate(subjects):
        own = [(row, spread) for row, (_, name, spread) in enumerate(rows) if name == subject]
        places, spreads = zip(*own, strict=True)
        medians = [one.median for one in spreads]
        axes.barh(places, medians, xerr=_errors(spreads), color=f"C{number}", label=subject)
    axes.set_yticks(range(len(rows)), [one.what for one, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(series[0].unit)


def _draw_stack(axes: Axes, chart: Chart, series: Sequence[Series]) -> None:
    """A bar for each place, made of the layers; what is no layer is a point with its spread beside it."""
    places = sorted({one.at for one in series if one.at is not None})
    layers = list(dict.fromkeys(one.layer for one in series if one.layer))
    tops = dict.fromkeys(places, 0.0)
    colours = _colours(len(layers))
    for layer, colour in zip(layers, colours, strict=True):
        for one in (one for one in series if one.layer == layer and one.at is not None):
            spread = next(filter(None, map(one.spread, one.runs)), None)
            if spread is None or one.at is None:
                continue
            row = places.index(one.at)
            label = layer if row == 0 else None
            axes.bar(
                row,
                spread.median,
                0.5,
                bottom=tops[one.at],
                yerr=_errors([spread]),
                color=colour,
                label=label,
                error_kw={"elinewidth": 0.8, "capsize": 2},
            )
            tops[one.at] += spread.median
    _draw_points(axes, places, [one for one in series if not one.layer])
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlabel(chart.x)
    axes.set_ylabel(series[0].unit)


def _draw_points(axes: Axes, places: Sequence[float], series: Sequence[Series]) -> None:
    named: set[str] = set()
    for one in series:
        for subject in one.runs:
            spread = one.spread(subject)
            if spread is None or one.at is None:
                continue
            name = one.what.partition(",")[0]
            axes.errorbar(
                places.index(one.at) + 0.33,
                spread.median,
                _errors([spread]),
                fmt="D",
                color="black",
                ms=4,
                capsize=3,
                label=None if name in named else name,
            )
            named.add(name)


def _colours(number: int) -> list[Any]:
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    return [colours(index % colours.N) for index in range(number)]


def _errors(spreads: Sequence[Spread]) -> tuple[list[float], list[float]]:
    """How far the runs go below and above their medians."""
    return [one.median - one.low for one in spreads], [one.high - one.median for one in spreads]
