"""The scenarios of an engine that dies and of bugs within the leg, against trioleg: what must hold for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trioleg.compare.scenarios  # noqa: F401
from trioleg.bench.leg_streams import leg_token_ids
from trioleg.compare.legs import TRIOLEG, Case
from trioleg.compare.outcome import Outcome
from trioleg.compare.scenario import SCENARIOS, Scene

_DEAD = "200, {} chunk{}, error event (engine_dead), [DONE]"
_WHOLE = "200, 4 chunks, finish (length), [DONE]"
_ENDED_BY_LINK = _DEAD.format(1, "")
# What clients see, where the error surfaces, and whether the engine is told.
_FAULTS = {
    "process-one": (
        f"it: 200, 2 chunks, error event (output_error), [DONE]; the other: {_WHOLE}",
        "the client, the log",
        True,
    ),
    "process-step": (
        f"it: {_ENDED_BY_LINK}; the other: {_ENDED_BY_LINK}",
        "the client, the log",
        True,
    ),
    "frame": (
        f"it: 200, 2 chunks, error event (output_error), [DONE]; the other: {_WHOLE}",
        "the client, the log",
        True,
    ),
    "reader-crash": (
        f"it: {_ENDED_BY_LINK}; the other: {_ENDED_BY_LINK}",
        "the client, the log",
        True,
    ),
    "abort-fails": (f"it: 200, 3 chunks, then it left; the other: {_WHOLE}", "the log", None),
}


async def _play(name: str, directory: Path) -> Outcome:
    outcome = Outcome(name, TRIOLEG, 0)
    await SCENARIOS[name].play(Scene(outcome, Case(directory, leg_token_ids(directory)), 1))
    assert (outcome.verdicts, outcome.leaked) == ([], {}), outcome
    return outcome


@pytest.mark.parametrize("name", _FAULTS)
async def test_a_fault_costs_those_whom_it_concerns_and_no_one_else(
    name: str, smollm2: Path
) -> None:
    outcome = await _play(name, smollm2)
    client, surfaced, is_told = _FAULTS[name]
    assert (outcome.client, outcome.surfaced) == (client, surfaced), outcome
    assert outcome.has_told_engine is is_told
    # Either it is named at once, or where to look is.
    assert re.search("the scenario's fault|its log says why", outcome.error)
    assert any(one.startswith("a new request: 200") for one in outcome.remarks)


async def test_a_killed_engine_is_named_to_all_who_ask(smollm2: Path) -> None:
    outcome = await _play("engine-sigkill", smollm2)
    assert outcome.client == _DEAD.format(3, "s")
    assert outcome.cause == "killed by SIGKILL"
    assert outcome.surfaced == "the client, the log, the exit"
    assert outcome.noticed_s.keys() == {"client", "health"}
    assert outcome.exit_code == 1
    assert "a new request: 503" in outcome.remarks


@pytest.mark.parametrize("name", ["engine-dies-loading", "engine-dies-when-ready"])
async def test_a_start_that_fails_says_why(name: str, smollm2: Path) -> None:
    outcome = await _play(name, smollm2)
    assert (outcome.cause, outcome.exit_code) == ("status 3", 1)
    assert outcome.surfaced == "the log, the exit"
