"""A cache that is too small, and requests that come and go: everything ends, every block returns."""

from __future__ import annotations

import random

import pytest
from engine_helpers import VOCAB, make_core, run_to_the_end, wire_request

from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM
from trioleg.messages import EngineCoreEvent, EngineCoreOutputs, FinishReason


def add_some(core: EngineCore, count: int) -> None:
    rng = random.Random(count)
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        # Half of them sample: what a preempted request recomputes must not use up its noise.
        params = {"temperature": 1.0, "seed": index} if index % 2 else {}
        core.add_request(wire_request(f"r{index}", prompt, max_tokens=40, **params))


@pytest.mark.parametrize("budget", [9, 64])
def test_preemption_changes_no_token(tiny_model: CausalLM, budget: int) -> None:
    roomy = make_core(tiny_model, num_blocks=200, max_num_batched_tokens=budget)
    add_some(roomy, 12)
    expected = run_to_the_end(roomy)
    tight = make_core(tiny_model, num_blocks=8, max_num_batched_tokens=budget)
    add_some(tight, 12)
    results = run_to_the_end(tight)
    preempted = [
        event
        for result in results.values()
        for output in result.outputs
        for event in output.events or ()
        if event.type == EngineCoreEvent.PREEMPTED
    ]
    assert len(preempted) > 3
    for request_id, result in expected.items():
        assert results[request_id].token_ids == result.token_ids
        assert results[request_id].finish_reason == FinishReason.LENGTH


def test_what_can_never_fit_ends_alone(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, num_blocks=3)
    core.add_request(wire_request("prompt", [1] * 49))
    core.add_request(wire_request("answer", [1] * 40, max_tokens=100))
    core.add_request(wire_request("small", [1] * 4, max_tokens=4))
    results = run_to_the_end(core)
    assert "at most 48" in str(results["prompt"].stop_reason)
    # The whole cache is its own before it ends: 48 tokens have keys and values, the 49th is sampled.
    assert len(results["answer"].token_ids) == 9
    assert results["answer"].finish_reason == FinishReason.ERROR
    assert "the key/value cache is full: 48 tokens" in str(results["answer"].stop_reason)
    assert len(results["small"].token_ids) == 4


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_two_that_exceed_the_cache_together_both_finish(
    tiny_model: CausalLM, prefix_caching: bool
) -> None:
    """Each alone needs all the blocks that there are."""
    core = make_core(tiny_model, num_blocks=4, enable_prefix_caching=prefix_caching)
    for name in "ab":
        core.add_request(wire_request(name, [ord(name) % 90] * 20, max_tokens=44))
    results = run_to_the_end(core, max_steps=500)
    assert {k: len(v.token_ids) for k, v in results.items()} == {"a": 44, "b": 44}
    assert {v.finish_reason for v in results.values()} == {FinishReason.LENGTH}


def test_a_prompt_as_large_as_the_cache_runs(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, num_blocks=3, max_num_batched_tokens=10)
    core.add_request(wire_request("a", [1] * 48, max_tokens=1))
    assert run_to_the_end(core)["a"].finish_reason == FinishReason.LENGTH


REQUESTS = 80


@pytest.mark.parametrize("seed", range(4))
def test_random_churn(tiny_model: CausalLM, seed: int) -> None:
    rng = random.Random(seed)
    core = make_core(
        tiny_model,
        num_blocks=rng.choice([4, 7, 12]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
    )
    live: dict[str, int] = {}
    ended: dict[str, FinishReason] = {}
    aborted: set[str] = set()
    left, last = REQUESTS, None
    while left or core.wait_s() is not None:
        for _ in range(min(left, rng.choice([0, 0, 1, 4]))):
            left -= 1
            request_id = f"r{left}"
            live[request_id] = rng.randrange(3)
            core.add_request(
                wire_request(
                    request_id,
                    [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 20, 40]))],
                    client_index=live[request_id],
                    max_tokens=rng.randint(1, 30),
                    temperature=rng.choice([0.0, 1.0]),
                    top_k=rng.choice([0, 5]),
                    top_p=rng.choice([1.0, 0.9]),
                    eos_token_id=rng.randrange(VOCAB),
                )
            )
        if live and rng.random() < 0.15:
            victim = rng.choice(list(live))
            core.abort_requests([victim, "unknown"])
            aborted.add(victim)
            del live[victim]
        if rng.random() < 0.02:
            client = rng.randrange(3)
            core.abort_client(client)
            gone = {request_id for request_id, owner in live.items() if owner == client}
            aborted |= gone
            live = {k: v for k, v in live.items() if k not in gone}
        for client, message in core.step().items():
            last = message if message.scheduler_stats else last
            settle(client, message, live, ended)
    assert live == {}
    assert len(ended) + len(aborted) == REQUESTS
    assert {FinishReason.LENGTH, FinishReason.ERROR} <= set(ended.values())
    assert last is not None
    assert last.scheduler_stats is not None
    stats = last.scheduler_stats
    assert (stats.kv_cache_usage, stats.num_running_reqs, stats.num_waiting_reqs) == (0.0, 0, 0)


def settle(
    client: int, message: EngineCoreOutputs, live: dict[str, int], ended: dict[str, FinishReason]
) -> None:
    for output in message.outputs:
        # Only live requests speak, on their own client's leg, and nothing comes after an end.
        assert live[output.request_id] == client
        if output.finish_reason is not None:
            del live[output.request_id]
            ended[output.request_id] = output.finish_reason
