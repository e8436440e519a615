"""``open_llm`` with a real engine process (the scripted one): its start, its body's errors, its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from programs import alive, descendants, wait_until

from trioleg import (
    EngineDeadError,
    EngineStartError,
    LLMConfig,
    ModelStoreError,
    SamplingParams,
    open_llm,
)

# "The capital of France is Paris." in the tokens of SmolLM2, and its end token.
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
# Only to end a test that hangs.
PATIENCE = 60


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def write(**fields: object) -> Path:
        file = tmp_path / "script.json"
        file.write_text(json.dumps({"steps": [[token] for token in PARIS], **fields}))
        return file

    return write


def engine_processes() -> list[int]:
    return descendants(os.getpid())


@pytest.mark.parametrize(("generation_config", "temperature"), [("auto", 0.25), ("vllm", 1.0)])
async def test_the_models_own_sampling_defaults_can_be_left_out(
    smollm2: Path,
    script: Callable[..., Path],
    tmp_path: Path,
    generation_config: str,
    temperature: float,
) -> None:
    for file in smollm2.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    config = LLMConfig(generation_config=generation_config)
    with trio.fail_after(PATIENCE):
        async with open_llm(tmp_path, config, script=script()) as llm:
            assert llm.default_sampling_params().temperature == temperature


async def test_an_answer_and_nothing_left(smollm2: Path, script: Callable[..., Path]) -> None:
    with trio.fail_after(PATIENCE):
        async with open_llm(smollm2, script=script()) as llm:
            processes = engine_processes()
            assert len(processes) == 2
            output = await llm.generate([{"role": "user", "content": "Hi"}])
            assert output.outputs[0].text == "The capital of France is Paris."
            async with llm.open_stream("Hello", SamplingParams()) as stream:
                text = "".join([output.outputs[0].text async for output in stream])
            assert text == "The capital of France is Paris."
    assert not any(alive(pid) for pid in processes)


async def test_the_bodys_error_leaves_as_itself(smollm2: Path, script: Callable[..., Path]) -> None:
    error = LookupError("the body's own")
    with trio.fail_after(PATIENCE), pytest.raises(LookupError) as caught:
        async with open_llm(smollm2, script=script()):
            raise error
    assert caught.value is error
    assert engine_processes() == []


async def test_a_cancel_from_outside_takes_everything_down(
    smollm2: Path, script: Callable[..., Path]
) -> None:
    with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
        async with open_llm(smollm2, script=script(first_token_delay_s=600)) as llm:
            scope.cancel()
            await llm.generate("Hello")
    assert scope.cancelled_caught
    assert engine_processes() == []


async def test_a_cancel_while_the_engine_loads(smollm2: Path, script: Callable[..., Path]) -> None:
    with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel_when_started() -> None:
                await trio.to_thread.run_sync(wait_until, lambda: len(engine_processes()) >= 2)
                scope.cancel()

            nursery.start_soon(cancel_when_started)
            async with open_llm(smollm2, script=script(load_s=600)):
                pytest.fail("it is still loading")
    assert scope.cancelled_caught
    assert engine_processes() == []


async def test_death_is_raised_after_the_body(smollm2: Path, script: Callable[..., Path]) -> None:
    body_ended = False
    faulty = script(faults=[{"after_steps": 2, "how": "raise"}])
    with trio.fail_after(PATIENCE), pytest.raises(EngineDeadError, match="the script says"):
        async with open_llm(smollm2, script=faulty) as llm:
            with pytest.raises(EngineDeadError):
                await llm.generate("Hello")
            assert "reported its own death" in await llm.wait_dead()
            body_ended = True
    assert body_ended


async def test_cancel_on_death(smollm2: Path, script: Callable[..., Path]) -> None:
    with trio.fail_after(PATIENCE), pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        async with open_llm(smollm2, script=script(), cancel_on_death=True):
            os.kill(engine_processes()[-1], signal.SIGKILL)
            await trio.sleep_forever()


async def test_an_engine_that_does_not_start_says_why(
    smollm2: Path, script: Callable[..., Path]
) -> None:
    broken = script(load_error="the weights are upside down")
    with trio.fail_after(PATIENCE), pytest.raises(EngineStartError, match="upside down"):
        async with open_llm(smollm2, script=broken):
            pytest.fail("there is no engine")
    assert engine_processes() == []


async def test_an_engine_that_takes_too_long(smollm2: Path, script: Callable[..., Path]) -> None:
    config = LLMConfig(start_timeout=0.5)
    with trio.fail_after(PATIENCE), pytest.raises(EngineStartError, match=r"within 0\.5 s"):
        async with open_llm(smollm2, config, script=script(load_s=600)):
            pytest.fail("it is still loading")
    assert engine_processes() == []


async def test_an_unknown_model() -> None:
    with pytest.raises(ModelStoreError, match="no-such-model"):
        async with open_llm("no-such-model"):
            pytest.fail("there is no model")
