"""Reads the wire's arrays back, to see what was written: by the wire's rules, and with no code of ours."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

_FORMATS = {"<i4": "i", "<f4": "f", "<i8": "q", "int32": "i", "float32": "f"}


def read_array(array: Any, frames: Sequence[Any] = ()) -> list[Any]:
    """The elements of one array as nested lists. ``array`` is an NdArray, or a list that was decoded.

    ``frames`` are the message's, the body being the first.
    """
    dtype, shape, data = (
        array if isinstance(array, list) else (array.dtype, array.shape, array.data)
    )
    if isinstance(data, int):
        assert data > 0, "frame 0 is the body"
        data = frames[data]
    data = bytes(getattr(data, "buffer", data))
    values = list(struct.unpack(f"<{math.prod(shape)}{_FORMATS[dtype]}", data))
    for size in reversed(shape[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)]
    return values


def read_rows(
    logprobs: Any, frames: Sequence[Any] = ()
) -> list[tuple[list[int], list[float], int]]:
    """LogprobsLists or LogprobsTensors, row by row: token ids, logprobs, rank."""
    arrays = (
        logprobs[:3]
        if isinstance(logprobs, list)
        else (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
    )
    token_ids, values, ranks = (read_array(array, frames) for array in arrays)
    return list(zip(token_ids, values, ranks, strict=True))
