"""Readers that leave, and requests aborted by id, in every phase: one path for all, and one ABORT."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from phases import PHASES, Phase, aborted_ids, endless
from scripted_llm import PROMPT, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import LLMConfig
from trioleg.errors import ReaderTooSlow, RequestAborted
from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import SamplingParams
from trioleg.testing import ScriptedTransport

CAFE = ("caf", "C3", "A9", "</s>")
EVERY_PHASE = pytest.mark.parametrize("phase", PHASES, ids=str)
NUMBER_OF_CHOICES = pytest.mark.parametrize("n", [1, 3])


async def read_stream(llm: LLM, params: SamplingParams) -> None:
    async with llm.open_stream(PROMPT, params) as stream:
        async for _ in stream:
            pass


async def read_whole(llm: LLM, params: SamplingParams) -> None:
    await llm.generate(PROMPT, params)


@asynccontextmanager
async def in_phase(
    phase: Phase, read: Callable[[LLM, SamplingParams], Awaitable[None]], n: int
) -> AsyncIterator[tuple[LLM, ScriptedTransport, RequestStream, trio.CancelScope]]:
    """A request that has come to ``phase``, and the scope of its reader."""
    async with open_scripted(phase.script) as (llm, transport), trio.open_nursery() as nursery:
        if phase.needs_occupant:
            nursery.start_soon(read_stream, llm, SamplingParams())
            await wait_all_tasks_blocked()
        async with trio.open_nursery() as readers:
            readers.start_soon(read, llm, SamplingParams(n=n, **phase.asked))
            await trio.sleep(0.2)
            assert phase.is_reached(llm, transport)
            yield llm, transport, llm.live_requests()[-1], readers.cancel_scope
        nursery.cancel_scope.cancel("the test is over")


async def check_only_the_occupant_lives(
    phase: Phase, llm: LLM, transport: ScriptedTransport
) -> None:
    await wait_all_tasks_blocked()
    others = 1 if phase.needs_occupant else 0
    (engine,) = llm.statistics().engines
    assert engine.processor.requests == others
    assert len(transport.core._live()) == others
    assert llm.statistics().open_streams == others


@EVERY_PHASE
@NUMBER_OF_CHOICES
@pytest.mark.parametrize("read", [read_stream, read_whole])
async def test_a_reader_that_leaves_in_any_phase(
    autojump_clock: MockClock,
    phase: Phase,
    read: Callable[[LLM, SamplingParams], Awaitable[None]],
    n: int,
) -> None:
    """One ABORT with all its choices, one ending, and nothing left behind (C2, below the server)."""
    async with in_phase(phase, read, n) as (llm, transport, stream, scope):
        scope.cancel("the client has left")
        await trio.lowlevel.cancel_shielded_checkpoint()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            (ids,) = aborted_ids(transport)
            assert ids == stream.submission.engine_request_ids
            assert len(ids) == n
            assert llm.statistics().endings == {EndingKind.LEFT: 1}
            await check_only_the_occupant_lives(phase, llm, transport)


# ---------------------------------------------------------------------------- abort by id


@EVERY_PHASE
@NUMBER_OF_CHOICES
async def test_an_abort_by_id_in_any_phase(autojump_clock: MockClock, phase: Phase, n: int) -> None:
    """C15: exactly that one, once; its reader is told."""
    told = trio.Event()

    async def be_told(llm: LLM, params: SamplingParams) -> None:
        with pytest.raises(RequestAborted):
            await read_stream(llm, params)
        told.set()

    async with in_phase(phase, be_told, n) as (llm, transport, stream, _):
        name = stream.request_id
        for wrong in (name[:-1], name + "0", name.upper() + "-", "", "0", f"{name}-0", "nobody"):
            assert not llm.abort(wrong)
        assert stream.ending is None
        assert llm.abort(name)
        assert not llm.abort(name)
        await told.wait()
        assert not llm.abort(name)
        (ids,) = aborted_ids(transport)
        assert len(ids) == n
        assert llm.statistics().endings == {EndingKind.ABORTED: 1}
        await check_only_the_occupant_lives(phase, llm, transport)


async def test_the_clients_own_id_aborts_nothing(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, _):
        async with llm.open_stream(PROMPT, external_req_id="mine") as stream:
            assert not llm.abort("mine")
            assert stream.ending is None


async def test_what_an_aborted_request_had_is_read_first(autojump_clock: MockClock) -> None:
    async with open_scripted(script("a", "b", "c", "a", "</s>")) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams(stop=["bcz"])) as stream:
            await trio.sleep(0.25)
            assert llm.abort(stream.request_id)
            assert (await stream.receive()).outputs[0].text == "abc"
            with pytest.raises(RequestAborted):
                await stream.receive()


# ---------------------------------------------------------------------------- the engine's queue


async def test_the_fourth_of_five_in_the_queue_leaves(autojump_clock: MockClock) -> None:
    """C4: the same ABORT as for a running one, and the others take their turns."""
    finished: list[int] = []
    async with open_scripted(script(*CAFE, max_num_seqs=1)) as (llm, transport):
        scopes = [trio.CancelScope() for _ in range(6)]

        async def read(number: int) -> None:
            with scopes[number]:
                assert (await llm.generate(PROMPT)).outputs[0].text == "café"
                finished.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(read, number)
                await wait_all_tasks_blocked()
            assert len(transport.core._waiting) == 5
            fourth = llm.live_requests()[4].request_id
            scopes[4].cancel("the client has left")
            await wait_all_tasks_blocked()
            assert len(transport.core._waiting) == 4
        assert finished == [0, 1, 2, 3, 5]
        assert aborted_ids(transport) == [[fourth]]
        assert transport.core._live() == []
        assert llm.statistics().endings == {EndingKind.STOP: 5, EndingKind.LEFT: 1}


async def test_twenty_that_leave_the_queue_are_never_started(autojump_clock: MockClock) -> None:
    """C5: no prefill for the dead."""
    async with open_scripted(script(*CAFE, max_num_seqs=1)) as (llm, transport):
        async with llm.open_stream(PROMPT) as first, trio.open_nursery() as nursery:
            await first.receive()
            for _ in range(20):
                nursery.start_soon(read_stream, llm, SamplingParams())
                await wait_all_tasks_blocked()
            queued = list(transport.core._waiting)
            assert len(queued) == 20
            nursery.cancel_scope.cancel("all clients have left")
        await trio.sleep(10.0)
        assert [one.admitted_at for one in queued] == [0.0] * 20
        assert len(aborted_ids(transport)) == 21
        assert transport.core._live() == []
        assert llm.statistics().engines[0].scheduler.num_waiting_reqs == 0


async def test_an_engine_that_acknowledges_late_and_keeps_sending(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """C3: what comes late is counted and dropped, with no line for each, and no second ABORT."""
    caplog.set_level(logging.DEBUG, "trioleg")
    async with open_scripted(endless("a", "b", "c")) as (llm, transport):
        abort_requests = transport.core.abort_requests
        unacknowledged: list[Any] = []
        transport.core.abort_requests = unacknowledged.append
        async with llm.open_stream(PROMPT, SamplingParams(n=3)) as stream:
            await stream.receive()
        await trio.sleep(2.0)
        (engine,) = llm.statistics().engines
        assert engine.stale_outputs > 500
        assert engine.processor.requests == 0
        for one in unacknowledged:
            abort_requests(one)
        transport.core.abort_requests = abort_requests
        await trio.sleep(0.1)
        last = llm.statistics().engines[0].stale_outputs
        await trio.sleep(5.0)
        assert llm.statistics().engines[0].stale_outputs == last
        assert transport.core._live() == []
        assert len(aborted_ids(transport)) == 1
        (line,) = caplog.messages
        assert line.startswith(f"request {stream.request_id} ended: left")


# ---------------------------------------------------------------------------- nobody reads


@pytest.mark.parametrize("max_bytes", [2**20, 2**30], ids=["over the bound", "within it"])
async def test_nobody_reads_20_000_tokens_with_20_logprobs_each(
    autojump_clock: MockClock, max_bytes: int
) -> None:
    """C17: one merged output, bounded in bytes; over the bound only that request ends."""
    long = endless("a", "b", "c", tokens_per_step=50, max_model_len=32_000)
    config = LLMConfig(mailbox_max_bytes=max_bytes)
    asked = SamplingParams(max_tokens=20_000, logprobs=20)
    async with open_scripted(long, config) as (llm, transport):
        async with llm.open_stream(PROMPT, asked) as unread:
            read = await llm.generate(PROMPT, SamplingParams(max_tokens=21_000))
            assert len(read.outputs[0].token_ids) == 21_000
            output = await unread.receive()
            num_tokens = len(output.outputs[0].token_ids)
            assert len(output.outputs[0].logprobs or []) == num_tokens
            statistics = unread.statistics()
            assert statistics.num_merges == num_tokens // 50 - 1
            # A step's own output is kept whole, so that nothing that was decoded is lost.
            assert statistics.max_num_bytes < max_bytes + 2**17
            if max_bytes == 2**30:
                assert (num_tokens, output.finished) == (20_000, True)
            else:
                with pytest.raises(ReaderTooSlow):
                    await unread.receive()
                assert len(aborted_ids(transport)) == 1
        assert transport.core._live() == []
