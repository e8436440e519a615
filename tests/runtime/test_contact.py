"""Out of contact, frozen, back, given up: what a request sees of it, in virtual time.

The same with real processes and stop signals is in ``test_engine_death.py``.
"""

from __future__ import annotations

import pytest
import trio
from scripted_llm import PROMPT, aborted, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import (
    EngineDeadError,
    EngineUnavailableError,
    LLMConfig,
    LLMState,
    SamplingParams,
)
from trioleg.runtime.llm import LLM
from trioleg.runtime.request_stream import RequestStream

LONG = script(*"abcabccbac", step=0.1, finish="length")
SILENT = script("a", first_token_delay_s=10_000.0)
MANY = SamplingParams(max_tokens=100)


async def text_of(stream: RequestStream) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def answers(llm: LLM) -> bool:
    return (await llm.generate(PROMPT, MANY)).outputs[0].text == "abcabccbac"


async def test_a_moment_without_contact_costs_nothing(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport):
        async with llm.open_stream(PROMPT, MANY) as stream:
            await trio.sleep(2.5 * 0.1)
            transport.freeze()
            await wait_all_tasks_blocked()
            assert llm.health().state is LLMState.FROZEN
            assert llm.health().retry_after is not None
            await trio.sleep(0.9)
            transport.thaw()
            await wait_all_tasks_blocked()
            assert llm.health().state is LLMState.READY
            assert await text_of(stream) == "abcabccbac"
        assert aborted(transport) == []


async def test_a_request_in_that_moment_waits(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport), trio.open_nursery() as nursery:
        transport.freeze()
        await wait_all_tasks_blocked()

        async def ask() -> None:
            assert await answers(llm)

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        assert added(transport) == []
        transport.thaw()


async def test_a_request_that_leaves_in_that_moment_was_never_there(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(LONG) as (llm, transport):
        transport.freeze()
        await wait_all_tasks_blocked()
        async with llm.open_stream(PROMPT, SamplingParams(n=3, max_tokens=100)):
            await trio.sleep(0.5)
        transport.thaw()
        assert await answers(llm)
        assert len(added(transport)) == 1
        assert aborted(transport) == []


async def test_one_frozen_for_longer_ends_its_requests_and_comes_back(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(LONG) as (llm, transport):
        async with llm.open_stream(PROMPT, MANY) as stream:
            await trio.sleep(0.25)
            transport.freeze()
            assert (await stream.receive()).outputs[0].text == "abc"
            with pytest.raises(EngineDeadError, match=r"does not answer.*not back in 1 s"):
                await stream.receive()
        with pytest.raises(EngineUnavailableError, match="does not answer") as caught:
            await llm.generate(PROMPT, MANY)
        assert caught.value.retry_after == 1.0
        with pytest.raises(EngineUnavailableError):
            await llm.is_sleeping()
        assert aborted(transport) == []
        transport.thaw()
        await wait_all_tasks_blocked()
        assert llm.health().state is LLMState.READY
        # The ABORT was kept, and is said once.
        assert aborted(transport) == [[stream.request_id]]
        assert await answers(llm)
        assert llm.cause_of_death is None


async def test_one_that_stays_frozen_is_given_up(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG, LLMConfig(frozen_timeout=7)) as (llm, transport):
        started = trio.current_time()
        transport.freeze("it was stopped")
        cause = await llm.wait_dead()
        assert trio.current_time() - started == pytest.approx(1 + 7 + 0.05)
        assert "it was stopped, and was not back in 1 s" in cause
        assert "given up after 7 s more" in cause


@pytest.mark.parametrize(("is_local", "patience"), [(True, 0.25), (False, 1)])
async def test_a_closed_connection_is_death(
    autojump_clock: MockClock, is_local: bool, patience: float
) -> None:
    async with open_scripted(LONG) as (llm, transport):
        transport.is_local = is_local
        started = trio.current_time()
        transport.make_unreachable()
        assert f"not back in {patience} s" in await llm.wait_dead()
        # Nobody is there who could send: that is seen at the first look.
        assert trio.current_time() - started == pytest.approx(patience + 0.005)


async def test_a_broken_output_connection_ends_what_may_have_lost_tokens(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(LONG) as (llm, transport):
        async with llm.open_stream(PROMPT, MANY) as stream:
            await trio.sleep(0.25)
            transport.break_outputs()
            with pytest.raises(EngineDeadError, match="may be lost"):
                await text_of(stream)
        assert aborted(transport) == [[stream.request_id]]
        assert await answers(llm)


async def test_a_request_that_may_have_been_lost_on_its_way_is_told(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*"ab", first_token_delay_s=3.0)) as (llm, transport):
        async with llm.open_stream(PROMPT, MANY) as old:
            await trio.sleep(2.5)
            async with llm.open_stream(PROMPT, MANY) as young:
                await trio.sleep(0.1)
                transport.freeze()
                await trio.sleep(0.1)
                transport.thaw()
                with pytest.raises(EngineDeadError, match="may be lost"):
                    await text_of(young)
            assert await text_of(old) == "a"
        assert [young.request_id] in aborted(transport)


async def test_aborts_of_the_last_moments_are_said_again(autojump_clock: MockClock) -> None:
    """They left, and may have been lost with the connection that took them."""
    async with open_scripted(SILENT) as (llm, transport):
        async with llm.open_stream(PROMPT, MANY) as early:
            pass
        await trio.sleep(60)
        async with llm.open_stream(PROMPT, MANY) as late:
            pass
        transport.freeze()
        await trio.sleep(0.5)
        transport.thaw()
        await wait_all_tasks_blocked()
        assert aborted(transport) == [[early.request_id], [late.request_id], [late.request_id]]


async def test_work_without_a_step_and_without_an_answer(autojump_clock: MockClock) -> None:
    """The slow second rule: its sockets are well, its steps are not."""
    hanging = script(*"ab", faults=[{"after_steps": 1, "how": "hang"}])
    config = LLMConfig(step_timeout=60, frozen_timeout=15)
    async with open_scripted(hanging, config) as (llm, _):
        started = trio.current_time()
        with pytest.raises(EngineDeadError, match="work for 60 s, makes no step") as caught:
            await llm.generate(PROMPT, MANY)
        assert 60 <= trio.current_time() - started <= 60 + 15 + 10
        assert caught.value.partial.outputs[0].text == "a"
        assert llm.health().state is LLMState.FROZEN
        assert "given up after 15 s more" in await llm.wait_dead()


async def test_work_without_a_step_but_with_an_answer_is_no_freeze(
    autojump_clock: MockClock,
) -> None:
    """A long prefill, a request that waits in a paused engine: utilities are answered."""
    async with open_scripted(script("a", "b", first_token_delay_s=500.0)) as (llm, _):
        assert (await llm.generate(PROMPT, MANY)).outputs[0].text == "a"


async def test_idle_is_not_frozen(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport):
        before = transport.sent.copy()
        await trio.sleep(10_000)
        assert llm.health().state is LLMState.READY
        assert transport.sent == before
        assert await answers(llm)
