"""The mailbox: one slot, one reader, and nothing lost to a cancel."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trioleg.outputs import CompletionOutput, RequestOutput
from trioleg.runtime.mailbox import Mailbox


def output(text: str) -> RequestOutput:
    return RequestOutput("r", [1], [CompletionOutput(0, text, [len(text)])], False)


def text(mailbox: Mailbox) -> str | None:
    taken = mailbox.take()
    return None if taken is None else taken.outputs[0].text


async def test_a_waiting_reader_is_woken_once_and_finds_everything() -> None:
    mailbox = Mailbox(aggregate=True, max_bytes=10_000)
    seen: list[str | None] = []

    async def read() -> None:
        await mailbox.wait()
        seen.append(text(mailbox))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert mailbox.statistics().reader_waits
        mailbox.put(output("a"))
        mailbox.put(output("b"))
    assert seen == ["ab"]
    assert mailbox.statistics().num_merges == 1


async def test_a_cancelled_wait_loses_nothing_and_the_next_reader_gets_it() -> None:
    mailbox = Mailbox(aggregate=True, max_bytes=10_000)
    with trio.CancelScope() as scope:
        scope.cancel()
        await mailbox.wait()
    assert scope.cancelled_caught
    assert not mailbox.statistics().reader_waits
    mailbox.put(output("a"))
    assert text(mailbox) == "a"


async def test_a_second_reader_is_refused() -> None:
    mailbox = Mailbox(aggregate=True, max_bytes=10_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await mailbox.wait()
        mailbox.wake()


def test_the_bound_is_reported_and_nothing_is_lost() -> None:
    mailbox = Mailbox(aggregate=True, max_bytes=2_000)
    assert mailbox.put(output("a" * 1_000))
    assert not mailbox.put(output("b" * 1_000))
    assert text(mailbox) == "a" * 1_000 + "b" * 1_000
    assert mailbox.put(output("c"))
    assert mailbox.statistics().max_num_bytes > 2_000
