"""C1: a cancel at every point of everything that waits, in virtual time: nothing stays behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from cancel_everywhere import HOW, cuts
from scripted_llm import PROMPT, TOKENIZER, aborted, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.chat_template import ChatTemplate
from trioleg.config import LLMConfig
from trioleg.errors import RequestEnded
from trioleg.outputs import EndingKind
from trioleg.runtime.engines import Engine
from trioleg.runtime.llm import LLM
from trioleg.runtime.opening import running
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import SamplingParams
from trioleg.structured_outputs import StructuredOutputsParams
from trioleg.testing import ScriptedTransport, open_scripted_llm
from trioleg.timeouts import Timeouts

CAFE = ("caf", "C3", "A9", "</s>")
MESSAGES = [{"role": "user", "content": "a"}]
WITH_TEMPLATE = replace(
    TOKENIZER, chat_template=ChatTemplate("<s>{{ messages[0].content }}", {}, origin="this test")
)
_WITH_ABORT = (EndingKind.LEFT, EndingKind.STOP_STRING, EndingKind.ABORTED)
TIMEOUTS = LLMConfig(timeouts=Timeouts(first_token=100.0, total=200.0))

EVERY_WAY = pytest.mark.parametrize("how", HOW)
NUMBER_OF_CHOICES = pytest.mark.parametrize("n", [1, 3])


async def check_nothing_left(llm: LLM, transport: ScriptedTransport) -> None:
    """No state on our side, nothing live in the engine, and no ABORT but one for what was sent."""
    await wait_all_tasks_blocked()
    statistics = llm.statistics()
    assert statistics.open_streams == 0
    assert [engine.processor.requests for engine in statistics.engines] == [0]
    assert llm.live_requests() == ()
    assert transport.core._live() == []
    aborts = Counter(one for message in aborted(transport) for one in message)
    assert aborts <= Counter(added(transport))
    assert len(aborted(transport)) <= sum(statistics.endings.get(kind, 0) for kind in _WITH_ABORT)


async def check_no_deadline_left(llm: LLM) -> None:
    await trio.sleep(201.0)
    assert len(llm._requests.deadlines) == 0


@EVERY_WAY
@NUMBER_OF_CHOICES
@pytest.mark.parametrize("prompt", ["a", PROMPT, MESSAGES], ids=["text", "ids", "messages"])
async def test_submitting(autojump_clock: MockClock, prompt: Any, n: int, how: str) -> None:
    late = script(*CAFE, first_token_delay_s=60.0)
    async with open_scripted_llm(late, WITH_TEMPLATE, TIMEOUTS) as (llm, transport):
        for cut in cuts(how):
            sent = len(added(transport))
            with cut.made():
                async with llm.open_stream(prompt, SamplingParams(n=n)):
                    sent += n
            assert len(added(transport)) == sent
            await check_nothing_left(llm, transport)
        assert cut.point >= 2
        assert llm.statistics().endings == {EndingKind.LEFT: cut.point + 1}
        await check_no_deadline_left(llm)


async def test_submitting_with_a_constraint() -> None:
    """Its trial is in a thread and a process, so this is in real time."""
    with trio.fail_after(60.0):
        async with open_scripted(script(*CAFE, first_token_delay_s=600.0)) as (llm, transport):
            for cut in cuts():
                regex = f"a{{{cut.point + 1}}}"
                params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
                with cut.made():
                    async with llm.open_stream(PROMPT, params):
                        pass
                assert len(added(transport)) == (not cut.struck)
                await check_nothing_left(llm, transport)
            assert cut.point >= 3


async def test_submitting_text_that_a_thread_tokenizes() -> None:
    """As outside of tests, so in real time, too."""
    with trio.fail_after(60.0):
        async with bare_llm([]) as llm, running(llm):
            await llm.wait_ready()
            for cut in cuts():
                with cut.made():
                    async with llm.open_stream("a"):
                        pass
                assert (llm.statistics().open_streams, llm.live_requests()) == (0, ())
                assert llm.statistics().engines[0].processor.requests == 0
            assert cut.point >= 2
            assert llm.statistics().endings == {EndingKind.LEFT: cut.point + 1}


# ---------------------------------------------------------------------------- whole requests


async def read_all(llm: LLM, params: SamplingParams) -> None:
    async with llm.open_stream(PROMPT, params) as stream:
        async for _ in stream:
            pass
        assert stream.ending is not None


async def leave_early(llm: LLM, params: SamplingParams) -> None:
    async with llm.open_stream(PROMPT, params) as stream:
        await stream.receive()


async def be_aborted(llm: LLM, params: SamplingParams) -> None:
    with suppress(RequestEnded):
        async with llm.open_stream(PROMPT, params) as stream:
            await stream.receive()
            llm.abort(stream.request_id)
            async for _ in stream:
                pass


async def generate(llm: LLM, params: SamplingParams) -> None:
    output = await llm.generate(PROMPT, params)
    assert output.finished


@EVERY_WAY
@NUMBER_OF_CHOICES
@pytest.mark.parametrize("stop", [[], ["é"]], ids=["whole", "stop string"])
@pytest.mark.parametrize("request_", [read_all, leave_early, be_aborted, generate])
async def test_a_request_from_its_prompt_to_its_end(
    autojump_clock: MockClock,
    request_: Callable[[LLM, SamplingParams], Awaitable[None]],
    stop: list[str],
    n: int,
    how: str,
) -> None:
    async with open_scripted(script(*CAFE), TIMEOUTS) as (llm, transport):
        for cut in cuts(how, of_all=how == "outer"):
            with cut.made():
                await request_(llm, SamplingParams(n=n, stop=stop))
            await check_nothing_left(llm, transport)
        assert cut.point >= 3
        assert sum(llm.statistics().endings.values()) == cut.point + 1
        await check_no_deadline_left(llm)


# ---------------------------------------------------------------------------- one receive


@EVERY_WAY
@pytest.mark.parametrize("seconds", [0.0, 0.15, 0.35, 10.0], ids=str)
async def test_receiving_loses_nothing(autojump_clock: MockClock, seconds: float, how: str) -> None:
    """Waiting for the first output, with something unread, before the end, and behind it."""
    async with open_scripted(script(*CAFE, first_token_delay_s=0.1)) as (llm, transport):
        for cut in cuts(how):
            async with llm.open_stream(PROMPT, SamplingParams()) as stream:
                await trio.sleep(seconds)
                text = ""
                with cut.made():
                    text += (await stream.receive()).outputs[0].text
                text += "".join([output.outputs[0].text async for output in stream])
                assert text == "café"
            await check_nothing_left(llm, transport)
        assert aborted(transport) == []


async def end_well(llm: LLM, stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def end_badly(llm: LLM, stream: RequestStream) -> None:
    llm.abort(stream.request_id)
    await trio.lowlevel.checkpoint()


async def close(llm: LLM, stream: RequestStream) -> None:
    stream.close()
    await trio.lowlevel.checkpoint()


@EVERY_WAY
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (end_well, trio.EndOfChannel),
        (end_badly, RequestEnded),
        (close, trio.ClosedResourceError),
    ],
)
async def test_receiving_behind_the_end(
    autojump_clock: MockClock,
    end: Callable[[LLM, RequestStream], Awaitable[None]],
    error: type[Exception],
    how: str,
) -> None:
    """It raises, and before that it can be cancelled, as at every checkpoint."""
    async with open_scripted(script(*CAFE)) as (llm, _):
        raised = 0
        for cut in cuts(how):
            async with llm.open_stream(PROMPT, SamplingParams()) as stream:
                await end(llm, stream)
                with cut.made():
                    try:
                        await stream.receive()
                    except error:
                        raised += 1
        assert (raised, cut.point) == (1, 2)


@EVERY_WAY
async def test_a_utility_call(autojump_clock: MockClock, how: str) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        for cut in cuts(how):
            answer = None
            with cut.made():
                answer = await llm.call_utility("get_supported_tasks")
            assert answer == (None if cut.struck else ["generate"])
            assert llm._supervisor.link is not None
            assert llm._supervisor.link._utilities == {}
        assert cut.point >= 2


# ---------------------------------------------------------------------------- the LLM's own block


@EVERY_WAY
@pytest.mark.parametrize("of_all", [False, True], ids=["the owner's yields", "all tasks' yields"])
async def test_the_block_from_its_entry_to_its_exit(
    autojump_clock: MockClock, of_all: bool, how: str
) -> None:
    """With a request that ends in it and one that the exit has to end."""
    opened = 0
    for cut in cuts(how, of_all=of_all):
        with cut.made():
            async with open_scripted(script(*CAFE)) as (llm, transport):
                opened += 1
                seen = llm, transport
                await llm.generate(PROMPT, SamplingParams(max_tokens=2))
                async with llm.open_stream(PROMPT, SamplingParams()) as stream:
                    await stream.receive()
                    await trio.lowlevel.checkpoint()
        if opened:
            llm, transport = seen
            assert (llm.statistics().open_streams, llm.live_requests()) == (0, ())
            assert transport._is_closed
    assert opened >= 5


@asynccontextmanager
async def bare_llm(closed: list[str]) -> AsyncIterator[LLM]:
    """An LLM that nobody runs yet; what its engine's block does on the way out is written down."""

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[Engine]:
        transport = ScriptedTransport(script(*CAFE))
        await trio.lowlevel.checkpoint()
        try:
            yield Engine(0, transport.ready, transport)
        finally:
            with trio.CancelScope(shield=True):
                await transport.aclose()
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            closed.append("engine")

    await trio.lowlevel.checkpoint()
    yield LLM("scripted", TOKENIZER, open_engine, LLMConfig(), clock=trio.current_time)


@EVERY_WAY
@pytest.mark.parametrize("wait_until_ready", [True, False])
async def test_running_and_an_engine_that_takes_its_time_to_leave(
    autojump_clock: MockClock, wait_until_ready: bool, how: str
) -> None:
    closed: list[str] = []
    for cut in cuts(how, of_all=True):
        closed.clear()
        async with bare_llm(closed) as llm:
            with cut.made():
                async with running(llm, cancel_on_death=True, wait_until_ready=wait_until_ready):
                    await llm.wait_ready()
                    await llm.generate(PROMPT, SamplingParams())
                    assert closed == []
            if llm.statistics().engines:
                assert closed == ["engine"]
            assert (llm.statistics().open_streams, llm.live_requests()) == (0, ())
    assert cut.point >= 10
