"""What the legs cost, small: every figure is there, named as the tables judge it, and refusals say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trioleg.bench.leg_streams import leg_token_ids
from trioleg.compare.legs import TRIOLEG, Case
from trioleg.compare.measured import measuring
from trioleg.compare.measures import measures_of
from trioleg.compare.outcome import Outcome
from trioleg.compare.scenario import SCENARIOS, Scene
from trioleg.compare.scenarios import cost
from trioleg.errors import TriolegError


@pytest.fixture
def case(smollm2: Path) -> Case:
    return Case(smollm2, leg_token_ids(smollm2))


def _scene(case: Case, name: str = "cost-processor") -> Scene:
    return Scene(Outcome(name, TRIOLEG, 1), case, seed=1)


async def test_processor_and_gaps(case: Case) -> None:
    scene = _scene(case)
    await cost.measure_processor(scene, [1, 3], [40.0], 0.3)
    figures = scene.outcome.figures
    for at in ("1 stream", "3 streams"):
        assert 0 < figures[f"µs/token, {at} at 40 Hz"] < 1e6
        p50, p99 = (
            figures[f"ms gap {one} beyond the step, {at} at 40 Hz"] for one in ("p50", "p99")
        )
        assert 0 <= p50 <= p99
        assert 0 <= figures[f"% merged, {at}"] < 100
    assert len(figures) == 8
    directions = {name: one.less_is_better for name, one in measures_of([scene.outcome]).items()}
    assert {name for name, less in directions.items() if less is not True} == {
        "% merged, 1 stream",
        "% merged, 3 streams",
    }


async def test_first_tokens_and_memory(case: Case) -> None:
    scene = _scene(case)
    async with measuring(TRIOLEG, case) as measured:
        run = measured.run()
        await run.open(2)
        await measured.subject.engine.tell("pace", rate=40.0)
        await cost.measure_first_tokens(scene.outcome, measured.subject.port, 2, 3)
    await cost.measure_memory(scene, 5)
    assert list(scene.outcome.figures) == [
        "ms first token p50, beside 2 streams",
        "ms first token worst of 3, beside 2 streams",
        "s start to ready, with its engine",
        "MB ready",
        "KB/stream, 5 idle",
    ]
    assert min(list(scene.outcome.figures.values())[:-1]) > 0


async def test_wakeups_are_counted(case: Case) -> None:
    """By task, one stream's frame wakes the link and the stream; a step of four streams shares the first."""
    scene = _scene(case)
    await cost.measure_wakeups(scene, [1, 4], 10, ", by task", direct="off")
    figures = scene.outcome.figures
    assert figures["tasks/stream, 4 streams, by task"] == 2
    one, four = (figures[f"wake-ups/token, {of}, by task"] for of in ("1 stream", "4 streams"))
    # A loaded machine may merge tokens, and so save some.
    assert 1 <= one <= 4
    assert 0 < four <= one


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"options": {"loop": "uvloop"}}, "no such thing: loop"),
        ({"directory": Path("/no/such/model")}, "/no/such/model"),
        # The bench's engine has no such way to end.
        ({"die": "loading"}, "unrecognized arguments: --die"),
    ],
)
async def test_a_leg_that_does_not_start_says_why(
    case: Case, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(TriolegError, match=f"trioleg ended before it was ready.*{why}"):
        async with measuring(TRIOLEG, replace(case, **asked)):
            pass


async def test_idle_streams_need_open_files(monkeypatch, case: Case) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (500, 500))
    name = "cost-memory-and-start"
    with pytest.raises(TriolegError, match=f"{name} opens 1000: 1000 streams need 1128 open files"):
        await SCENARIOS[name].play(_scene(case, name))
