"""Rows of logprobs on their way to the wire: what both engines gather, in the wire's own numbers.

Rules of this file: pure Python, no torch, no numpy. The numbers are little-endian, as on every machine
that this engine runs on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..messages import ArrayData, LogprobsLists, LogprobsTensors, NdArray

__all__ = ["LogprobRows"]


class LogprobRows:
    """A row for each scored token: ``k`` + 1 token ids with their logprobs, and the token's own rank.

    The first column is the scored token itself, then come the ``k`` most probable ones. Whoever has
    called ``lists`` or ``tensors`` has given the memory away and may not append any more.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._ranks = array("i")

    def __len__(self) -> int:
        return len(self._ranks)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> None:
        """One more row, of exactly ``k`` + 1 columns."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ranks.append(rank)

    def lists(self) -> LogprobsLists:
        """The rows as those of generated tokens travel: in numpy's spelling, with 64-bit ranks."""
        shape = [len(self), self.k + 1]
        return LogprobsLists(
            NdArray("<i4", shape, _data(self._token_ids)),
            NdArray("<f4", shape, _data(self._logprobs)),
            NdArray("<i8", [len(self)], _data(array("q", self._ranks))),
        )

    def tensors(self) -> LogprobsTensors:
        """The rows as a prompt's travel: in torch's spelling, with 32-bit ranks."""
        shape = [len(self), self.k + 1]
        return LogprobsTensors(
            NdArray("int32", shape, _data(self._token_ids)),
            NdArray("float32", shape, _data(self._logprobs)),
            NdArray("int32", [len(self)], _data(self._ranks)),
        )


def _data(values: array[int] | array[float]) -> ArrayData:
    return ArrayData(memoryview(values))
