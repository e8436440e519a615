"""``OutputMerger``: several outputs of one request, merged into the one that is read next.

Pure. A reader that falls behind finds one output, not a queue of them. Deltas are joined (their
texts are collected in lists and joined once, at ``take``, so the work is linear in what is new);
cumulative and final outputs replace what was there. Choices never mix: each has its own index.
"""

from __future__ import annotations

from ..outputs import CompletionOutput, RequestOutput

__all__ = ["OutputMerger"]

# A token id in a Python list: the pointer and, for most ids, an int object of its own.
_BYTES_PER_TOKEN = 36
# An output object itself, with its lists.
_BYTES_PER_OUTPUT = 400


class OutputMerger:
    """One slot. ``num_merges`` counts the outputs that found the slot taken; ``num_bytes`` is an
    estimate of what the slot holds."""

    __slots__ = ("_aggregate", "_output", "_pieces", "num_bytes", "num_merges")

    def __init__(self, *, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | None = None
        self._pieces: dict[int, list[str]] = {}
        self.num_bytes = 0
        self.num_merges = 0

    def put(self, output: RequestOutput) -> None:
        """Take ``output`` over: it belongs to the slot from now on."""
        size = sum(len(one.text) + _BYTES_PER_TOKEN * len(one.token_ids) for one in output.outputs)
        if self._output is None:
            self._output = output
            self.num_bytes = _BYTES_PER_OUTPUT + size
            return
        self.num_merges += 1
        self.num_bytes = self.num_bytes + size if self._aggregate else _BYTES_PER_OUTPUT + size
        self._merge(self._output, output)

    def take(self) -> RequestOutput | None:
        """What has come since the last ``take``, or None."""
        output = self._output
        if output is None:
            return None
        for completion in output.outputs:
            pieces = self._pieces.get(completion.index)
            if pieces is not None:
                completion.text = "".join(pieces)
        self._output = None
        self._pieces = {}
        self.num_bytes = 0
        return output

    def _merge(self, old: RequestOutput, new: RequestOutput) -> None:
        old.finished = old.finished or new.finished
        if new.num_cached_tokens is not None:
            old.num_cached_tokens = new.num_cached_tokens
        for completion in new.outputs:
            place = next((i for i, o in enumerate(old.outputs) if o.index == completion.index), -1)
            if place < 0:
                old.outputs.append(completion)
            elif self._aggregate:
                self._join(old.outputs[place], completion)
            else:
                old.outputs[place] = completion

    def _join(self, old: CompletionOutput, new: CompletionOutput) -> None:
        self._pieces.setdefault(old.index, [old.text]).append(new.text)
        old.token_ids.extend(new.token_ids)
        if new.finish_reason is not None:
            old.finish_reason = new.finish_reason
            old.stop_reason = new.stop_reason
