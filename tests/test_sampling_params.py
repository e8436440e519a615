"""Sampling parameters: every range, and what an engine is told."""

from __future__ import annotations

from typing import Any

import pytest

from trioleg.errors import InvalidRequestError
from trioleg.sampling_params import RequestOutputKind, SamplingParams


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
    ],
)
def test_refused_by_name_with_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert str(caught.value).startswith(f"{name} is ")


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
