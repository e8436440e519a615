"""The leg of trioleg as a scenario meets it: its server under each fault, and each of its consumers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trioleg.bench.client import CHAT, Exchange, ask, chat_body
from trioleg.compare.inside.faults import put_in
from trioleg.compare.legs import TRIOLEG, Case, Running, consuming, serving
from trioleg.compare.programs.trioleg_consumers import CONSUMERS

PATIENCE_S = 60.0
TOKEN_IDS = (504, 2365, 260)
# A connection, its request, who waits for its client to leave.
TASKS_OF_A_STREAM = 3
DONE = b"data: [DONE]\n\n"


def case(directory: Path, **asked: Any) -> Case:
    return Case(directory, TOKEN_IDS, **asked)


@asynccontextmanager
async def two_streams(server: Running) -> AsyncIterator[list[Exchange]]:
    """Two that the engine has, in this order."""
    assert server.port is not None
    async with AsyncExitStack() as stack:
        exchanges = []
        for number in (1, 2):
            body = chat_body(stream=True, max_tokens=20)
            exchanges.append(await stack.enter_async_context(ask(server.port, CHAT, body)))
            await server.puppet.wait_requests(number)
        yield exchanges


async def say_six(server: Running) -> None:
    """Six steps, of which the last one ends what is still live."""
    for number in range(6):
        await server.puppet.say(finish="length" if number == 5 else None)


async def settled(server: Running, tasks: int, requests: int = 0) -> None:
    """Returns once there is no more than there was."""
    while True:
        census = await server.probe.tell("census")
        if census["tasks"] <= tasks and census["requests"] <= requests:
            return
        await trio.lowlevel.checkpoint()


# The server's own bug is told to its client, but not what it is.
_TOLD = {"process-one": b"the scenario's fault: process-one", "frame": b'"code":"output_error"'}


@pytest.mark.parametrize("fault", _TOLD)
async def test_a_fault_of_one_request_is_its_own_alone(
    smollm2: Path, tmp_path: Path, fault: str
) -> None:
    asked = case(smollm2, fault=fault, lanes=tmp_path / "lanes")
    with trio.fail_after(PATIENCE_S):
        async with serving(TRIOLEG, asked) as server:
            before = await server.probe.tell("census")
            async with two_streams(server) as (first, second):
                await say_six(server)
                await first.receive_all()
                assert first.body.endswith(DONE)
                await second.receive_all()
                assert _TOLD[fault] in second.body
                assert second.body.endswith(DONE)
            await settled(server, before["tasks"])
            assert f"RuntimeError: the scenario's fault: {fault}" in "\n".join(server.program.lines)
            assert (await server.probe.tell("lanes"))["events"] > 100
    lines = (tmp_path / "lanes").read_text(encoding="utf-8").splitlines()
    assert any(json.loads(line)["event"] == "cancelled" for line in lines)


@pytest.mark.parametrize("fault", ["process-step", "reader"])
async def test_a_fault_of_the_reading_task_is_told_to_all(smollm2: Path, fault: str) -> None:
    with trio.fail_after(PATIENCE_S):
        async with serving(TRIOLEG, case(smollm2, fault=fault)) as server:
            async with two_streams(server) as exchanges:
                await say_six(server)
                for exchange in exchanges:
                    await exchange.receive_all()
                    assert b"its link has failed: RuntimeError: the scenario's" in exchange.body
                    assert exchange.body.endswith(DONE)
                    assert b'"finish_reason":"length"' not in exchange.body
            # It would go on saying so for a while.
            os.kill(server.program.pid, signal.SIGTERM)
            assert await server.program.wait_code() == 1
            assert f"RuntimeError: the scenario's fault: {fault}" in "\n".join(server.program.lines)


async def test_an_abort_that_fails_is_logged_and_nothing_is_left(smollm2: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        async with serving(TRIOLEG, case(smollm2, fault="abort")) as server:
            before = await server.probe.tell("census")
            async with two_streams(server) as (first, second):
                first.leave()
                await settled(server, before["tasks"] + TASKS_OF_A_STREAM, requests=1)
                await server.puppet.say(finish="length")
                await second.receive_all()
                assert second.body.endswith(DONE)
            await settled(server, before["tasks"])
            assert "RuntimeError: the scenario's fault: abort" in "\n".join(server.program.lines)
            assert not (await server.puppet.state()).aborted


def test_a_fault_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="fault is 'flood'; allowed: process-one, process-step,"):
        put_in("flood", lambda _check: None, [])


ERRORS = {
    "break": ("", [], 0),
    "forget": ("", [], 0),
    "error-in-cleanup": ("KeyError: 'the clean-up'", ["ValueError: the body"], 1),
    "two-errors": (
        "ExceptionGroup: Exceptions from Trio nursery (2 sub-exceptions)",
        ["ValueError: first", "KeyError: 'second'"],
        1,
    ),
    "crash": ("ValueError: the body", [], 1),
}


@pytest.mark.parametrize("name", CONSUMERS)
async def test_a_consumer_says_what_came_of_it(smollm2: Path, tmp_path: Path, name: str) -> None:
    over = tmp_path / "over"
    num_requests = 2 if name == "two-errors" else 1
    asked = case(smollm2, options={"until": str(over)})
    with trio.fail_after(PATIENCE_S):
        async with consuming(TRIOLEG, asked, name) as consumer:
            await consumer.puppet.wait_requests(num_requests)
            await consumer.puppet.pace(50.0)
            if name == "break":
                await consumer.puppet.wait_aborts(1, PATIENCE_S)
                assert not (await consumer.probe.tell("census"))["requests"]
            over.touch()
            code = await consumer.program.wait_code()
    (said,) = [json.loads(line) for line in consumer.program.lines if line.startswith("{")]
    error, others, expected_code = ERRORS[name]
    assert (said["error"], said["cause"], code) == (error, "", expected_code)
    assert sorted(said["others"]) == sorted(others)
    assert said["cause_at"] is not None
    assert said["census"]["requests"] == 0
    # Trio's own, and the program's.
    assert set(said["census"]["names"]) == {"<init>", "_watched", "<TrioToken.run_sync_soon task>"}


async def test_an_option_that_there_is_not(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trioleg.compare.programs.trioleg_leg", str(smollm2)]
    command += ["--engine", "[]", "--probe", str(tmp_path / "probe"), "--port", "1"]
    with trio.fail_after(PATIENCE_S):
        ended = await trio.run_process(
            [*command, "--option", "colour=red"], check=False, capture_stderr=True
        )
    assert (ended.returncode, ended.stderr) == (64, b"no such thing: colour\n")
