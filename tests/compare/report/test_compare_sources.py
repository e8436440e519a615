"""What is counted in sources: a few lines that hold it, and their honest neighbours that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import trioleg
from trioleg.compare.source_counts import Counts, count_code, count_sources, totals
from trioleg.errors import TriolegError


@pytest.mark.parametrize(
    ("source", "kind", "places"),
    [
        ("asyncio.create_task(f())\nloop.create_task(f())", "spawns", 2),
        ("nursery.start_soon(f)\nawait self._nursery.start(f)", "spawns", 2),
        ("Thread(target=f).start()", "spawns", 1),
        ("server.start()", "spawns", 0),
        ("try: f()\nexcept Exception: pass", "catches_broadly", 1),
        ("try: f()\nexcept (ValueError, BaseException): raise", "catches_broadly", 1),
        ("try: f()\nexcept: raise", "catches_broadly", 1),
        ("with suppress(Exception): f()", "catches_broadly", 1),
        ("try: f()\nexcept ValueError: pass", "catches_broadly", 0),
        ("try: f()\nexcept asyncio.CancelledError: raise", "catches_cancel", 1),
        ("try: f()\nexcept (GeneratorExit, CancelledError): raise", "catches_cancel", 1),
        ("try: f()\nexcept BaseException: raise", "catches_cancel", 1),
        ("try: f()\nexcept Exception: pass", "catches_cancel", 0),
        ("try: f()\nfinally: g()", "cleans_up", 1),
        ("task.cancel()\nself.client.shutdown()", "cleans_up", 2),
        ("cancel()", "cleans_up", 0),
        ("class A:\n  def __del__(self): pass", "left_to_collector", 1),
        ("weakref.finalize(a, f)\natexit.register(f)", "left_to_collector", 2),
        ("try: f()\nexcept Exception as e: queue.put_nowait(e)", "errors_as_values", 1),
        ("queue.put(EngineDeadError())", "errors_as_values", 1),
        ("isinstance(output, Exception)", "errors_as_values", 1),
        ("queue.put_nowait(output)\nisinstance(a, int)", "errors_as_values", 0),
    ],
)
def test_a_place_is_counted(source: str, kind: str, places: int) -> None:
    assert getattr(count_code(source), kind) == places


_CODE = '''"""A docstring,
of two lines."""

# A comment.
import a

@decorated
def f():
    """Says it."""
    text = """not a
    docstring"""

    return text  # said


class B:
    x = 1
'''


def test_lines_of_code_are_neither_blank_nor_comment_nor_docstring() -> None:
    assert count_code(_CODE).lines == 8


def test_a_part_of_a_file_is_counted_alone() -> None:
    assert count_code(_CODE, ["f"]).lines == 5
    assert count_code(_CODE, ["B"]).lines == 2
    with pytest.raises(TriolegError, match=r"x\.py has no C to count"):
        count_code(_CODE, ["B", "C"], "x.py")


def test_every_file_of_the_table_is_there() -> None:
    package = Path(trioleg.__file__).parent
    counted = count_sources("trioleg", package)
    summed = totals(counted)["trioleg"]
    assert summed.lines == sum(one.counts.lines for one in counted) > 500
    # Rules of the house, which the count must see, too.
    assert summed.left_to_collector == 0


def test_a_version_that_the_table_does_not_know_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TriolegError, match=r"no v1/engine/async_llm\.py in the sources of vllm"):
        count_sources("vllm", tmp_path)


def test_counts_are_summed() -> None:
    counts = Counts(1, 2)
    counts.add(Counts(10, 20, errors_as_values=3))
    assert counts == Counts(11, 22, errors_as_values=3)
