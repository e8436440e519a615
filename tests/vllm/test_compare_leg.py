"""vLLM's leg of the study: it is vLLM's own server and library, with an engine of ours that it takes for its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from vllm_place import VLLM_PYTHON

from trioleg.bench.client import CHAT, ask, chat_body
from trioleg.compare.legs import VLLM, Case, consuming, serving, started
from trioleg.errors import TriolegError

# Milliseconds here; these are for a machine under load.
_SOON_S = 30.0
# vLLM looks every five seconds whether its engine is still there.
_EXIT_S = 60.0


@pytest.fixture
def case(smollm2: Path) -> Case:
    return Case(smollm2, (504, 253, 260), str(VLLM_PYTHON))


def stream_body() -> bytes:
    return chat_body(stream=True, max_tokens=50, model="model")


async def receive_frames(exchange: Any, number: int) -> None:
    with trio.fail_after(_SOON_S):
        while exchange.body.count(b"data:") < number:
            await exchange.receive()


async def test_it_streams_tells_of_a_disconnect_and_notices_its_engines_end(case: Case) -> None:
    async with serving(VLLM, case) as leg:
        async with ask(leg.port, CHAT, stream_body()) as exchange:
            await leg.puppet.wait_requests(1, _SOON_S)
            await leg.puppet.say(steps=2)
            await receive_frames(exchange, 2)
            assert (await leg.probe.tell("census"))["requests"] == 1
        assert (await leg.puppet.wait_aborts(1, _SOON_S)).aborted == 1
        assert (await leg.probe.tell("census"))["requests"] == 0

        async with ask(leg.port, CHAT, stream_body()) as exchange:
            await leg.puppet.wait_requests(2, _SOON_S)
            await leg.puppet.say()
            await receive_frames(exchange, 2)
            await leg.puppet.signal(signal.SIGKILL)
            with trio.fail_after(_SOON_S):
                await exchange.receive_all()
            assert b'"error"' in exchange.body
        with trio.fail_after(_EXIT_S):
            await leg.program.wait_code()


async def test_a_bug_in_processing_reaches_every_stream(case: Case) -> None:
    """One task processes for all; what is raised in it is raised to all."""
    async with (
        serving(VLLM, Case(case.directory, case.token_ids, case.vllm_python, "process-one")) as leg,
        ask(leg.port, CHAT, stream_body()) as first,
    ):
        await leg.puppet.wait_requests(1, _SOON_S)
        async with ask(leg.port, CHAT, stream_body()) as second:
            await leg.puppet.wait_requests(2, _SOON_S)
            await leg.puppet.say(steps=3)
            with trio.fail_after(_SOON_S):
                await first.receive_all()
                await second.receive_all()
        assert b'"error"' in first.body
        assert b'"error"' in second.body
        # The clients are told no reason; the log has it.
        assert any("the scenario's fault: process-one" in line for line in leg.program.lines)


async def test_a_consumer_that_fails_tells_and_leaves_with_its_error(case: Case) -> None:
    async with consuming(VLLM, case, "crash") as leg:
        await leg.puppet.wait_requests(1, _SOON_S)
        # Step by step, so that no output is merged with the next.
        await leg.puppet.pace(20.0)
        with trio.fail_after(_EXIT_S):
            assert await leg.program.wait_code() == 1
        (told,) = [json.loads(line) for line in leg.program.lines if line.startswith("{")]
        assert told["error"] == "ValueError: the body"
        assert told["cause_at"] is not None


@pytest.mark.parametrize(
    ("asked", "value"), [("write_timeout", "1"), ("total_timeout", "1"), ("mailbox_max_bytes", "1")]
)
async def test_it_says_what_vllm_does_not_have(case: Case, asked: str, value: str) -> None:
    with_option = Case(case.directory, case.token_ids, case.vllm_python, options={asked: value})
    async with started(VLLM, with_option, 1) as (program, _):
        with trio.fail_after(_SOON_S):
            assert await program.wait_code() == 64
    assert program.last_words.startswith(f"no such thing: {asked}")


async def test_an_engine_that_dies_while_it_loads_ends_the_start(case: Case) -> None:
    dying = Case(case.directory, case.token_ids, case.vllm_python, die="loading")
    with pytest.raises(TriolegError, match="Engine core initialization failed"):
        async with serving(VLLM, dying):
            pass
