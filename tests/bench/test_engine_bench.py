"""``trioleg bench engine``: ours alone, small; and what the head makes of engines that fail it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from programs import END_S, TRIOLEG, descendants, running, wait_until

from trioleg.bench.engine import run_engine_bench
from trioleg.bench.engine_subjects import EngineBench, Subject, opened
from trioleg.cli import commands
from trioleg.config import LLMConfig
from trioleg.errors import TriolegError
from trioleg.runtime.engines import start_engine

_ENDLESS = {"token_ids": [5, 6, 7]}
_PROMPTS = [[1, 2, 3], [4, 5]]


@asynccontextmanager
async def _scripted(tmp_path, script):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    async with opened("scripted", start_engine(tmp_path, LLMConfig(), script=path)) as subject:
        yield subject


def _measure(subject: Subject, prompts, steps: int):
    return subject.measure(lambda head: head.decode(prompts, steps))


def test_every_figure_is_measured_and_no_process_is_left(smollm2) -> None:
    sizes = ("--streams", "1", "--streams", "2", "--contexts", "16", "--prompt-tokens", "8")
    options = (*sizes, "--steps", "3", "--runs", "2", "--json")
    with running(*TRIOLEG, "bench", "engine", *options) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    report = json.loads(program.stdout)
    runs = {series["what"]: series["runs"] for series in report["series"]}
    assert {what: len(by["trioleg"]) for what, by in runs.items()} == {
        "time to first token, 8 tokens": 2,
        "prefill, 8 prompts of 8 tokens": 2,
        "decode, 1 × 16": 2,
        "decode, 2 × 16": 2,
        "peak memory of its processes": 1,
    }
    for by in runs.values():
        assert list(by) == ["trioleg"]
        assert min(by["trioleg"]) > 0
    assert all(series["goal"] is None for series in report["series"])
    assert report["settings"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("python", "why"), [("no/python", "cannot be run"), ("false", "has no vLLM")]
)
async def test_vllm_needs_an_interpreter_that_has_it_before_engines_start(
    smollm2, python, why
) -> None:
    told: list[str] = []
    with pytest.raises(TriolegError, match=f"--vllm-python is '{python}', but it {why}"):
        await run_engine_bench("smollm2-135m", EngineBench(vllm_python=Path(python)), told.append)
    assert told == []


def test_an_option_of_vllm_alone_needs_vllm() -> None:
    said = CliRunner().invoke(commands, ["bench", "engine", "--enforce-eager"])
    assert said.exit_code == 2
    assert "without --vllm-python" in said.output


def test_it_leaves_in_order_at_control_c(smollm2) -> None:
    sizes = ("--streams", "1", "--contexts", "16", "--prompt-tokens", "8")
    with running(*TRIOLEG, "bench", "engine", *sizes, "--runs", "100000") as program:
        program.wait_for(r"run 2 of 100000")
        program.process.send_signal(signal.SIGINT)
        code = program.wait()
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 130, program.said()
    assert "Traceback" not in program.stderr


async def test_steady_decoding_is_counted_from_when_all_have_begun(tmp_path) -> None:
    async with _scripted(tmp_path, _ENDLESS) as subject:
        for _ in range(2):
            measured = await _measure(subject, _PROMPTS, 10)
            assert measured.tokens == 20
            assert measured.seconds > 0
            assert measured.first == [5, 5]
        read = await subject.measure(lambda head: head.prefill(_PROMPTS))
        assert (read.tokens, read.first) == (5, [5, 5])
        assert read.rate == read.tokens / read.seconds


async def test_an_engine_leaves_the_processor_to_others(tmp_path) -> None:
    async with _scripted(tmp_path, _ENDLESS) as subject:
        await _measure(subject, _PROMPTS, 10)
        with trio.fail_after(END_S):
            await subject.quiet_down()
        assert subject.cpu_seconds() > 0
        assert subject.peak_mb() > 1


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ({"steps": [[5], [6]]}, "ended a request with stop"),
        ({"steps": [[5], [6]], "finish": "length"}, "an answer was complete before"),
        (_ENDLESS | {"faults": [{"after_steps": 3, "how": "error"}]}, "ended a request with error"),
        (_ENDLESS | {"faults": [{"after_steps": 3, "how": "raise"}]}, "says that it is dead"),
    ],
)
async def test_an_engine_that_does_not_do_what_it_is_asked_for(tmp_path, script, why) -> None:
    async with _scripted(tmp_path, script) as subject:
        with pytest.raises(TriolegError, match=why):
            await _measure(subject, _PROMPTS, 100)


async def test_an_engine_that_is_killed(tmp_path) -> None:
    script = {"token_ids": [5], "step_interval_s": 60.0}
    async with _scripted(tmp_path, script) as subject:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_when_asked, subject)
            with pytest.raises(TriolegError, match="gave no figure: it was killed by SIGKILL"):
                await _measure(subject, _PROMPTS, 100)


async def _kill_when_asked(subject: Subject) -> None:
    # The measurement has sent its requests by then, and waits for a step that is a minute away.
    await trio.testing.wait_all_tasks_blocked(0.05)
    os.kill(subject.pids[0], signal.SIGKILL)


def test_there_is_room_for_every_stream_at_its_longest() -> None:
    asked = EngineBench(streams=(1, 32), contexts=(128, 1500), steps=32)
    assert asked.max_model_len > 1500 + 32 + 32 * 1500 // 2048
    assert asked.cache_tokens > 32 * asked.max_model_len
    assert EngineBench(streams=(1,), contexts=(8,)).max_num_seqs == 8
