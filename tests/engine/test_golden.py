"""SmolLM2-135M in float32 gives the greedy tokens that were computed for it elsewhere.

A sequence may leave the recorded one only at a step whose best two tokens were less than 0.02 apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import run_to_the_end, wire_request
from wire_arrays import read_rows

from trioleg.config import EngineConfig
from trioleg.engine.core import EngineCore

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
SMALL_MARGIN = 0.02


def load(path: Path, dtype: str, budget: int) -> EngineCore:
    config = EngineConfig(dtype=dtype, device="cpu", max_num_batched_tokens=budget)
    return EngineCore.load(path, config)


def add(core: EngineCore, index: int) -> None:
    case = CASES[index]
    count = len(case["greedy_token_ids"])
    core.add_request(
        wire_request(str(index), case["prompt_token_ids"], max_tokens=count, eos_token_id=2)
    )


def check(index: int, token_ids: list[int]) -> None:
    case = CASES[index]
    for step, (ours, right) in enumerate(zip(token_ids, case["greedy_token_ids"], strict=False)):
        if ours != right:
            margin = case["margin_per_step"][step]
            assert margin < SMALL_MARGIN, f"{case['user']!r} parts at step {step}, margin {margin}"
            return
    assert len(token_ids) == len(case["greedy_token_ids"])


@pytest.mark.parametrize("budget", [1024, 50])
def test_all_at_once(smollm2: Path, budget: int) -> None:
    core = load(smollm2, "float32", budget)
    for index in range(len(CASES)):
        add(core, index)
    results = run_to_the_end(core)
    for index in range(len(CASES)):
        check(index, results[str(index)].token_ids)


def test_one_at_a_time(smollm2: Path) -> None:
    core = load(smollm2, "float32", 1024)
    for index in range(len(CASES)):
        add(core, index)
        check(index, run_to_the_end(core)[str(index)].token_ids)


def test_the_five_most_probable_tokens_of_the_first_steps(smollm2: Path) -> None:
    core = load(smollm2, "float32", 1024)
    for index, case in enumerate(CASES):
        params = {"max_tokens": 4, "logprobs": 5}
        core.add_request(wire_request(str(index), case["prompt_token_ids"], **params))
    results = run_to_the_end(core)
    for index, case in enumerate(CASES):
        steps = zip(results[str(index)].outputs, case["top5_logprobs_first_4_steps"], strict=True)
        for output, right in steps:
            ((ids, logprobs, rank),) = read_rows(output.new_logprobs)
            assert (ids[0], logprobs[0], rank) == (ids[1], logprobs[1], 1)
            assert ids[1:] == [token_id for token_id, _ in right]
            assert logprobs[1:] == pytest.approx([value for _, value in right], abs=1e-3)


def test_the_default_dtype_knows_the_capital_of_france(smollm2: Path) -> None:
    core = load(smollm2, "auto", 1024)
    assert core.ready.dtype == "bfloat16"
    assert CASES[0]["user"] == "What is the capital of France?"
    add(core, 0)
    assert run_to_the_end(core)["0"].token_ids == CASES[0]["greedy_token_ids"]
