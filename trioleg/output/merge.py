"""``OutputMerger``: several outputs of one request, merged into the one that is read next.

Pure. A reader that falls behind finds one output, not a queue of them. Deltas are joined, and the work is
linear in what is new: until ``take`` a choice's texts lie as bytes in one buffer and its ids as integers in another,
8 bytes a token where lists of Python's objects take 96. Cumulative and final outputs replace what was
there. Choices never mix: each has its own index. An output of a pooling model replaces whatever was there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ..outputs import CompletionOutput, LogprobsOfToken, PoolingRequestOutput, RequestOutput

__all__ = ["OutputMerger"]

# Estimates, of CPython 3.11 on 64 bits. A token id in a list: the pointer and, for most, an int object.
_BYTES_PER_TOKEN = 36
# A text without its characters, and the pointer to it.
_BYTES_PER_TEXT = 57
# So many joined tokens of a choice are packed. Readers who keep up have fewer unread, for which that would be dearer.
_MAX_LOOSE_TOKENS = 64
# The ids that get here are a vocabulary's, by the detokenizer: they fit into 32 bits.
_TYPE_OF_IDS = "i"
# An output object itself, with its lists.
_BYTES_PER_OUTPUT = 400
# One token's entry of logprobs: the dict, and a Logprob with its float for each token in it.
_BYTES_PER_ENTRY = 232
_BYTES_PER_LOGPROB = 120
_BYTES_PER_FLOAT = 32


class _Packed:
    """The beginning of one choice's unread deltas."""

    __slots__ = ("text", "token_ids")

    def __init__(self) -> None:
        self.text = bytearray()
        self.token_ids = array(_TYPE_OF_IDS)

    def add(self, text: str, token_ids: list[int]) -> int:
        """Returns by how many bytes this has grown."""
        encoded = text.encode()
        self.text += encoded
        self.token_ids.extend(token_ids)
        return len(encoded) + self.token_ids.itemsize * len(token_ids)


class OutputMerger:
    """One slot. ``num_merges`` counts the outputs that found the slot taken; ``num_bytes`` is an
    estimate of what the slot holds."""

    __slots__ = ("_aggregate", "_output", "_packed", "_texts", "num_bytes", "num_merges")

    def __init__(self, *, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | PoolingRequestOutput | None = None
        # By the choice's index, of choices that met an unread output of their own: the texts of the deltas whose
        # ids are in the output, and what was before these.
        self._texts: dict[int, list[str]] = {}
        self._packed: dict[int, _Packed] = {}
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
            self._merge(old, output)

    def take(self) -> Any:
        """What has come since the last ``take``, or None: a ``RequestOutput``, unless the request is one of
        a pooling model."""
        output = self._output
        if self._texts and isinstance(output, RequestOutput):
            for completion in output.outputs:
                self._unpack(completion)
            self._texts.clear()
            self._packed.clear()
        self._output = None
        self.num_bytes = 0
        return output

    def _merge(self, old: RequestOutput, new: RequestOutput) -> None:
        old.finished = old.finished or new.finished
        if new.num_cached_tokens is not None:
            old.num_cached_tokens = new.num_cached_tokens
        if new.prompt_logprobs is not None:
            self.num_bytes += _size_of_entries(new.prompt_logprobs)
            self.num_bytes -= _size_of_entries(old.prompt_logprobs)
            old.prompt_logprobs = new.prompt_logprobs
        if new.metrics is not None:
            old.metrics = new.metrics
        for completion in new.outputs:
            place = next((i for i, o in enumerate(old.outputs) if o.index == completion.index), -1)
            if place < 0:
                self.num_bytes += _size_of_choice(completion)
                old.outputs.append(completion)
                old.outputs.sort(key=lambda one: one.index)
            elif self._aggregate:
                self._join(old.outputs[place], completion)
            else:
                self.num_bytes += _size_of_choice(completion) - _size_of_choice(old.outputs[place])
                old.outputs[place] = completion

    def _join(self, old: CompletionOutput, new: CompletionOutput) -> None:
        texts = self._texts.get(old.index)
        if texts is None:
            self._texts[old.index] = texts = [old.text]
        texts.append(new.text)
        old.token_ids.extend(new.token_ids)
        self.num_bytes += _size_of_delta(new)
        if len(old.token_ids) >= _MAX_LOOSE_TOKENS:
            self._pack(old, texts)
        if old.logprobs is not None and new.logprobs is not None:
            self.num_bytes += _size_of_entries(new.logprobs)
            old.logprobs.extend(new.logprobs)
            old.cumulative_logprob = new.cumulative_logprob
        if new.finish_reason is not None:
            old.finish_reason = new.finish_reason
            old.stop_reason = new.stop_reason

    def _pack(self, loose: CompletionOutput, texts: list[str]) -> None:
        packed = self._packed.get(loose.index)
        if packed is None:
            packed = self._packed[loose.index] = _Packed()
        text = "".join(texts)
        self.num_bytes += packed.add(text, loose.token_ids)
        self.num_bytes -= _BYTES_PER_TEXT * len(texts) + len(text)
        self.num_bytes -= _BYTES_PER_TOKEN * len(loose.token_ids)
        texts.clear()
        loose.token_ids = []

    def _unpack(self, completion: CompletionOutput) -> None:
        texts = self._texts.get(completion.index)
        if texts is None:
            return
        completion.text = "".join(texts)
        packed = self._packed.get(completion.index)
        if packed is not None:
            completion.text = packed.text.decode() + completion.text
            completion.token_ids = [*packed.token_ids, *completion.token_ids]


def _size(output: RequestOutput) -> int:
    size = _size_of_entries(output.prompt_logprobs)
    for one in output.outputs:
        size += _size_of_choice(one)
    return size


def _size_of_choice(one: CompletionOutput) -> int:
    size = _size_of_delta(one)
    return size if one.logprobs is None else size + _size_of_entries(one.logprobs)


def _size_of_delta(one: CompletionOutput) -> int:
    """Without its logprobs."""
    return _BYTES_PER_TEXT + len(one.text) + _BYTES_PER_TOKEN * len(one.token_ids)


def _size_of_entries(entries: Sequence[LogprobsOfToken | None] | None) -> int:
    if entries is None:
        return 0
    held = [entry for entry in entries if entry is not None]
    return _BYTES_PER_ENTRY * len(held) + _BYTES_PER_LOGPROB * sum(map(len, held))
