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
from trioleg.messages import EngineCoreEvent

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
SMALL_MARGIN = 0.02


def load(path: Path, dtype: str, **settings: Any) -> EngineCore:
    return EngineCore.load(path, EngineConfig(dtype=dtype, device="cpu", **settings))


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


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "small chunks": {"max_num_batched_tokens": 23},
    "no prefix cache": {"enable_prefix_caching": False},
    # The longest needs 6 blocks: three at a time, and no room to grow.
    "preemption": {"num_gpu_blocks_override": 11},
    "preemption, small chunks, no prefix cache": {
        "num_gpu_blocks_override": 11,
        "max_num_batched_tokens": 23,
        "enable_prefix_caching": False,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_all_at_once(smollm2: Path, name: str) -> None:
    core = load(smollm2, "float32", **SETTINGS[name])
    for index in range(len(CASES)):
        add(core, index)
    results = run_to_the_end(core)
    for index in range(len(CASES)):
        check(index, results[str(index)].token_ids)
    outputs = [output for result in results.values() for output in result.outputs]
    events = [event.type for output in outputs for event in output.events or ()]
    assert (EngineCoreEvent.PREEMPTED in events) is ("preemption" in name)


def test_again_with_the_beginnings_known(smollm2: Path) -> None:
    core = load(smollm2, "float32")
    for known in (False, True):
        for index in range(len(CASES)):
            add(core, index)
        results = run_to_the_end(core)
        for index in range(len(CASES)):
            check(index, results[str(index)].token_ids)
            prefill = results[str(index)].outputs[0].prefill_stats
            assert prefill is not None
            # All but the last block, and the last token of a full one.
            length = prefill.num_prompt_tokens
            assert not known or prefill.num_cached_tokens == (length - 1) // 16 * 16


def test_one_at_a_time(smollm2: Path) -> None:
    core = load(smollm2, "float32")
    for index in range(len(CASES)):
        add(core, index)
        check(index, run_to_the_end(core)[str(index)].token_ids)


def test_the_five_most_probable_tokens_of_the_first_steps(smollm2: Path) -> None:
    core = load(smollm2, "float32")
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


def test_the_default_dtype_knows_the_capital_of_france_every_time(smollm2: Path) -> None:
    core = load(smollm2, "auto")
    assert core.ready.dtype == "bfloat16"
    assert CASES[0]["user"] == "What is the capital of France?"
    # The second time its beginning comes from the cache, and five tokens are computed instead of 37.
    for _ in range(2):
        add(core, 0)
        assert run_to_the_end(core)["0"].token_ids == CASES[0]["greedy_token_ids"]
