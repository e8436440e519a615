"""An engine after another (D14), and what ``Health`` says meanwhile, in virtual time.

With real processes: ``test_supervision.py``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import trio
from scripted_llm import PROMPT, TOKENIZER, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import (
    EngineDeadError,
    EngineStartError,
    EngineUnavailableError,
    Health,
    LLMConfig,
    LLMState,
    SamplingParams,
    ServerShutdown,
)
from trioleg.messages import EngineCoreOutput, EngineCoreOutputs
from trioleg.runtime.engines import Engine
from trioleg.runtime.llm import LLM
from trioleg.runtime.opening import running
from trioleg.testing import Script, ScriptedTransport

WORDS = script(*"abcabccbac", step=0.1, finish="length")
MANY = SamplingParams(max_tokens=100)
RESTARTS = LLMConfig(restart_engine=True)


async def answers(llm: LLM) -> bool:
    return (await llm.generate(PROMPT, MANY)).outputs[0].text == "abcabccbac"


@dataclass
class Fleet:
    """Engines to come: ``load_s`` each, ``fail`` names the starts that fail, from 0."""

    load_s: float = 0.0
    fail: set[int] = field(default_factory=set)
    forget_to_answer: bool = False
    words: Script = WORDS
    transports: list[ScriptedTransport] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        self.starts.append(trio.current_time())
        await trio.sleep(self.load_s)
        if len(self.starts) - 1 in self.fail:
            raise EngineStartError("the engine did not start: the weights are upside down")
        transport = ScriptedTransport(self.words)
        if self.forget_to_answer:
            transport._is_running = False
        self.transports.append(transport)
        try:
            yield Engine(0, transport.ready, transport)
        finally:
            self.ends.append(trio.current_time())
            await transport.aclose()

    def llm(self, config: LLMConfig) -> LLM:
        async def inline(tokenize: Callable[[], list[int]]) -> list[int]:
            await trio.lowlevel.checkpoint()
            return tokenize()

        return LLM("m", TOKENIZER, self.open, config, run_sync=inline, clock=trio.current_time)


async def test_another_engine_follows_one_that_died(autojump_clock: MockClock) -> None:
    async with open_scripted(WORDS, RESTARTS) as (llm, first):
        async with llm.open_stream(PROMPT, MANY) as stream:
            await trio.sleep(0.25)
            first.inject_dead()
            assert (await stream.receive()).outputs[0].text == "abc"
            with pytest.raises(EngineDeadError, match="reported its own death"):
                await stream.receive()
            health = llm.health()
            assert (health.state, llm.cause_of_death) == (LLMState.RESTARTING, None)
            assert "reported its own death" in health.cause
            assert health.retry_after is not None
            with pytest.raises(EngineUnavailableError, match="being restarted") as caught:
                await llm.generate(PROMPT, MANY)
            assert caught.value.retry_after > 0
            await trio.sleep(1.5)
        assert llm.health() == Health(LLMState.READY)
        assert llm.statistics().engine_restarts == 1
        assert await answers(llm)
        second = first.successor
        assert second is not None
        assert len(added(first)) == len(added(second)) == 1


async def test_old_ids_never_reach_new_requests(autojump_clock: MockClock) -> None:
    """Even an engine that went on with the old request's id could not: nobody has it any more."""
    async with open_scripted(WORDS, RESTARTS) as (llm, first):
        async with llm.open_stream(PROMPT, MANY) as old:
            first.inject_dead()
            await trio.sleep(3)
        second = first.successor
        assert second is not None
        async with llm.open_stream(PROMPT, MANY) as new:
            late = EngineCoreOutputs(outputs=[EngineCoreOutput(old.request_id, [5])], timestamp=1.0)
            second.inject([msgspec.msgpack.encode(late)])
            assert "".join([o.outputs[0].text async for o in new]) == "abcabccbac"
        assert old.request_id != new.request_id
        assert llm.statistics().engines[0].stale_outputs == 1


async def test_the_first_start_must_succeed(autojump_clock: MockClock) -> None:
    fleet = Fleet(fail={0})
    with pytest.raises(EngineStartError, match="upside down"):
        async with running(fleet.llm(RESTARTS)):
            pytest.fail("there is no engine")
    assert len(fleet.starts) == 1


async def test_loading_is_a_state(autojump_clock: MockClock) -> None:
    fleet = Fleet(load_s=30)
    llm = fleet.llm(LLMConfig())
    async with running(llm, wait_until_ready=False):
        health = llm.health()
        assert health.state is LLMState.LOADING
        assert health.retry_after is not None
        with pytest.raises(EngineUnavailableError, match="being started"):
            await llm.generate(PROMPT, MANY)
        with pytest.raises(EngineUnavailableError):
            _ = llm.max_model_len
        assert llm.statistics().engines == ()
        await llm.wait_ready()
        assert trio.current_time() - fleet.starts[0] == pytest.approx(30)
        assert llm.max_model_len == 2048
        assert await answers(llm)


async def test_a_failed_start_cancels_the_body_that_did_not_wait(
    autojump_clock: MockClock,
) -> None:
    fleet = Fleet(load_s=30, fail={0})
    with pytest.raises(EngineStartError, match="upside down"):
        async with running(fleet.llm(LLMConfig()), wait_until_ready=False):
            await trio.sleep_forever()


