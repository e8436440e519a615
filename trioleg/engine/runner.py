"""Runs the model on what the scheduler chose: chunks become tensors, logits tokens and logprobs.

Rules of this file: torch, no trio. The runner owns the key/value cache's memory, nobody else touches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import group_chunks, plan_group
from .kv_cache import BLOCK_SIZE
from .logprob_rows import LogprobRows
from .logprobs import score_prompts, score_samples
from .model import Batch, LlamaModel
from .request import Request
from .sampler import sample
from .scheduler import Chunk, Schedule

__all__ = ["ModelRunner", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request's new token, None where the model gave no usable logits.

    ``logprobs`` is the token's row, if the request asks for one; without a token it means nothing.
    """

    request: Request
    token_id: int | None
    logprobs: LogprobRows | None = None


class ModelRunner:
    """A model and its cache of ``num_blocks`` blocks, [layers, blocks, block_size, 2, kv_heads, head_dim].

    One block more than the scheduler knows stands at the end: it is always zero, and pads block tables.
    """

    def __init__(self, model: LlamaModel, *, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        config = model.config
        self.model = model
        self._block_size = block_size
        self._null_block = num_blocks
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, num_blocks + 1, block_size, 2, heads, head_dim)
        # Not zeroed: on CPU untouched memory stays uncommitted, and a block is cleared when it is given out.
        self._cache = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._cache[:, self._null_block] = 0

    def run(self, schedule: Schedule) -> list[Sampled]:
        """Computes a schedule's chunks. Returns what was sampled, in no particular order. Raises what
        torch raises; then the cache is not to be trusted any more."""
        if not schedule.chunks:
            return []
        requests, logits = self.forward(schedule)
        if not requests:
            return []
        asking = [i for i, one in enumerate(requests) if one.params.logprobs is not None]
        # A copy, since sampling works in place; and none, where nobody asks.
        raw = logits[asking] if asking else None
        token_ids = sample(logits, requests)
        found: dict[int, LogprobRows] = {}
        if raw is not None:
            rows = score_samples(raw, [token_ids[i] for i in asking], [requests[i] for i in asking])
            found = dict(zip(asking, rows, strict=True))
        pairs = zip(requests, token_ids, strict=True)
        return [Sampled(*pair, found.get(i)) for i, pair in enumerate(pairs)]

    @torch.inference_mode()
    def forward(self, schedule: Schedule) -> tuple[list[Request], Tensor]:
        """The requests that sample, and their logits, [requests, vocab_size] in float32.

        What requests want to know of their prompts is noted in them on the way.
        """
        self._clear(schedule.new_blocks)
        batch, chunks = self._batch(schedule.chunks)
        hidden = self.model.forward(batch, self._cache)
        score_prompts(self.model, hidden, chunks)
        logits = self.model.compute_logits(hidden[batch.sample_rows])
        return [chunk.request for chunk in chunks if chunk.samples], logits

    def _clear(self, block_ids: Sequence[int]) -> None:
        # A masked slot is multiplied by zero, which turns an earlier owner's NaN into a NaN of ours.
        if block_ids:
            self._cache[:, torch.tensor(block_ids, device=self.model.device)] = 0

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[Batch, list[Chunk]]:
        """What the model computes, and the chunks in the order of its rows."""
        device = self.model.device
        ordered: list[Chunk] = []
        groups = []
        for group in group_chunks(chunks, self._block_size):
            ordered += group
            groups.append(
                plan_group(
                    group,
                    block_size=self._block_size,
                    null_block=self._null_block,
                    dtype=self.model.dtype,
                    device=device,
                )
            )
        ids: list[int] = []
        sample_rows: list[int] = []
        for chunk in ordered:
            ids += chunk.request.token_ids[chunk.start : chunk.end]
            if chunk.samples:
                sample_rows.append(len(ids) - 1)
        batch = Batch(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.cat([group.positions for group in groups]),
            slots=torch.cat([group.slots for group in groups]),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
            groups=groups,
        )
        return batch, ordered
