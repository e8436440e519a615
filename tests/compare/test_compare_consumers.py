"""The scenarios of programs that use the library, against trioleg: what must hold for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import trioleg.compare.scenarios  # noqa: F401
from trioleg.bench.leg_streams import leg_token_ids
from trioleg.compare.legs import ASYNCIO, TRIOLEG, Case
from trioleg.compare.outcome import SWALLOW, Outcome
from trioleg.compare.scenario import SCENARIOS, Scene

_TWO = "errors-in-two-places"
_BOTH = "what came out of the library (2 of 2), the traceback (2 of 2)"
# The error that came out, and where those that were raised are to be found.
_FAILING = {
    "consumer-crashes": (
        "ValueError: the body",
        "what came out of the library (1 of 1), the traceback (1 of 1)",
    ),
    "error-in-cleanup": ("KeyError: 'the clean-up'", _BOTH),
    _TWO: ("ExceptionGroup: Exceptions from Trio nursery (2 sub-exceptions)", _BOTH),
}


async def _play(name: str, leg: str, directory: Path) -> Outcome:
    outcome = Outcome(name, leg, 0)
    await SCENARIOS[name].play(Scene(outcome, Case(directory, leg_token_ids(directory)), 1))
    assert outcome.cause_at is not None
    return outcome


def _check_clean(outcome: Outcome) -> None:
    assert (outcome.verdicts, outcome.leaked, outcome.is_absent) == ([], {}, False), outcome
    assert outcome.figures["until its engine had gone (s)"] > 0


async def test_break_tells_the_engine_while_the_program_goes_on(smollm2: Path) -> None:
    outcome = await _play("consumer-breaks", TRIOLEG, smollm2)
    _check_clean(outcome)
    assert (outcome.has_told_engine, outcome.error, outcome.exit_code) == (True, "", 0)
    assert outcome.told_engine_s is not None
    assert outcome.told_engine_s > 0


async def test_a_forgotten_stream_is_held_and_ends_with_the_library(smollm2: Path) -> None:
    outcome = await _play("consumer-forgets", TRIOLEG, smollm2)
    _check_clean(outcome)
    assert outcome.figures["requests held while kept"] == 1
    assert (outcome.error, outcome.exit_code) == ("", 0)
    assert "__aenter__" in outcome.remarks[0]


@pytest.mark.parametrize("name", _FAILING)
async def test_all_errors_are_told(name: str, smollm2: Path) -> None:
    outcome = await _play(name, TRIOLEG, smollm2)
    _check_clean(outcome)
    assert (outcome.error, outcome.surfaced) == _FAILING[name]
    assert outcome.exit_code == 1


async def test_an_error_that_reached_nobody_is_seen(smollm2: Path) -> None:
    """``asyncio.gather`` raises the first that came, and keeps the other to itself."""
    outcome = await _play(_TWO, ASYNCIO, smollm2)
    assert (outcome.verdicts, outcome.exit_code) == ([SWALLOW], 1), outcome
