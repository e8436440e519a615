"""The study that docs/comparison shows: its pages are made of its data, and it has every scenario and every leg."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioleg.compare import scenarios  # noqa: F401 - to import it is to know them
from trioleg.compare.legs import LEGS, TRIOLEG
from trioleg.compare.markdown import to_markdown
from trioleg.compare.scenario import SCENARIOS
from trioleg.compare.study import Study, load

_FOLDER = Path(__file__).parents[3] / "docs" / "comparison"


@pytest.fixture(scope="module")
def study() -> Study:
    return load(_FOLDER / "study.json")


def test_the_page_is_made_of_the_data(study: Study) -> None:
    assert (_FOLDER / "results.md").read_text(encoding="utf-8") == to_markdown(study)


def test_every_scenario_was_played_three_times_against_every_leg_that_has_it(study: Study) -> None:
    played = [(one.scenario, one.leg) for one in study.outcomes]
    assert study.failed == []
    assert study.settings.legs == list(LEGS)
    for scenario in SCENARIOS.values():
        for leg in scenario.legs:
            assert played.count((scenario.name, leg)) == 3, (scenario.name, leg)


def test_trioleg_has_no_verdict(study: Study) -> None:
    found = {
        one.scenario: one.verdicts for one in study.outcomes if one.leg == TRIOLEG and one.verdicts
    }
    assert found == {}


def test_every_picture_is_there(study: Study) -> None:
    for one in study.recordings:
        assert (_FOLDER / "timelines" / f"{one.name}.svg").exists()
