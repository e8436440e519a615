"""An outlet of a reader's: asked only while the reader waits, and order holds whichever way an output goes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import pytest
import trio
from scripted_llm import PROMPT, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import LLMConfig
from trioleg.errors import RequestEnded
from trioleg.output.submission import make_pooling_submission
from trioleg.outputs import CompletionOutput, Ending, EndingKind, RequestOutput
from trioleg.runtime.burst import Burst
from trioleg.runtime.llm import LLM
from trioleg.runtime.mailbox import Mailbox
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from trioleg.testing import ScriptedTransport
from trioleg.timeouts import Timeouts


def output(text: str, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", [1], [CompletionOutput(0, text, [len(text)])], finished)


def text_of(given: RequestOutput) -> str:
    return "".join(one.text for one in given.outputs)


def make_stream() -> RequestStream:
    submission = make_pooling_submission("r", [1], PoolingParams())
    mailbox = Mailbox(aggregate=True, max_bytes=10_000)
    return RequestStream(submission, mailbox, on_end=lambda *_: None)


class Outlet:
    """Takes what ``takes`` says, in order."""

    def __init__(self, stream: RequestStream) -> None:
        self.takes = True
        self.asked: list[str] = []
        self.taken: list[str] = []
        self._stream = stream

    def __call__(self, given: RequestOutput) -> bool:
        statistics = self._stream.statistics()
        assert statistics.reader_waits
        assert statistics.num_bytes == 0
        self.asked.append(text_of(given))
        if self.takes:
            self.taken.append(text_of(given))
        return self.takes


# ---------------------------------------------------------------------------- the mailbox


async def test_it_is_asked_only_while_the_reader_waits() -> None:
    stream = make_stream()
    outlet, received = Outlet(stream), list[str]()

    async def read() -> None:
        with stream.serving(outlet), suppress(trio.EndOfChannel):
            while True:
                received.append(text_of(await stream.receive()))

    put = stream.mailbox.put
    put(output("before anybody reads,"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert outlet.asked == []
        assert put(output("a"))
        assert put(output("b"))
        assert stream.statistics().reader_waits
        outlet.takes = False
        put(output("c"))
        # The reader has been woken, and what it has not read yet comes first.
        outlet.takes = True
        assert put(output("d"))
        await wait_all_tasks_blocked()
        put(output("e"))
        stream.end(Ending(EndingKind.STOP))
        put(output("f"))
    assert outlet.asked == ["a", "b", "c", "e"]
    assert outlet.taken == ["a", "b", "e"]
    assert received == ["before anybody reads,", "cd", "f"]
    assert stream.mailbox.outlet is None


async def test_a_cancelled_receive_has_nothing_delivered_past_it() -> None:
    stream = make_stream()
    outlet = Outlet(stream)
    with stream.serving(outlet):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive)
            await wait_all_tasks_blocked()
            stream.mailbox.put(output("a"))
            nursery.cancel_scope.cancel("the reader is")
            # It has not run yet, and waits no more.
            stream.mailbox.put(output("b"))
        stream.mailbox.put(output("c"))
        assert text_of(await stream.receive()) == "bc"
    assert outlet.asked == ["a"]


async def test_an_outlet_lasts_as_long_as_its_block() -> None:
    stream = make_stream()
    outlet = Outlet(stream)
    with pytest.raises(ValueError, match="the body's"), stream.serving(outlet):
        raise ValueError("the body's")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive)
        await wait_all_tasks_blocked()
        stream.mailbox.put(output("a"))
    assert outlet.asked == []


def writes_in_bursts(
    stream: RequestStream, burst: Burst, got: list[str], chance: random.Random
) -> Callable[[RequestOutput], bool]:
    """An outlet like the server's, whose client takes something at once now and then."""

    def outlet(given: RequestOutput) -> bool:
        statistics = stream.statistics()
        assert statistics.reader_waits
        assert statistics.num_bytes == 0
        if not burst.is_open or given.finished or chance.random() < 0.3:
            return False
        burst.add(lambda data: got.append(data.decode()), text_of(given).encode())
        return True

    return outlet


async def test_order_holds_when_the_way_changes_at_random(autojump_clock: MockClock) -> None:
    """Bursts of any size, outputs outside of them, receives that are cancelled, readers that are slow."""
    ways = set[bool]()
    for seed in range(150):
        chance, got, burst = random.Random(seed), list[str](), Burst()
        stream = make_stream()

        async def link(chance: random.Random, burst: Burst, stream: RequestStream) -> None:
            for first in range(0, 60, 3):
                in_burst = chance.random() < 0.8
                if in_burst:
                    burst.open()
                for number in range(first, first + 3):
                    stream.mailbox.put(output(f"{number},", finished=number == 59))
                if first == 57:
                    stream.end(Ending(EndingKind.STOP))
                burst.flush()
                await trio.sleep(chance.choice([0, 0, 0.01, 0.05]))

        with trio.fail_after(60), stream.serving(writes_in_bursts(stream, burst, got, chance)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link, chance, burst, stream)
                with suppress(trio.EndOfChannel):
                    while True:
                        before = len(got)
                        with trio.move_on_after(chance.choice([0, 0.01, math.inf])):
                            received = await stream.receive()
                            ways |= {len(got) > before}
                            got.append(text_of(received))
                        await trio.sleep(chance.choice([0, 0, 0.02]))
        assert "".join(got) == "".join(f"{number}," for number in range(60)), seed
    assert ways == {True, False}


# ---------------------------------------------------------------------------- the whole runtime

