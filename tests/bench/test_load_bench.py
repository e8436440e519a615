"""``trioleg bench load``, small: every figure is there, in pairs, and no process is."""

from __future__ import annotations

import json

import pytest
from programs import END_S, TRIOLEG, descendants, running, wait_until

from trioleg.bench.load import Load, run_load
from trioleg.errors import TriolegError


def test_every_figure_is_measured_and_no_process_is_left(smollm2) -> None:
    options = ("--streams", "20", "--prompts", "1", "--megabytes", "0.5", "--json")
    with running(*TRIOLEG, "bench", "load", *options) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    *pairs, answer = json.loads(program.stdout)
    assert len(pairs) == 6
    for alone, beside in zip(pairs[::2], pairs[1::2], strict=True):
        assert alone["what"].endswith(", alone")
        assert beside["what"].endswith(", beside 0.5 MB")
        for one in (alone, beside):
            assert one["tries"] > 0, one
            assert one["missing"] == 0, one
            assert 0 <= one["median_ms"] <= one["p99_ms"] <= one["worst_ms"]
    assert answer["tries"] == 1
    # 20 streams had at least one piece a second in the 3 s before the prompt.
    assert pairs[2]["tries"] > 60


async def test_too_little_time_is_told(smollm2) -> None:
    with pytest.raises(TriolegError, match=r"0\.1 s were not enough for one prompt of 5 MB"):
        await run_load("smollm2-135m", Load(streams=2, time_limit=0.1), lambda _: None)
