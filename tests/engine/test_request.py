from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import wire_request

from trioleg.engine.request import Request, Stop
from trioleg.messages import FinishReason


def request(prompt: list[int] | None = None, **params: Any) -> Request:
    return Request.from_wire(wire_request("r", prompt or [1, 2, 3], **params), vocab_size=100)


@pytest.mark.parametrize(
    ("params", "tokens", "stop"),
    [
        ({"max_tokens": 3}, [5, 6, 7], Stop(FinishReason.LENGTH)),
        ({"eos_token_id": 6}, [5, 6], Stop(FinishReason.STOP)),
        ({"stop_token_ids": [7]}, [5, 7], Stop(FinishReason.STOP, 7)),
        # The end-of-sequence token comes before stop_token_ids, and both before the length.
        ({"eos_token_id": 6, "stop_token_ids": [6]}, [6], Stop(FinishReason.STOP)),
        ({"stop_token_ids": [7], "max_tokens": 1}, [7], Stop(FinishReason.STOP, 7)),
        ({"eos_token_id": 6, "max_tokens": 1}, [6], Stop(FinishReason.STOP)),
        (
            {"eos_token_id": 6, "ignore_eos": True, "max_tokens": 2},
            [6, 6],
            Stop(FinishReason.LENGTH),
        ),
        ({"max_tokens": 99}, [5] * 7, Stop(FinishReason.LENGTH)),
    ],
)
def test_what_stops(params: dict[str, Any], tokens: list[int], stop: Stop) -> None:
    one = request(**params)
    stops = [one.append(token, max_model_len=10) for token in tokens]
    assert stops == [None] * (len(tokens) - 1) + [stop]
    assert one.token_ids == [1, 2, 3, *tokens]


def test_min_tokens_masks_every_stop_token_of_the_vocabulary() -> None:
    one = request(
        min_tokens=2, stop_token_ids=[7, 100], eos_token_id=6, all_stop_token_ids=[6, 9, 5000]
    )
    assert one.masked_token_ids == [6, 7, 9]
    going_on = []
    for token in (1, 1, 1):
        going_on.append(one.must_go_on)
        one.append(token, max_model_len=100)
    assert going_on == [True, True, False]


def test_ignore_eos_leaves_eos_unmasked() -> None:
    assert request(eos_token_id=6, ignore_eos=True, min_tokens=2).masked_token_ids == []


@pytest.mark.parametrize(("asked", "used"), [(0.0, 0.0), (1e-7, 0.01), (0.005, 0.01), (0.7, 0.7)])
def test_small_temperatures_are_raised(asked: float, used: float) -> None:
    assert request(temperature=asked).temperature == used


def test_noise_belongs_to_the_seed_and_its_sign() -> None:
    def first(seed: int | None) -> float:
        return request(seed=seed).noise.random()

    assert first(5) == first(5)
    assert len({first(seed) for seed in (5, -5, 0, -(2**63), 2**63 - 1, None)}) == 6


def test_events_are_taken_once() -> None:
    one = request()
    one.record(1)
    events = one.take_events()
    assert events is not None
    assert events[0].timestamp > 0
    assert one.take_events() is None
