"""From logits to logprobs, for the requests that ask for them and at no other's price.

Rules of this file: torch, no trio, no state. The figures are vLLM's by default (raw_logprobs): the
log-softmax of the logits as the model made them, in float32, before temperature, ``min_tokens``, top_k
and top_p, but behind the mask of a grammar. A token's rank is the number of tokens that are at least as probable, itself included, so of
two equal ones both have the worse rank. Beside a generated token stand the most probable ones, or, with
``logprob_token_ids``, exactly those and in that order.

A prompt's rows are scored in the step that computes them, whatever chunk that is: row i says how
probable prompt token i + 1 was. They collect in their request, which knows by their number what a
recomputation after a preemption need not score again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .logprob_rows import LogprobRows
from .model import CausalLM
from .request import Request
from .scheduler import Chunk

__all__ = ["gather_logprobs", "score_prompts", "score_samples"]

# Of a prompt's rows as many have logits at the same time: with 150,000 tokens to choose from that is
# 77 MB in float32, and about as much for each of the few intermediate results.
_ROWS_AT_ONCE = 128
# And as many figures become Python's numbers at the same time, some 60 bytes each with their ids: only
# prompt_logprobs of all tokens come near that.
_FIGURES_AT_ONCE = 2**20

_Row = tuple[list[int], list[float], int]


@torch.inference_mode()
def gather_logprobs(
    logits: Tensor, token_ids: Sequence[int], wanted: Sequence[int | Sequence[int]]
) -> list[_Row]:
    """For each row of ``logits`` [rows, vocab]: token ids, their logprobs, and the first one's rank.

    The first is the row's own of ``token_ids``; behind it stand those that are ``wanted``: so many of
    the most probable ones, in order, or these.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    chosen_logprobs = chosen.squeeze(1).tolist()
    found: list[_Row] = [([], [], 0)] * len(ranks)
    for rows, ids, values in _others(logprobs, wanted):
        for row, others, logprobs_of_others in zip(rows, ids, values, strict=True):
            found[row] = (
                [token_ids[row], *others],
                [chosen_logprobs[row], *logprobs_of_others],
                ranks[row],
            )
    return found


def _others(
    logprobs: Tensor, wanted: Sequence[int | Sequence[int]]
) -> Iterator[tuple[list[int], Iterator[list[int]], Iterator[list[float]]]]:
    """Groups of rows, and for each of their rows the wanted ids and their logprobs."""
    widths = [one if isinstance(one, int) else len(one) for one in wanted]
    groups: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
    for row, (one, width) in enumerate(zip(wanted, widths, strict=True)):
        # By powers of two: one row that wants all tokens must not make every row sort all of them.
        groups[isinstance(one, int), width.bit_length()].append(row)
    for (ranked, _), rows in groups.items():
        width = max(widths[row] for row in rows)
        of_rows = logprobs if len(rows) == len(wanted) else logprobs[rows]
        if ranked:
            values, ids = of_rows.topk(width, dim=-1)
        else:
            ids = _padded([wanted[row] for row in rows], width, logprobs)
            values = of_rows.gather(1, ids)
        yield rows, _cut(ids.tolist(), rows, widths), _cut(values.tolist(), rows, widths)


def _padded(lists: Sequence[Any], width: int, like: Tensor) -> Tensor:
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in lists], device=like.device)


def _cut(table: list[list[Any]], rows: Sequence[int], widths: Sequence[int]) -> Iterator[list[Any]]:
    return (columns[: widths[row]] for columns, row in zip(table, rows, strict=True))


def score_samples(
    raw: Tensor, token_ids: Sequence[object], requests: Sequence[Request]
) -> list[LogprobRows]:
    """One row for each request, which must ask for logprobs; ``raw`` [requests, vocab] is what its
    token was sampled from, before sampling touched it. Where there is no token the row means nothing."""
    wanted = [one.params.logprob_token_ids or one.num_logprobs or 0 for one in requests]
    found = [LogprobRows(one.num_logprobs or 0) for one in requests]
    targets = [i if isinstance(i, int) else 0 for i in token_ids]
    for rows, row in zip(found, gather_logprobs(raw, targets, wanted), strict=True):
        rows.append(*row)
    return found


@torch.inference_mode()
def score_prompts(model: CausalLM, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
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
    widest = max((one.k for _, _, one in wanted), default=0)
    count = max(1, min(_ROWS_AT_ONCE, _FIGURES_AT_ONCE // (widest + 1)))
    for start in range(0, len(wanted), count):
        rows, token_ids, collectors = zip(*wanted[start : start + count], strict=True)
        logits = model.compute_logits(hidden[list(rows)])
        scored = gather_logprobs(logits, token_ids, [one.k for one in collectors])
        for collector, found in zip(collectors, scored, strict=True):
            collector.append(*found)
