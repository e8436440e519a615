"""What EngineCore promises its shell: outputs, figures, aborts, endings, and who survives a fault."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from engine_helpers import VOCAB, make_core, only, run_to_the_end, wire_request

from trioleg.engine import core as core_module
from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM
from trioleg.messages import EngineCoreEvent, EngineCoreOutputs, FinishReason, PrefillStats


def free_blocks(message: EngineCoreOutputs, core: EngineCore) -> int:
    assert message.scheduler_stats is not None
    return round((1 - message.scheduler_stats.kv_cache_usage) * core.ready.num_gpu_blocks)


def test_at_rest_there_is_nothing_to_do(core: EngineCore) -> None:
    assert core.wait_s() is None
    assert core.step() == {}


def test_a_request_from_first_output_to_last(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, engine_index=3)
    core.add_request(wire_request("a", [1, 2, 3], max_tokens=3, client_index=2))
    assert core.wait_s() == 0.0
    messages = [core.step() for _ in range(3)]
    assert all(list(one) == [2] for one in messages)
    first, second, last = (one[2].outputs[0] for one in messages)
    assert [len(one.new_token_ids) for one in (first, second, last)] == [1, 1, 1]
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    assert [event.type for event in first.events or ()] == [
        EngineCoreEvent.QUEUED,
        EngineCoreEvent.SCHEDULED,
    ]
    assert (second.prefill_stats, second.events, second.finish_reason) == (None, None, None)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)
    assert {one[2].engine_index for one in messages} == {3}
    assert 0 < messages[0][2].timestamp <= messages[1][2].timestamp <= time.monotonic()
    stats = [one[2].scheduler_stats for one in messages]
    assert [one and one.step_counter for one in stats] == [1, 2, 3]
    assert [one and one.num_running_reqs for one in stats] == [1, 1, 0]
    assert free_blocks(messages[0][2], core) == 63
    assert free_blocks(messages[2][2], core) == 64
    assert core.wait_s() is None


def test_a_chunk_without_a_token_still_makes_a_message(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, max_num_batched_tokens=4)
    core.add_request(wire_request("a", [1] * 10))
    for _ in range(2):
        message = only(core.step())
        assert message.outputs == []
        assert message.scheduler_stats.num_running_reqs == 1
    assert len(only(core.step()).outputs) == 1


def test_each_client_gets_its_own_and_one_of_them_the_figures(core: EngineCore) -> None:
    for index, client in enumerate([0, 1, 0, 5]):
        core.add_request(wire_request(f"r{index}", [index + 1] * 3, client_index=client))
    messages = core.step()
    got = {client: sorted(o.request_id for o in one.outputs) for client, one in messages.items()}
    assert got == {0: ["r0", "r2"], 1: ["r1"], 5: ["r3"]}
    assert sum(one.scheduler_stats is not None for one in messages.values()) == 1


@pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
def test_stop_tokens_end_a_request_and_are_in_the_output(core: EngineCore, kind: str) -> None:
    core.add_request(wire_request("free", [5, 6, 7], max_tokens=12))
    free = run_to_the_end(core)["free"].token_ids
    stop = next(token for token in free if token != free[0])
    at = free.index(stop) + 1
    params: dict[str, Any] = {"eos": {"eos_token_id": stop}, "stop_token_ids": {kind: [3, stop]}}
    core.add_request(wire_request("a", [5, 6, 7], max_tokens=12, **params[kind]))
    core.add_request(wire_request("b", [5, 6, 7], max_tokens=12, min_tokens=at + 1, **params[kind]))
    results = run_to_the_end(core)
    assert results["a"].token_ids == free[:at]
    assert results["a"].finish_reason == FinishReason.STOP
    assert results["a"].stop_reason == (None if kind == "eos" else stop)
    # Below min_tokens the next best token is taken instead.
    assert len(results["b"].token_ids) >= at + 1
    assert stop not in results["b"].token_ids[:at]


def test_the_context_ends_a_request(tiny_model: CausalLM, core: EngineCore) -> None:
    core.add_request(wire_request("a", [1] * 250, max_tokens=1000))
    result = run_to_the_end(core)["a"]
    assert len(result.token_ids) == tiny_model.max_model_len - 250
    assert result.finish_reason == FinishReason.LENGTH


def test_an_abort_is_silent_and_its_blocks_are_seen_to_return(core: EngineCore) -> None:
    core.add_request(wire_request("a", [1] * 40, max_tokens=100))
    core.add_request(wire_request("b", [2] * 40, max_tokens=1))
    before = only(core.step())
    assert free_blocks(before, core) == 58
    core.abort_requests(["a", "unknown"])
    after = only(core.step())
    assert [one.request_id for one in after.outputs] == ["b"]
    assert free_blocks(after, core) == 64


def test_the_last_abort_makes_one_message_of_figures(core: EngineCore) -> None:
    core.add_request(wire_request("a", [1] * 40, max_tokens=100, client_index=4))
    core.step()
    core.abort_requests(["a"])
    core.abort_requests(["a"])
    core.abort_requests([])
    assert core.wait_s() == 0.0
    messages = core.step()
    assert list(messages) == [4]
    assert messages[4].outputs == []
    assert free_blocks(messages[4], core) == 64
    assert core.wait_s() is None
    assert core.step() == {}


def test_a_queued_request_that_is_aborted_never_runs(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, max_num_seqs=1)
    for name in "abc":
        core.add_request(wire_request(name, [1], max_tokens=3))
    core.step()
    core.abort_requests(["b"])
    assert set(run_to_the_end(core)) == {"a", "c"}


def test_an_id_may_be_used_again_once_it_is_free(core: EngineCore) -> None:
    core.add_request(wire_request("a", [1, 2]))
    first = run_to_the_end(core)["a"].token_ids
    core.add_request(wire_request("a", [1, 2]))
    core.step()
    core.abort_requests(["a"])
    core.add_request(wire_request("a", [1, 2]))
    assert run_to_the_end(core)["a"].token_ids == first


def test_a_second_request_with_a_live_id_is_logged_and_dropped(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    core.add_request(wire_request("a", [1, 2], max_tokens=3))
    with caplog.at_level(logging.ERROR):
        core.add_request(wire_request("a", [7, 8, 9], max_tokens=20))
    assert "request a: the id is live already" in caplog.text
    assert len(run_to_the_end(core)["a"].token_ids) == 3


def test_a_client_is_aborted_whole(core: EngineCore) -> None:
    for index in range(4):
        core.add_request(wire_request(f"r{index}", [1] * 5, client_index=index % 2))
    core.add_request(wire_request("bad", [], client_index=1))
    core.abort_client(1)
    core.abort_client(7)
    assert set(run_to_the_end(core)) == {"r0", "r2"}


def test_shutdown_ends_every_request_once(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, max_num_seqs=2)
    for index in range(4):
        core.add_request(wire_request(f"r{index}", [1, 2], max_tokens=50, client_index=index))
    core.step()
    core.finish_all()
    messages = core.step()
    outputs = [one for message in messages.values() for one in message.outputs]
    assert sorted(one.request_id for one in outputs) == ["r0", "r1", "r2", "r3"]
    assert {one.finish_reason for one in outputs} == {FinishReason.ABORT}
    assert all(one.new_token_ids == [] for one in outputs)
    assert core.wait_s() is None
    core.close()


BAD: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": None},
    {"prompt": [VOCAB]},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": [1] * 300},
    {"max_tokens": None},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"seed": 2**63},
    {"min_p": 1.5},
    {"presence_penalty": float("nan")},
    {"repetition_penalty": 0.0},
    {"logit_bias": {VOCAB: 1.0}},
    {"logit_bias": {1: float("inf")}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": list(range(VOCAB)) * 1000},
    {"bad_words_token_ids": [[]]},
    {"bad_words_token_ids": [[1, 2**40]]},
    {"logprob_token_ids": [-1]},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": -(2**62)}},
    {"logprobs": -1},
    {"prompt_logprobs": 21},
    {"structured_outputs": {"json": "{}", "regex": "a"}},
]


def test_bad_requests_end_alone(core: EngineCore) -> None:
    core.add_request(wire_request("good", [1, 2, 3], max_tokens=6))
    right = run_to_the_end(core)["good"].token_ids
    core.add_request(wire_request("good", [1, 2, 3], max_tokens=6))
    core.step()
    for index, changes in enumerate(BAD):
        changes = dict(changes)
        prompt = changes.pop("prompt", [1])
        core.add_request(wire_request(f"bad{index}", prompt, client_index=1, **changes))
    results = run_to_the_end(core)
    assert [right[0], *results.pop("good").token_ids] == right
    assert len(results) == len(BAD)
    for result in results.values():
        assert (result.finish_reason, result.token_ids) == (FinishReason.ERROR, [])
        assert isinstance(result.stop_reason, str)
        assert "; allowed: " in result.stop_reason


def test_a_refused_request_that_is_aborted_at_once_says_nothing(core: EngineCore) -> None:
    core.add_request(wire_request("bad", []))
    core.abort_requests(["bad"])
    assert core.wait_s() is None


def test_what_validation_never_thought_of_is_still_one_requests_error(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    core.add_request(wire_request("odd", ["x"]))  # type: ignore[list-item]
    result = run_to_the_end(core)["odd"]
    assert result.finish_reason == FinishReason.ERROR
    assert "cannot be taken" in str(result.stop_reason)
    assert "request odd: cannot be taken" in caplog.text


def test_a_fault_in_one_requests_bookkeeping_ends_that_request(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = core_module.Request.append

    def faulty(request: core_module.Request, token_id: int, *, max_model_len: int) -> Any:
        if request.request_id == "b" and request.num_output_tokens == 2:
            raise RuntimeError("out of paper")
        return append(request, token_id, max_model_len=max_model_len)

    monkeypatch.setattr(core_module.Request, "append", faulty)
    for name in "abc":
        core.add_request(wire_request(name, [1, 2], max_tokens=5))
    results = run_to_the_end(core)
    assert [len(results[name].token_ids) for name in "abc"] == [5, 2, 5]
    assert results["b"].finish_reason == FinishReason.ERROR
    assert "out of paper" in str(results["b"].stop_reason)
    assert "request b: its step failed" in caplog.text


def test_nan_ends_the_request_that_has_it_and_poisons_no_other(tiny_model: CausalLM) -> None:
    # Token 0's embedding is NaN in a copy of the model: whoever has it in the prompt gets NaN logits, and
    # leaves NaN keys and values in blocks that others use next.
    weights = tiny_model.weights
    poisoned = weights.embed_tokens.clone()
    poisoned[0] = torch.nan
    model = CausalLM(
        tiny_model.config,
        with_embeddings(weights, poisoned),
        max_model_len=tiny_model.max_model_len,
    )
    core = make_core(model, num_blocks=6, max_num_batched_tokens=16)
    core.add_request(wire_request("good", [1, 2, 3], max_tokens=20))
    right = run_to_the_end(core)["good"].token_ids
    for round_ in range(3):
        core.add_request(wire_request("good", [1, 2, 3], max_tokens=20))
        core.add_request(wire_request(f"nan{round_}", [5, 0, 7] * 11, max_tokens=20))
        results = run_to_the_end(core)
        assert results["good"].token_ids == right
        assert results[f"nan{round_}"].finish_reason == FinishReason.ERROR
        assert "NaN" in str(results[f"nan{round_}"].stop_reason)


def with_embeddings(weights: Any, embed_tokens: torch.Tensor) -> Any:
    """The same weights with other embeddings; the output matrix stays whole."""
    return type(weights)(embed_tokens, weights.layers, weights.norm, weights.lm_head)


def test_a_fault_of_the_model_leaves_step(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the accelerator is gone")

    monkeypatch.setattr(CausalLM, "forward", broken)
    core.add_request(wire_request("a", [1]))
    with pytest.raises(RuntimeError, match="the accelerator is gone"):
        core.step()


def test_ready_says_what_is_true(tiny_model: CausalLM) -> None:
    ready = make_core(tiny_model, num_blocks=10, engine_index=2).ready
    assert (ready.max_model_len, ready.dtype, ready.num_gpu_blocks) == (256, "float32", 10)
    assert ready.kv_cache_size_tokens == ready.num_gpu_blocks * ready.block_size
    assert ready.kv_cache_max_concurrency == pytest.approx(160 / 256)
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (8, 64)
    assert ready.data_parallel_rank == 2
    assert ready.instance_id != make_core(tiny_model).ready.instance_id
