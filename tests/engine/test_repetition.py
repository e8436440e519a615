"""Endless repetitions: what counts as one, and how it ends a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_helpers import make_core, run_to_the_end, wire_request

from trioleg.engine.model import CausalLM
from trioleg.messages import FinishReason
from trioleg.sampling_params import RepetitionDetectionParams


def repeats(token_ids: Sequence[int], low: int, high: int, count: int) -> bool:
    """By definition: the text ends with a pattern of one of these sizes, so many times."""
    text = list(token_ids)
    return any(
        len(text) >= size * count and text[-size * count :] == text[-size:] * count
        for size in range(max(low, 1), high + 1)
    )


def test_found_exactly_where_the_definition_says() -> None:
    chance = random.Random(1)
    found = 0
    for _ in range(3000):
        high = chance.randrange(1, 6)
        low, count = chance.randrange(high + 1), chance.randrange(2, 5)
        pattern = [chance.randrange(3) for _ in range(chance.randrange(1, 7))]
        text = [chance.randrange(3) for _ in range(4)] + pattern * chance.randrange(5)
        params = RepetitionDetectionParams(
            max_pattern_size=high, min_pattern_size=low, min_count=count
        )
        right = repeats(text, low, high, count)
        assert params.finds(text) == right
        found += right
    assert 500 < found < 2500


def test_off_by_default() -> None:
    assert not RepetitionDetectionParams().finds([5] * 100)


@pytest.mark.parametrize(
    ("detection", "more", "count", "reason"),
    [
        ({"max_pattern_size": 1, "min_count": 4}, {}, 4, FinishReason.REPETITION),
        ({"max_pattern_size": 9, "min_pattern_size": 3, "min_count": 2}, {}, 6, "repetition"),
        # Not before min_tokens, and the length comes first. The prompt's tokens do not count.
        ({"max_pattern_size": 1, "min_count": 4}, {"min_tokens": 7}, 7, FinishReason.REPETITION),
        ({"max_pattern_size": 1, "min_count": 4}, {"max_tokens": 4}, 4, FinishReason.LENGTH),
        ({"max_pattern_size": 0, "min_count": 4}, {}, 8, FinishReason.LENGTH),
        ({"max_pattern_size": 2**31 - 1, "min_count": 2**31 - 1}, {}, 8, FinishReason.LENGTH),
        (None, {}, 8, FinishReason.LENGTH),
    ],
)
def test_through_the_engine(
    tiny_model: CausalLM,
    detection: dict[str, int] | None,
    more: dict[str, Any],
    count: int,
    reason: FinishReason | str,
) -> None:
    core = make_core(tiny_model)
    params = {"allowed_token_ids": [5], "repetition_detection": detection, **more}
    core.add_request(wire_request("a", [5] * 10, **params))
    result = run_to_the_end(core)["a"]
    assert result.token_ids == [5] * count
    assert str(result.finish_reason) == str(reason)
    is_repetition = result.finish_reason is FinishReason.REPETITION
    assert result.stop_reason == ("repetition_detected" if is_repetition else None)
