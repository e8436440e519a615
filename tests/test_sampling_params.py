"""Sampling parameters: every range, and what an engine is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trioleg.errors import InvalidRequestError
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
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
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
    """A19."""
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


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="x").stop == ("x",)


def test_with_output_kind() -> None:
    params = SamplingParams(temperature=0)
    assert params.output_kind is RequestOutputKind.DELTA
    final = params.with_output_kind(RequestOutputKind.FINAL_ONLY)
    assert (final.output_kind, final.temperature) == (RequestOutputKind.FINAL_ONLY, 0)
