from __future__ import annotations

from collections.abc import Collection

import torch
from engine_helpers import wire_request

from trioleg.engine.attention import AttentionGroup, group_chunks, plan_group
from trioleg.engine.request import Request
from trioleg.engine.scheduler import Chunk


def chunk(start: int, count: int = 1) -> Chunk:
    request = Request.from_wire(wire_request("r", [1] * (start + count)), vocab_size=10)
    return Chunk(request, start, count)


def groups(*chunks: Chunk) -> list[list[int]]:
    return [[one.end for one in group] for group in group_chunks(chunks, 16)]


def test_decodes_of_like_context_share_a_call() -> None:
    assert groups(chunk(9), chunk(200), chunk(90)) == [[10, 91, 201]]


def test_a_long_context_does_not_pad_the_short_ones() -> None:
    assert groups(chunk(8000), chunk(99), chunk(5000), chunk(300)) == [[100], [301], [5001, 8001]]


def test_each_chunk_of_a_prompt_is_alone() -> None:
    assert groups(chunk(0, 5), chunk(9), chunk(0, 5)) == [[10], [5], [5]]


def plan(*chunks: Chunk, windows: Collection[int | None] = (None,)) -> AttentionGroup:
    """Blocks of four tokens, the tenth of them the one that pads."""
    return plan_group(chunks, cache=torch.zeros(10, 4, 2, 1, 8), windows=windows)


def with_blocks(one: Chunk, *block_ids: int) -> Chunk:
    one.request.block_ids += block_ids
    return one


def test_one_mask_for_each_window() -> None:
    group = plan(with_blocks(chunk(1, 3), 0), windows={None, 2, 4})
    seen = {
        window: None if mask is None else (mask[0, 0] == 0).int().tolist()
        for window, mask in group.masks.items()
    }
    rows_2 = [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    rows = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen == {None: rows, 4: rows, 2: rows_2}


def test_no_mask_where_only_later_tokens_are_hidden() -> None:
    whole, one, two = (
        with_blocks(chunk(0, 6), 3, 1),
        with_blocks(chunk(5), 3, 1),
        with_blocks(chunk(5), 0, 2),
    )
    for group in (plan(whole, windows={None, 6}), plan(one, two, windows={None, 6})):
        assert group.masks == {None: None, 6: None}
    assert plan(whole, windows={5}).masks[5] is not None
    assert plan(one, with_blocks(chunk(4), 0, 2)).masks[None] is not None


def test_a_sequence_alone_in_neighbouring_blocks_is_read_in_place() -> None:
    assert plan(with_blocks(chunk(9), 4, 5, 6)).blocks == slice(4, 7)
    for blocks in [(4, 6, 5), (4, 5, 7)]:
        found = plan(with_blocks(chunk(9), *blocks)).blocks
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == list(blocks)
