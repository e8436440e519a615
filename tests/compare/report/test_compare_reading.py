"""How a study is read across: facts, words that differ, and what is worse by rule."""

from __future__ import annotations

import pytest
from compare_outcomes import MACHINE, made_study, outcomes

from trioleg.compare.measures import measures_of
from trioleg.compare.outcome import HANG, Outcome
from trioleg.compare.reading import Row, read_study
from trioleg.compare.study import FailedRun, Question, Settings, Study


def _row(*played: Outcome, failed: tuple[FailedRun, ...] = ()) -> Row:
    legs = list(dict.fromkeys(one.leg for one in (*played, *failed)))
    study = Study(Settings("m", legs, 1, 0), MACHINE, [Question("s", "g", "?")], list(played))
    study.failed += failed
    return read_study(study)[0]


def _two(ours: dict, theirs: dict) -> Row:
    return _row(Outcome("s", "trioleg", 1, **ours), Outcome("s", "asyncio", 1, **theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "worse"),
    [
        ({"told_engine_s": 0.010}, {"told_engine_s": 0.004}, "engine told after 10.0 ms, against"),
        ({"told_engine_s": 0.010}, {"told_engine_s": 0.009}, None),  # less than a quarter
        ({"told_engine_s": 0.0012}, {"told_engine_s": 0.0004}, None),  # less than 1 ms
        ({"exit_s": 3.0}, {"exit_s": 1.0}, "gone after 3.00 s, against asyncio 1.00 s"),
        ({"noticed_s": {"health": 2.0}}, {"noticed_s": {"health": 1.0}}, "health noticed after"),
        ({"noticed_s": {"health": 2.0}}, {"noticed_s": {"log": 1.0}}, None),
        ({"memory_kb": 900}, {"memory_kb": 500}, "memory that stays, KB 900, against asyncio 500"),
        ({"memory_kb": 300}, {"memory_kb": 100}, None),
        ({"figures": {"µs/token, 64": 30.0}}, {"figures": {"µs/token, 64": 20.0}}, "µs/token"),
        ({"figures": {"tokens/s": 10.0}}, {"figures": {"tokens/s": 20.0}}, "tokens/s 10.0"),
        ({"figures": {"tokens/s": 20.0}}, {"figures": {"tokens/s": 10.0}}, None),
        ({"figures": {"waits (ms)": 2.5}}, {"figures": {"waits (ms)": 1.0}}, "waits (ms) 2.50"),
        ({"figures": {"the client's": 9.0}}, {"figures": {"the client's": 1.0}}, None),
        ({"verdicts": [HANG]}, {}, "hangs, which asyncio does not"),
        ({"verdicts": [HANG]}, {"verdicts": [HANG]}, None),
        ({"is_absent": True}, {}, "has no such thing, which asyncio has"),
        ({}, {"is_absent": True}, None),
        (
            {"has_told_engine": False},
            {"has_told_engine": True, "told_engine_s": 1.0},
            "never told the engine, which asyncio did",
        ),
        ({"has_told_engine": False}, {"has_told_engine": False}, None),
        ({"has_told_engine": False}, {}, None),  # nobody had to
    ],
)
def test_what_is_worse(ours: dict, theirs: dict, worse: str | None) -> None:
    found = [one.sentence for one in _two(ours, theirs).worse("trioleg")]
    assert len(found) == (worse is not None)
    assert all(worse is not None and one.startswith(worse) for one in found)


def test_the_same_rule_holds_for_every_leg() -> None:
    row = _two({"exit_s": 1.0}, {"exit_s": 3.0})
    assert row.worse("trioleg") == []
    assert [one.what for one in row.worse("asyncio")] == ["gone after"]


def test_alone_nobody_is_worse() -> None:
    assert _row(*outcomes("trioleg", None, scenario="s", verdicts=[HANG])).worse("trioleg") == []


def test_failed_runs_are_worse_than_whole_ones() -> None:
    failed = (FailedRun("s", "trioleg", 1, "x"),)
    row = _row(Outcome("s", "asyncio", 1), failed=failed)
    assert [one.sentence for one in row.worse("trioleg")] == [
        "failed (all runs), which asyncio did not"
    ]
    assert row.cells["trioleg"].brief() == "! failed"


def test_a_median_is_compared_and_the_spread_is_shown() -> None:
    measure = measures_of(outcomes("trioleg", 0.002, 0.001, 0.03))["engine told after"]
    assert str(measure) == "2.00 ms (1.00–30.0)"
    assert measure.median == "2.00 ms"


def test_words_that_differ_are_all_shown() -> None:
    facts = read_study(made_study())[1].facts()
    assert facts["error"] == {
        "trioleg": "ValueError: a (1×); nothing (1×)",
        "asyncio": "",
        "vllm": "",
    }
    assert facts["exit code"]["trioleg"] == "1"
    assert facts["gone after"]["trioleg"] == "1.50 s (2 of 3 runs)"


def test_what_is_left_is_shown_with_its_spread() -> None:
    facts = read_study(made_study())[0].facts()
    assert facts["left behind"]["asyncio"] == "tasks 0–2"
    assert facts["verdict"] == {"trioleg": "clean", "asyncio": "leak (2 of 3 runs)"}
    assert facts["engine never told"]["asyncio"] == "never (1 of 3 runs)"
