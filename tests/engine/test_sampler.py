"""The sampler against exact distributions. Seeds are fixed, so a chi-square test cannot fail by chance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_helpers import wire_request
from sampling_reference import chi_square_is_plausible

from trioleg.engine.request import Request
from trioleg.engine.sampler import NoToken, sample

DRAWS = 4000


def make_request(seed: int = 0, vocab_size: int = 1000, **params: Any) -> Request:
    params = {"temperature": 1.0, "seed": seed, **params}
    return Request.from_wire(wire_request(f"r{seed}", [1], **params), vocab_size=vocab_size)


def exact(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution by definition, one row, in double."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    kept = probs[order]
    if top_k:
        kept[top_k:] = 0
    kept = kept / kept.sum()
    kept[(kept.cumsum(0) - kept) >= top_p] = 0
    result = torch.zeros_like(probs)
    result[order] = kept / kept.sum()
    return result


def draw_many(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    requests = [make_request(seed, vocab_size=len(logits), **params) for seed in range(DRAWS)]
    token_ids = sample(logits.repeat(DRAWS, 1), requests)
    return torch.bincount(torch.tensor(token_ids), minlength=len(logits)).double()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10**9},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    ],
    ids=str,
)
def test_the_distribution_is_exact(params: dict[str, Any]) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 2
    filled = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **params}
    filled["top_k"] = min(filled["top_k"], 60)
    probs = exact(logits, **filled)
    counts = draw_many(logits, **params)
    assert counts[probs == 0].sum() == 0
    if int((probs > 0).sum()) > 1:
        assert chi_square_is_plausible(counts, probs)


def test_the_chi_square_notices_a_wrong_distribution() -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 2
    counts = draw_many(logits, temperature=1.1)
    assert not chi_square_is_plausible(counts, logits.double().softmax(-1))


def test_a_flat_distribution_needs_more_than_the_first_look() -> None:
    # 1,000 equal tokens at top_p 0.5: the first look covers a quarter of the probability.
    logits = torch.zeros(1000)
    token_ids = sample(logits.repeat(DRAWS, 1), [make_request(i, top_p=0.5) for i in range(DRAWS)])
    assert 495 <= len(set(token_ids)) <= 500


def test_rows_of_all_kinds_share_a_batch() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(5))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 400, "top_p": 0.9},
        {"temperature": 0.0, "top_k": 3},
    ]
    together = sample(logits.clone(), [make_request(i, **kind) for i, kind in enumerate(kinds)])
    alone = [
        sample(logits[i : i + 1].clone(), [make_request(i, **kind)])[0]
        for i, kind in enumerate(kinds)
    ]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[5] == int(logits[5].argmax())


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch() -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(6))
    request = make_request(11)
    alone = [sample(row[None].clone(), [request])[0] for row in logits]
    request = make_request(11)
    crowded = []
    for row in logits:
        others = [make_request(i, top_p=0.9) for i in range(3)]
        crowded.append(sample(row.repeat(4, 1), [*others, request])[3])
    assert alone == crowded
    assert alone != [sample(row[None].clone(), [make_request(12)])[0] for row in logits]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_is_none_and_others_go_on(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(8))
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 20] = bad
    requests = [make_request(i, temperature=temperature, top_p=0.9) for i in range(3)]
    expected = [
        sample(logits[i : i + 1].clone(), [make_request(i, temperature=temperature, top_p=0.9)])[0]
        for i in (0, 2)
    ]
    result = sample(logits, requests)
    assert [result[0], result[2]] == expected
    assert NoToken.NOT_FINITE not in expected
    assert result[1] is (NoToken.ALL_FORBIDDEN if bad == -torch.inf else NoToken.NOT_FINITE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_until_enough_are_out(temperature: float) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 50.0
    request = make_request(1, temperature=temperature, min_tokens=1, stop_token_ids=[4])
    first = sample(logits.clone(), [request])[0]
    assert first is not None
    assert first != 4
    request.append(first, max_model_len=100)
    assert sample(logits.clone(), [request]) == [4]


def test_huge_logits_and_the_smallest_temperature_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, 0.0]])
    assert sample(logits, [make_request(0, temperature=1e-9, top_p=0.5)]) == [0]
