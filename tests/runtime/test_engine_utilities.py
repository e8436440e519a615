"""Sleep, pause, caches and profile, asked of a real engine in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from scripted_llm import open_scripted, script

from trioleg import (
    LLM,
    EngineConfig,
    LLMConfig,
    RequestAborted,
    SamplingParams,
    WireError,
    open_llm,
)
from trioleg.ipc.codec import encode
from trioleg.messages import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from trioleg.runtime.utilities import EngineUtilities

# Only to end a test that hangs.
PATIENCE = 300
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0)
PARIS = "The capital of France is Paris."


@asynccontextmanager
async def open_small(model: Path, tmp_path: Path) -> AsyncIterator[LLM]:
    engine = EngineConfig(num_gpu_blocks_override=100, torch_profiler_dir=tmp_path)
    with trio.fail_after(PATIENCE):
        async with open_llm(model, LLMConfig(engine=engine)) as llm:
            yield llm


async def answer(llm: LLM) -> tuple[str, int | None]:
    output = await llm.generate(QUESTION, GREEDY)
    return output.outputs[0].text, output.num_cached_tokens


class _Odd(EngineUtilities):
    """An engine that answers everything with nothing."""

    async def call_utility(self, method: str, *args: object) -> None:
        await trio.lowlevel.checkpoint()

    async def add_lora(self, lora_request: object) -> bool:
        raise AssertionError("nobody asks")


async def test_an_answer_of_another_kind_is_an_error() -> None:
    with pytest.raises(WireError, match="answers reset_prefix_cache with None; allowed: bool"):
        await _Odd().reset_prefix_cache()
    with pytest.raises(WireError, match="answers get_supported_tasks with None; allowed: a list"):
        await _Odd().get_supported_tasks()


async def test_what_an_engine_says_of_a_failure_has_an_end() -> None:
    async with open_scripted(script("a")) as (llm, transport):

        def send(kind: EngineCoreRequestType, body: bytes) -> bool:
            answer = UtilityOutput(msgspec.msgpack.decode(body)[1], "no " * 100_000)
            transport.inject([encode(EngineCoreOutputs(timestamp=1.0, utility_output=answer))])
            return kind is EngineCoreRequestType.UTILITY

        transport.send = send
        with trio.fail_after(PATIENCE), pytest.raises(WireError, match="no no") as refused:
            await llm.call_utility("list_loras")
        assert len(str(refused.value)) < 3000


@pytest.mark.parametrize("result", [7, "x", [], [None], {"a": 1}, True, [None, 1, 2]])
async def test_an_answer_in_another_form_is_an_error(result: object) -> None:
    async with open_scripted(script("a")) as (llm, transport):

        def send(kind: EngineCoreRequestType, body: bytes) -> bool:
            assert kind is EngineCoreRequestType.UTILITY
            answer = UtilityOutput(msgspec.msgpack.decode(body)[1], None, result)
            transport.inject([encode(EngineCoreOutputs(timestamp=1.0, utility_output=answer))])
            return True

        transport.send = send
        with trio.fail_after(PATIENCE), pytest.raises(WireError, match="allowed: a pair or nil"):
            await llm.call_utility("list_loras")


async def test_a_day_of_an_engine(smollm2: Path, tmp_path: Path) -> None:
    async with open_small(smollm2, tmp_path) as llm:
        assert await answer(llm) == (PARIS, 0)
        assert await answer(llm) == (PARIS, 32)
        assert await llm.reset_prefix_cache() is True
        assert await answer(llm) == (PARIS, 0)

        for level in (0, 1, 2):
            await llm.sleep(level)
            assert await llm.is_sleeping() is True
            # Asked while it sleeps, answered when it is awake.
            async with llm.open_stream(QUESTION, GREEDY) as stream:
                if level == 2:
                    assert await llm.wake_up(["weights"]) is False
                assert await llm.wake_up() is True
                assert "".join([one.outputs[0].text async for one in stream]) == PARIS
        assert await llm.is_sleeping() is False

        await llm.start_profile("test")
        await answer(llm)
        trace = await llm.stop_profile()
        assert trace is not None
        assert Path(trace).parent == tmp_path
        assert Path(trace).stat().st_size > 0
        with pytest.raises(WireError, match="the profiler is off; start it first"):
            await llm.stop_profile()


async def test_what_a_pause_does_to_a_stream(smollm2: Path, tmp_path: Path) -> None:
    async with open_small(smollm2, tmp_path) as llm:
        long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
        async with llm.open_stream("Once upon a time", long) as stream:
            await stream.receive()
            assert await llm.reset_prefix_cache() is False
            await llm.pause("keep")
            await llm.resume()
            await stream.receive()
            await llm.pause("abort")
            with pytest.raises(RequestAborted):
                async for _ in stream:
                    pass
            await llm.resume()

        short = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)
        async with llm.open_stream("Once upon a time", short) as stream:
            await stream.receive()
            # Answered when the stream's last token has been made.
            await llm.pause("wait")
            assert await llm.call_utility("get_request_counts") == [0, 0]
            tokens = [token async for one in stream for token in one.outputs[0].token_ids]
            assert 10 < len(tokens) <= 19
            await llm.resume()
