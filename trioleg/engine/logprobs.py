"""From logits to logprobs, for the requests that ask for them and at no other's price.

Rules of this file: torch, no trio, no state. The figures are vLLM's by default (raw_logprobs): the
log-softmax of the logits as the model made them, in float32, before temperature, ``min_tokens``, top_k
and top_p. A token's rank is the number of tokens that are at least as probable, itself included, so of
two equal ones both have the worse rank.

A prompt's rows are scored in the step that computes them, whatever chunk that is: row i says how
probable prompt token i + 1 was. They collect in their request, which knows by their number what a
recomputation after a preemption need not score again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .logprob_rows import LogprobRows
from .model import LlamaModel
from .request import Request
from .scheduler import Chunk

__all__ = ["gather_logprobs", "score_prompts", "score_samples"]

# Of a prompt's rows as many have logits at the same time: with 150,000 tokens to choose from that is
# 77 MB in float32, and about as much for each of the few intermediate results.
_ROWS_AT_ONCE = 128


@torch.inference_mode()
def gather_logprobs(
    logits: Tensor, token_ids: Sequence[int], ks: Sequence[int]
) -> Iterator[tuple[list[int], list[float], int]]:
    """For each row of ``logits`` [rows, vocab]: token ids, their logprobs, and the first one's rank.

    The first is the row's own of ``token_ids``; behind it stand the ``ks`` most probable ones in order.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    best, best_ids = logprobs.topk(max(ks), dim=-1)
    all_ids = torch.cat([chosen_ids, best_ids], dim=1).tolist()
    all_logprobs = torch.cat([chosen, best], dim=1).tolist()
    for ids, values, rank, k in zip(all_ids, all_logprobs, ranks, ks, strict=True):
        yield ids[: k + 1], values[: k + 1], rank


def score_samples(
    raw: Tensor, token_ids: Sequence[int | None], requests: Sequence[Request]
) -> list[LogprobRows]:
    """One row for each request, which must ask for ``logprobs``; ``raw`` [requests, vocab] is what its
    token was sampled from, before sampling touched it. Where there is no token the row means nothing."""
    ks = [request.params.logprobs or 0 for request in requests]
    found = [LogprobRows(k) for k in ks]
    for rows, row in zip(found, gather_logprobs(raw, [i or 0 for i in token_ids], ks), strict=True):
        rows.append(*row)
    return found


@torch.inference_mode()
def score_prompts(model: LlamaModel, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
    """Adds to each request what its chunk says about the prompt, where the request asks for that.

    ``hidden`` [rows, hidden_size] are the model's rows, chunk after chunk.
    """
    wanted: list[tuple[int, int, LogprobRows]] = []
    first_row = 0
    for chunk in chunks:
        known = chunk.request.prompt_logprobs
        if known is not None:
            targets = chunk.request.token_ids
            row_of = first_row - chunk.start
            wanted += [(row_of + i, targets[i + 1], known) for i in chunk.scores]
        first_row += chunk.count
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        rows, token_ids, collectors = zip(*wanted[start : start + _ROWS_AT_ONCE], strict=True)
        logits = model.compute_logits(hidden[list(rows)])
        scored = gather_logprobs(logits, token_ids, [one.k for one in collectors])
        for collector, found in zip(collectors, scored, strict=True):
            collector.append(*found)
