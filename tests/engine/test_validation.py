"""Every refusal names the parameter, the value and what is allowed."""

from __future__ import annotations

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
        ({"min_p": 0.1}, "min_p is 0.1; allowed: 0.0 only"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5"),
        ({"frequency_penalty": -0.5}, "frequency_penalty is -0.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1; allowed: 1.0 only"),
        ({"logprobs": -1}, "logprobs is -1; allowed: 0 to 20, or None"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; allowed: 0 to 20, or None"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is [1]"),
        ({"logit_bias": {1: 2.0}}, "logit_bias is {1: 2.0}"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is [1]"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is {'regex': 'a'}"),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection is"),
        ({"thinking_token_budget": 5}, "thinking_token_budget is 5"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids is [1]"),
        ({"watermarking": True}, "watermarking is True"),
        ({"extra_args": {"a": 1}}, "extra_args is {'a': 1}"),
        ({"bad_words_token_ids": [[1]]}, "bad_words_token_ids is [[1]]"),
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
    used |= {"logprobs", "prompt_logprobs"}
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
        check_request(wire_request("r", [1], allowed_token_ids=list(range(10_000))), LIMITS)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "seed": -(2**63)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"top_k": 10**9, "seed": 2**63 - 1, "min_tokens": 8, "max_tokens": 8},
        {"stop_token_ids": [5, 10**6], "logit_bias": {}, "watermarking": False},
    ],
)
def test_what_is_allowed(params: dict[str, Any]) -> None:
    check_request(wire_request("r", [0, 99], **params), LIMITS)


def test_the_shortest_request_of_the_wire() -> None:
    body = msgspec.msgpack.encode(["r", [1], None, {}, None, 0.0, None, "salt", 3])
    check_request(msgspec.msgpack.decode(body, type=EngineCoreRequest), LIMITS)


def test_no_more_logprobs_than_the_model_has_tokens() -> None:
    small = Limits(vocab_size=10, max_model_len=32, cache_tokens=24)
    check_request(wire_request("r", [1], logprobs=10), small)
    with pytest.raises(InvalidRequestError, match="logprobs is 11; allowed: 0 to 10, or None"):
        check_request(wire_request("r", [1], logprobs=11), small)
