"""The scenario that the document shows is the file that runs, and it runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from programs import ROOT

from trioleg.bench.leg_streams import leg_token_ids
from trioleg.compare.legs import TRIOLEG, Case
from trioleg.compare.outcome import Outcome
from trioleg.compare.scenario import SCENARIOS, Scene

FOLDER = ROOT / "docs" / "comparison"
NAME = "client-leaves-at-the-last-token"


async def test_the_example_runs(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Known to itself alone: other tests count on those of the package.
    monkeypatch.setattr("trioleg.compare.scenario.SCENARIOS", dict(SCENARIOS))
    play = runpy.run_path(str(FOLDER / "last_token.py"))["play"]
    outcome = Outcome(NAME, TRIOLEG, 0)
    await play(Scene(outcome, Case(smollm2, leg_token_ids(smollm2)), 1))
    assert (outcome.verdicts, outcome.leaked) == ([], {}), outcome
    assert outcome.client == "200, 1 chunk, then it left"


def test_the_document_shows_it() -> None:
    document = (FOLDER / "adding-a-scenario.md").read_text(encoding="utf-8")
    shown = document.partition("```python\n")[2].partition("```")[0].splitlines()
    rest = iter((FOLDER / "last_token.py").read_text(encoding="utf-8").splitlines())
    # Left out lines are fine; other ones, or another order, are not.
    assert shown
    assert [line for line in shown if line not in rest] == []
