"""Sampling parameters: every range, and what an engine is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineSamplingParams
from trioleg.sampling_params import PoolingParams, RequestOutputKind, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", -(10**400)),
        ("top_p", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("inf")),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", -(10**400)),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 10**400),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0}),
        ("logit_bias", {"x": 0}),
        ("logit_bias", {"9" * 5000: 0}),
        ("logit_bias", {"٣": 0}),
        ("logit_bias", {True: 0}),
        ("logit_bias", {2**31: 0}),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: None}),
        ("logit_bias", dict.fromkeys(range(2**18 + 1), 0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [0] * (2**18 + 1)),
        ("bad_words", ""),
        ("bad_words", ["x", ""]),
        ("bad_words", {"x": 1}),
        ("bad_words", "\ud800"),
        ("logprob_token_ids", ["5"]),
        ("logprob_token_ids", [5] * 129),
        ("repetition_detection", 3),
        ("repetition_detection", {"size": 3}),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stop", ""),
        ("stop", ["", "x"]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 0),
        ("stop_hold_back", "some"),
        ("output_kind", 3),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("logprobs", -2),
        ("logprobs", 2**31),
        ("logprobs", True),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("detokenize", None),
        ("spaces_between_special_tokens", "no"),
        ("stream_interval", 0),
        ("stream_interval", 2**31),
    ],
)
def test_refused_by_name_with_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert str(caught.value).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 1.0}, "max_pattern_size"),
        ({"min_pattern_size": 1}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"min_count": -1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 10**400}, "min_count"),
    ],
)
def test_repetition_detection_is_refused_by_its_fields(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.parameter == f"repetition_detection.{name}"


def test_bad_words_have_a_bound() -> None:
    for words in ([f"x{i}" for i in range(129)], ["x" * 2**13, "y"]):
        with pytest.raises(InvalidRequestError, match="at most 128 strings and 8192") as caught:
            SamplingParams(bad_words=words)
        assert caught.value.parameter == "bad_words"


def test_logprobs_beside_logprob_token_ids_can_only_be_their_number() -> None:
    """vLLM's rule."""
    assert SamplingParams(logprob_token_ids=[5, 6], logprobs=2).logprobs == 2
    with pytest.raises(InvalidRequestError, match="logprobs is 1; allowed: null, or 2, as many"):
        SamplingParams(logprob_token_ids=[5, 6], logprobs=1)


@pytest.mark.parametrize("stop", [[f"x{i}" for i in range(65)], ["x" * 2**16, "y"]])
def test_stop_strings_have_a_bound(stop: list[str]) -> None:
    """Each of them costs every other request a little of every step."""
    with pytest.raises(
        InvalidRequestError, match="allowed: at most 64 strings and 65536"
    ) as caught:
        SamplingParams(stop=stop)
    assert caught.value.parameter == "stop"
    assert len(SamplingParams(stop=stop[:1]).stop) == 1


def test_stop_strings_need_the_text() -> None:
    """Without text there is nothing to find them in; ids of stop tokens need none (A19)."""
    with pytest.raises(InvalidRequestError, match="detokenize is False; allowed: true where stop"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop_token_ids=[3], detokenize=False).detokenize is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("task", ""), ("task", None), ("dimensions", 0), ("dimensions", 1.5), ("use_activation", 1)],
)
def test_pooling_parameters_are_refused_likewise(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        PoolingParams(**{name: value})
    assert caught.value.parameter == name


def test_pooling_parameters_for_the_engine() -> None:
    """An array, in vLLM's order."""
    wire = PoolingParams(dimensions=4).for_engine()
    assert msgspec.to_builtins(wire) == [True, 4, None, None, "embed"]


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="at most max_tokens, which is 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_for_engine_fills_in_what_the_engine_does_not_look_up() -> None:
    params = SamplingParams(top_k=-1, stop_token_ids=[7], min_tokens=9)
    wire = params.for_engine(max_tokens=5, eos_token_id=2, other_eos_token_ids=[2, 3])
    assert (wire.top_k, wire.max_tokens, wire.min_tokens) == (0, 5, 5)
    assert (wire.eos_token_id, wire.stop_token_ids) == (2, [7, 3])
    assert wire.all_stop_token_ids == [7, 3, 2]


def test_for_engine_with_ignore_eos() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    wire = params.for_engine(max_tokens=5, eos_token_id=2, other_eos_token_ids=[3])
    assert (wire.eos_token_id, wire.stop_token_ids, wire.all_stop_token_ids) == (None, [7], [7])


def test_what_asks_for_nothing_is_the_default_on_the_wire() -> None:
    params = SamplingParams(
        logit_bias={}, bad_words=[], logprob_token_ids=[], min_p=0, repetition_penalty=1
    )
    assert params == SamplingParams()
    wire = params.for_engine(max_tokens=5, eos_token_id=2)
    assert wire == EngineSamplingParams(max_tokens=5, eos_token_id=2, all_stop_token_ids=[2])


def test_every_parameter_on_the_wire() -> None:
    params = SamplingParams(
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=2,
        logit_bias={"5": 1, 6: -2.5},
        allowed_token_ids=(5, 6),
        bad_words=["x"],
        logprob_token_ids=[6],
        logprobs=1,
        prompt_logprobs=-1,
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
    )
    wire = params.for_engine(max_tokens=5, eos_token_id=None, bad_words_token_ids=[[7], [8, 9]])
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), strict=False)
    assert {name: body[name] for name in body if name not in ("temperature", "top_p")} == {
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 2.0,
        "logit_bias": {5: 1.0, 6: -2.5},
        "allowed_token_ids": [5, 6],
        "_bad_words_token_ids": [[7], [8, 9]],
        "logprobs": 1,
        "prompt_logprobs": -1,
        "logprob_token_ids": [6],
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 0, "min_count": 2},
        "max_tokens": 5,
    }
    assert type(body["presence_penalty"]) is float


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="x").stop == ("x",)


def test_with_output_kind() -> None:
    params = SamplingParams(temperature=0)
    assert params.output_kind is RequestOutputKind.DELTA
    final = params.with_output_kind(RequestOutputKind.FINAL_ONLY)
    assert (final.output_kind, final.temperature) == (RequestOutputKind.FINAL_ONLY, 0)
