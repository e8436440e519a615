"""Plays the study: every scenario against every leg, so many times, in an order that a seed shuffles.

Rules of this file: legs of a scenario play one right after the other, in shuffled order, so that they have the same
weather, and all scenarios have had a turn before one has its second. A run that fails is kept with its error, and the
others go on. A run is bounded. Whoever has lanes plays once more for the recording, which takes time and so would be
no fair run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h11
import trio

from .. import model_store
from ..bench.leg_streams import leg_token_ids
from ..bench.machine import FRONT_END_PACKAGES, Machine, read_machine
from ..bench.measurement import about_minutes
from ..bench.vllm_python import read_vllm_folder, read_vllm_version
from ..errors import TriolegError
from ..runtime.unwrap import unwrapped
from .legs import READY_S, VLLM, Case
from .outcome import Outcome
from .scenario import SCENARIOS, Scenario, Scene
from .source_counts import SourceCount, count_sources
from .study import FailedRun, Question, Recording, Settings, Study

__all__ = ["AskedStudy", "count_legs", "failed_runs", "play_once", "run_study"]

# Beside the scenario's own time, of which it may take a multiple on a machine under load, and the start of its legs.
_AROUND_S = 120.0
_PATIENCE = 10
# An interpreter, imports, an engine; vLLM's import alone is 7 s.
_START_S = {VLLM: 12.0}
_OTHER_START_S = 3.0
# The run that is recorded is none of those that count.
_RECORDED_RUN = 0

_Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AskedStudy:
    """``only``: names of scenarios; empty: all. ``legs``: names. ``folder``: where recordings go, in ``lanes/``; without
    it there are none. ``vllm_python``: an interpreter that has vLLM, if that is among the legs."""

    legs: tuple[str, ...]
    only: tuple[str, ...] = ()
    runs: int = 3
    seed: int = 0
    vllm_python: str | None = None
    folder: Path | None = None

    @property
    def scenarios(self) -> list[Scenario]:
        """In the order of the tables."""
        return [one for one in SCENARIOS.values() if not self.only or one.name in self.only]

    def turns(self) -> list[tuple[Scenario, str, int]]:
        """Scenario, leg and number of each run that counts, as they are played. The same for the same seed."""
        shuffled = random.Random(self.seed)
        return [
            (one, leg, run)
            for run in range(1, self.runs + 1)
            for one in shuffled.sample(self.scenarios, len(self.scenarios))
            for leg in shuffled.sample(self._legs_of(one), len(self._legs_of(one)))
        ]

    def recordings(self) -> list[tuple[Scenario, str]]:
        """Whose lanes are recorded."""
        if self.folder is None:
            return []
        return [(one, leg) for one in self.scenarios if one.has_lanes for leg in self._legs_of(one)]

    @property
    def expected_s(self) -> float:
        """Roughly, how long all of it takes."""
        played = [(one, leg) for one, leg, _ in self.turns()] + self.recordings()
        return sum(one.seconds + _START_S.get(leg, _OTHER_START_S) for one, leg in played)

    def _legs_of(self, scenario: Scenario) -> list[str]:
        return [leg for leg in self.legs if leg in scenario.legs]


async def run_study(model: str, asked: AskedStudy, progress: _Progress) -> Study:
    """Play all that is asked for. Cancel-safe: what was started ends. ``progress`` is told of each run.

    Raises ``InvalidRequestError`` if the interpreter has no vLLM, and what ``model_store.resolve`` raises. Runs that
    fail do not raise: see ``Study.failed``.
    """
    study = await _begin(model, asked, progress)
    directory = model_store.resolve(model, weights=False)
    case = Case(directory, leg_token_ids(directory), asked.vllm_python)
    progress(about_minutes(asked.expected_s))
    turns = asked.turns()
    for number, (scenario, leg, run) in enumerate(turns, 1):
        progress(f"{number} of {len(turns)}: {scenario.name}, {leg}, run {run}")
        outcome, error = await play_once(scenario, _scene(scenario, leg, run, case, asked))
        if error:
            progress(f"failed: {error}")
            study.failed.append(FailedRun(scenario.name, leg, run, error))
        else:
            study.outcomes.append(outcome)
    for scenario, leg in asked.recordings():
        progress(f"recording: {scenario.name}, {leg}")
        await _record(study, scenario, _scene(scenario, leg, _RECORDED_RUN, case, asked), progress)
    return study


async def _begin(model: str, asked: AskedStudy, progress: _Progress) -> Study:
    machine = await _machine(asked)
    try:
        sources = await count_legs(asked.legs, asked.vllm_python)
    except TriolegError as error:
        # Another version of vLLM, whose files this table does not know; it can be played all the same.
        progress(f"the sources are not counted: {error}")
        sources = []
    questions = [Question(one.name, one.group, one.asks) for one in asked.scenarios]
    settings = Settings(model, list(asked.legs), asked.runs, asked.seed)
    return Study(settings, machine, questions, sources=sources)


async def count_legs(legs: tuple[str, ...], vllm_python: str | None) -> list[SourceCount]:
    """What there is in the sources of ``legs``. Raises as ``source_counts.count_sources`` and ``read_vllm_folder``."""
    packages = dict.fromkeys(legs, Path(__file__).parents[1])
    if VLLM in legs:
        assert vllm_python is not None, "a leg that is asked for has its interpreter"
        packages[VLLM] = await read_vllm_folder(vllm_python)
    return [one for leg, package in packages.items() for one in count_sources(leg, package)]


async def _machine(asked: AskedStudy) -> Machine:
    elsewhere = {}
    if asked.vllm_python is not None:
        elsewhere[VLLM] = await read_vllm_version(asked.vllm_python)
    return read_machine(FRONT_END_PACKAGES, elsewhere)


def _scene(scenario: Scenario, leg: str, run: int, case: Case, asked: AskedStudy) -> Scene:
    lanes = None
    if run == _RECORDED_RUN and asked.folder is not None:
        lanes = (asked.folder / Recording(scenario.name, leg, None).lanes).resolve()
        lanes.parent.mkdir(parents=True, exist_ok=True)
        lanes.unlink(missing_ok=True)
    return Scene(Outcome(scenario.name, leg, run), case, asked.seed, lanes_to=lanes)


async def play_once(scenario: Scenario, scene: Scene) -> tuple[Outcome, str]:
    """What came of it, and why it failed; "" if it did not. Takes no longer than it may."""
    bound = READY_S + _AROUND_S + _PATIENCE * scenario.seconds
    try:
        with trio.move_on_after(bound) as scope:
            # Programs are owned by nurseries, and an error comes out of them in a group.
            with unwrapped():
                await scenario.play(scene)
    except (TriolegError, OSError, h11.RemoteProtocolError) as error:
        return scene.outcome, " ".join(f"{type(error).__name__}: {error}".split())
    if scope.cancelled_caught:
        return scene.outcome, f"it was not over within {bound:g} s"
    return scene.outcome, ""


async def _record(study: Study, scenario: Scenario, scene: Scene, progress: _Progress) -> None:
    outcome, error = await play_once(scenario, scene)
    lanes = scene.case().lanes
    if error or outcome.is_absent or lanes is None or not lanes.exists():
        progress(f"no recording: {error or 'the leg has written none'}")
        return
    study.recordings.append(Recording(scenario.name, outcome.leg, outcome.cause_at))


def failed_runs(study: Study) -> Iterator[str]:
    """A clause for each, for whoever reads only the last line."""
    for one in study.failed:
        yield f"{one.scenario} against {one.leg}, run {one.run}: {one.error}"
