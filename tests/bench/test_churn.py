"""``trioleg bench churn``, small: a thousand requests and one dead engine, and nothing of them is left."""

from __future__ import annotations

import json

import pytest
from programs import END_S, TRIOLEG, descendants, running, wait_until

from trioleg.bench.churn import Churn, ChurnReport
from trioleg.bench.churn_client import ENDS
from trioleg.errors import InvalidRequestError

REQUESTS = 1000


def test_nothing_is_left_of_a_thousand_requests_and_an_engine(smollm2) -> None:
    options = ("--requests", str(REQUESTS), "--kills", "1", "--clients", "32", "--json")
    with running(*TRIOLEG, "bench", "churn", *options) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    report = json.loads(program.stdout)
    ends = report["ends"]
    assert sum(ends.values()) == REQUESTS
    assert set(ends) <= set(ENDS)
    # Of every kind of client there were some, or the churn is none.
    assert {"stream complete", "answer complete", "reset", "left in mid-stream"} <= set(ends)
    assert set(report["leftovers"].values()) == {0.0}
    assert len(report["leftovers"]) == 7
    before, after = report["descriptors"]
    assert after <= before
    assert report["restarts"] == 1
    # Wildly would be 200 KB a request; the server itself takes 60 to 80 MB.
    ((requests, kilobytes),) = report["memory_kb"]
    assert requests == REQUESTS
    assert kilobytes < 300_000


def test_faults_are_told() -> None:
    churn = Churn(requests=3, kills=1, time_limit=5)
    report = ChurnReport()
    report.ends.update(["stream complete", "the connection broke: reset"])
    report.leftovers = {"trioleg_open_streams": 2.0, "trioleg_engine_live_requests": 0.0}
    report.descriptors = (30, 32)
    assert report.faults(churn) == [
        "1 requests: the connection broke: reset",
        "2 of 3 requests within 5 s",
        "0 restarts after 1 kills",
        "trioleg_open_streams is 2",
        "32 descriptors, where there were 30",
    ]
    report.ends.update(["reset", "left a plain request"])
    del report.ends["the connection broke: reset"]
    report.restarts, report.leftovers, report.descriptors = 1, {}, (30, 30)
    assert report.faults(churn) == []


def test_the_slope_is_of_what_comes_after_the_warm_up() -> None:
    report = ChurnReport()
    assert report.slope is None
    report.memory = [(1000, 50_000), (4000, 80_000), (8000, 80_080), (12_000, 80_160)]
    assert report.slope is not None
    assert abs(report.slope - 20) < 1e-9


def test_more_kills_than_requests_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kills is 3; allowed: fewer than requests"):
        Churn(requests=3, kills=3)
