"""Logprobs: by definition, against an independent implementation, and at nobody else's price."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import VOCAB, Result, make_core, run_to_the_end, wire_request
from wire_arrays import read_rows

from trioleg.engine import logprobs as logprobs_module
from trioleg.engine.core import EngineCore
from trioleg.engine.logprobs import gather_logprobs
from trioleg.engine.model import CausalLM
from trioleg.messages import EngineCoreEvent, FinishReason

Row = tuple[list[int], list[float], int]

# The kinds of requests that share a batch: who asks for what, and samples how.
KINDS: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 2},
    {},
    {"logprobs": 0, "prompt_logprobs": 0, "temperature": 1.0, "seed": 1},
    {"prompt_logprobs": 5},
    {"logprobs": 20, "temperature": 1.5, "seed": 2, "top_k": 4, "top_p": 0.5},
    {"temperature": 1.0, "seed": 3},
    {"logprobs": 1, "prompt_logprobs": 20, "min_tokens": 8, "stop_token_ids": list(range(90))},
]


def prompt(index: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def add(core: EngineCore, index: int, length: int, max_tokens: int = 8) -> None:
    params = {"max_tokens": max_tokens, **KINDS[index % len(KINDS)]}
    core.add_request(wire_request(str(index), prompt(index, length), **params))


def run(model: CausalLM, lengths: list[int], **sizes: int) -> list[Result]:
    core = make_core(model, **sizes)
    for index, length in enumerate(lengths):
        add(core, index, length)
    results = run_to_the_end(core)
    return [results[str(index)] for index in range(len(lengths))]


def generated_rows(result: Result) -> list[Row]:
    """A row for each token; every output with a token has exactly its own."""
    rows = []
    for output in result.outputs:
        found = read_rows(output.new_logprobs)
        assert [row[0][0] for row in found] == output.new_token_ids
        rows += found
    return rows


def prompt_rows(result: Result) -> list[Row]:
    """They come once, with the first token."""
    first, *others = result.outputs
    assert first.new_token_ids
    assert all(output.new_prompt_logprobs_tensors is None for output in others)
    return read_rows(first.new_prompt_logprobs_tensors)


def check_rows(rows: list[Row], k: int, token_ids: list[int], right: torch.Tensor) -> None:
    """``right`` [rows, vocab] are the logprobs elsewhere, to 1e-4; near ties may stand in any order."""
    assert len(rows) == len(token_ids) == len(right)
    for (ids, logprobs, rank), token_id, row in zip(rows, token_ids, right, strict=True):
        assert len(ids) == len(logprobs) == k + 1
        assert ids[0] == token_id
        assert len(set(ids[1:])) == k
        assert logprobs == pytest.approx(row[ids].tolist(), abs=1e-4)
        assert logprobs[1:] == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)
        assert logprobs[1:] == sorted(logprobs[1:], reverse=True)
        least, most = ((row >= row[token_id] + shift).sum() for shift in (1e-4, -1e-4))
        assert max(1, least) <= rank <= most


def check(
    index: int, result: Result, reference: transformers.LlamaForCausalLM, length: int
) -> None:
    kind, tokens = KINDS[index % len(KINDS)], prompt(index, length)
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens + result.token_ids])).logits[0]
    right = logits.log_softmax(-1)
    if "logprobs" in kind:
        check_rows(
            generated_rows(result), kind["logprobs"], result.token_ids, right[length - 1 : -1]
        )
    else:
        assert all(output.new_logprobs is None for output in result.outputs)
    if "prompt_logprobs" in kind:
        check_rows(prompt_rows(result), kind["prompt_logprobs"], tokens[1:], right[: length - 1])
    else:
        assert all(output.new_prompt_logprobs_tensors is None for output in result.outputs)


@pytest.mark.parametrize("budget", [7, 1000])
def test_a_mixed_batch_whole_and_in_chunks(
    tiny_model: CausalLM, tiny_reference: transformers.LlamaForCausalLM, budget: int
) -> None:
    lengths = [9, 20, 1, 33, 2, 8, 40, 7, 3, 14, 15, 5, 6, 1]
    results = run(
        tiny_model, lengths, num_blocks=200, max_num_batched_tokens=budget, max_num_seqs=6
    )
    for index, (result, length) in enumerate(zip(results, lengths, strict=True)):
        assert len(result.token_ids) == 8
        check(index, result, tiny_reference, length)


@pytest.mark.parametrize("budget", [3, 64])
def test_preemption_loses_and_doubles_no_row(
    tiny_model: CausalLM, tiny_reference: transformers.LlamaForCausalLM, budget: int
) -> None:
    lengths = [30, 14, 28, 31, 13, 30, 29, 46, 30, 45, 20, 30, 31, 12]
    in_the_middle = set()

    def look() -> None:
        for request in core.scheduler.waiting:
            if request.prompt_logprobs is not None and len(request.prompt_logprobs):
                in_the_middle.add(request.request_id)

    core = make_core(tiny_model, num_blocks=8, max_num_batched_tokens=budget)
    for index, length in enumerate(lengths):
        add(core, index, length, max_tokens=40)
    results = run_to_the_end(core, after_step=look)
    events = [e for r in results.values() for o in r.outputs for e in o.events or ()]
    assert sum(event.type == EngineCoreEvent.PREEMPTED for event in events) > 3
    # With whole prompts in a step none is preempted before it has all its rows.
    assert bool(in_the_middle) == (budget == 3)
    for index, length in enumerate(lengths):
        check(index, results[str(index)], tiny_reference, length)


@pytest.mark.parametrize("budget", [7, 1000])
def test_all_tokens_and_tokens_by_id_in_one_batch(
    tiny_model: CausalLM, tiny_reference: transformers.LlamaForCausalLM, budget: int
) -> None:
    """Rows of every width, -1 for all; those of ``logprob_token_ids`` in the order that was asked for."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": -1, "prompt_logprobs": -1},
        {"logprob_token_ids": [7, 90, 3]},
        {"logprobs": 2, "prompt_logprobs": 0},
        {"logprob_token_ids": [5], "logprobs": 1, "prompt_logprobs": 40, "temperature": 1.0},
        {},
        {"logprobs": 0, "logit_bias": {9: 50.0}},
        {"logprobs": 60, "allowed_token_ids": [1, 2]},
    ]
    core = make_core(tiny_model, max_num_batched_tokens=budget, max_logprobs=-1)
    prompts = [prompt(i, 9 + i) for i in range(len(kinds))]
    for i, kind in enumerate(kinds):
        core.add_request(wire_request(str(i), prompts[i], max_tokens=4, **kind))
    results = run_to_the_end(core)
    for i, kind in enumerate(kinds):
        result, tokens = results[str(i)], prompts[i]
        with torch.inference_mode():
            logits = tiny_reference(torch.tensor([tokens + result.token_ids])).logits[0]
        right = logits.log_softmax(-1)
        if "prompt_logprobs" in kind:
            k = VOCAB if kind["prompt_logprobs"] == -1 else kind["prompt_logprobs"]
            check_rows(prompt_rows(result), k, tokens[1:], right[: len(tokens) - 1])
        of_generated = right[len(tokens) - 1 : -1]
        listed = kind.get("logprob_token_ids")
        if listed is not None:
            rows = generated_rows(result)
            assert len(rows) == 4
            for (ids, logprobs, rank), row in zip(rows, of_generated, strict=True):
                assert ids[1:] == listed
                assert logprobs == pytest.approx(row[ids].tolist(), abs=1e-4)
                assert rank >= 1
        elif "logprobs" in kind:
            k = VOCAB if kind["logprobs"] == -1 else kind["logprobs"]
            check_rows(generated_rows(result), k, result.token_ids, of_generated)


