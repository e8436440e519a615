"""``Study``: what was asked, and everything that the runs have shown. It is what study.json holds.

Rules of this file: plain data and two functions; nothing here runs anything. A study says itself which scenarios it
had, so an old one can be read when the scenarios have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ..bench.machine import Machine
from ..errors import InvalidRequestError
from .outcome import Outcome
from .source_counts import SourceCount

__all__ = [
    "STUDY_FILE",
    "FailedRun",
    "Question",
    "Recording",
    "Settings",
    "Study",
    "load",
    "merge",
    "write_json",
]

STUDY_FILE = "study.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for: ``runs`` of each scenario against each leg."""

    model: str
    legs: list[str]
    runs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Question:
    """A scenario, as it was when it was played."""

    name: str
    group: str
    asks: str


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that met what its scenario does not understand: the study's failure, not the leg's. ``run``: from 1."""

    scenario: str
    leg: str
    run: int
    error: str


@dataclass(frozen=True, slots=True)
class Recording:
    """The lives of a leg's tasks in one more run, whose figures do not count since recording takes time. ``cause_at``:
    of that run; None if its scenario does not say. The file lies beside study.json, in ``lanes/``."""

    scenario: str
    leg: str
    cause_at: float | None

    @property
    def name(self) -> str:
        """Of its files, without what follows the point."""
        return f"{self.scenario}-{self.leg}"

    @property
    def lanes(self) -> str:
        """Its file, from the study's folder on."""
        return f"lanes/{self.name}.jsonl"


@dataclass(slots=True)
class Study:
    """``sources``: what was counted in the legs' sources; empty where nobody asked for it."""

    settings: Settings
    machine: Machine
    questions: list[Question]
    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[FailedRun] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    sources: list[SourceCount] = field(default_factory=list)

    def narrow(self, only: Collection[str], legs: Collection[str]) -> None:
        """Leave out other scenarios and other legs; empty: none."""
        names = only or [one.name for one in self.questions]
        self.settings = replace(
            self.settings, legs=[leg for leg in self.settings.legs if not legs or leg in legs]
        )
        kept = self.settings.legs
        self.questions = [one for one in self.questions if one.name in names]
        self.outcomes = [one for one in self.outcomes if one.scenario in names and one.leg in kept]
        self.failed = [one for one in self.failed if one.scenario in names and one.leg in kept]
        self.recordings = [
            one for one in self.recordings if one.scenario in names and one.leg in kept
        ]
        self.sources = [one for one in self.sources if one.leg in kept]


def merge(studies: Sequence[Study]) -> Study:
    """One study of several that were played one after the other: of a scenario against a leg that more than one has, the
    last counts.

    Raises ``InvalidRequestError`` if they are not of one machine, one model and as many runs: nothing in them could be
    compared.
    """
    merged, *others = studies
    for other in others:
        merged = _with(merged, other)
    return merged


def _with(study: Study, other: Study) -> Study:
    legs = list(dict.fromkeys(study.settings.legs + other.settings.legs))
    settings = replace(study.settings, legs=legs)
    _check_alike("settings", settings, replace(other.settings, legs=legs))
    known = study.machine.versions | other.machine.versions
    machine = replace(study.machine, versions=known)
    _check_alike("machines", machine, replace(other.machine, versions=known))
    played = {(one.scenario, one.leg) for one in other.outcomes}
    played |= {(one.scenario, one.leg) for one in other.failed}
    asked = {one.name: one for one in (*study.questions, *other.questions)}
    counted = {one.leg for one in other.sources}
    return Study(
        settings,
        machine,
        list(asked.values()),
        [one for one in study.outcomes if (one.scenario, one.leg) not in played] + other.outcomes,
        [one for one in study.failed if (one.scenario, one.leg) not in played] + other.failed,
        [one for one in study.recordings if (one.scenario, one.leg) not in played]
        + other.recordings,
        [one for one in study.sources if one.leg not in counted] + other.sources,
    )


def _check_alike(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise InvalidRequestError(
            f"--from is given for studies whose {what} differ: {ours}, {theirs}; allowed: studies of one machine and one "
            "model, with as many runs and the same seed",
            parameter="from",
        )


def write_json(study: Study, path: Path) -> None:
    """Everything, each run, indented for people. Raises ``OSError``."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(study), indent=2) + b"\n")


def load(path: Path) -> Study:
    """What ``write_json`` wrote. Raises ``InvalidRequestError`` if it cannot be read, or is something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Study)
    except OSError as error:
        raise _refusal(path, f"it cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refusal(path, str(error)) from error


def _refusal(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"--from is {str(path)!r}, but {why}; allowed: a {STUDY_FILE} that trioleg compare --out has written",
        parameter="from",
    )
