"""What all readers together leave unread has a bound: the one furthest behind ends, and nobody who keeps up."""

from __future__ import annotations

import pytest
import trio
from phases import aborted_ids, endless
from scripted_llm import PROMPT, open_scripted
from trio.testing import MockClock

from trioleg.config import LLMConfig
from trioleg.errors import InvalidRequestError, ReaderTooSlow
from trioleg.outputs import CompletionOutput, RequestOutput
from trioleg.runtime.mailbox import Mailbox
from trioleg.runtime.unread import Unread
from trioleg.sampling_params import SamplingParams

# A thousand letters a step, of five bytes each in a mailbox: 20 steps are 100,000 bytes.
SCRIPT = endless(*"abc", tokens_per_step=1000, max_model_len=200_000)
BOUND = 400_000
CONFIG = LLMConfig(unread_max_bytes=BOUND)


async def test_the_reader_that_is_furthest_behind_ends_for_all(autojump_clock: MockClock) -> None:
    asked = SamplingParams(max_tokens=60_000)
    async with open_scripted(SCRIPT, CONFIG) as (llm, transport):
        async with llm.open_stream(PROMPT, asked) as first:
            await llm.generate(PROMPT, SamplingParams(max_tokens=5_000))
            async with llm.open_stream(PROMPT, asked) as second:
                read = await llm.generate(PROMPT, SamplingParams(max_tokens=70_000))
                assert len(read.outputs[0].token_ids) == 70_000
                statistics = llm.statistics()
                assert statistics.num_unread_requests == 2
                output = await first.receive()
                # What came until then is whole, and is all that is taken from it.
                assert output.outputs[0].text == ("abc" * 20_000)[: len(output.outputs[0].text)]
                with pytest.raises(ReaderTooSlow, match=r"allowed: 400000 \(unread_max_bytes\)"):
                    await first.receive()
                whole = await second.receive()
                assert (len(whole.outputs[0].token_ids), whole.finished) == (60_000, True)
                assert BOUND / 2 < statistics.num_unread_bytes < 2 * BOUND
                assert aborted_ids(transport) == [[first.request_id]]
                assert llm.statistics().num_unread_bytes == 0


async def test_whoever_keeps_up_ends_for_nobody(autojump_clock: MockClock) -> None:
    """A whole answer that nobody takes fills the bound alone, and cannot be ended any more."""
    config = LLMConfig(unread_max_bytes=100_000)
    async with open_scripted(SCRIPT, config) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams(max_tokens=19_000)) as unread:
            await trio.sleep(1)
            async with llm.open_stream(PROMPT, SamplingParams(max_tokens=19_000)) as other:
                await trio.sleep(1)
            # The second was over the bound with the first, which had ended well.
            assert [str(one.ending.kind) for one in (unread, other)] == [
                "length",
                "reader_too_slow",
            ]
            async with llm.open_stream(PROMPT, SamplingParams(max_tokens=50_000)) as read:
                outputs = [len(output.outputs[0].token_ids) async for output in read]
            assert sum(outputs) == 50_000
        async with llm.open_stream(PROMPT, SamplingParams(max_tokens=19_000)) as alone:
            await trio.sleep(1)
            assert alone.ending.kind == "length"


def test_a_mailbox_counts_from_64_kib_on_until_it_is_read_or_left() -> None:
    unread = Unread(2**30)
    mailbox = Mailbox(aggregate=True, max_bytes=2**30, tally=unread)
    for size, least in ((2**15, 0), (2**16, 2**16), (2**15, 2**16), (2**17, 2**17)):
        mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, "a" * size, [1])], False))
        assert least <= unread.num_bytes <= mailbox.statistics().num_bytes
        assert unread.num_bytes == mailbox.num_counted
        assert bool(unread.num_bytes) == bool(least)
    mailbox.take()
    assert (unread.num_bytes, mailbox.num_counted) == (0, 0)
    mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, "a" * 2**18, [1])], False))
    assert unread.num_bytes > 2**18
    mailbox.stop_counting()
    mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, "a" * 2**18, [1])], False))
    mailbox.stop_counting()
    assert unread.num_bytes == 0


def test_the_bound_is_a_positive_number() -> None:
    with pytest.raises(InvalidRequestError, match="unread_max_bytes is 0; allowed: an integer"):
        LLMConfig(unread_max_bytes=0)
