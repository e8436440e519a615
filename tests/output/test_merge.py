"""Merging: a reader that falls behind finds one output with everything in it."""

from __future__ import annotations

from trioleg.output.merge import OutputMerger
from trioleg.outputs import CompletionOutput, RequestOutput


def output(text: str, *token_ids: int, index: int = 0, finish: str | None = None) -> RequestOutput:
    completion = CompletionOutput(index, text, list(token_ids), finish)
    return RequestOutput("r", [1], [completion], finish is not None)


def test_empty_is_none() -> None:
    assert OutputMerger(aggregate=True).take() is None


def test_deltas_are_joined() -> None:
    merger = OutputMerger(aggregate=True)
    merger.put(output("a", 1))
    merger.put(output("b", 2))
    merger.put(output("c", 3, finish="stop"))
    taken = merger.take()
    assert taken == RequestOutput("r", [1], [CompletionOutput(0, "abc", [1, 2, 3], "stop")], True)
    assert merger.take() is None
    assert merger.num_merges == 2


def test_cumulative_outputs_replace() -> None:
    merger = OutputMerger(aggregate=False)
    merger.put(output("a", 1))
    merger.put(output("ab", 1, 2))
    taken = merger.take()
    assert taken is not None
    assert taken.outputs == [CompletionOutput(0, "ab", [1, 2])]


def test_choices_never_mix() -> None:
    merger = OutputMerger(aggregate=True)
    for text, index in (("a", 0), ("x", 1), ("b", 0), ("y", 1)):
        merger.put(output(text, ord(text), index=index))
    taken = merger.take()
    assert taken is not None
    assert [(o.index, o.text) for o in taken.outputs] == [(0, "ab"), (1, "xy")]


def test_bytes_are_counted_and_given_back() -> None:
    merger = OutputMerger(aggregate=True)
    merger.put(output("a" * 1000, 1))
    first = merger.num_bytes
    merger.put(output("a" * 1000, 2))
    assert merger.num_bytes >= first + 1000
    merger.take()
    assert merger.num_bytes == 0
