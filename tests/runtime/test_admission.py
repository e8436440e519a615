"""Overload (E7, E8): what has no room is turned away before it costs anything, and a slot comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import trio
from scripted_llm import PROMPT, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import (
    InvalidRequestError,
    LLMConfig,
    LLMState,
    OverloadedError,
    RequestStream,
    SamplingParams,
    ServerShutdown,
    Timeouts,
)
from trioleg.runtime.admission import Admission
from trioleg.runtime.llm import LLM
from trioleg.testing import ScriptedTransport

LONG = script(*["a"] * 100)
PARAMS = SamplingParams(max_tokens=100)


async def open_streams(
    llm: LLM, stack: AsyncExitStack, count: int, params: SamplingParams = PARAMS
) -> list[RequestStream]:
    return [await stack.enter_async_context(llm.open_stream(PROMPT, params)) for _ in range(count)]


@asynccontextmanager
async def full(limit: int = 4) -> AsyncIterator[tuple[LLM, ScriptedTransport, list[RequestStream]]]:
    """An LLM with as many streams as it may have."""
    config = LLMConfig(max_inflight_requests=limit)
    async with open_scripted(LONG, config) as (llm, transport), AsyncExitStack() as stack:
        yield llm, transport, await open_streams(llm, stack, limit)


async def refused(llm: LLM, params: SamplingParams = PARAMS, **more: object) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        async with llm.open_stream(PROMPT, params, **more):
            pass
    return caught.value


async def test_more_than_the_limit_are_turned_away(autojump_clock: MockClock) -> None:
    async with full() as (llm, transport, _):
        for _ in range(6):
            error = await refused(llm)
            assert "4 requests are in flight, and this one counts 1; allowed: 4" in str(error)
            assert error.code == "too_many_requests"
            assert error.retry_after >= 1
        assert len(added(transport)) == 4
        assert llm.statistics().overloaded == {"too_many_requests": 6}
        assert llm.statistics().num_inflight_requests == 4


async def leave(_: LLM, stream: RequestStream) -> None:
    stream.close()
    await trio.lowlevel.checkpoint()


async def abort(llm: LLM, stream: RequestStream) -> None:
    assert llm.abort(stream.request_id)
    await trio.lowlevel.checkpoint()


async def finish(_: LLM, stream: RequestStream) -> None:
    async for _output in stream:
        pass


@pytest.mark.parametrize("end", [leave, abort, finish])
async def test_a_slot_comes_back_at_the_end(
    autojump_clock: MockClock, end: Callable[[LLM, RequestStream], object]
) -> None:
    async with full() as (llm, _, streams):
        await refused(llm)
        await end(llm, streams[1])  # type: ignore[misc]
        # Its block has not been left: the request has ended, and that is what counts.
        async with llm.open_stream(PROMPT, PARAMS):
            if end is not finish:
                await refused(llm)


async def test_choices_count(autojump_clock: MockClock) -> None:
    two, three = SamplingParams(n=2), SamplingParams(n=3)
    config = LLMConfig(max_inflight_requests=4)
    async with open_scripted(LONG, config) as (llm, _), llm.open_stream(PROMPT, three):
        assert "this one counts 2" in str(await refused(llm, two))
        async with llm.open_stream(PROMPT, PARAMS):
            await refused(llm)


async def test_more_choices_than_ever_fit_are_no_overload(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG, LLMConfig(max_inflight_requests=4)) as (llm, _):
        with pytest.raises(
            InvalidRequestError, match=r"n is 5; allowed: 1 to 4.*max_inflight"
        ) as e:
            await llm.generate(PROMPT, SamplingParams(n=5))
        assert e.value.parameter == "n"


async def test_a_bad_request_keeps_no_slot(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG, LLMConfig(max_inflight_requests=1)) as (llm, _):
        for prompt in ([-1], [], "a" * 100_000):
            with pytest.raises(InvalidRequestError):
                await llm.generate(prompt)
        with pytest.raises(InvalidRequestError):
            await llm.generate(PROMPT, SamplingParams(max_tokens=10**6))
        async with llm.open_stream(PROMPT, PARAMS):
            pass


QUEUE = script(*["a"] * 20, max_num_seqs=1)


@asynccontextmanager
async def busy(
    config: LLMConfig | None = None, queued: int = 0
) -> AsyncIterator[tuple[LLM, RequestStream, list[RequestStream]]]:
    """One request runs, as many as the engine takes at once; so many wait."""
    async with open_scripted(QUEUE, config) as (llm, _), AsyncExitStack() as stack:
        (running,) = await open_streams(llm, stack, 1)
        await running.receive()
        yield llm, running, await open_streams(llm, stack, queued)


async def test_queued_tokens_have_a_bound(autojump_clock: MockClock) -> None:
    limit = 3 * len(PROMPT)
    config = LLMConfig(max_queued_prompt_tokens=limit)
    async with busy(config, queued=3) as (llm, running, queued):
        # What runs waits no more, and so does not count.
        assert llm.statistics().num_queued_prompt_tokens == limit
        error = await refused(llm)
        assert error.code == "too_many_queued_tokens"
        assert f"{limit} tokens of prompts are queued, and this request brings 1 or more" in str(
            error
        )
        await finish(llm, running)
        await queued[0].receive()
        async with llm.open_stream(PROMPT, PARAMS):
            assert llm.statistics().num_queued_prompt_tokens == limit
    assert llm.statistics().num_queued_prompt_tokens == 0


async def test_each_choice_brings_its_prompt(autojump_clock: MockClock) -> None:
    config = LLMConfig(max_queued_prompt_tokens=3 * len(PROMPT))
    async with busy(config, queued=1) as (llm, _, _):
        assert "this request brings 6" in str(await refused(llm, SamplingParams(n=3)))
        async with llm.open_stream(PROMPT, SamplingParams(n=2)):
            pass


async def test_a_prompt_above_the_bound_is_taken_alone(autojump_clock: MockClock) -> None:
    config = LLMConfig(max_queued_prompt_tokens=1)
    async with busy(config, queued=1) as (llm, running, queued):
        await refused(llm)
        await finish(llm, running)
        await finish(llm, queued[0])


async def test_who_is_cancelled_in_the_queue_waits_no_more(autojump_clock: MockClock) -> None:
    config = LLMConfig(max_queued_prompt_tokens=len(PROMPT))
    async with busy(config) as (llm, _, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, PROMPT)
            await wait_all_tasks_blocked()
            await refused(llm)
            nursery.cancel_scope.cancel()
        assert llm.statistics().num_queued_prompt_tokens == 0
        async with llm.open_stream(PROMPT, PARAMS):
            pass


# ---------------------------------------------------------------------- the wait


@pytest.mark.parametrize("timeouts", [Timeouts(first_token=5), Timeouts(total=5)])
async def test_a_queue_longer_than_the_deadline(
    autojump_clock: MockClock, timeouts: Timeouts
) -> None:
    """A request takes 2 s here; four wait, so the fifth would wait 8 s behind the one that runs."""
    async with busy() as (llm, running, _):
        await finish(llm, running)
        async with AsyncExitStack() as stack:
            first, *_ = await open_streams(llm, stack, 5)
            await first.receive()
            error = await refused(llm, timeouts=timeouts)
            assert error.code == "deadline_too_short"
            assert "expected in 7.6 s, behind 4 others, and its deadline is in 5.0 s" in str(error)
            assert error.retry_after == pytest.approx(2.6)
            # Others may wait.
            for patience in (None, Timeouts(first_token=8)):
                async with llm.open_stream(PROMPT, PARAMS, timeouts=patience):
                    pass


async def test_nothing_waits_nothing_is_refused(autojump_clock: MockClock) -> None:
    short = Timeouts(first_token=0.5)
    async with busy() as (llm, running, _):
        # The first in the queue: the engine has not yet said that anybody waits.
        async with llm.open_stream(PROMPT, PARAMS, timeouts=short):
            pass
        await finish(llm, running)
        output = await llm.generate(PROMPT, PARAMS, timeouts=Timeouts(first_token=0.5))
        assert output.finished


async def test_a_burst_on_an_idle_engine_is_no_queue(autojump_clock: MockClock) -> None:
    """Nothing is known yet, and all of it may begin in the next step."""
    async with open_scripted(script(*["a"] * 20, max_num_seqs=64)) as (llm, _):
        ask = partial(llm.generate, PROMPT, PARAMS, timeouts=Timeouts(first_token=0.2))
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(ask)


def test_the_wait_is_littles_law() -> None:
    async def main() -> list[float]:
        admission = Admission(100, 10**6, lambda: (4, 8))
        waits = [admission._wait(8)]
        slots = [admission.admit(1, 10, Timeouts(), 0.0) for _ in range(4)]
        for slot in slots:
            slot.start()
        await trio.sleep(3)
        # By their age: four have run for 3 s, and nobody has ended.
        waits.append(admission._wait(8))
        await trio.sleep(1)
        slots[0].release()
        waits.append(admission._wait(8))
        return waits

    waits = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert waits == pytest.approx([0.0, 8 * 3 / 4, 8 * 4 / 4], abs=1e-6)


# ---------------------------------------------------------------------- drain


async def test_a_drain_lets_go_on_what_has_begun(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport), llm.open_stream(PROMPT, PARAMS) as stream:
        await stream.receive()
        llm.drain("the server is shutting down")
        assert llm.health().state == "draining"
        with pytest.raises(ServerShutdown, match="the server is shutting down"):
            await llm.generate(PROMPT)
        with pytest.raises(ServerShutdown):
            llm.check_room()
        outputs = [output async for output in stream]
        assert outputs[-1].finished
        assert len(added(transport)) == 1


async def test_a_drain_takes_what_is_being_prepared(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, _):
        read, going_on = llm._requests._prompts.read, trio.Event()

        async def read_later(*prompt: object) -> list[int]:
            await going_on.wait()
            return await read(*prompt)  # type: ignore[arg-type]

        llm._requests._prompts.read = read_later  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, PROMPT)
            await wait_all_tasks_blocked()
            llm.drain("the server is shutting down")
            going_on.set()
        assert llm.statistics().endings == {"stop": 1}


async def test_a_shutdown_does_not_wait_for_what_is_being_prepared(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(LONG) as (llm, _):

        async def read(*prompt: object) -> list[int]:
            await trio.sleep_forever()
            raise AssertionError(prompt)

        llm._requests._prompts.read = read  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(ServerShutdown, match="enough"):
                    await llm.generate(PROMPT, timeouts=Timeouts(total=60))

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert llm.statistics().num_inflight_requests == 1
            llm.shut_down("enough")
        # It had not begun.
        assert llm.statistics().endings == {}
        assert llm.statistics().turned_away == {LLMState.DRAINING: 1}
        await llm.wait_idle()


async def test_a_prompt_counts_before_it_is_tokenized(autojump_clock: MockClock) -> None:
    """By a guess: a character in four; so those that wait for the tokenizer have a bound, too."""
    async with open_scripted(LONG, LLMConfig(max_queued_prompt_tokens=100)) as (llm, _):

        async def read(*prompt: object) -> list[int]:
            await trio.sleep_forever()
            raise AssertionError(prompt)

        llm._requests._prompts.read = read  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, "a" * 4000)
            await wait_all_tasks_blocked()
            assert llm.statistics().num_queued_prompt_tokens == 1000
            with pytest.raises(OverloadedError, match="1000 tokens of prompts are queued"):
                llm.check_room()
            nursery.cancel_scope.cancel()
        llm.check_room()


async def test_an_overload_is_logged_once_a_minute(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with full(1) as (llm, _, _):
        for _ in range(3):
            await refused(llm)
        assert len([one for one in caplog.messages if "turned away" in one]) == 1


async def test_a_queue_for_a_turn_is_none(autojump_clock: MockClock) -> None:
    """Requests that wait though there are free places wait for their prompts' turn, which says nothing of how long
    requests stay."""
    async with busy() as (llm, running, _):
        await finish(llm, running)
        async with AsyncExitStack() as stack:
            first, *_ = await open_streams(llm, stack, 5)
            await first.receive()
            llm._supervisor.link.ready.max_num_seqs = 64  # type: ignore[union-attr]
            async with llm.open_stream(PROMPT, PARAMS, timeouts=Timeouts(first_token=0.5)):
                pass
