"""What is kept of finished requests, who may use it, and that no answer changes by it."""

from __future__ import annotations

import random

import pytest
from engine_helpers import VOCAB, make_core, only, run_to_the_end, wire_request

from trioleg.engine.core import EngineCore
from trioleg.engine.kv_cache import BlockPool, extend_block_hashes, root_hash
from trioleg.engine.model import CausalLM
from trioleg.messages import EngineCoreRequest, PrefillStats, PrefixCacheStats

PROMPT = [(7 * i) % VOCAB for i in range(50)]


def hashes(token_ids: list[int], salt: str | None = None) -> list[bytes]:
    found: list[bytes] = []
    extend_block_hashes(found, root_hash(salt), token_ids, len(token_ids) // 4, 4)
    return found


def test_a_hash_is_of_the_block_and_all_before_it() -> None:
    one = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8]) == one
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[1] != one[1]
    assert hashes([9, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert len({*one, *hashes([1, 2, 3, 4] * 2, ""), *hashes([1, 2, 3, 4] * 2, "a")}) == 6


def test_a_salt_may_be_any_text() -> None:
    assert len({root_hash(salt) for salt in (None, "", "salt:", "\ud800", "é")}) == 5


def test_a_named_block_is_found_until_its_memory_is_needed() -> None:
    pool = BlockPool(3, block_size=4)
    names = hashes(list(range(12)))
    taken = pool.allocate(3)
    assert taken is not None
    for block, name in zip(taken, names, strict=True):
        pool.name(block, name)
    pool.free(taken)
    assert pool.num_free == 3
    assert pool.find(names) == taken
    # The end of a sequence goes first: without what is before it, it is of no use.
    assert pool.allocate(1) == [taken[2]]
    assert pool.find(names) == taken[:2]
    assert pool.allocate(1) == [taken[1]]
    assert pool.find(names) == taken[:1]


def test_a_shared_block_returns_with_its_last_user() -> None:
    pool = BlockPool(2, block_size=4)
    (name,) = hashes([1, 2, 3, 4])
    taken = pool.allocate(1)
    assert taken is not None
    pool.name(taken[0], name)
    assert pool.num_unused(taken) == 0
    pool.share(taken)
    pool.free(taken)
    assert pool.num_free == 1
    pool.free(taken)
    assert (pool.num_free, pool.num_unused(taken)) == (2, 1)
    pool.share(taken)
    assert pool.num_free == 1


def test_names_are_unique_and_nothing_is_forgotten_while_in_use() -> None:
    pool = BlockPool(4, block_size=4)
    (name,) = hashes([1, 2, 3, 4])
    taken = pool.allocate(2)
    assert taken is not None
    for block in taken:
        pool.name(block, name)
    assert pool.find([name]) == taken[:1]
    assert pool.forget_names() is False
    pool.free(taken)
    assert pool.forget_names() is True
    assert pool.find([name]) == []
    assert sorted(pool.allocate(4) or ()) == [0, 1, 2, 3]


def cached(core: EngineCore, request: EngineCoreRequest) -> int:
    """How many tokens of a request's prompt were there already."""
    core.add_request(request)
    first = run_to_the_end(core)[request.request_id].outputs[0]
    assert first.prefill_stats is not None
    stats = first.prefill_stats
    assert stats.num_cached_tokens + stats.num_computed_tokens == stats.num_prompt_tokens
    assert stats.num_local_cached_tokens == stats.num_cached_tokens
    return stats.num_cached_tokens


def salted(request: EngineCoreRequest, salt: str) -> EngineCoreRequest:
    request.cache_salt = salt
    return request


def test_a_prompt_that_begins_alike_starts_behind_what_is_known(core: EngineCore) -> None:
    assert cached(core, wire_request("a", PROMPT)) == 0
    assert cached(core, wire_request("b", PROMPT)) == 48
    assert cached(core, wire_request("c", [*PROMPT[:40], 1, 2])) == 32
    assert cached(core, wire_request("d", [1, *PROMPT])) == 0
    # The last token is computed, though its whole block is known.
    assert cached(core, wire_request("e", PROMPT[:48])) == 32


def test_an_answer_is_known_as_well(core: EngineCore) -> None:
    core.add_request(wire_request("a", PROMPT, max_tokens=30))
    answer = run_to_the_end(core)["a"].token_ids
    assert cached(core, wire_request("b", PROMPT + answer)) == 64


def test_the_same_prompt_twice_in_one_step_is_computed_once(core: EngineCore) -> None:
    core.add_request(wire_request("a", PROMPT))
    core.add_request(wire_request("b", PROMPT, temperature=1.0, seed=1))
    outputs = only(core.step()).outputs
    assert [one.prefill_stats for one in outputs if one.request_id == "b"] == [
        PrefillStats(
            num_prompt_tokens=50,
            num_computed_tokens=2,
            num_cached_tokens=48,
            num_local_cached_tokens=48,
        )
    ]
    both = run_to_the_end(core)
    alone = make_core(core._runner.model, enable_prefix_caching=False)
    alone.add_request(wire_request("b", PROMPT, temperature=1.0, seed=1))
    assert outputs[1].new_token_ids + both["b"].token_ids == run_to_the_end(alone)["b"].token_ids


def test_a_salt_keeps_prompts_apart(core: EngineCore) -> None:
    assert cached(core, salted(wire_request("a", PROMPT), "x")) == 0
    assert cached(core, wire_request("b", PROMPT)) == 0
    assert cached(core, salted(wire_request("c", PROMPT), "y")) == 0
    assert cached(core, salted(wire_request("d", PROMPT), "x")) == 48


def test_scores_of_a_prompt_are_computed_whatever_is_known(core: EngineCore) -> None:
    cached(core, wire_request("a", PROMPT))
    assert cached(core, wire_request("b", PROMPT, prompt_logprobs=1)) == 0
    assert cached(core, wire_request("c", PROMPT, skip_reading_prefix_cache=True)) == 0
    assert cached(core, wire_request("d", PROMPT)) == 48


def test_turned_off_nothing_is_known(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, enable_prefix_caching=False)
    assert cached(core, wire_request("a", PROMPT)) == 0
    assert cached(core, wire_request("b", PROMPT)) == 0


def test_the_figures_of_a_step(core: EngineCore) -> None:
    core.add_request(wire_request("a", PROMPT, max_tokens=1))
    assert only(core.step()).scheduler_stats.prefix_cache_stats == PrefixCacheStats(
        requests=1, queries=50
    )
    core.add_request(wire_request("b", PROMPT, max_tokens=2))
    stats = [only(core.step()).scheduler_stats.prefix_cache_stats for _ in range(2)]
    assert stats == [PrefixCacheStats(requests=1, queries=50, hits=48), PrefixCacheStats()]


def test_a_reset_forgets_and_says_so(core: EngineCore) -> None:
    cached(core, wire_request("a", PROMPT))
    assert core.call_utility("reset_prefix_cache", []) is True
    core.add_request(wire_request("b", PROMPT))
    message = only(core.step())
    assert message.scheduler_stats.prefix_cache_stats.reset
    assert message.outputs[0].prefill_stats.num_cached_tokens == 0
    assert core.call_utility("reset_prefix_cache", []) is False


def test_a_reset_of_running_requests_changes_no_token(core: EngineCore) -> None:
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    core.add_request(wire_request("a", PROMPT, **params))
    right = run_to_the_end(core)["a"].token_ids
    core.add_request(wire_request("a", PROMPT, **params))
    tokens = [*only(core.step()).outputs[0].new_token_ids]
    assert core.call_utility("reset_prefix_cache", [True]) is True
    assert core.scheduler.running == []
    assert tokens + run_to_the_end(core)["a"].token_ids == right


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("num_blocks", [9, 200])
def test_no_token_changes_by_what_is_known(
    tiny_model: CausalLM, num_blocks: int, budget: int
) -> None:
    """Prompts with common beginnings, in a cache that is too small for all of them, or is not."""
    rng = random.Random(num_blocks + budget)
    beginnings = [[rng.randrange(VOCAB) for _ in range(length)] for length in (16, 33, 48)]
    requests = [
        wire_request(
            f"r{index}",
            rng.choice(beginnings) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))],
            max_tokens=rng.randint(1, 30),
            temperature=float(index % 2),
            seed=index,
        )
        for index in range(40)
    ]
    plain = make_core(tiny_model, num_blocks=200, enable_prefix_caching=False)
    known = make_core(tiny_model, num_blocks=num_blocks, max_num_batched_tokens=budget)
    for request in requests:
        plain.add_request(request)
        known.add_request(request)
    expected, results = run_to_the_end(plain), run_to_the_end(known)
    assert {k: v.token_ids for k, v in results.items()} == {
        k: v.token_ids for k, v in expected.items()
    }
    hits = [
        output.prefill_stats.num_cached_tokens
        for result in results.values()
        for output in result.outputs
        if output.prefill_stats is not None
    ]
    assert sum(hits) > 300
    assert known.scheduler.pool.num_free == num_blocks