async def test_back_off_and_limit(autojump_clock: MockClock) -> None:
    """Starts that fail count as deaths do; the waits double."""
    fleet = Fleet(fail={1, 2, 3})
    llm = fleet.llm(LLMConfig(restart_engine=True, max_engine_restarts=3))
    async with running(llm):
        fleet.transports[0].inject_dead()
        cause = await llm.wait_dead()
        assert "upside down" in cause
        assert "max_engine_restarts is 3" in cause
        assert llm.health() == Health(LLMState.DEAD, cause)
        with pytest.raises(EngineDeadError, match="max_engine_restarts is 3"):
            await llm.generate(PROMPT, MANY)
    waits = [round(b - a) for a, b in zip(fleet.starts, fleet.starts[1:], strict=False)]
    assert waits == [1, 2, 4]


async def test_one_that_served_well_for_a_while_starts_the_count_anew(
    autojump_clock: MockClock,
) -> None:
    fleet = Fleet()
    llm = fleet.llm(LLMConfig(restart_engine=True, max_engine_restarts=1))
    async with running(llm):
        for number in range(5):
            await trio.sleep(100)
            assert await answers(llm)
            fleet.transports[number].make_unreachable()
            await trio.sleep(10)
        assert llm.statistics().engine_restarts == 5
        fleet.transports[5].make_unreachable()
        await trio.sleep(1)
        assert "max_engine_restarts is 1" in await llm.wait_dead()


async def test_one_that_is_ready_and_answers_nothing(autojump_clock: MockClock) -> None:
    """D10: the start has one deadline, whatever it hangs at."""
    fleet = Fleet(forget_to_answer=True)
    with pytest.raises(EngineStartError, match=r"answers nothing \(start_timeout is 3 s\)"):
        async with running(fleet.llm(LLMConfig(start_timeout=3))):
            pytest.fail("it is not ready")
    assert len(fleet.ends) == 1
    assert fleet.ends[0] - fleet.starts[0] == pytest.approx(3)


async def test_the_figures_of_observers_go_on(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A logger of stats, set once, sees the steps of every engine."""
    ranks: list[int] = []

    class Logger:
        def record(self, rank: int, *_: object) -> None:
            ranks.append(rank)

    caplog.set_level(logging.INFO, "trioleg")
    async with open_scripted(WORDS, RESTARTS) as (llm, first):
        llm.stats_logger = Logger()
        assert await answers(llm)
        before = len(ranks)
        first.inject_dead()
        await trio.sleep(5)
        assert await answers(llm)
        assert len(ranks) >= before + 10
    assert "is ready again" in caplog.text


async def test_shutting_down_while_another_is_started(autojump_clock: MockClock) -> None:
    fleet = Fleet()
    llm = fleet.llm(RESTARTS)
    async with running(llm):
        fleet.load_s = 1000
        fleet.transports[0].inject_dead()
        await trio.sleep(5)
        llm.shut_down("the server is shutting down")
        assert llm.health() == Health(LLMState.DRAINING, "the server is shutting down")
    assert len(fleet.starts) == 2
    assert trio.current_time() - fleet.starts[1] < 10


async def test_health_is_true_in_the_moment_that_a_client_is_told(
    autojump_clock: MockClock,
) -> None:
    for config, state in ((LLMConfig(), LLMState.DEAD), (RESTARTS, LLMState.RESTARTING)):
        async with open_scripted(WORDS, config) as (llm, transport):
            async with llm.open_stream(PROMPT, MANY) as stream:
                transport.make_unreachable()
                with pytest.raises(EngineDeadError):
                    while True:
                        await stream.receive()
                assert llm.health().state is state
        await wait_all_tasks_blocked()


async def test_wait_ready_waits_for_what_takes_requests_now(autojump_clock: MockClock) -> None:
    async with open_scripted(WORDS, RESTARTS) as (llm, first):
        first.inject_dead()
        await trio.sleep(0.1)
        assert llm.health().state is LLMState.RESTARTING
        await llm.wait_ready()
        assert llm.health() == Health(LLMState.READY)
        second = first.successor
        assert second is not None
        second.freeze()
        await wait_all_tasks_blocked()
        with trio.move_on_after(5) as waited:
            await llm.wait_ready()
        assert waited.cancelled_caught
        second.thaw()
        await llm.wait_ready()
        assert await answers(llm)


async def test_wait_ready_does_not_wait_for_what_never_comes(autojump_clock: MockClock) -> None:
    async with open_scripted(WORDS) as (llm, transport), trio.open_nursery() as nursery:
        transport.freeze()
        await wait_all_tasks_blocked()

        async def wait() -> None:
            with pytest.raises(EngineDeadError):
                await llm.wait_ready()

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        transport.make_unreachable()
    async with open_scripted(WORDS) as (llm, transport):
        transport.freeze()
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:

            async def wait_in_vain() -> None:
                with pytest.raises(ServerShutdown):
                    await llm.wait_ready()

            nursery.start_soon(wait_in_vain)
            await wait_all_tasks_blocked()
            llm.shut_down("enough")


async def test_who_is_turned_away_is_counted(autojump_clock: MockClock) -> None:
    async with open_scripted(WORDS, RESTARTS) as (llm, transport):
        transport.inject_dead()
        await trio.sleep(0.1)
        for _ in range(3):
            with pytest.raises(EngineUnavailableError):
                await llm.generate(PROMPT, MANY)
        await llm.wait_ready()
        assert llm.statistics().turned_away == {LLMState.RESTARTING: 3}
        assert LLMState.READY not in llm.statistics().turned_away


async def test_retry_after_counts_down(autojump_clock: MockClock) -> None:
    fleet = Fleet(load_s=8)
    llm = fleet.llm(RESTARTS)
    async with running(llm):
        fleet.transports[0].inject_dead()
        await trio.sleep(0.1)
        seen: list[float] = []
        while llm.health().retry_after is not None:
            seen.append(round(llm.health().retry_after or 0))
            await trio.sleep(2)
        assert seen == [9, 7, 5, 3, 1]
