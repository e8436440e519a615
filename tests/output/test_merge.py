"""Merging: a reader that falls behind finds one output with everything in it."""

from __future__ import annotations

import tracemalloc

import pytest

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


# Of two bytes and of four; and one that is finished by the next delta has none of its own.
PIECES = (" the", "", "é", "🙂", "of ")


@pytest.mark.parametrize("count", [2, 63, 64, 65, 1000])
def test_however_many_are_joined_each_choice_is_exact(count: int) -> None:
    merger = OutputMerger(aggregate=True)
    for round_ in range(2):
        for place in range(count):
            for index in (0, 1):
                piece = PIECES[(place + index) % 5]
                merger.put(output(piece, place, 70_000 + round_, index=index))
        merger.put(output("end", 7, index=1, finish="length"))
        taken = merger.take()
        assert taken is not None
        ids = [i for place in range(count) for i in (place, 70_000 + round_)]
        texts = ["".join(PIECES[(p + index) % 5] for p in range(count)) for index in (0, 1)]
        assert taken.outputs == [
            CompletionOutput(0, texts[0], ids),
            CompletionOutput(1, f"{texts[1]}end", [*ids, 7], "length"),
        ]
        assert merger.num_bytes == 0


def test_what_is_unread_takes_few_bytes_and_the_estimate_is_near_them() -> None:
    merger = OutputMerger(aggregate=True)
    count = 20_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for place in range(count):
            # A text and an id of its own each, as a decoder makes them.
            merger.put(output(f" {place:05}", 300 + place))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Six characters, and an id in four bytes; lists of objects would take 100.
    assert taken < 14 * count
    assert 0.7 * taken < merger.num_bytes < 1.3 * taken
