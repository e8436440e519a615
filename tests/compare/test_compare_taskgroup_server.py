"""The leg of today's asyncio, as it is served: good ends, leaving, deadlines, an engine's death, and a drain."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import trio

from trioleg.bench.processes import until
from trioleg.compare.legs import TASKGROUP, Case, Running, consuming, serving

_IDS = (504, 1453, 28, 339, 5248)
_BOUND_S = 60.0


@pytest.fixture
def case(smollm2: Path) -> Case:
    return Case(smollm2, _IDS)


def _body(**more: Any) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        **more,
    }


async def _ask(server: Running, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=_BOUND_S) as client:
        address = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        return await client.post(address, json=_body(**more))


async def _read(server: Running, has_begun: trio.Event) -> list[str]:
    """The events of a stream; ``has_begun`` once there is one."""
    lines: list[str] = []
    address = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=_BOUND_S) as client,
        client.stream("POST", address, json=_body()) as answer,
    ):
        async for line in answer.aiter_lines():
            lines.append(line)
            has_begun.set()
    return _events("\n".join(lines))


def _events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def _settled(server: Running) -> dict[str, Any]:
    """The census once no request is held."""

    async def is_settled() -> bool:
        return not (await server.probe.tell("census"))["requests"]

    assert await until(is_settled, _BOUND_S)
    return await server.probe.tell("census")


async def test_good_ends_deadlines_and_leaving(case: Case) -> None:
    async with serving(TASKGROUP, case) as server:
        puppet = server.puppet
        before = await server.probe.tell("census")
        answers: list[httpx.Response] = []

        async def ask(**more: Any) -> None:
            answers.append(await _ask(server, **more))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await puppet.wait_requests(1)
            await puppet.say(steps=3, finish="length")
        events = _events(answers.pop().text)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"

        # n = 3: one client that leaves, one ABORT of each choice.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask(n=3))
            await puppet.wait_requests(4)
            await puppet.say()
            nursery.cancel_scope.cancel()
        assert (await puppet.wait_aborts(3, _BOUND_S)).aborted == 3

        # Before the first token a deadline is a status; behind it, an event.
        answer = await _ask(server, timeouts={"first_token": 0.2})
        assert answer.status_code == 504
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask(timeouts={"total": 1.0}))
            await puppet.wait_requests(6)
            await puppet.say()
        events = _events(answers.pop().text)
        assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
        assert (await puppet.wait_aborts(5, _BOUND_S)).live == 0
        census = await _settled(server)
        assert census["names"].get("engine link") == before["names"]["engine link"] == 1
        assert census["names"]["read_outputs"] == 1


async def test_an_engine_that_dies_is_told_to_the_client_and_by_the_exit(case: Case) -> None:
    async with serving(TASKGROUP, case) as server:
        has_begun = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                events = await _read(server, has_begun)
                assert json.loads(events[-2])["error"]["code"] == "engine_dead"
                assert events[-1] == "[DONE]"

            nursery.start_soon(ask)
            await server.puppet.wait_requests(1)
            await server.puppet.say()
            await has_begun.wait()
            await server.puppet.signal(signal.SIGKILL)
        assert (await _ask(server)).status_code == 503
        os.kill(server.program.pid, signal.SIGTERM)
        with trio.fail_after(_BOUND_S):
            assert await server.program.wait_code() == 1
        assert "exit code -9" in server.program.last_words


async def test_a_drain_ends_what_is_left(case: Case) -> None:
    async with serving(TASKGROUP, replace(case, options={"drain_timeout": "0.3"})) as server:
        has_begun = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                events = await _read(server, has_begun)
                assert json.loads(events[-2])["error"]["code"] == "server_shutdown"

            nursery.start_soon(ask)
            await server.puppet.wait_requests(1)
            await server.puppet.say()
            await has_begun.wait()
            os.kill(server.program.pid, signal.SIGTERM)
        with trio.fail_after(_BOUND_S):
            assert await server.program.wait_code() == 0


@pytest.mark.parametrize(
    ("name", "error", "others"),
    [
        ("crash", "ValueError: the body", []),
        ("error-in-cleanup", "KeyError: 'the clean-up'", ["ValueError: the body"]),
    ],
)
async def test_what_a_consumer_raises_leaves_as_itself(
    case: Case, name: str, error: str, others: list[str]
) -> None:
    async with consuming(TASKGROUP, case, name) as consumer:
        await consumer.puppet.wait_requests(1)
        await consumer.puppet.pace(100)
        with trio.fail_after(_BOUND_S):
            assert await consumer.program.wait_code() == 1
        (line,) = [json.loads(one) for one in consumer.program.lines if one.startswith("{")]
    assert (line["error"], line["others"]) == (error, others)
