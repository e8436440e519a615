"""What is looked at behind a cause, against a real server: before its engine dies, and after."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from trioleg.compare.aftermath import Family, health, note_again
from trioleg.compare.legs import TRIOLEG, Case, serving
from trioleg.compare.observing import warm_up
from trioleg.compare.outcome import Outcome


@pytest.fixture
def case(smollm2: Path) -> Case:
    return Case(smollm2, (345, 678, 901))


async def test_a_server_before_and_after_its_engine(case: Case) -> None:
    outcome = Outcome("a-scenario", TRIOLEG, 1)
    async with serving(TRIOLEG, case) as server:
        await warm_up(server)
        family = Family(server.program)
        assert await note_again(outcome, server)
        assert await health(server) == "200"
        assert set(family.there()) == {"processes", "socket files"}
        await server.puppet.signal(signal.SIGKILL)
        assert not await note_again(outcome, server)
        said = "engine_dead: engine 0 is dead: it was killed by SIGKILL"
        assert await health(server) == f"503 {said}"
    await family.note_left(outcome)
    assert outcome.leaked == {}
    assert outcome.verdicts == []
