from __future__ import annotations

from engine_helpers import wire_request

from trioleg.engine.attention import group_chunks
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
