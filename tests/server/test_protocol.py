"""What a chat request may hold: every parameter is honoured or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioleg.errors import (
    EngineDeadError,
    InvalidRequestError,
    OutputError,
    ServerShutdown,
)
from trioleg.outputs import CompletionOutput, Logprob, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams
from trioleg.server.protocol import (
    ChatCompletionRequest,
    ModelNotFoundError,
    error_of,
    full_response,
    parse_chat_completion,
)

MESSAGES = [{"role": "user", "content": "Hi"}]


def parse(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return parse_chat_completion(json.dumps(body).encode(), SamplingParams)


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**fields)
    return caught.value


def test_the_least_request() -> None:
    request = parse()
    assert request.messages == MESSAGES
    assert (request.model, request.stream, request.include_usage) == ("m", False, False)
    assert request.params == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


def test_every_honoured_parameter_arrives() -> None:
    asked: dict[str, Any] = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1, "6": -100.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["ugly"],
        "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
        "seed": 11,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stop_hold_back": "fixed",
        "stream_interval": 4,
    }
    wanted = {"logprobs": True, "top_logprobs": 2}
    params = parse(**asked, **wanted, max_completion_tokens=9, stream=True).params
    assert params == SamplingParams(**asked, logprobs=2, max_tokens=9)
    assert parse(prompt_logprobs=1).params.prompt_logprobs == 1
    assert parse(return_token_ids=True).return_token_ids


def test_priority_and_cache_salt_are_passed_on() -> None:
    assert (parse().priority, parse().cache_salt) == (0, None)
    assert (parse(priority=None).priority, parse(cache_salt=None).cache_salt) == (0, None)
    asked = parse(priority=-4, cache_salt="x")
    assert (asked.priority, asked.cache_salt) == (-4, "x")


def test_null_is_the_default_everywhere() -> None:
    names = ("temperature", "stop", "max_tokens", "seed", "stream", "stream_options", "n", "tools")
    assert parse(**dict.fromkeys(names)) == parse()


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("best_of", 1, 2),
        ("best_of", 1, True),
        ("length_penalty", 1.0, 1.1),
        ("detokenize", True, False),
        ("tools", [], [{"type": "function"}]),
        ("tool_choice", "none", "required"),
        ("store", False, True),
        ("echo", False, True),
    ],
)
def test_what_is_not_honoured_is_refused_unless_it_asks_for_nothing(
    name: str, neutral: Any, asking: Any
) -> None:
    assert parse(**{name: neutral}) == parse()
    error = refusal(**{name: asking})
    assert error.parameter == name
    assert str(error).startswith(f"{name} is ")
    assert "which is not supported; allowed: null" in str(error)


def test_unknown_parameters_are_refused() -> None:
    error = refusal(temprature=0)
    assert (error.parameter, str(error)) == ("temprature", "unknown parameter: 'temprature'")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"messages": NaN}', "not valid JSON"),
    ],
)
def test_bodies_that_are_no_request(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_chat_completion(body, SamplingParams)


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0].text",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_are_refused_by_place(messages: Any, parameter: str) -> None:
    assert refusal(messages=messages).parameter == parameter


@pytest.mark.parametrize("name", ["stop", "messages", "stream", "n", "stream_options"])
def test_no_depth_is_too_deep_for_a_refusal(name: str) -> None:
    for depth in range(900, 1030):
        nested = b'{"messages":[],"%b":' % name.encode() + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(InvalidRequestError):
            parse_chat_completion(nested, SamplingParams)


def test_messages_that_are_not_there() -> None:
    with pytest.raises(InvalidRequestError, match="messages is missing") as caught:
        parse_chat_completion(b"{}", SamplingParams)
    assert caught.value.parameter == "messages"


def test_text_parts_and_the_developer_role() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(messages=[{"role": "developer", "content": parts}])
    assert request.messages == [{"role": "system", "content": "ab"}]


def test_an_assistants_message_may_come_back_as_it_was_sent() -> None:
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert parse(messages=[message]).messages == [{"role": "assistant", "content": "x"}]


def test_stream_options() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    assert refusal(stream_options={"include_usage": True}).parameter == "stream_options"
    for bad in ({"include_usage": 1}, {"include_usage": "yes"}):
        error = refusal(stream=True, stream_options=bad)
        assert error.parameter == "stream_options.include_usage"
    assert refusal(stream=True, stream_options=[1]).parameter == "stream_options"
    error = refusal(stream=True, stream_options={"include_obfuscation": True})
    assert error.parameter == "stream_options.include_obfuscation"
    neutral = {"include_obfuscation": False, "include_usage": None}
    assert parse(stream=True, stream_options=neutral) == parse(stream=True)


def test_continuous_usage_needs_usage() -> None:
    """vLLM ignores the one without the other; we do not ignore what is asked for."""
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert parse(stream=True, stream_options=both).continuous_usage
    error = refusal(stream=True, stream_options={"continuous_usage_stats": True})
    assert error.parameter == "stream_options.continuous_usage_stats"
    assert "unless include_usage is true" in str(error)


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        # How many there may be, the engine's settings say: make_submission refuses what is more.
        ({"logprobs": True, "top_logprobs": 2000}, 2000),
        ({"logprobs": True, "top_logprobs": -1}, -1),
        ({"logprobs": True, "logprob_token_ids": [5], "top_logprobs": 0}, None),
        ({"logprobs": True, "logprob_token_ids": []}, 0),
    ],
)
def test_two_parameters_for_logprobs(asked: dict[str, Any], logprobs: int | None) -> None:
    assert parse(**asked).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("asked", "parameter", "allowed"),
    [
        ({"logprobs": 1}, "logprobs", "true, false or null"),
        ({"top_logprobs": 3}, "top_logprobs", "unless logprobs is true"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "unless logprobs is true"),
        ({"top_logprobs": -1}, "top_logprobs", "unless logprobs is true"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "-1 (all), at least 0"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "-1 (all), at least 0"),
        ({"logprobs": True, "top_logprobs": 2.5}, "top_logprobs", "-1 (all), at least 0"),
        ({"logprobs": True, "top_logprobs": 2**31}, "top_logprobs", "-1 (all), at least 0"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "unless logprobs is true"),
        (
            {"logprobs": True, "logprob_token_ids": [5], "top_logprobs": 1},
            "top_logprobs",
            "beside logprob_token_ids",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias", "an object of token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "a number from -100 to 100"),
        ({"logit_bias": [5]}, "logit_bias", "an object of token ids"),
        ({"bad_words": [""]}, "bad_words", "a non-empty string"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
        ({"min_p": "0.1"}, "min_p", "a number from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "a number from 0.001 to 1000.0"),
        ({"repetition_detection": True}, "repetition_detection", "an object of max_pattern_size"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "-1 (all), at least 0"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "unless stream is false"),
        ({"return_token_ids": 1}, "return_token_ids", "true, false or null"),
        ({"n": 0}, "n", "1 to 128"),
        ({"n": 129}, "n", "1 to 128"),
        ({"n": True}, "n", "1 to 128"),
        ({"stream_interval": 0}, "stream_interval", "at least 1"),
        ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens", "true or false"),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    asked: dict[str, Any], parameter: str, allowed: str
) -> None:
    error = refusal(**asked)
    assert error.parameter == parameter
    assert allowed in str(error)


def test_two_names_for_max_tokens() -> None:
    assert parse(max_tokens=3).params.max_tokens == 3
    assert parse(max_tokens=3, max_completion_tokens=3).params.max_tokens == 3
    assert refusal(max_tokens=3, max_completion_tokens=4).parameter == "max_tokens"
    assert refusal(max_tokens=0).parameter == "max_tokens"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("x", parameter="p"), 400, None),
        (ModelNotFoundError("x", parameter="model"), 404, "model_not_found"),
        (EngineDeadError("x"), 503, "engine_dead"),
        (ServerShutdown("x"), 503, "server_shutdown"),
        (OutputError("x"), 500, "output_error"),
        (RuntimeError("a secret"), 500, None),
    ],
)
def test_errors_as_status_and_object(error: Exception, status: int, code: str | None) -> None:
    got, fields = error_of(error)
    assert (got, fields["code"]) == (status, code)
    assert fields["param"] == getattr(error, "parameter", None)
    assert "secret" not in fields["message"]


def answer(output: RequestOutput, **asked: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(full_response(output, parse(**asked), created=7, model="m"))
    return body


def test_full_response() -> None:
    body = answer(
        RequestOutput(
            "r", [1, 2, 3], [CompletionOutput(0, "Hi", [4, 5], "stop")], True, num_cached_tokens=2
        )
    )
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 7, "m")
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}


def test_choices_come_in_order_and_the_prompt_counts_once() -> None:
    outputs = [
        CompletionOutput(1, "b", [4], "length"),
        CompletionOutput(0, "a", [5, 6], "stop", "END"),
    ]
    body = answer(RequestOutput("r", [1, 2, 3], outputs, True), n=2, return_token_ids=True)
    got = [(c["index"], c["message"]["content"], c["stop_reason"]) for c in body["choices"]]
    assert got == [(0, "a", "END"), (1, "b", None)]
    assert [c["token_ids"] for c in body["choices"]] == [[5, 6], [4]]
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


LIKELY = Logprob(-0.5, 1, "a", b"a")
PART = Logprob(-1.5, 2, "\\xf0", b"\xf0")
RULED_OUT = Logprob(float("-inf"), 9, "z", b"z")


def spelled(one: Logprob, logprob: float) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": logprob, "bytes": list(one.token_bytes)}


@pytest.mark.parametrize(
    ("top", "of_token", "listed"),
    [
        (0, {8: PART}, []),
        (1, {8: PART, 7: LIKELY}, [LIKELY]),
        (1, {7: LIKELY}, [LIKELY]),
        (2, {8: PART, 7: LIKELY}, [LIKELY, PART]),
        (2, {9: RULED_OUT, 7: LIKELY, 8: PART}, [LIKELY, PART]),
    ],
    ids=["none", "chosen is second", "chosen is first", "both", "chosen is neither"],
)
def test_top_logprobs_are_the_most_probable_in_order(
    top: int, of_token: dict[int, Logprob], listed: list[Logprob]
) -> None:
    one = CompletionOutput(0, "x", [next(iter(of_token))], "stop", logprobs=[of_token])
    body = answer(RequestOutput("r", [1], [one], True), logprobs=True, top_logprobs=top)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry.pop("top_logprobs") == [spelled(one, one.logprob) for one in listed]
    chosen = next(iter(of_token.values()))
    assert entry == spelled(chosen, max(chosen.logprob, -9999.0))
    assert body["choices"][0]["logprobs"]["refusal"] is None


def test_all_tokens_are_listed_the_likeliest_first() -> None:
    one = CompletionOutput(0, "x", [8], "stop", logprobs=[{8: PART, 7: LIKELY}])
    body = answer(RequestOutput("r", [1], [one], True), logprobs=True, top_logprobs=-1)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == [spelled(one, one.logprob) for one in (LIKELY, PART)]


def test_tokens_that_were_asked_for_are_listed_behind_the_chosen_one() -> None:
    one = CompletionOutput(0, "x", [8], "stop", logprobs=[{8: PART, 9: RULED_OUT, 7: LIKELY}])
    output = RequestOutput("r", [1], [one], True)
    body = answer(output, logprobs=True, logprob_token_ids=[9, 7])
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert [listed["token"] for listed in entry["top_logprobs"]] == ["\\xf0", "z", "a"]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e30])
def test_what_json_cannot_hold_is_ruled_out(logprob: float) -> None:
    of_token = {5: Logprob(logprob, None, "z", b"z")}
    one = CompletionOutput(0, "z", [5], "stop", logprobs=[of_token])
    output = RequestOutput("r", [1, 5], [one], True, prompt_logprobs=[None, of_token])
    body = answer(output, logprobs=True, prompt_logprobs=0)
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert body["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -9999.0, "rank": None, "decoded_token": "z"}},
    ]