def test_all_tokens_of_a_prompt_are_scored_a_few_rows_at_a_time(
    tiny_model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_at_once: list[int] = []
    compute = CausalLM.compute_logits

    def count(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        rows_at_once.append(len(hidden))
        return compute(model, hidden)

    monkeypatch.setattr(CausalLM, "compute_logits", count)
    monkeypatch.setattr(logprobs_module, "_FIGURES_AT_ONCE", 3 * (VOCAB + 1))
    core = make_core(tiny_model, max_logprobs=-1)
    core.add_request(wire_request("a", [1] * 11, max_tokens=1, prompt_logprobs=-1))
    assert len(prompt_rows(run_to_the_end(core)["a"])) == 10
    assert rows_at_once == [3, 3, 3, 1, 1]


def test_a_prompt_of_one_token_has_no_rows_but_an_answer(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model)
    core.add_request(wire_request("a", [1], max_tokens=1, prompt_logprobs=2))
    (output,) = run_to_the_end(core)["a"].outputs
    assert output.new_prompt_logprobs_tensors.token_ids.shape == [0, 3]
    assert read_rows(output.new_prompt_logprobs_tensors) == []


def test_what_is_computed_is_what_is_asked_for(
    tiny_model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = CausalLM.compute_logits

    def count(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return compute(model, hidden)

    monkeypatch.setattr(CausalLM, "compute_logits", count)
    core = make_core(tiny_model, max_num_batched_tokens=1000)
    core.add_request(wire_request("silent", [1] * 200, max_tokens=2))
    core.add_request(wire_request("scored", [1] * 200, max_tokens=2, logprobs=1))
    run_to_the_end(core)
    assert computed == [2, 2]
    computed.clear()
    core.add_request(wire_request("silent", [1] * 200, max_tokens=2))
    core.add_request(wire_request("asks", [1] * 201, max_tokens=2, prompt_logprobs=1))
    run_to_the_end(core)
    # Bounded pieces of the 200 rows, then the two that sample; the next step knows them all.
    assert computed == [128, 72, 2, 2]


def test_nan_in_the_logits_ends_the_request_without_logprobs(
    tiny_model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = CausalLM.compute_logits

    def poison(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(model, hidden)
        logits[0, 5] = torch.nan
        return logits

    monkeypatch.setattr(CausalLM, "compute_logits", poison)
    core = make_core(tiny_model, max_num_batched_tokens=1000)
    for name in "ab":
        core.add_request(wire_request(name, [1, 2], max_tokens=1, logprobs=2))
    results = run_to_the_end(core)
    ended = {result.finish_reason: result for result in results.values()}
    assert set(ended) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert ended[FinishReason.ERROR].outputs[0].new_logprobs is None
    ((ids, logprobs, rank),) = generated_rows(ended[FinishReason.LENGTH])
    assert ids[0] == ids[1]
    assert rank == 1
    assert all(map(math.isfinite, logprobs))


def test_the_definition() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0], [-math.inf, 0.0, 0.0, 3.0]])
    first, second = gather_logprobs(logits, [2, 0], [1, 3])
    right = logits.log_softmax(-1)
    assert first == ([2, 1], right[0, [2, 1]].tolist(), 3)
    # Two equal tokens share the worse rank; one that is ruled out is behind all others.
    assert second[0][:2] == [0, 3]
    assert sorted(second[0][2:]) == [1, 2]
    assert second[1] == right[1, [0, 3, 1, 2]].tolist()
    assert second[2] == 4


def test_huge_logits_do_not_overflow() -> None:
    ((ids, logprobs, rank),) = gather_logprobs(torch.tensor([[3e38, -3e38]]), [1], [2])
    assert (ids, rank) == ([1, 0, 1], 2)
    assert logprobs == [-math.inf, 0.0, -math.inf]
