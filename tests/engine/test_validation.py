"""Every refusal names the parameter, the value and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from engine_helpers import wire_request

from trioleg.engine.validation import Limits, check_request
from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineCoreRequest, EngineSamplingParams

LIMITS = Limits(vocab_size=100, max_model_len=32, cache_tokens=24)


@pytest.mark.parametrize(
    ("params", "fragment"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; allowed: a number from 0 to 2"),
        ({"temperature": 2.1}, "temperature is 2.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0; allowed: a number above 0 and up to 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2; allowed: -1 or 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808; allowed: a 64-bit integer"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
        ({"max_tokens": None}, "max_tokens is None; allowed: an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9}, "min_tokens is 9; allowed: 0 to max_tokens, which is 8"),
        ({"min_p": -0.1}, "min_p is -0.1; allowed: a number from 0 to 1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; allowed: a number from -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5; allowed: a number from -2 to 2"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty is 0.0; allowed: a number from 0.001 to 1000.0",
        ),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"logprobs": -1}, "logprobs is -1; allowed: 0 to 20, or None"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; allowed: 0 to 20, or None"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"logprob_token_ids": [1, 100]}, "logprob_token_ids holds 100; allowed: 0 to 99"),
        (
            {"logprob_token_ids": [1] * 129},
            "logprob_token_ids is 129 ids long; allowed: at most 128",
        ),
        ({"logprobs": 3, "logprob_token_ids": [1]}, "logprobs is 3; allowed: None, or 1, as many"),
        ({"logit_bias": {100: 2.0}}, "logit_bias holds 100; allowed: 0 to 99"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias holds -1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan; allowed: numbers from -100 to 100"),
        ({"logit_bias": {1: float("-inf")}}, "logit_bias is -inf"),
        ({"allowed_token_ids": []}, "allowed_token_ids is []; allowed: at least one token id"),
        ({"allowed_token_ids": [2**63]}, "allowed_token_ids holds 9223372036854775808"),
        (
            {"allowed_token_ids": [1] * 101},
            "allowed_token_ids is 101 ids long; allowed: at most 100",
        ),
        (
            {"bad_words_token_ids": [[1], []]},
            "bad_words_token_ids is []; allowed: lists of at least",
        ),
        ({"bad_words_token_ids": [[1, -1]]}, "bad_words_token_ids holds -1; allowed: 0 to 99"),
        (
            {"bad_words_token_ids": [[1]] * 1025},
            "bad_words_token_ids is 1025 long; allowed: at most",
        ),
        (
            {"bad_words_token_ids": [[1] * 33]},
            "bad_words_token_ids is 33 ids long; allowed: at most 32",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": "{}"}},
            "structured_outputs is json and regex",
        ),
        ({"thinking_token_budget": 5}, "thinking_token_budget is 5"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids is [1]"),
        ({"watermarking": True}, "watermarking is True"),
        ({"extra_args": {"a": 1}}, "extra_args is {'a': 1}"),
    ],
)
def test_sampling_parameters(params: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wire_request("r", [1], **params), LIMITS)
    assert str(caught.value).startswith(fragment)
    assert caught.value.parameter == next(iter(params))


def test_every_parameter_is_checked_or_used() -> None:
    # A field that joins the wire struct must be honoured or refused here, never ignored.
    used = {"temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "ignore_eos"}
    used |= {"stop_token_ids", "eos_token_id", "all_stop_token_ids"}
    used |= {"logprobs", "prompt_logprobs", "skip_reading_prefix_cache"}
    used |= {"logprobs", "prompt_logprobs", "logprob_token_ids", "repetition_detection"}
    used |= {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    used |= {"logit_bias", "allowed_token_ids", "bad_words_token_ids"}
    for name in set(EngineSamplingParams.__struct_fields__) - used:
        with pytest.raises(InvalidRequestError, match=name):
            check_request(wire_request("r", [1], **{name: object()}), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "fragment"),
    [
        (None, "prompt_token_ids is 0 tokens long; allowed: 1 to 31 tokens"),
        ([], "prompt_token_ids is 0 tokens long"),
        ([1] * 32, "prompt_token_ids is 32 tokens long; allowed: 1 to 31 tokens"),
        ([1] * 25, "prompt_token_ids is 25 tokens long; allowed: at most 24"),
        ([1, -1], "prompt_token_ids is -1; allowed: ids from 0 to 99"),
        ([1, 100], "prompt_token_ids is 100; allowed: ids from 0 to 99"),
        ([2**40], "prompt_token_ids is 1099511627776"),
    ],
)
def test_prompts(prompt: list[int] | None, fragment: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wire_request("r", prompt), LIMITS)
    assert str(caught.value).startswith(fragment)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_features", [{}]),
        ("pooling_params", {}),
        ("lora_request", ["a", 1, "p"]),
        ("prompt_embeds", b"x"),
        ("priority", 3),
        ("client_index", -1),
        ("sampling_params", None),
    ],
)
def test_request_fields(field: str, value: Any) -> None:
    request = wire_request("r", [1])
    setattr(request, field, value)
    with pytest.raises(InvalidRequestError, match=f"{field} is .*; allowed: "):
        check_request(request, LIMITS)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wire_request("r", [1], extra_args=list(range(10_000))), LIMITS)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "seed": -(2**63)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"top_k": 10**9, "seed": 2**63 - 1, "min_tokens": 8, "max_tokens": 8},
        {"stop_token_ids": [5, 10**6], "logit_bias": {}, "watermarking": False},
        {"min_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.001, "logit_bias": {0: -100.0, 99: 100.0}},
        {"allowed_token_ids": list(range(100)), "bad_words_token_ids": [[99] * 32] * 1024},
        {"logprobs": 128, "logprob_token_ids": [99] * 128},
        {"repetition_detection": {}},
        {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 4, "min_count": 2}},
    ],
)
def test_what_is_allowed(params: dict[str, Any]) -> None:
    check_request(wire_request("r", [0, 99], **params), LIMITS)


def test_the_shortest_request_of_the_wire() -> None:
    body = msgspec.msgpack.encode(["r", [1], None, {}, None, 0.0, None, "salt", 3])
    check_request(msgspec.msgpack.decode(body, type=EngineCoreRequest), LIMITS)


def test_as_many_logprobs_as_the_engine_is_set_to() -> None:
    small = Limits(vocab_size=10, max_model_len=32, cache_tokens=24)
    for k in (10, -1):
        check_request(wire_request("r", [1], logprobs=k, prompt_logprobs=k), small)
    with pytest.raises(
        InvalidRequestError, match=r"is 11; allowed: -1 \(all\) or 0 to 10, or None"
    ):
        check_request(wire_request("r", [1], logprobs=11), small)
    unbounded = replace(LIMITS, max_logprobs=-1)
    check_request(wire_request("r", [1], logprobs=-1, prompt_logprobs=100), unbounded)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is 4; allowed: 0 to 3, or None"):
        check_request(wire_request("r", [1], prompt_logprobs=4), replace(LIMITS, max_logprobs=3))


@pytest.mark.parametrize(
    ("value", "parameter"),
    [
        (5, ""),
        ([], ""),
        ({"min_counts": 2}, ""),
        ({"max_pattern_size": -1}, ".max_pattern_size"),
        ({"max_pattern_size": 2.0, "min_count": 2}, ".max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, ".min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, ".min_count"),
        ({"max_pattern_size": 2}, ".min_count"),
        ({"min_count": True}, ".min_count"),
    ],
)
def test_repetition_detection(value: Any, parameter: str) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        check_request(wire_request("r", [1], repetition_detection=value), LIMITS)
    assert caught.value.parameter == f"repetition_detection{parameter}"


def test_a_priority_needs_a_policy_that_reads_it() -> None:
    request = wire_request("r", [1])
    request.priority = -3
    with pytest.raises(
        InvalidRequestError, match="priority is -3; allowed: 0, unless the engine's"
    ):
        check_request(request, LIMITS)
    check_request(request, replace(LIMITS, takes_priority=True))
