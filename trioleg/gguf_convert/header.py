"""One GGUF file: its settings, and its tensors as they are stored.

Rules of this file: imports gguf (formats), numpy and ``errors``. A tensor costs memory when somebody asks
for its rows. They are read, not mapped: a file that shrinks under a map kills the process (SIGBUS). Every
length is checked against what is left of the file before it is used, so that a damaged file is an error and
no more.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The gguf
package has a reader of its own. It makes an array of each string: 16 s and 540 MB for the 150,000 tokens
and as many merges of Qwen3, where this one takes half a second and 70 MB (gguf 0.19, two cores).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import numpy.typing as npt

from ..errors import ModelStoreError

__all__ = ["Tensor", "open_gguf_file"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_Kind = gguf.GGUFValueType
# How struct spells the numbers.
_CODES = {
    _Kind.UINT8: "B",
    _Kind.INT8: "b",
    _Kind.UINT16: "H",
    _Kind.INT16: "h",
    _Kind.UINT32: "I",
    _Kind.INT32: "i",
    _Kind.UINT64: "Q",
    _Kind.INT64: "q",
    _Kind.FLOAT32: "f",
    _Kind.FLOAT64: "d",
    _Kind.BOOL: "?",
}

# As ggml has them (GGML_MAX_DIMS).
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """``shape`` is [rows, …, width], as numpy has it. Usable while its file is open."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    file: _File
    place: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def values(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """``count`` rows from ``first`` on, [count, width].

        Raises ``ModelStoreError`` for a format that is not dequantized, and a file that has shrunk.
        """
        raw = np.empty((count, self.row_bytes), np.uint8)
        self.file.read_into(raw.data.cast("B"), self.place + first * self.row_bytes)
        try:
            return gguf.dequantize(raw, self.kind)
        except NotImplementedError:
            raise ModelStoreError(
                f"{self.file.name}: {self.name} is stored as {self.kind.name}, which the gguf "
                "package does not dequantize"
            ) from None


class _File:
    """An open file; every error names it."""

    def __init__(self, name: str, handle: IO[bytes]) -> None:
        self.name, self._handle = name, handle
        self.size = os.fstat(handle.fileno()).st_size

    def damage(self, what: str) -> ModelStoreError:
        return ModelStoreError(f"{self.name} is cut off or damaged: {what}")

    def read_on(self, size: int) -> bytes:
        """The next bytes of a header, whose texts are many and short."""
        try:
            data = self._handle.read(size)
        except OSError as error:
            raise ModelStoreError(f"{self.name} cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise self.damage(f"{len(data)} of {size} bytes are there, now")
        return data

    def read_into(self, data: memoryview, place: int) -> None:
        try:
            self._handle.seek(place)
            found = self._handle.readinto(data)  # type: ignore[attr-defined]  # typeshed: not in IO
        except OSError as error:
            raise ModelStoreError(f"{self.name} cannot be read: {error.strerror}") from error
        if found != len(data):
            raise self.damage(f"{found} of {len(data)} bytes are there at {place}, now")


@contextmanager
def open_gguf_file(path: Path) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Settings by name, arrays as lists; and the tensors, in the file's order. Leaving closes the file.

    Raises ``ModelStoreError`` that names a file which is none, cut off, damaged or big-endian, or that
    cannot be read.
    """
    try:
        handle = path.open("rb")
    except OSError as error:
        raise ModelStoreError(f"{path.name} cannot be read: {error.strerror}") from error
    with handle:
        file = _File(path.name, handle)
        cursor = _Cursor(file)
        num_tensors, num_settings = cursor.begin()
        settings = dict(cursor.setting() for _ in range(num_settings))
        found = [cursor.tensor() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise file.damage(f"general.alignment is {alignment!r}")
        start = -(-cursor.place // alignment) * alignment
        yield settings, [_checked(file, start, *one) for one in found]


class _Cursor:
    """Reads on from one place to the next."""

    def __init__(self, file: _File) -> None:
        self._file, self._name, self.place = file, file.name, 0

    def begin(self) -> tuple[int, int]:
        """How many tensors and how many settings follow."""
        if not self._file.size:
            raise ModelStoreError(f"{self._name} is no GGUF file: it is empty")
        if self._take(4) != _MAGIC:
            raise ModelStoreError(f"{self._name} is no GGUF file: it does not begin with GGUF")
        (version,) = self._numbers("I")
        if version & 0xFFFF == 0:
            raise ModelStoreError(
                f"{self._name} is big-endian; what can be converted: little-endian"
            )
        if version not in _VERSIONS:
            raise ModelStoreError(
                f"{self._name} is GGUF version {version}; what can be converted: 2, 3"
            )
        num_tensors, num_settings = self._numbers("QQ")
        return num_tensors, num_settings

    def setting(self) -> tuple[str, Any]:
        name = self._text()
        return name, self._value(self._value_kind())

    def tensor(self) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
        """Name, format, shape, and place among the data."""
        name = self._text()
        (num_dimensions,) = self._numbers("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._file.damage(f"{name!r} has {num_dimensions} dimensions")
        # The fastest dimension comes first.
        shape = tuple(reversed(self._numbers("Q" * num_dimensions)))
        number, offset = self._numbers("IQ")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ModelStoreError(
                f"{self._name}: {name} is stored in format {number}, which the gguf package does not know"
            ) from None
        return name, kind, shape, offset

    def _value_kind(self) -> gguf.GGUFValueType:
        (number,) = self._numbers("I")
        try:
            return _Kind(number)
        except ValueError:
            raise self._file.damage(f"a setting of type {number}") from None

    def _value(self, kind: gguf.GGUFValueType) -> Any:
        if kind == _Kind.STRING:
            return self._text()
        if kind != _Kind.ARRAY:
            return self._numbers(_CODES[kind])[0]
        inner = self._value_kind()
        (count,) = self._numbers("Q")
        if inner in _CODES:
            return list(self._numbers(_CODES[inner], count))
        if inner != _Kind.STRING:
            raise self._file.damage("an array of arrays")
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._file.damage(f"a text that is not UTF-8: {error}") from None

    def _numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """``count`` numbers of one code, or one of each of several."""
        raw = self._take(struct.calcsize(f"<{code}") * count)
        return struct.unpack(f"<{code}" if count == 1 else f"<{count}{code}", raw)

    def _take(self, size: int) -> bytes:
        end = self.place + size
        if end > self._file.size:
            raise self._file.damage(
                f"{size} bytes at {self.place} go past its end, {self._file.size}"
            )
        self.place = end
        return self._file.read_on(size)


def _checked(
    file: _File,
    start: int,
    name: str,
    kind: gguf.GGMLQuantizationType,
    shape: tuple[int, ...],
    offset: int,
) -> Tensor:
    """A tensor that has whole blocks and lies within the file; ``start`` is where the data begin."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    tensor = Tensor(name, kind, shape, file, start + offset)
    if shape[-1] % block or not math.prod(shape):
        raise file.damage(f"{name} of format {kind.name} has shape {list(shape)}")
    if tensor.place + tensor.num_bytes > file.size:
        raise file.damage(f"the data of {name} goes past its end, {file.size}")
    return tensor
