"""``OutputMerger``: several outputs of one request, merged into the one that is read next.

Pure. A reader that falls behind finds one output, not a queue of them. Deltas are joined (their
texts are collected in lists and joined once, at ``take``, so the work is linear in what is new);
cumulative and final outputs replace what was there. Choices never mix: each has its own index. An output of a
pooling model replaces whatever was there.
"""

from __future__ import annotations

from typing import Any

from ..outputs import CompletionOutput, LogprobsOfToken, PoolingRequestOutput, RequestOutput

__all__ = ["OutputMerger"]

# Estimates, of CPython 3.11 on 64 bits. A token id in a list: the pointer and, for most, an int object.
_BYTES_PER_TOKEN = 36
# An output object itself, with its lists.
_BYTES_PER_OUTPUT = 400
# One token's entry of logprobs: the dict, and a Logprob with its float for each token in it.
_BYTES_PER_ENTRY = 232
_BYTES_PER_LOGPROB = 120
_BYTES_PER_FLOAT = 32


class OutputMerger:
    """One slot. ``num_merges`` counts the outputs that found the slot taken; ``num_bytes`` is an
    estimate of what the slot holds."""

    __slots__ = ("_aggregate", "_output", "_pieces", "num_bytes", "num_merges")

    def __init__(self, *, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | PoolingRequestOutput | None = None
        self._pieces: dict[int, list[str]] = {}
        self.num_bytes = 0
        self.num_merges = 0

    def put(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Take ``output`` over: it belongs to the slot from now on."""
        old = self._output
        if old is not None:
            self.num_merges += 1
        if isinstance(output, PoolingRequestOutput):
            self._output = output
            self.num_bytes = _BYTES_PER_OUTPUT + _BYTES_PER_FLOAT * len(output.outputs.data)
        elif old is None or isinstance(old, PoolingRequestOutput):
            self._output = output
            self.num_bytes = _BYTES_PER_OUTPUT + _size(output)
        else:
            self.num_bytes += _size(output)
            self._merge(old, output)

    def take(self) -> Any:
        """What has come since the last ``take``, or None: a ``RequestOutput``, unless the request is one of
        a pooling model."""
        output = self._output
        if self._pieces and isinstance(output, RequestOutput):
            for completion in output.outputs:
                pieces = self._pieces.get(completion.index)
                if pieces is not None:
                    completion.text = "".join(pieces)
            self._pieces = {}
        self._output = None
        self.num_bytes = 0
        return output

    def _merge(self, old: RequestOutput, new: RequestOutput) -> None:
        old.finished = old.finished or new.finished
        if new.num_cached_tokens is not None:
            old.num_cached_tokens = new.num_cached_tokens
        if new.prompt_logprobs is not None:
            old.prompt_logprobs = new.prompt_logprobs
        if new.metrics is not None:
            old.metrics = new.metrics
        for completion in new.outputs:
            place = next((i for i, o in enumerate(old.outputs) if o.index == completion.index), -1)
            if place < 0:
                old.outputs.append(completion)
                old.outputs.sort(key=lambda one: one.index)
            elif self._aggregate:
                self._join(old.outputs[place], completion)
            else:
                self.num_bytes -= _size_of_choice(old.outputs[place])
                old.outputs[place] = completion

    def _join(self, old: CompletionOutput, new: CompletionOutput) -> None:
        pieces = self._pieces.get(old.index)
        if pieces is None:
            self._pieces[old.index] = [old.text, new.text]
        else:
            pieces.append(new.text)
        old.token_ids.extend(new.token_ids)
        if old.logprobs is not None and new.logprobs is not None:
            old.logprobs.extend(new.logprobs)
            old.cumulative_logprob = new.cumulative_logprob
        if new.finish_reason is not None:
            old.finish_reason = new.finish_reason
            old.stop_reason = new.stop_reason


def _size(output: RequestOutput) -> int:
    size = 0
    for one in output.outputs:
        size += _size_of_choice(one)
    if output.prompt_logprobs is not None:
        size += sum(_size_of_entry(one) for one in output.prompt_logprobs if one is not None)
    return size


def _size_of_choice(one: CompletionOutput) -> int:
    size = len(one.text) + _BYTES_PER_TOKEN * len(one.token_ids)
    if one.logprobs is not None:
        size += sum(map(_size_of_entry, one.logprobs))
    return size


def _size_of_entry(entry: LogprobsOfToken) -> int:
    return _BYTES_PER_ENTRY + _BYTES_PER_LOGPROB * len(entry)
