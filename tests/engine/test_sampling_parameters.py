"""Every sampling parameter against the reference: exact where greedy, by chi-square where drawn. Seeds are
fixed, so nothing fails by chance."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import VOCAB, make_core, run_to_the_end, wire_request
from sampling_reference import adjusted, chi_square_is_plausible, probabilities, random_params

from trioleg.engine.model import CausalLM
from trioleg.engine.request import Request
from trioleg.engine.sampler import NoToken, sample
from trioleg.messages import EngineCoreEvent, FinishReason
from trioleg.sampling_params import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN

TOKENS = 40
DRAWS = 2000
PROMPT, OUTPUT = [1, 2, 3, 2, 7, 7, 30], [4, 5, 4, 4, 2, 9]


def logits_of(seed: int, rows: int = 1, vocab: int = TOKENS) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def make_request(
    seed: int, output: Sequence[int] = OUTPUT, *, vocab: int = TOKENS, **params: Any
) -> Request:
    """A request in the middle of its life."""
    params = {"temperature": 1.0, "max_tokens": 100, "seed": seed, **params}
    request = Request.from_wire(wire_request(f"r{seed}", PROMPT, **params), vocab_size=vocab)
    for token_id in output:
        request.append(token_id, max_model_len=10**6)
    return request


def check_distribution(logits: torch.Tensor, **params: Any) -> None:
    right = probabilities(logits.tolist(), PROMPT, OUTPUT, **params)
    assert right is not None
    requests = [make_request(seed, **params) for seed in range(DRAWS)]
    drawn = sample(logits.repeat(DRAWS, 1), requests)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(logits)).double()
    probs = torch.tensor(right, dtype=torch.float64)
    assert counts[probs == 0].sum() == 0
    if int((probs > 0).sum()) > 1:
        assert chi_square_is_plausible(counts, probs)


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.1},
        {"min_p": 0.2, "temperature": 2.0},
        {"min_p": 1.0},
        {"min_p": 0.05, "top_p": 0.7},
        {"min_p": 0.02, "top_k": 6, "top_p": 0.9},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -1.0, "temperature": 0.7},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
        {"logit_bias": {3: 5.0, 4: -100.0, 39: 2.5}},
        {"allowed_token_ids": [4, 9, 11, 39]},
        {"bad_words_token_ids": [[5], [9, 6], [2, 9, 7], [9, 9, 8], [7, 30, 4, 5]]},
        {"logit_bias": {3: 6.0}, "repetition_penalty": 1.5, "min_tokens": 7, "stop_token_ids": [5]},
    ],
    ids=str,
)
def test_the_distribution_is_exact(params: dict[str, Any]) -> None:
    check_distribution(logits_of(11)[0], **params)


@pytest.mark.parametrize("seed", range(20))
def test_the_distribution_of_many_parameters_together(seed: int) -> None:
    chance = random.Random(seed)
    params = random_params(chance, TOKENS, OUTPUT, temperature=chance.choice([0.5, 1.0, 2.0]))
    check_distribution(logits_of(seed)[0], **params)


def test_top_p_is_a_share_of_what_min_p_has_left() -> None:
    """Also where only a part of the vocabulary is looked at: 900 tokens hold half of the probability."""
    logits = torch.cat([torch.linspace(2.2, 2.3, 100), torch.zeros(900)])
    params = {"min_p": 0.5, "top_p": 0.5, "temperature": 1.0}
    right = probabilities(logits.tolist(), [], [], **params)
    assert right is not None
    requests = [make_request(seed, (), vocab=1000, **params) for seed in range(DRAWS)]
    drawn = set(sample(logits.repeat(DRAWS, 1), requests))
    assert drawn == {i for i, p in enumerate(right) if p > 0}


def test_a_batch_in_which_every_row_has_other_parameters() -> None:
    rows = 64
    logits = logits_of(21, rows)
    chance = random.Random(21)
    outputs = [[chance.randrange(TOKENS) for _ in range(chance.randrange(9))] for _ in range(rows)]
    params = [{"temperature": 1.0} | random_params(chance, TOKENS, output) for output in outputs]
    right = [
        probabilities(row, PROMPT, output, **asked)
        for row, output, asked in zip(logits.tolist(), outputs, params, strict=True)
    ]
    for number in range(25):
        requests = [make_request(number * rows + i, outputs[i], **params[i]) for i in range(rows)]
        for token_id, probs in zip(sample(logits.clone(), requests), right, strict=True):
            if probs is None:
                assert token_id is NoToken.ALL_FORBIDDEN
            else:
                assert isinstance(token_id, int)
                assert probs[token_id] > 0


@pytest.mark.parametrize("ties", [False, True])
def test_a_token_does_not_depend_on_what_shares_its_batch(ties: bool) -> None:
    """Equal logits are what bfloat16 makes of many: which of them is found must not change, either."""
    vocab, rows = 1000, 40
    logits = logits_of(31, rows, vocab)
    if ties:
        logits = logits.round()
    chance = random.Random(31)
    params = [random_params(chance, vocab, OUTPUT) for _ in range(rows)]

    def request(i: int) -> Request:
        return make_request(i, vocab=vocab, **params[i])

    alone = [sample(logits[i : i + 1].clone(), [request(i)])[0] for i in range(rows)]
    for _ in range(10):
        batch = chance.sample(range(rows), chance.randrange(2, rows))
        together = sample(logits[batch], [request(i) for i in batch])
        assert together == [alone[i] for i in batch]


def test_a_batch_that_asks_for_nothing_is_left_as_it_is() -> None:
    logits = logits_of(41, 4)
    before = logits.clone()
    requests = [make_request(i, temperature=0.0, logit_bias={}) for i in range(4)]
    assert all(request.rules is None for request in requests)
    sample(logits, requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX])
def test_the_most_extreme_penalty_leaves_numbers(penalty: float) -> None:
    logits = torch.tensor([[0.0, 1e30, -1e30, *[0.5] * 37]])
    (token_id,) = sample(logits, [make_request(1, repetition_penalty=penalty)])
    assert isinstance(token_id, int)


# ---------------------------------------------------------------------------- through the core


@pytest.mark.parametrize("num_blocks", [200, 12])
def test_every_step_of_the_engine_is_the_references(
    tiny_model: CausalLM, tiny_reference: transformers.LlamaForCausalLM, num_blocks: int
) -> None:
    """A mixed batch from the first token to the last; with few blocks, computed again after preemptions."""
    chance = random.Random(51)
    asked, prompts = [], []
    core = make_core(tiny_model, num_blocks=num_blocks)
    for i in range(24):
        prompts.append([chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))])
        greedy = 0.0 if i % 2 else None
        params = random_params(chance, VOCAB, [], temperature=greedy)
        # Each token forbids another one behind it, so that some are about to be completed in every step.
        params["bad_words_token_ids"] = [[j, (j + i) % VOCAB] for j in range(VOCAB)]
        asked.append({"temperature": 1.0, "seed": i, "stop_token_ids": []} | params)
        core.add_request(wire_request(str(i), prompts[i], max_tokens=24, **asked[i]))
    results = run_to_the_end(core)
    events = [e.type for r in results.values() for o in r.outputs for e in o.events or ()]
    assert (EngineCoreEvent.PREEMPTED in events) == (num_blocks == 12)
    for i, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        result = results[str(i)]
        assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        with torch.inference_mode():
            logits = tiny_reference(torch.tensor([prompt + result.token_ids])).logits[0].tolist()
        for place, token_id in enumerate(result.token_ids):
            row, output = logits[len(prompt) - 1 + place], result.token_ids[:place]
            scores = adjusted(row, prompt, output, **params)
            if params["temperature"] == 0:
                # The model's numbers agree to 1e-4; penalties may multiply that by 3.
                assert scores[token_id] >= max(scores) - 1e-3
            else:
                probs = probabilities(row, prompt, output, **params)
                assert probs is not None
                assert probs[token_id] > 0


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1}, "min_tokens, allowed"),
        ({"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [4], "bad_words_token_ids": [[4]]}, "allowed_token_ids, bad_words"),
        ({"bad_words_token_ids": [[i] for i in range(VOCAB)]}, "bad_words"),
        ({"allowed_token_ids": [4], "bad_words_token_ids": [[4, 4, 4]]}, "allowed_token_ids, bad"),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_forbid_every_token_end_their_own_request(
    tiny_model: CausalLM, params: dict[str, Any], names: str, temperature: float
) -> None:
    core = make_core(tiny_model)
    core.add_request(wire_request("good", [1, 2], max_tokens=6))
    right = run_to_the_end(core)["good"].token_ids
    core.add_request(wire_request("good", [1, 2], max_tokens=6))
    core.add_request(wire_request("bad", [1, 2], temperature=temperature, **params))
    results = run_to_the_end(core)
    assert results["good"].token_ids == right
    bad = results["bad"]
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.token_ids == ([4, 4] if [4, 4, 4] in params.get("bad_words_token_ids", ()) else [])
    assert re.search(
        f"no token can be sampled: .*{names}.* forbid every token", str(bad.stop_reason)
    )
