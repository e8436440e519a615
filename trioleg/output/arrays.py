"""Arrays off the wire: from an ``NdArray`` and the message's frames to plain Python numbers.

Pure, and without numpy, which the front end does not load. What comes from an engine is untrusted: what
does not fit together is an ``OutputError`` of the request that it belongs to.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from ..errors import OutputError
from ..messages import ArrayData, NdArray

__all__ = ["Frames", "read_array"]

# The frames of one message, the body first. Empty where nothing was sent: an engine in this process.
Frames = Sequence[bytes | bytearray | memoryview]

# The dtypes of logprobs and pooled vectors, in numpy's and in torch's spelling, as struct's codes.
_CODES = {
    "<i4": "i",
    "int32": "i",
    "<i8": "q",
    "int64": "q",
    "<f2": "e",
    "float16": "e",
    "<f4": "f",
    "float32": "f",
    "<f8": "d",
    "float64": "d",
    # The upper half of a float32, which struct has no code for.
    "bfloat16": "H",
}


# More than any of these arrays has, and little enough for every product to be a number that means something.
_MAX_DIMENSIONS = 4
_MAX_LENGTH = 2**31 - 1


def read_array(wire: Any, frames: Frames, what: str) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the elements, in C order. Raises ``OutputError``, naming ``what``.

    ``wire``: an ``NdArray``, or the list that one is on the wire.
    """
    dtype, shape, data = _fields(wire, what)
    code = _CODES.get(dtype)
    if code is None:
        raise _refusal(what, f"dtype {dtype!r}", ", ".join(_CODES))
    # In bytes, whatever an engine in this process made the array of.
    buffer = memoryview(_buffer(data, frames, what)).cast("B")
    count = math.prod(shape)
    size = count * struct.calcsize(f"<{code}")
    if len(buffer) != size:
        raise _refusal(what, f"{len(buffer)} bytes", f"{size}, for {dtype} {list(shape)}")
    values: Sequence[Any] = struct.unpack(f"<{count}{code}", buffer)
    if dtype == "bfloat16":
        whole = struct.pack(f"<{count}I", *(half << 16 for half in values))
        values = struct.unpack(f"<{count}f", whole)
    return tuple(shape), list(values)


def _fields(wire: Any, what: str) -> tuple[str, Sequence[int], Any]:
    if isinstance(wire, NdArray):
        return wire.dtype, wire.shape, wire.data
    if isinstance(wire, list) and len(wire) == 3:
        dtype, shape, data = wire
        if isinstance(dtype, str) and _is_shape(shape):
            return dtype, shape, data
    raise _refusal(what, f"{type(wire).__name__}", "[dtype, shape, data]")


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return False
    return all(type(one) is int and 0 <= one <= _MAX_LENGTH for one in shape)


def _buffer(data: Any, frames: Frames, what: str) -> bytes | bytearray | memoryview:
    if isinstance(data, ArrayData):
        return data.buffer
    if isinstance(data, bytes):
        return data
    # The body itself, frame 0, is nobody's data.
    if type(data) is int and 1 <= data < len(frames):
        return frames[data]
    raise _refusal(
        what, f"data {data!r}", f"bytes, or the number of a frame, 1 to {len(frames) - 1}"
    )


def _refusal(what: str, found: str, allowed: str) -> OutputError:
    return OutputError(f"{what} from the engine: {found}; allowed: {allowed}")
