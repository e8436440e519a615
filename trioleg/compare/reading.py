"""How a study is read across: a row for each scenario, a cell for each leg, and who is worse than whom in what.

Rules of this file: pure. A figure is the median of the runs with the smallest and the largest beside it; where runs
differ in a word, every word is shown with how many runs had it. What is worse is found by rule alone, for every leg
alike: a leg is worse than another in a row if it leaks, hangs or swallows and the other does not; if the other told the
engine, or has such a thing, or ended all its runs, and it has not; and if a figure is (``measures.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .measures import GONE, TOLD, Measure, measures_of
from .outcome import HANG, LEAK, SWALLOW, Outcome, Verdict
from .study import FailedRun, Question, Study

__all__ = ["Cell", "Row", "Worse", "read_study"]

# What stands in a table that has little room.
_SHORT = {TOLD: "told", GONE: "gone"}
_DOES = {LEAK: "leaks", HANG: "hangs", SWALLOW: "swallows"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What the runs of one scenario against one leg came to. Without an outcome nothing was played."""

    leg: str
    outcomes: tuple[Outcome, ...]
    failed: tuple[FailedRun, ...]
    measures: dict[str, Measure]

    @property
    def is_played(self) -> bool:
        """In at least one run the leg had what it takes."""
        return any(not one.is_absent for one in self.outcomes)

    @property
    def is_absent(self) -> bool:
        """It has no such thing."""
        return bool(self.outcomes) and not self.is_played

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """In how many runs."""
        counts = Counter(verdict for one in self.outcomes for verdict in one.verdicts)
        return {verdict: counts[verdict] for verdict in _DOES if counts[verdict]}

    @property
    def never_told(self) -> int:
        """In how many runs the engine did not hear of it, though it should have."""
        return sum(one.has_told_engine is False for one in self.outcomes)

    def share(self, count: int) -> str:
        """ " (2 of 3 runs)", or nothing where it was all of them."""
        runs = len(self.outcomes) + len(self.failed)
        return "" if count == runs else f" ({count} of {runs} runs)"

    def facts(self) -> Iterator[tuple[str, str]]:
        """All there is to say of it, under the names of the lines, in order."""
        if self.is_absent:
            yield "", "has no such thing"
            return
        yield "seen by the client", _words(one.client for one in self.outcomes)
        yield "verdict", self.verdict()
        yield "left behind", self._left()
        if self.never_told:
            yield "engine never told", f"never{self.share(self.never_told)}"
        for what, measure in self.measures.items():
            yield what, f"{measure}{self.share(measure.runs)}"
        yield "error", _words(one.error for one in self.outcomes)
        yield "it surfaced in", _words(one.surfaced for one in self.outcomes)
        yield "its cause", _words(one.cause for one in self.outcomes)
        codes = (one.exit_code for one in self.outcomes)
        yield "exit code", _words("" if code is None else str(code) for code in codes)

    def verdict(self) -> str:
        """ "leak, hang (2 of 3 runs)", or "clean"; "" where nothing was played."""
        if not self.is_played:
            return ""
        found = [f"{name}{self.share(count)}" for name, count in self.verdicts.items()]
        return ", ".join(found) or "clean"

    def brief(self) -> str:
        """Its verdict as a mark, and the one figure that says most."""
        if self.is_absent:
            return "– absent"
        failed = f"! failed{self.share(len(self.failed))}" if self.failed else ""
        if not self.is_played:
            return failed
        mark = f"✗ {', '.join(self.verdicts)}" if self.verdicts else "✓"
        return ", ".join(filter(None, (f"{mark} {self._key_figure()}".rstrip(), failed)))

    def _key_figure(self) -> str:
        if self.never_told:
            return f"never told{self.share(self.never_told)}"
        for what, measure in self.measures.items():
            return f"{_SHORT.get(what, what.partition(',')[0])} {measure.median}"
        return ""

    def remarks(self) -> list[str]:
        """The scenario's own, each once, and the errors of the runs that failed."""
        counts = Counter(remark for one in self.outcomes for remark in one.remarks)
        said = [f"{remark}{self.share(count)}" for remark, count in counts.items()]
        return said + [f"Run {one.run} failed: {one.error}" for one in self.failed]

    def _left(self) -> str:
        kinds = dict.fromkeys(kind for one in self.outcomes for kind in one.leaked)
        return ", ".join(f"{kind} {self._left_of(kind)}" for kind in kinds)

    def _left_of(self, kind: str) -> str:
        counts = [one.leaked.get(kind, 0) for one in self.outcomes]
        low, high = min(counts), max(counts)
        return str(low) if low == high else f"{low}–{high}"


