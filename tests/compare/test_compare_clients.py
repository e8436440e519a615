"""The scenarios of clients and load, against trioleg: what must hold for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import trioleg.compare.scenarios  # noqa: F401
from trioleg.bench.leg_streams import leg_token_ids
from trioleg.compare.legs import TRIOLEG, Case
from trioleg.compare.outcome import Outcome
from trioleg.compare.scenario import SCENARIOS, Scene

# What each client sees; the storm and the long ones are left to the study itself.
_CLIENTS = {
    "client-leaves-before-the-first-token": "it left",
    "client-leaves-in-mid-stream": "200, 3 chunks, then it left",
    "client-resets-in-mid-stream": "200, 3 chunks, then it left",
    "client-leaves-while-text-is-held-back": "it left",
    "client-leaves-a-plain-request": "it left",
    "client-leaves-three-choices": "200, 9 chunks, then it left",
    "deadline": "1 × 504; 1 × 200, 3 chunks, error event (deadline_exceeded), [DONE]",
    "message-that-nobody-can-read": "200, 3 chunks, error event (output_error), [DONE]",
    "overload": "429",
    "shutdown-in-mid-stream": "200, chunks, finish (length), [DONE]",
}
_TELL_NOBODY = ("message-that-nobody-can-read", "overload", "shutdown-in-mid-stream")


def test_all_are_known() -> None:
    groups = {one.group for one in SCENARIOS.values()}
    assert {"leaving", "reading", "ending", "load"} <= groups


@pytest.mark.parametrize("name", _CLIENTS)
async def test_nothing_leaks_or_hangs(name: str, smollm2: Path) -> None:
    outcome = Outcome(name, TRIOLEG, 0)
    await SCENARIOS[name].play(Scene(outcome, Case(smollm2, leg_token_ids(smollm2)), 1))
    assert (outcome.verdicts, outcome.leaked, outcome.is_absent) == ([], {}, False), outcome
    assert outcome.client == _CLIENTS[name], outcome
    assert outcome.has_told_engine is (None if name in _TELL_NOBODY else True)
    assert outcome.exit_code in (None, 0)