End: TypeAlias = Callable[[LLM, ScriptedTransport, RequestStream], None]
ENDS: dict[str, tuple[EndingKind, End]] = {
    "abort": (EndingKind.ABORTED, lambda llm, _, stream: llm.abort(stream.request_id) and None),
    "death": (EndingKind.ENGINE_DEAD, lambda _, transport, __: transport.inject_dead()),
    "cut off": (EndingKind.ENGINE_DEAD, lambda _, transport, __: transport.make_unreachable()),
    "frozen": (EndingKind.ENGINE_DEAD, lambda _, transport, __: transport.freeze()),
    "shutdown": (EndingKind.SHUTDOWN, lambda llm, _, __: llm.shut_down("on purpose")),
    "garbage": (EndingKind.OUTPUT_ERROR, lambda _, transport, __: transport.inject([b"\xc1"])),
}


async def read_all(
    llm: LLM, stream: RequestStream, got: list[str], chance: random.Random
) -> RequestEnded | None:
    """As the server's loop: what it receives, and what was unread or held back at the end."""
    failure = None
    outlet = writes_in_bursts(stream, llm.burst, got, chance)
    try:
        with stream.serving(outlet), suppress(trio.EndOfChannel):
            while True:
                got.append(text_of(await stream.receive()))
    except RequestEnded as error:
        failure = error
    rest = stream.receive_nowait()
    got.append("" if rest is None else text_of(rest))
    return failure


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("seed", range(3))
async def test_every_ending_finds_the_text_whole(
    autojump_clock: MockClock, way: str, seed: int
) -> None:
    """A stop string holds "ab" back when it comes; some outputs have gone the direct way before."""
    kind, end = ENDS[way]
    got: list[str] = []
    params = SamplingParams(
        max_tokens=300, stop=["abX"], output_kind=RequestOutputKind.DELTA, ignore_eos=True
    )
    async with open_scripted(script(*"caab" * 50)) as (llm, transport):
        async with llm.open_stream(PROMPT, params) as stream:
            async with trio.open_nursery() as nursery:

                async def strike() -> None:
                    await trio.sleep(0.75)
                    assert stream.num_output_tokens == 8
                    assert "".join(got) == "caabca"
                    end(llm, transport, stream)

                nursery.start_soon(strike)
                with trio.fail_after(600):
                    await read_all(llm, stream, got, random.Random(seed))
            assert stream.ending is not None
            assert stream.ending.kind is kind
            assert "".join(got) == ("caab" * 50)[: stream.num_output_tokens]
            assert not llm.burst.is_open


@pytest.mark.parametrize("seed", range(3))
async def test_a_deadline_and_a_good_end_find_it_whole(
    autojump_clock: MockClock, seed: int
) -> None:
    asked = {"output_kind": RequestOutputKind.DELTA, "ignore_eos": True}
    cases = [
        (SamplingParams(max_tokens=300, **asked), Timeouts(total=1.25), EndingKind.DEADLINE),
        (SamplingParams(max_tokens=13, **asked), Timeouts(), EndingKind.LENGTH),
        (SamplingParams(max_tokens=300, stop=["abcX", "bca"], **asked), Timeouts(), None),
    ]
    for params, timeouts, kind in cases:
        got: list[str] = []
        async with open_scripted(script(*"aabc" * 50)) as (llm, _):
            async with llm.open_stream(PROMPT, params, timeouts=timeouts) as stream:
                with trio.fail_after(600):
                    await read_all(llm, stream, got, random.Random(seed))
                assert stream.ending is not None
                if kind is None:
                    assert stream.ending.kind is EndingKind.STOP_STRING
                    assert "".join(got) == "aa"
                else:
                    assert stream.ending.kind is kind
                    assert "".join(got) == ("aabc" * 50)[: stream.num_output_tokens]


async def test_a_reader_that_is_too_slow_gets_all_of_it(autojump_clock: MockClock) -> None:
    """It takes outputs past it, then none, and stands still until its mailbox is full."""
    got: list[str] = []
    params = SamplingParams(max_tokens=300, output_kind=RequestOutputKind.DELTA)
    async with open_scripted(script(*"abc" * 100), LLMConfig(mailbox_max_bytes=2000)) as (llm, _):
        async with llm.open_stream(PROMPT, params) as stream:

            def outlet(given: RequestOutput) -> bool:
                if len(got) >= 10:
                    return False
                llm.burst.add(lambda data: got.append(data.decode()), text_of(given).encode())
                return True

            with stream.serving(outlet) as scope:
                got.append(text_of(await stream.receive()))
                await trio.sleep_forever()
            assert scope.cancelled_caught
            rest = stream.receive_nowait()
            assert rest is not None
            got.append(text_of(rest))
            assert stream.ending is not None
            assert stream.ending.kind is EndingKind.READER_TOO_SLOW
            assert len(got) == 12
            assert "".join(got) == ("abc" * 100)[: stream.num_output_tokens]


async def test_what_an_outlet_raises_ends_its_request_alone(autojump_clock: MockClock) -> None:
    params = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA)

    def fail(_: RequestOutput) -> bool:
        raise RuntimeError("an outlet's fault")

    async with open_scripted(script(*"abcab")) as (llm, _), llm.open_stream(PROMPT, params) as one:
        async with llm.open_stream(PROMPT, params) as other:
            with one.serving(fail), pytest.raises(RequestEnded, match="an outlet's fault"):
                while True:
                    await one.receive()
            got: list[str] = []
            assert await read_all(llm, other, got, random.Random(1)) is None
            assert "".join(got) == "abcab"