@dataclass(frozen=True, slots=True)
class Worse:
    """``leg`` is worse in ``what``; ``sentence`` says than whom, and by how much."""

    leg: str
    what: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario. ``cells``: by leg, in the study's order."""

    question: Question
    cells: dict[str, Cell]

    def facts(self) -> dict[str, dict[str, str]]:
        """For each line its text by leg; lines that say nothing of any leg are left out."""
        lines: dict[str, dict[str, str]] = {}
        for leg, cell in self.cells.items():
            for what, text in cell.facts():
                lines.setdefault(what, {})[leg] = text
        return {what: texts for what, texts in lines.items() if what and any(texts.values())}

    def worse(self, leg: str) -> list[Worse]:
        """In what ``leg`` is worse than another; empty if in nothing."""
        cell = self.cells[leg]
        others = [one for name, one in self.cells.items() if name != leg and one.is_played]
        if not others:
            return []
        found = [*self._worse_in_runs(cell), *_worse_in_having(cell, others)]
        if cell.is_played:
            found += [*_worse_in_verdicts(cell, others), *_worse_in_telling(cell, others)]
            found += _worse_in_figures(cell, others)
        return found

    def _worse_in_runs(self, cell: Cell) -> Iterator[Worse]:
        whole = [one.leg for one in self.cells.values() if one.outcomes and not one.failed]
        if cell.failed and whole:
            share = cell.share(len(cell.failed)) or " (all runs)"
            yield Worse(cell.leg, "runs", f"failed{share}, which {_and(whole)} did not")


def read_study(study: Study) -> list[Row]:
    """A row for each scenario that was played, in the study's order."""
    return [_row(study, question) for question in study.questions]


def _row(study: Study, question: Question) -> Row:
    cells = {}
    for leg in study.settings.legs:
        key = (question.name, leg)
        outcomes = [one for one in study.outcomes if (one.scenario, one.leg) == key]
        outcomes.sort(key=lambda one: one.run)
        failed = sorted(
            (one for one in study.failed if (one.scenario, one.leg) == key),
            key=lambda one: one.run,
        )
        cells[leg] = Cell(leg, tuple(outcomes), tuple(failed), measures_of(outcomes))
    return Row(question, cells)


def _worse_in_having(cell: Cell, others: list[Cell]) -> Iterator[Worse]:
    if cell.is_absent:
        having = _and([one.leg for one in others])
        has = "has" if len(others) == 1 else "have"
        yield Worse(cell.leg, "absent", f"has no such thing, which {having} {has}")


def _worse_in_verdicts(cell: Cell, others: list[Cell]) -> Iterator[Worse]:
    for verdict, count in cell.verdicts.items():
        clean = [one.leg for one in others if verdict not in one.verdicts]
        if clean:
            do = "does" if len(clean) == 1 else "do"
            sentence = f"{_DOES[verdict]}{cell.share(count)}, which {_and(clean)} {do} not"
            yield Worse(cell.leg, verdict, sentence)


def _worse_in_telling(cell: Cell, others: list[Cell]) -> Iterator[Worse]:
    telling = [one.leg for one in others if _tells(one)]
    if cell.never_told and telling:
        sentence = f"never told the engine{cell.share(cell.never_told)}, which {_and(telling)} did"
        yield Worse(cell.leg, "engine told", sentence)


def _tells(cell: Cell) -> bool:
    return not cell.never_told and any(one.told_engine_s is not None for one in cell.outcomes)


def _worse_in_figures(cell: Cell, others: list[Cell]) -> Iterator[Worse]:
    for what, ours in cell.measures.items():
        theirs = [(one.measures[what], one.leg) for one in others if what in one.measures]
        better = [(one, leg) for one, leg in theirs if ours.is_worse_than(one)]
        if better:
            against = ", ".join(f"{leg} {one.median}" for one, leg in better)
            yield Worse(cell.leg, what, f"{what} {ours.median}, against {against}")


def _words(said: Iterable[str]) -> str:
    """What all runs say, or what each says with its count; runs that say nothing count as "nothing" beside others."""
    counts = Counter(said)
    if len(counts) <= 1:
        return next(iter(counts), "")
    return "; ".join(f"{word or 'nothing'} ({count}×)" for word, count in counts.items())


def _and(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
