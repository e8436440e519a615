"""Studies that were played one after the other become one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compare_outcomes import made_study, outcomes

from trioleg.compare.study import Question, merge
from trioleg.errors import InvalidRequestError


def test_of_a_scenario_and_a_leg_in_two_the_last_counts() -> None:
    first, again = made_study(), made_study()
    again.settings = replace(again.settings, legs=["asyncio", "taskgroup"])
    again.questions = [Question("leaves", "Endings", "Asked anew?"), Question("new", "New", "?")]
    again.outcomes = outcomes("asyncio", 0.1) + outcomes("taskgroup", 0.2, scenario="new")
    again.failed, again.recordings, again.sources = [], [], []
    both = merge([first, again])
    assert both.settings.legs == ["trioleg", "asyncio", "vllm", "taskgroup"]
    assert next(one.asks for one in both.questions) == "Asked anew?"
    assert [one.name for one in both.questions] == ["leaves", "dies", "new"]
    told = {
        leg: [one.told_engine_s for one in both.outcomes if (one.scenario, one.leg) == (name, leg)]
        for name, leg in (("leaves", "asyncio"), ("leaves", "trioleg"), ("new", "taskgroup"))
    }
    assert told == {"asyncio": [0.1], "trioleg": [0.004, 0.006, 0.005], "taskgroup": [0.2]}
    assert (both.failed, both.recordings) == (first.failed, first.recordings)
    assert both.sources == first.sources
    assert first.settings.legs == ["trioleg", "asyncio", "vllm"]


@pytest.mark.parametrize("what", ["machines", "settings"])
def test_what_cannot_be_compared_is_refused(what: str) -> None:
    first, other = made_study(), made_study()
    if what == "machines":
        other.machine = replace(other.machine, cores=64)
    else:
        other.settings = replace(other.settings, runs=1)
    with pytest.raises(InvalidRequestError, match=f"whose {what} differ"):
        merge([first, other])
