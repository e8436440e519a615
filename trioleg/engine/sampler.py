"""From logits to token ids, for a whole batch at once.

Rules of this file: torch, no trio, no state: a request brings its own noise. The plan: forbid what
``min_tokens`` forbids; take the best token of every row; then, for rows with a temperature, draw from the
distribution by inverting its cumulated sum at one uniform number of the request's own. One number a
token, drawn outside torch, is what makes a seeded request independent of its batch.

top_k comes before top_p, and top_p's share is of what top_k has left, as in vLLM. A row with either looks
only at its most probable tokens: sorting 32 rows of 49,152 took 146 ms on one core,
finding the 256 largest of each 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import Request

__all__ = ["sample"]

# How many of the most probable tokens are looked at first, where only top_p bounds them.
_FIRST_LOOK = 256


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """One token id for each row of ``logits`` [rows, vocab] (float32; changed in place).

    None for a row that has no finite best token: NaN or infinity among its logits, or every token forbidden.
    """
    _forbid_stop_tokens(logits, requests)
    # NaN counts as the largest here, so that one look at the maximum finds it wherever it stands.
    best, token_ids = logits.max(dim=-1)
    rows = [i for i, request in enumerate(requests) if request.temperature > 0]
    if rows:
        drawn = _draw(logits[rows] - best[rows, None], [requests[i] for i in rows])
        token_ids[rows] = drawn
    usable = best.isfinite().tolist()
    return [i if ok else None for i, ok in zip(token_ids.tolist(), usable, strict=True)]


def _forbid_stop_tokens(logits: Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        if request.must_go_on and request.masked_token_ids:
            logits[row, request.masked_token_ids] = -torch.inf


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """One token id for each row; ``logits`` are at most 0, so no temperature makes them overflow."""
    probs = (logits / _column([r.temperature for r in requests], logits)).softmax(dim=-1)
    uniform = _column([r.noise.random() for r in requests], logits, torch.float64)
    bounded = [i for i, r in enumerate(requests) if r.top_k > 0 or r.top_p < 1]
    free = [i for i in range(len(requests)) if i not in bounded]
    token_ids = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    if free:
        token_ids[free] = _invert(probs[free], uniform[free])
    if bounded:
        kept, ids = _most_probable(probs[bounded], [requests[i] for i in bounded])
        index = _invert(kept, uniform[bounded])
        token_ids[bounded] = ids.gather(1, index[:, None]).squeeze(1)
    return token_ids


def _most_probable(probs: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """What top_k and top_p leave: probabilities (0 where cut), most probable first, and token ids."""
    vocab = probs.shape[1]
    top_k = [min(r.top_k, vocab) or vocab for r in requests]
    top_p = _column([r.top_p for r in requests], probs, torch.float64)
    width = min(vocab, max(_FIRST_LOOK, *(k for k in top_k if k < vocab), 0))
    while True:
        values, ids = probs.topk(width, dim=-1)
        ranks = torch.arange(width, device=probs.device)
        in_top_k = ranks < _column(top_k, probs, torch.int64)
        values = values.double() * in_top_k
        cumulated = values.cumsum(dim=-1)
        has_all = _column([k <= width for k in top_k], probs, torch.bool)
        total = torch.where(has_all, cumulated[:, -1:], 1.0)
        enough = has_all | (cumulated[:, -1:] >= top_p)
        if width == vocab or bool(enough.all()):
            return values * (cumulated - values < top_p * total), ids
        width = min(vocab, 8 * width)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulated probability exceeds ``uniform`` × the row's sum."""
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Strictly below the sum: at the sum itself the search would end behind the last possible token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    return index.clamp(max=probs.shape[1] - 1)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
