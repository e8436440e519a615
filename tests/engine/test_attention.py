from __future__ import annotations

import torch
from engine_helpers import wire_request

from trioleg.engine.attention import group_chunks, plan_group
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


def test_one_mask_for_each_window() -> None:
    prompt = chunk(1, 3)
    prompt.request.block_ids.append(0)
    group = plan_group(
        [prompt],
        block_size=4,
        null_block=9,
        windows={None, 2},
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    seen = {window: (mask[0, 0] == 0).int().tolist() for window, mask in group.masks.items()}
    assert seen == {
        None: [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        2: [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
    }
