"""``trioleg bench engine`` with vLLM's engine beside ours, small."""

from __future__ import annotations

import json
import re

from programs import TRIOLEG, descendants, running, wait_until
from vllm_place import VLLM_ENV, VLLM_PYTHON, VLLM_START_S


def test_both_engines_are_asked_the_same_and_none_is_left(smollm2) -> None:
    sizes = ("--streams", "2", "--contexts", "16", "--prompt-tokens", "8")
    peer = ("--vllm-python", str(VLLM_PYTHON), "--enforce-eager")
    options = (*sizes, *peer, "--steps", "3", "--runs", "2", "--json")
    with running(*TRIOLEG, "bench", "engine", *options, env=VLLM_ENV) as program:
        code = program.wait(VLLM_START_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    report = json.loads(program.stdout)
    for series in report["series"]:
        ours, theirs = (series["runs"][name] for name in ("trioleg", "vllm"))
        assert len(ours) == len(theirs) >= 1
        assert series["ratio"]["median"] > 0
        assert (series["goal"], series["against"]) == (1.0, "vllm")
    assert report["machine"]["versions"]["vllm"]
    (same, asked) = re.search(r"answer (\d+) of (\d+) requests", " ".join(report["notes"])).groups()
    assert int(same) > 0.8 * int(asked)
