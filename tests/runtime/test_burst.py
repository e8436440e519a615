"""``Burst``: writes leave together, in order, and one that fails takes no other with it."""

from __future__ import annotations

from functools import partial

import pytest

from trioleg.runtime.burst import Burst


def test_nothing_is_written_before_the_flush_and_then_all_in_order() -> None:
    burst, written = Burst(), list[tuple[str, bytes]]()

    def write(name: str, data: bytes) -> None:
        assert not burst.is_open
        written.append((name, data))

    burst.open()
    assert burst.is_open
    for name, data in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        burst.add(partial(write, name), data)
    assert written == []
    burst.flush()
    assert written == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    burst.flush()
    assert len(written) == 3


def test_a_write_that_raises_is_logged_and_the_others_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    burst, written = Burst(), list[bytes]()

    def fail(data: bytes) -> None:
        raise OSError("on purpose")

    burst.open()
    for write in (written.append, fail, fail, written.append):
        burst.add(write, b"four")
    burst.flush()
    assert written == [b"four", b"four"]
    assert [record.getMessage() for record in caplog.records] == 2 * ["a write of 4 bytes failed"]
    assert all(record.exc_info for record in caplog.records)
    # And nothing of it comes again.
    burst.open()
    burst.flush()
    assert len(written) == 2


def test_it_is_closed_before_the_first_open_and_after_each_flush() -> None:
    burst = Burst()
    assert not burst.is_open
    for _ in range(2):
        burst.open()
        burst.flush()
        assert not burst.is_open


def test_links_take_turns_and_each_flush_writes_only_its_own() -> None:
    """No link waits between ``open`` and ``flush``, so that one burst serves all of them."""
    burst, written = Burst(), list[bytes]()
    for turn in range(4):
        burst.open()
        burst.add(written.append, b"%d" % turn)
        burst.flush()
        assert written == [b"%d" % done for done in range(turn + 1)]
