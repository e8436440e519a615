"""A timeline as SVG: one lane a task, thin while it is parked and thick while it runs, with marks and arrows.

As in ``bench/plots.py``: matplotlib only when a picture is asked for, the same file for the same events, text as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.plots import require_matplotlib
from ..errors import TriolegError
from .study import Recording, Study
from .timeline import Lane, Timeline, choose_lanes, read_lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_timeline", "write_timelines"]

# Inches.
_WIDTH, _ROW_HEIGHT, _AROUND_HEIGHT = 9.0, 0.24, 1.3
# Of the width: what is shorter could not be seen, and what is nearer together is drawn as one.
_LEAST_SHARE = 0.0015
# Of a name, about: they begin at the left, so that the indentation shows.
_LETTER_PT = 4.8
# A task's name and an error may be whole sentences.
_LONGEST_NAME = 48
_LONGEST_ERROR = 40
_MARKS = {
    "cancelled": ("x", "#d62728", "a cancel is delivered"),
    "raised": ("D", "#9467bd", "it ends with an error"),
    "ended": ("|", "#222222", "it ends"),
}
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "trioleg",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
}


def write_timelines(study: Study, beside: Sequence[Path], folder: Path) -> list[str]:
    """``timelines/*.svg`` in ``folder``, from the recordings that lie in the last of the folders ``beside`` study.json
    that has them. Returns a sentence for each recording that cannot be drawn. Raises ``TriolegError`` without matplotlib, and ``OSError``."""
    require_matplotlib("compare")
    faults = []
    for one in study.recordings:
        try:
            timeline = choose_lanes(read_lanes(_newest(beside, one)), one.cause_at)
        except TriolegError as error:
            faults.append(f"no picture: {error}")
            continue
        path = folder / "timelines" / f"{one.name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_timeline(timeline, _title(one), path)
    return faults


def _newest(beside: Sequence[Path], recording: Recording) -> Path:
    paths = [one / recording.lanes for one in beside]
    return next((path for path in reversed(paths) if path.exists()), paths[-1])


def _title(one: Recording) -> str:
    zero = "the first mark" if one.cause_at is None else "the cause"
    return f"{one.scenario}, {one.leg}; 0 is {zero}"


def draw_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Write it. Raises ``OSError``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        height = _AROUND_HEIGHT + _ROW_HEIGHT * len(timeline.lanes)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        _draw_lanes(axes, timeline)
        _draw_marks(axes, timeline)
        axes.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlim(_ms(timeline.begin), _ms(timeline.end))
        axes.set_xlabel(_below(timeline))
        if timeline.marks:
            figure.legend(frameon=False, loc="outside lower left", ncols=len(_MARKS))
        figure.savefig(path, format="svg", metadata={"Date": None})


def _below(timeline: Timeline) -> str:
    if not timeline.left_out:
        return "ms"
    return f"ms ({timeline.left_out} more tasks, to which less happens, are not shown)"


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    least = _LEAST_SHARE * _ms(timeline.end - timeline.begin)
    for row, lane in enumerate(timeline.lanes):
        axes.hlines(row, _ms(lane.begin), _ms(lane.end), color="#bbbbbb", linewidth=1)
        axes.broken_barh(_bars(lane, least), (row - 0.3, 0.6), color="#1f77b4", linewidth=0)
    names = [_label(lane) for lane in timeline.lanes]
    axes.set_yticks(range(len(names)), names)
    for text in axes.get_yticklabels():
        text.set_horizontalalignment("left")
    axes.tick_params(axis="y", length=0, pad=_LETTER_PT * max(map(len, names), default=0))
    axes.invert_yaxis()


def _label(lane: Lane) -> str:
    name = "\N{NO-BREAK SPACE}" * 2 * lane.depth + lane.name
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _bars(lane: Lane, least: float) -> list[tuple[float, float]]:
    """Begin and width of each, in ms."""
    bars: list[list[float]] = []
    for begin, end in ((_ms(one), _ms(other)) for one, other in lane.runs):
        end = max(end, begin + least)
        if bars and begin - bars[-1][1] < least:
            bars[-1][1] = max(end, bars[-1][1])
        else:
            bars.append([begin, end])
    return [(begin, end - begin) for begin, end in bars]


def _draw_marks(axes: Axes, timeline: Timeline) -> None:
    for source, target in timeline.travels:
        axes.annotate(
            "",
            xy=(_ms(target.at), target.row),
            xytext=(_ms(source.at), source.row),
            arrowprops={"arrowstyle": "->", "color": "#d62728", "lw": 0.7, "alpha": 0.7},
        )
    for event, (marker, colour, label) in _MARKS.items():
        own = [one for one in timeline.marks if one.event == event]
        places = [_ms(one.at) for one in own], [one.row for one in own]
        axes.plot(*places, marker, color=colour, ms=5, label=label, linestyle="none")
    for one in timeline.marks:
        if one.event == "raised":
            said = one.detail[:_LONGEST_ERROR]
            axes.annotate(said, (_ms(one.at), one.row), (6, 3), textcoords="offset points")


def _ms(seconds: float) -> float:
    return 1000 * seconds
