"""What requests want of their logits before anything is chosen: for a whole batch at once, in place.

Rules of this file: torch, no trio, no state. The order is vLLM's: only allowed tokens; bad words and, until
``min_tokens`` are out, stop tokens are forbidden; ``logit_bias`` is added; then the repetition penalty
divides a positive logit and multiplies a negative one, and the frequency and presence penalties are
subtracted. These change which token is the best one; what only shapes a draw is the sampler's.

Only the cells that a request names are touched: 32 requests with 1,000 distinct tokens each are a gather
and a scatter of 32,000 numbers, and nobody builds a mask as wide as the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .request import Request
from .token_rules import TokenCounts

__all__ = ["adjust_logits"]


def adjust_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    """Applies to each row of ``logits`` [rows, vocab] (float32, contiguous) what its request asks for.

    A row of which nothing is left is -inf throughout.
    """
    _keep_allowed(logits, requests)
    _forbid(logits, requests)
    _add_biases(logits, requests)
    _penalise(logits, requests)


def _keep_allowed(logits: Tensor, requests: Sequence[Request]) -> None:
    allowed = [
        (row, one.rules.allowed_token_ids)
        for row, one in enumerate(requests)
        if one.rules is not None and one.rules.allowed_token_ids is not None
    ]
    if allowed:
        flat, cells = logits.view(-1), _cells(allowed, logits)
        kept = flat.index_select(0, cells)
        rows = torch.tensor([row for row, _ in allowed], device=logits.device)
        logits.index_fill_(0, rows, -torch.inf)
        flat.index_copy_(0, cells, kept)


def _forbid(logits: Tensor, requests: Sequence[Request]) -> None:
    forbidden = [(row, ids) for row, one in enumerate(requests) if (ids := one.forbidden_token_ids)]
    if forbidden:
        logits.view(-1).index_fill_(0, _cells(forbidden, logits), -torch.inf)


def _add_biases(logits: Tensor, requests: Sequence[Request]) -> None:
    rules = [(row, one.rules) for row, one in enumerate(requests) if one.rules and one.rules.biases]
    if rules:
        cells = _cells([(row, one.bias_token_ids) for row, one in rules], logits)
        biases = _joined("f", [one.biases for _, one in rules], logits)
        logits.view(-1).index_add_(0, cells, biases)


def _penalise(logits: Tensor, requests: Sequence[Request]) -> None:
    asking: list[tuple[int, TokenCounts]] = [
        (row, one.rules.counts)
        for row, one in enumerate(requests)
        if one.rules is not None and one.rules.counts is not None and one.rules.counts.counts
    ]
    if not asking:
        return
    params = [requests[row].params for row, _ in asking]
    lengths = [len(one.token_ids) for _, one in asking]

    def spread(penalties: list[float]) -> Tensor:
        columns = [array("f", [one]) * n for one, n in zip(penalties, lengths, strict=True)]
        return _joined("f", columns, logits)

    flat, cells = logits.view(-1), _cells([(row, one.token_ids) for row, one in asking], logits)
    counts = _joined("f", [one.counts for _, one in asking], logits)
    repetition = spread([one.repetition_penalty for one in params])
    values = flat.index_select(0, cells)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([one.frequency_penalty for one in params]) * counts
    values -= spread([one.presence_penalty for one in params]) * (counts > 0)
    flat.index_copy_(0, cells, values)


def _cells(parts: Sequence[tuple[int, Sequence[int]]], like: Tensor) -> Tensor:
    """Where the cells of ``parts``, each a row and some of its columns, stand in the flat logits.

    Flat, for ``index_select`` and its like, which do the work on the spot: an index in brackets
    wakes all of torch's threads, and on a busy machine their meeting takes a thousand times as long.
    """
    vocab = like.shape[1]
    rows = _joined("q", [array("q", [row * vocab]) * len(ids) for row, ids in parts], like)
    return rows + _joined("q", [ids for _, ids in parts], like)


_DTYPES = {"q": torch.int64, "f": torch.float32}


def _joined(code: str, parts: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    # From array to array is a copy of memory, and torch reads the result in place.
    whole: array[Any] = array(code)
    for part in parts:
        whole.extend(part)
    return torch.frombuffer(whole, dtype=_DTYPES[code]).to(like.device)
