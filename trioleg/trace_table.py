"""How a trace looks in a terminal: a row for each token, then the frames around them, then a summary.

Rules of this file: rich, and nothing that has to do with serving. What one cannot see from the numbers alone
is said in words below the table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .trace import FrameRow, TokenRow, Trace

__all__ = ["show_trace"]

_LEGEND = """
engine     when the engine handed the step on, in ms since the request was sent
read       its message came off the socket         ┐
processed  decoded to text, put into the mailbox   │ each in µs since "engine"
framed     taken by the reader, made a data: line  │
written    the write to the client has returned    ┘
content    of the frame that carried the token; ↓: the same frame as the next token"""


def show_trace(trace: Trace, console: Console) -> None:
    """Print a trace. ``console``: where to; a narrow one shows fewer hops, and says so."""
    counts = f"{_count(len(trace.tokens), 'token')} · {_count(len(trace.frames), 'frame')}"
    # As Text: a model's name is not markup.
    console.print(Text(f"{trace.model} · {trace.engine} engine · {counts}"))
    is_narrow = console.width < _WIDE
    console.print(_token_table(trace, is_narrow=is_narrow))
    if is_narrow:
        console.print(f"\n{_WIDE} columns show every hop", style="dim", highlight=False)
    console.print(_LEGEND, style="dim", highlight=False)
    console.print()
    for frame in trace.frames:
        console.print(_frame_line(frame), highlight=False, soft_wrap=True)
    if any(row.written is not None for row in trace.tokens):
        console.print()
        console.print(_summary(trace), highlight=False, soft_wrap=True)


# Narrower than that, the reasons would be cut, and they are what one looks for.
_WIDE = 125
_LEFT_OUT = ("id", "step", "read", "processed", "framed")


def _token_table(trace: Trace, *, is_narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [name for name in _COLUMNS if not (is_narrow and name in _LEFT_OUT)]
    for name in shown:
        is_text = name in ("piece", "content", "held back")
        no_wrap = name not in ("content", "held back")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=no_wrap)
    for row in trace.tokens:
        cells = _cells(row, trace.started)
        table.add_row(*(cells[name] for name in shown))
    return table


_TIMES = ("engine", "read", "processed", "framed", "written")
_COLUMNS = ("#", "id", "piece", "step", *_TIMES, "frame", "content", "held back")


def _cells(row: TokenRow, started: float) -> dict[str, str | Text]:
    return {
        "#": str(row.place),
        "id": str(row.token_id),
        "piece": Text(json.dumps(row.piece, ensure_ascii=False).replace("\\\\", "\\")),
        "step": str(row.step),
        "engine": f"{1000 * (row.engine - started):.2f}",
        "read": _since(row, row.read),
        "processed": _since(row, row.processed),
        "framed": _since(row, row.framed),
        "written": _since(row, row.written),
        "frame": "-" if row.frame is None else str(row.frame),
        "content": Text(
            "↓" if row.content is None else json.dumps(row.content, ensure_ascii=False)
        ),
        "held back": Text(row.held_back, style="yellow"),
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _since(row: TokenRow, moment: float | None) -> str:
    return "-" if moment is None else f"+{1e6 * (moment - row.engine):.0f}"


def _frame_line(frame: FrameRow) -> Text:
    line = Text(f"frame {frame.number:>3}  {frame.kind:<6}")
    if frame.kind == "tokens":
        line.append(f"  {_count(frame.num_tokens, 'token'):<8}")
    if frame.content is not None:
        shown = (
            frame.content
            if frame.kind in ("usage", "error")
            else json.dumps(frame.content, ensure_ascii=False)
        )
        line.append(f"  {shown}")
    if frame.finish_reason is not None:
        line.append(f"  finish_reason {frame.finish_reason!r}")
    return line


_HOPS: tuple[
    tuple[str, Callable[[TokenRow], float | None], Callable[[TokenRow], float | None]], ...
] = (
    ("to the socket's reader", lambda row: row.engine, lambda row: row.read),
    ("to text in the mailbox", lambda row: row.read, lambda row: row.processed),
    ("to a frame", lambda row: row.processed, lambda row: row.framed),
    ("to the client's socket", lambda row: row.framed, lambda row: row.written),
    ("the whole leg", lambda row: row.engine, lambda row: row.written),
)


def _summary(trace: Trace) -> str:
    """The median of each hop, over the tokens that were the last of their frame."""
    rows = [row for row in trace.tokens if row.content is not None]
    parts = []
    for name, start, end in _HOPS:
        spans = [_span(start(row), end(row)) for row in rows]
        known = [span for span in spans if span is not None]
        if known:
            parts.append(f"{name} {1e6 * statistics.median(known):.0f} µs")
    return "median of each frame's last token: " + ", ".join(parts)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
