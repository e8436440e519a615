"""What is said while a model loads: a line a second, and nothing about one that is there sooner."""

from __future__ import annotations

import itertools
import logging

import pytest

from trioleg.engine.loading_log import LoadingLog


def lines(caplog: pytest.LogCaptureFixture, step_s: float, steps: int = 100) -> list[str]:
    """What is logged if each of the steps, 20 MB of 2 GB or so, takes ``step_s``."""
    clock = (step_s * turn for turn in itertools.count())
    report = LoadingLog("tiny", lambda: next(clock))
    with caplog.at_level(logging.INFO, "trioleg.engine.loading_log"):
        for step in range(1, steps + 1):
            report(step * 20_000_000, steps * 20_000_000)
    return caplog.messages


def test_a_quick_model_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 0.0099) == []


def test_a_slow_model_says_one_line_a_second_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 0.034) == [
        "loading tiny: 30 % of 2.0 GB",
        "loading tiny: 60 % of 2.0 GB",
        "loading tiny: 90 % of 2.0 GB",
        "loaded tiny in 3 s",
    ]


def test_slow_tensors_say_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 1.5, steps=3) == [
        "loading tiny: 33 % of 0.1 GB",
        "loading tiny: 66 % of 0.1 GB",
        "loaded tiny in 4 s",
    ]
