"""Deadlines (E8): first token and total, wherever the request is when its time is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from scripted_llm import PROMPT, TOKENIZER, aborted, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import DeadlineExceeded, InvalidRequestError, LLMConfig, SamplingParams, Timeouts
from trioleg.outputs import EndingKind
from trioleg.testing.llm import open_scripted_llm

LONG = script(*["a"] * 100)


async def test_no_first_token_in_time(autojump_clock: MockClock) -> None:
    late = script("a", first_token_delay_s=60.0)
    async with open_scripted(late) as (llm, transport):
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded, match=r"no first token after 1\.5 s"):
            await llm.generate(
                PROMPT, SamplingParams(), timeouts=Timeouts(first_token=1.5, total=9)
            )
        assert trio.current_time() - started == pytest.approx(1.5)
        assert aborted(transport) == [added(transport)]
        assert llm.statistics().endings == {EndingKind.DEADLINE: 1}


async def test_the_first_token_in_time_is_enough(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport):
        timeouts = Timeouts(first_token=0.15)
        output = await llm.generate(PROMPT, SamplingParams(max_tokens=50), timeouts=timeouts)
        assert len(output.outputs[0].token_ids) == 50
        assert aborted(transport) == []


@pytest.mark.parametrize("n", [1, 3])
async def test_the_total_on_a_busy_stream(autojump_clock: MockClock, n: int) -> None:
    async with open_scripted(LONG) as (llm, transport):
        with pytest.raises(DeadlineExceeded, match=r"not complete after 0\.55 s") as e:
            params = SamplingParams(n=n, max_tokens=100)
            await llm.generate(PROMPT, params, timeouts=Timeouts(total=0.55))
        assert [one.text for one in e.value.partial.outputs] == ["aaaaaa"] * n
        assert aborted(transport) == [added(transport)]


async def test_a_queued_request(autojump_clock: MockClock) -> None:
    one_at_a_time = script(*["a"] * 100, max_num_seqs=1)
    async with open_scripted(one_at_a_time) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams(max_tokens=100)) as busy:
            await busy.receive()
            with pytest.raises(DeadlineExceeded):
                await llm.generate(PROMPT, SamplingParams(), timeouts=Timeouts(first_token=0.5))
            await busy.receive()
        assert len(aborted(transport)) == 2


async def test_a_reader_that_does_not_come_back(autojump_clock: MockClock) -> None:
    """The request ends though nobody receives; what had come is still there."""
    async with open_scripted(LONG) as (llm, transport):
        timeouts = Timeouts(total=0.55)
        params = SamplingParams(max_tokens=100)
        async with llm.open_stream(PROMPT, params, timeouts=timeouts) as stream:
            await trio.sleep(5)
            assert stream.ending is not None
            assert aborted(transport) == [[stream.request_id]]
            assert (await stream.receive()).outputs[0].text == "aaaaaa"
            with pytest.raises(DeadlineExceeded):
                await stream.receive()


async def test_a_frozen_engine(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG, LLMConfig(unreachable_timeout=10)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams(), timeouts=Timeouts(total=1)) as stream:
            await stream.receive()
            transport.freeze()
            with pytest.raises(DeadlineExceeded):
                while True:
                    await stream.receive()
            assert aborted(transport) == []
            transport.thaw()
            await trio.sleep(0.1)
            assert [stream.request_id] in aborted(transport)


async def test_the_time_runs_from_the_arrival(autojump_clock: MockClock) -> None:
    async with open_scripted(LONG) as (llm, transport):
        await trio.sleep(10)
        arrived_at = trio.current_time() - 2
        timeouts = Timeouts(total=2.5)
        async with llm.open_stream(
            PROMPT, SamplingParams(), timeouts=timeouts, arrived_at=arrived_at
        ) as stream:
            await trio.sleep(0.6)
            assert stream.ending is not None
            assert stream.ending.kind is EndingKind.DEADLINE
        with pytest.raises(DeadlineExceeded):
            await llm.generate(
                PROMPT, SamplingParams(), timeouts=timeouts, arrived_at=trio.current_time() - 3
            )
        assert len(added(transport)) == 1


async def test_while_the_prompt_is_read(autojump_clock: MockClock) -> None:
    async def slow(tokenize: Callable[[], list[int]]) -> list[int]:
        await trio.sleep(100)
        return tokenize()

    async with open_scripted_llm(LONG, TOKENIZER) as (llm, transport):
        llm._requests._prompts._run_sync = slow
        with pytest.raises(DeadlineExceeded, match="no first token after 1 s"):
            await llm.generate("a", SamplingParams(), timeouts=Timeouts(first_token=1))
        assert added(transport) == []
        assert llm.statistics().endings == {EndingKind.DEADLINE: 1}
        with trio.move_on_after(1):
            await llm.generate("a", SamplingParams())
        assert llm.statistics().endings[EndingKind.LEFT] == 1


async def test_the_defaults_are_the_configs(autojump_clock: MockClock) -> None:
    config = LLMConfig(timeouts=Timeouts(first_token=5, total=0.55))
    async with open_scripted(LONG, config) as (llm, _):
        with pytest.raises(DeadlineExceeded, match=r"0\.55"):
            await llm.generate(PROMPT, SamplingParams(max_tokens=100))
        output = await llm.generate(
            PROMPT, SamplingParams(max_tokens=100), timeouts=Timeouts(total=60)
        )
        assert len(output.outputs[0].token_ids) == 100


async def test_many_deadlines_one_timer_and_no_leak(autojump_clock: MockClock) -> None:
    """Requests that end long before their time leave nothing behind for that long."""
    async with open_scripted(script("a")) as (llm, _):
        for _ in range(3000):
            timeouts = Timeouts(first_token=3600, total=3600)
            await llm.generate(PROMPT, SamplingParams(), timeouts=timeouts)
        assert len(llm._requests.deadlines) <= 1100


async def test_an_earlier_deadline_is_not_slept_over(autojump_clock: MockClock) -> None:
    late = script("a", first_token_delay_s=1000.0)
    async with open_scripted(late) as (llm, _), trio.open_nursery() as nursery:
        ended: list[float] = []

        async def one(seconds: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await llm.generate(PROMPT, SamplingParams(), timeouts=Timeouts(total=seconds))
            ended.append(seconds)

        for seconds in (50.0, 20.0, 30.0, 1.0, 40.0):
            nursery.start_soon(one, seconds)
            await wait_all_tasks_blocked()
        await trio.sleep(60)
        assert ended == [1.0, 20.0, 30.0, 40.0, 50.0]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5", 10**90])
@pytest.mark.parametrize("name", ["first_token", "total"])
def test_what_is_no_duration_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"timeouts\.{name} is .*allowed: ") as caught:
        Timeouts(**{name: value})  # type: ignore[arg-type]
    assert caught.value.parameter == f"timeouts.{name}"
