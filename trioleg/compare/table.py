"""A study on the terminal: one row a scenario, one column a leg; with details, every line of every cell.

Rules of this file: what is said comes from ``reading.py``; here it is only laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .legs import TRIOLEG
from .reading import Row, Worse, read_study
from .source_counts import COUNTED, REMARK, SourceCount, totals
from .study import Settings, Study

__all__ = [
    "grouped",
    "legend",
    "settings_line",
    "show_sources",
    "show_study",
    "worse_in",
    "worse_of",
]

# A scenario may have dozens of figures.
_NAMED = 4


def show_study(study: Study, console: Console, *, details: bool = False) -> None:
    """Print it, for people."""
    rows = read_study(study)
    for group, members in grouped(rows):
        console.print(_group_table(group, members, study.settings.legs))
        console.print()
    for row in rows if details else ():
        _show_row(row, console)
    if not details:
        _show_worse(rows, console)
    if study.sources:
        show_sources(study.sources, console)
    for line in (*legend(), settings_line(study.settings), study.machine.line()):
        console.print(Text(line), soft_wrap=True)


def grouped(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows under their headings, in the order in which these appear."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.question.group, []).append(row)
    return list(groups.items())


def worse_in(row: Row) -> str:
    """In what trioleg is, for the row's last cell: the details have the rest."""
    found = [one.what for one in row.worse(TRIOLEG)]
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def worse_of(row: Row) -> Iterator[Worse]:
    """Of every leg, and trioleg's first."""
    for leg in sorted(row.cells, key=lambda leg: leg != TRIOLEG):
        yield from row.worse(leg)


def legend() -> Iterator[str]:
    """What the tables' signs mean."""
    yield "✓ nothing leaked, hung or was swallowed; ✗ it was; – the leg has no such thing; ! a run of the study failed."
    yield "Figures are medians, in brackets the smallest and the largest of the runs."
    yield (
        "Worse: by a verdict or by what is absent, or a figure by a quarter and, of a time, 1 ms; 0.1 ms, if every run "
        "of three or more was."
    )


def settings_line(settings: Settings) -> str:
    """How it was played."""
    return f"{settings.runs} runs of each, {settings.model}, seed {settings.seed}."


def _group_table(group: str, rows: Sequence[Row], legs: Sequence[str]) -> Table:
    table = _table(group, "scenario", legs)
    if TRIOLEG in legs:
        table.add_column(f"{TRIOLEG} is worse in")
    for row in rows:
        cells = [row.question.name, *(row.cells[leg].brief() for leg in legs)]
        if TRIOLEG in legs:
            cells.append(worse_in(row))
        table.add_row(*map(Text, cells))
    return table


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=Text(title, "bold"))
    table.title_justify = "left"
    table.add_column(first)
    for name in others:
        table.add_column(name)
    return table


def _show_worse(rows: Sequence[Row], console: Console) -> None:
    worse = [(row.question.name, one) for row in rows for one in worse_of(row)]
    ours = [f"  {name}: {one.sentence}" for name, one in worse if one.leg == TRIOLEG]
    if ours:
        console.print(Text(f"Where {TRIOLEG} is worse than another leg:", "bold"))
        for line in ours:
            console.print(Text(line), soft_wrap=True)
        console.print()


def _show_row(row: Row, console: Console) -> None:
    console.print(Text(f"{row.question.name}: {row.question.asks}", "bold"), soft_wrap=True)
    table = _table("", "", list(row.cells))
    table.title = None
    for what, texts in row.facts().items():
        table.add_row(Text(what), *(Text(texts.get(leg, "")) for leg in row.cells))
    console.print(table)
    for one in worse_of(row):
        console.print(Text(f"Worse: {one.leg}: {one.sentence}."), soft_wrap=True)
    for leg, cell in row.cells.items():
        for remark in cell.remarks():
            console.print(Text(f"{leg}: {remark}"), soft_wrap=True)
    console.print()


def show_sources(sources: Sequence[SourceCount], console: Console) -> None:
    """What was counted in the legs' sources, in all."""
    summed = totals(sources)
    table = _table("What the sources hold", "", list(summed))
    for name, said in COUNTED.items():
        table.add_row(said, *(f"{getattr(counts, name):,}" for counts in summed.values()))
    console.print(table)
    console.print(Text(REMARK), soft_wrap=True)
    console.print()
