"""Attention over a paged cache: sequences of like size share one padded call of PyTorch's own kernel.

Rules of this file: torch, no trio. The cache of one layer is [blocks, block_size, 2, kv_heads, head_dim]:
keys and values side by side, so that a step writes both at once and gathers both at once. The plan:

- A step's tokens are one flat list of rows. ``AttentionGroup`` is a run of them: ``batch`` sequences with
  ``length`` new tokens each, over block tables of one width. A prompt's chunk is a group of its own
  (batch 1); decodes (length 1) are grouped by context, so that padding at most doubles the work.
- A group's keys and values are copied out of the blocks into one piece, the same memory for every layer. A
  sequence alone whose blocks stand side by side needs no copy: it is read where it is.
- A mask hides what lies behind each token (later tokens, and the padding) and, in a layer with a sliding
  window, what lies before it. There is one mask for each window of the model, shared by its layers, and none
  where nothing is hidden but a prompt's later tokens, which the kernel leaves out by itself.
- In a decode the query heads that share a key head are rows of one product.

Not pretty: the copy, since PyTorch has no CPU kernel that reads pages in place. Where it is most, 32 decodes at
1,500 tokens (SmolLM2-135M, bfloat16, two cores), memory that is kept and rows that share their keys halved the
time of a step, from 631 to 293 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .scheduler import Chunk

__all__ = ["AttentionGroup", "attend", "group_chunks", "plan_group"]

# Contexts up to this many blocks share a group, whatever their sizes: a call costs more than the padding.
_SMALL_TABLE = 16


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """``batch`` × ``length`` rows, which look at no more than ``context`` tokens each.

    ``blocks`` is [batch × width] block numbers, or the slice that a view is taken of; ``pages`` has room for a
    copy of the blocks of one layer. ``masks`` has for each window (None: none) [batch, 1, length, context]:
    0 where a row may look, −inf where not; or None: a row looks at everything up to its own place.
    ``positions`` and ``slots`` are [rows]: each row's place in its sequence, and in the cache seen as one list of
    tokens.
    """

    batch: int
    length: int
    context: int
    blocks: Tensor | slice
    pages: Tensor
    masks: Mapping[int | None, Tensor | None]
    positions: Tensor
    slots: Tensor


def group_chunks(chunks: Sequence[Chunk], block_size: int) -> Iterator[list[Chunk]]:
    """Chunks that share a group: decodes of like context together, each chunk of a prompt alone."""
    decodes = sorted((c for c in chunks if c.count == 1), key=lambda chunk: chunk.end)
    group: list[Chunk] = []
    for chunk in decodes:
        width = -(-chunk.end // block_size)
        if group and width > max(_SMALL_TABLE, 2 * -(-group[0].end // block_size)):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group
    yield from ([chunk] for chunk in chunks if chunk.count > 1)


def plan_group(
    chunks: Sequence[Chunk],
    *,
    cache: Tensor,
    windows: Collection[int | None],
) -> AttentionGroup:
    """The group of chunks with one count. ``cache`` is one layer's; tables are padded with its last block, which
    holds zeros. ``windows``: those of the model's layers, each once.
    """
    block_size, device = cache.shape[1], cache.device
    length, context = chunks[0].count, max(chunk.end for chunk in chunks)
    width = -(-context // block_size)
    tables = [chunk.request.block_ids[:width] for chunk in chunks]
    null_block = len(cache) - 1
    table = torch.tensor([one + [null_block] * (width - len(one)) for one in tables], device=device)
    positions = torch.tensor([[chunk.start] for chunk in chunks], device=device)
    positions = positions + torch.arange(length, device=device)
    slots = table.gather(1, positions // block_size) * block_size + positions % block_size
    run = _run(tables[0]) if len(tables) == 1 else None
    pages = 0 if run else table.numel()
    return AttentionGroup(
        len(chunks),
        length,
        context,
        run or table.flatten(),
        torch.empty(pages, cache[0].numel(), dtype=cache.dtype, device=device),
        {window: _mask(chunks, positions, context, window, cache.dtype) for window in windows},
        positions.flatten(),
        slots.flatten(),
    )


def _run(blocks: Sequence[int]) -> slice | None:
    """These blocks as a slice of the cache, if they stand side by side in it."""
    first, end = blocks[0], blocks[0] + len(blocks)
    return slice(first, end) if blocks == list(range(first, end)) else None


def _mask(
    chunks: Sequence[Chunk],
    positions: Tensor,
    context: int,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """0 where a key stands 0 to ``window`` − 1 tokens before its row, else −inf."""
    is_whole = all(chunk.end == context and chunk.count in (1, context) for chunk in chunks)
    if is_whole and (window is None or context <= window):
        return None
    distance = positions[:, None, :, None] - torch.arange(context, device=positions.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )


def attend(query: Tensor, cache: Tensor, group: AttentionGroup, window: int | None) -> Tensor:
    """Attention of a group's rows, query [rows, heads, head_dim], over one layer's cache.

    The rows' own keys and values must be in the cache. Returns [rows, heads × head_dim].
    """
    kv_heads, head_dim = cache.shape[-2:]
    pages = cache[group.blocks] if isinstance(group.blocks, slice) else _copy_pages(cache, group)
    tokens = pages.view(group.batch, -1, 2, kv_heads, head_dim)[:, : group.context]
    keys, values = tokens.permute(2, 0, 3, 1, 4)
    mask = group.masks[window]
    if group.length == 1:
        queries = query.view(group.batch, kv_heads, -1, head_dim)
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    else:
        queries = query.view(group.batch, group.length, -1, head_dim).transpose(1, 2)
        output = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ).transpose(1, 2)
    return output.reshape(len(query), -1)


def _copy_pages(cache: Tensor, group: AttentionGroup) -> Tensor:
    assert isinstance(group.blocks, Tensor)
    return torch.index_select(cache.view(len(cache), -1), 0, group.blocks, out=group.pages)
