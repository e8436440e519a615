"""Arrays as an engine sends them, made by hand: [dtype, shape, data]."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any


def array(dtype: str, code: str, shape: Sequence[int], values: Sequence[float]) -> list[Any]:
    return [dtype, list(shape), struct.pack(f"<{len(values)}{code}", *values)]


def logprobs_lists(rows: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[int]) -> list[Any]:
    """``rows``: the sampled token first, each a pair of id and logprob."""
    shape = (len(rows), len(rows[0]))
    ids = [token_id for row in rows for token_id, _ in row]
    logprobs = [logprob for row in rows for _, logprob in row]
    return [
        array("<i4", "i", shape, ids),
        array("<f4", "f", shape, logprobs),
        array("<i8", "q", shape[:1], ranks),
        None,
    ]


def logprobs_tensors(
    rows: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[int]
) -> list[Any]:
    """The prompt's, in torch's spelling."""
    ids, logprobs, _, _ = logprobs_lists(rows, ranks)
    ids[0], logprobs[0] = "int32", "float32"
    return [ids, logprobs, array("int32", "i", [len(rows)], ranks), None, None]
