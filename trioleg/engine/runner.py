"""Runs the model on what the scheduler chose: chunks become tensors, logits tokens and logprobs.

Rules of this file: torch, no trio. The runner owns the key/value cache's memory, nobody else touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import group_chunks, plan_group
from .kv_cache import BLOCK_SIZE
from .logprob_rows import LogprobRows
from .logprobs import score_prompts, score_samples
from .model import Batch, CausalLM
from .request import Request
from .sampler import NoToken, sample
from .scheduler import Chunk, Schedule
from .structured_output import apply_grammars

__all__ = ["ModelRunner", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request's new token, or why there is none.

    ``logprobs`` is the token's row, if the request asks for one; without a token it means nothing.
    """

    request: Request
    token_id: int | NoToken
    logprobs: LogprobRows | None = None


class ModelRunner:
    """A model and its cache of ``num_blocks`` blocks, [layers, blocks, block_size, 2, kv_heads, head_dim].

    One block more than the scheduler knows stands at the end: it is always zero, and pads block tables.
    """

    def __init__(self, model: CausalLM, *, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.take_model(model)
        self.device = model.device
        config = model.config
        heads, head_dim = config.num_key_value_heads, config.head_dim
        self._cache_shape = (
            config.num_hidden_layers,
            num_blocks + 1,
            block_size,
            2,
            heads,
            head_dim,
        )
        # Kept beside the model, which may be away when the cache is taken anew.
        self._dtype = model.dtype
        self._block_size = block_size
        self.take_cache()

    def take_model(self, model: CausalLM) -> None:
        """The model to run; another one must be of the same sizes."""
        self.model = model

    def take_cache(self) -> None:
        """Memory for the cache. What was in it before ``release`` is lost."""
        # Not zeroed: on CPU untouched memory stays uncommitted, and a block is cleared when it is given out.
        self._cache = torch.empty(self._cache_shape, dtype=self._dtype, device=self.device)
        self._cache[:, -1] = 0

    def release(self, what: Iterable[str]) -> None:
        """Gives memory back, of "weights" and "kv_cache". Nothing may run until both are taken again."""
        for one in what:
            if one == "weights":
                del self.model
            else:
                del self._cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, schedule: Schedule) -> list[Sampled]:
        """Computes a schedule's chunks. Returns what was sampled, in no particular order. Raises what
        torch raises; then the cache is not to be trusted any more."""
        if not schedule.chunks:
            return []
        requests, logits = self.forward(schedule)
        if not requests:
            return []
        # Before logprobs are taken: they tell of what could be sampled, as vLLM's do.
        apply_grammars(logits, requests)
        asking = [i for i, one in enumerate(requests) if one.num_logprobs is not None]
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
            self._cache[:, torch.tensor(block_ids, device=self.device)] = 0

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[Batch, list[Chunk]]:
        """What the model computes, and the chunks in the order of its rows."""
        device = self.device
        ordered: list[Chunk] = []
        groups = []
        for group in group_chunks(chunks, self._block_size):
            ordered += group
            groups.append(plan_group(group, cache=self._cache[0], windows=self.model.windows))
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
