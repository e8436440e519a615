"""A study as Markdown: for every group a table that one can read across, then every scenario with all that was seen.

Rules of this file: the same study gives the same text, and nothing is in it that is not in study.json. What is said
comes from ``reading.py``; here it is only laid out. Links go to ``timelines/``, beside the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from .legs import TRIOLEG
from .reading import Row, read_study
from .source_counts import COUNTED, REMARK, SourceCount, totals
from .study import Recording, Study
from .table import grouped, legend, settings_line, worse_in, worse_of

__all__ = ["to_markdown"]

_SPECIAL = str.maketrans({"|": "\\|", "<": "&lt;", "*": "\\*", "`": "\\`", "[": "\\["})


def to_markdown(study: Study) -> str:
    """The whole file."""
    return "\n".join(_lines(study)) + "\n"


def _lines(study: Study) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield "Written by `trioleg compare`; do not edit by hand."
    for line in (*legend(), settings_line(study.settings), study.machine.line()):
        yield ""
        yield _escape(line)
    rows = read_study(study)
    for group, members in grouped(rows):
        yield from ("", f"## {_escape(group)}", "")
        yield from _across(members, study.settings.legs)
    if study.sources:
        yield from _sources(study.sources)
    yield from ("", "## Every scenario")
    for row in rows:
        yield from _details(row, study.recordings)


def _across(rows: Sequence[Row], legs: Sequence[str]) -> Iterator[str]:
    header = ["scenario", *legs]
    lines = []
    for row in rows:
        name = row.question.name
        cells = [f"[{name}](#{name})", *(_escape(row.cells[leg].brief()) for leg in legs)]
        if TRIOLEG in legs:
            cells.append(_escape(worse_in(row)))
        lines.append(cells)
    if TRIOLEG in legs:
        header.append(f"{TRIOLEG} is worse in")
    yield from _table(header, lines)


def _details(row: Row, recordings: Iterable[Recording]) -> Iterator[str]:
    question = row.question
    yield from ("", f"### {question.name}", "", _escape(question.asks), "")
    yield from _table(
        ["", *row.cells],
        (
            [_escape(what), *(_escape(texts.get(leg, "")) for leg in row.cells)]
            for what, texts in row.facts().items()
        ),
    )
    worse = [f"- Worse: **{one.leg}** {_escape(one.sentence)}." for one in worse_of(row)]
    remarks = [
        f"- {leg}: {_escape(remark)}"
        for leg, cell in row.cells.items()
        for remark in cell.remarks()
    ]
    if worse or remarks:
        yield from chain([""], worse, remarks)
    for one in recordings:
        if one.scenario == question.name:
            yield from ("", f"![{one.leg}'s tasks](timelines/{one.name}.svg)")


def _sources(sources: Sequence[SourceCount]) -> Iterator[str]:
    summed = totals(sources)
    yield from ("", "## What the sources hold", "")
    sums = [
        [said, *(f"{getattr(counts, name):,}" for counts in summed.values())]
        for name, said in COUNTED.items()
    ]
    yield from _table(["", *summed], sums)
    yield from ("", REMARK, "")
    files = [
        [
            one.leg,
            _escape(f"{one.path}{': ' if one.only else ''}{', '.join(one.only)}"),
            _escape(one.why),
            *(f"{getattr(one.counts, name):,}" for name in COUNTED),
        ]
        for one in sources
    ]
    yield from _table(["leg", "file", "what it does", *COUNTED.values()], files)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _escape(text: str) -> str:
    return " ".join(text.translate(_SPECIAL).split())
