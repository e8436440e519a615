"""The fault matrix with a real engine process (the scripted one) and real sockets.

One server for each ending. It strikes when all phases are there at once: requests that are queued, in their
prefill, decoding, and decoding with text held back, each streamed and plain, with one choice and with three.
Afterwards the front end has the descriptors that it had, and the engine nothing to do.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from connection_harness import Client
from ending_lines import EndingLines
from fault_matrix import FAULTS, Fault
from process_helpers import wait_until
from programs import descendants
from sse_grammar import read_answer, read_stream

from trioleg import EngineDeadError, LLMConfig, ServerConfig, open_llm
from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.server.serve import bind_sockets, serve
from trioleg.timeouts import Timeouts

# "The capital of France is Paris." in the tokens of SmolLM2, again and again.
PARIS = [504, 3575, 282, 4649, 314, 7042, 30]
SCRIPT = {
    "token_ids": PARIS,
    "step_interval_s": 0.02,
    # Long enough for all requests to be there while some are still in their prefill.
    "first_token_delay_s": 1.0,
    # Those that decode and those that are in their prefill; the others wait.
    "max_num_seqs": 24,
}
# Only to end a test that hangs.
PATIENCE_S = 60.0
# More than any test waits for.
ENDLESS = 1500
# Begins in the text, and never ends there: from " of" on, everything is held back.
HELD = " of France is Paris.The capital of Spain"


@dataclass
class Request:
    """One client's, and what it got: ``status`` None: nothing, so far or at all."""

    asked: dict[str, Any]
    status: int | None = None
    body: bytes = b""
    leave: trio.Event = field(default_factory=trio.Event)

    @property
    def is_stream(self) -> bool:
        return bool(self.asked["stream"])

    async def run(self, port: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_told, nursery.cancel_scope)
            await self._ask(port)
            nursery.cancel_scope.cancel(reason="it has been answered")

    async def _cancel_when_told(self, scope: trio.CancelScope) -> None:
        await self.leave.wait()
        scope.cancel(reason="the client leaves")

    async def _ask(self, port: int) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            client = Client(stream)
            await client.send(request_bytes(self.asked))
            self.status, _, self.body = await client.response()


def request_bytes(asked: dict[str, Any]) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **asked}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def each_way(**more: Any) -> list[Request]:
    """Streamed and plain, one choice and three."""
    common = {"max_tokens": ENDLESS, "return_token_ids": True, **more}
    return [Request({"stream": s, "n": n, **common}) for s in (True, False) for n in (1, 3)]


@dataclass
class Served:
    llm: LLM
    port: int
    nursery: trio.Nursery
    shutdown: trio.Event
    stopped: trio.Event
    requests: list[Request] = field(default_factory=list)

    @property
    def engine_pid(self) -> int:
        """Below the guardian's."""
        return descendants(os.getpid())[-1]

    async def fill(self) -> None:
        """Requests in every phase; returns when they are there."""
        self.nursery.start_soon(self._run_all, [*each_way(), *each_way(stop=HELD)])
        await wait_until(lambda: self._with_tokens() == 8)
        self.nursery.start_soon(self._run_all, each_way())
        await wait_until(lambda: len(self.llm.live_requests()) == 12)
        self.nursery.start_soon(self._run_all, each_way())
        await wait_until(lambda: self._load() == (24, 8))

    async def _run_all(self, requests: list[Request]) -> None:
        self.requests += requests
        async with trio.open_nursery() as nursery:
            for one in requests:
                nursery.start_soon(one.run, self.port)

    def _with_tokens(self) -> int:
        # Enough of them for something to be held back.
        return sum(one.num_output_tokens >= 5 for one in self.llm.live_requests())

    def _load(self) -> tuple[int, int]:
        scheduler = self.llm.statistics().engines[0].scheduler
        return scheduler.num_running_reqs, scheduler.num_waiting_reqs

    async def until_idle(self) -> None:
        """Nothing is left of the requests, here or in the engine."""
        await wait_until(lambda: self._load() == (0, 0))
        (engine,) = self.llm.statistics().engines
        assert (engine.processor.requests, self.llm.statistics().open_streams) == (0, 0)
        assert engine.num_free_blocks == engine.num_gpu_blocks

    async def answer(self) -> str:
        """To a request of now."""
        request = Request({"stream": False, "max_tokens": 7})
        await request.run(self.port)
        assert request.status == 200
        return read_answer(request.body).choices[0].content


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def serving(
    smollm2: Path, folder: Path, config: LLMConfig | None = None, write_timeout: float = 30.0
) -> AsyncIterator[Served]:
    """A server in this process, with an engine in another one; all of it is gone behind the block."""
    file = folder / "script.json"
    file.write_text(json.dumps(SCRIPT))
    before = descriptors()
    with trio.fail_after(PATIENCE_S):
        async with open_llm(smollm2, config, script=file) as llm, trio.open_nursery() as nursery:
            server_config = ServerConfig(port=0, write_timeout=write_timeout)
            sockets = await bind_sockets(server_config)
            for one in sockets:
                # So that a client that does not read is felt after a few pieces.
                one.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
            shutdown, stopped = trio.Event(), trio.Event()

            async def run(**started: Any) -> None:
                await serve(llm, server_config, sockets=sockets, shutdown=shutdown, **started)
                stopped.set()

            bound = await nursery.start(run)
            yield Served(llm, bound.port, nursery, shutdown, stopped)
            nursery.cancel_scope.cancel(reason="the test has seen it all")
    assert descendants(os.getpid()) == []
    assert descriptors() == before


def row(name: str) -> Fault:
    return next(one for one in FAULTS if one.name == name)


# ---------------------------------------------------------------------------- what is checked


def check_answers(served: Served, fault: Fault, lines: EndingLines) -> None:
    """Each in the right form; and all tokens that came from the engine are in them."""
    assert len(served.requests) == len(lines.lines) == 16
    assert {kind for _, kind, _ in lines.lines} == {fault.kind}
    assert served.llm.statistics().endings == {fault.kind: 16}
    seen = sum(check_answer(served, fault, one) for one in served.requests)
    assert seen == sum(tokens for _, _, tokens in lines.lines)


def check_answer(served: Served, fault: Fault, request: Request) -> int:
    """The tokens in it."""
    if request.is_stream and request.status == 200:
        stream = read_stream(request.body, request.asked)
        assert (stream.error or {"code": None})["code"] == (
            None if fault.tells == "abort" else fault.code
        )
        texts = [(one.content, one.token_ids or []) for one in stream.choices.values()]
    else:
        assert request.status == fault.status
        error = json.loads(request.body)["error"]
        assert error["code"] == fault.code
        choices = error.get("partial", {"choices": []})["choices"]
        texts = [(one["message"]["content"], one["token_ids"]) for one in choices]
    for text, ids in texts:
        assert text == served.llm.tokenizer.decode(list(ids))
        assert ids == (PARIS * (len(ids) // 7 + 1))[: len(ids)]
    return sum(len(ids) for _, ids in texts)


async def all_answered(served: Served) -> None:
    await wait_until(lambda: all(one.status is not None for one in served.requests))


# ---------------------------------------------------------------------------- endings


async def test_clients_leave(smollm2: Path, tmp_path: Path, ending_lines: EndingLines) -> None:
    async with serving(smollm2, tmp_path) as served:
        assert await served.answer() == "The capital of France is Paris."
        before = descriptors()
        await served.fill()
        for one in served.requests:
            one.leave.set()
        await served.until_idle()
        assert served.llm.statistics().endings == {EndingKind.LENGTH: 1, EndingKind.LEFT: 16}
        await wait_until(lambda: descriptors() == before)
        assert all(one.status is None for one in served.requests)
        assert await served.answer() == "The capital of France is Paris."
    assert len(ending_lines.lines) == 18


def abort_all(served: Served) -> None:
    for one in served.llm.live_requests():
        assert served.llm.abort(one.request_id)


def let_deadlines_pass(served: Served) -> None:
    """Deadlines that nobody has to wait for, and that cannot pass before all phases are there."""
    for one in served.llm.live_requests():
        served.llm._requests.deadlines.add(one, Timeouts(total=0.001), trio.current_time())


@pytest.mark.parametrize(
    ("name", "strike"),
    [("an abort by id", abort_all), ("the deadline of the whole", let_deadlines_pass)],
)
async def test_requests_that_are_ended(
    smollm2: Path,
    tmp_path: Path,
    ending_lines: EndingLines,
    name: str,
    strike: Callable[[Served], None],
) -> None:
    async with serving(smollm2, tmp_path) as served:
        before = descriptors()
        await served.fill()
        strike(served)
        await all_answered(served)
        await served.until_idle()
        check_answers(served, row(name), ending_lines)
        await wait_until(lambda: descriptors() == before)
        assert await served.answer() == "The capital of France is Paris."


async def test_the_engine_is_killed(
    smollm2: Path, tmp_path: Path, ending_lines: EndingLines
) -> None:
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        async with serving(smollm2, tmp_path) as served:
            await served.fill()
            os.kill(served.engine_pid, signal.SIGKILL)
            await all_answered(served)
            check_answers(served, row("the engine's process is gone"), ending_lines)
            late = Request({"stream": True})
            await late.run(served.port)
            assert (late.status, json.loads(late.body)["error"]["code"]) == (503, "engine_dead")


async def test_the_engine_is_killed_and_another_one_follows(
    smollm2: Path, tmp_path: Path, ending_lines: EndingLines
) -> None:
    config = LLMConfig(restart_engine=True)
    async with serving(smollm2, tmp_path, config) as served:
        before = descriptors()
        await served.fill()
        os.kill(served.engine_pid, signal.SIGKILL)
        await all_answered(served)
        check_answers(served, row("the engine dies and is restarted"), ending_lines)
        await wait_until(lambda: served.llm.statistics().engine_restarts == 1)
        assert await served.answer() == "The capital of France is Paris."
        await served.until_idle()
        await wait_until(lambda: descriptors() == before)


async def test_the_engine_is_stopped_and_goes_on(
    smollm2: Path, tmp_path: Path, ending_lines: EndingLines
) -> None:
    """The ABORTs of meanwhile reach it."""
    config = LLMConfig(frozen_timeout=PATIENCE_S)
    async with serving(smollm2, tmp_path, config) as served:
        before = descriptors()
        await served.fill()
        engine = served.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            await all_answered(served)
        finally:
            os.kill(engine, signal.SIGCONT)
        check_answers(served, row("the engine is frozen and comes back"), ending_lines)
        await wait_until(lambda: served.llm.health().cause == "")
        await served.until_idle()
        await wait_until(lambda: descriptors() == before)
        assert await served.answer() == "The capital of France is Paris."


async def test_the_server_shuts_down(
    smollm2: Path, tmp_path: Path, ending_lines: EndingLines
) -> None:
    async with serving(smollm2, tmp_path) as served:
        await served.fill()
        served.shutdown.set()
        await served.stopped.wait()
        await all_answered(served)
        check_answers(served, row("the server shuts down"), ending_lines)
        await served.until_idle()


async def test_clients_stop_reading(
    smollm2: Path, tmp_path: Path, ending_lines: EndingLines
) -> None:
    """The bound of a write ends their requests; a plain one, whose answer is not there yet, goes on."""
    async with serving(smollm2, tmp_path, write_timeout=0.5) as served:
        before = descriptors()
        healthy = Request({"stream": True, "max_tokens": 150, "return_token_ids": True})
        async with trio.open_nursery() as nursery:
            stalled = [partial(stall, served.port, n, served) for n in (1, 3)]
            for one in stalled:
                nursery.start_soon(one)
            await healthy.run(served.port)
        await served.until_idle()
        kind = row("the client stops reading").kind
        assert served.llm.statistics().endings == {kind: 2, EndingKind.LENGTH: 1}
        choice = read_stream(healthy.body, healthy.asked).choices[0]
        assert len(choice.token_ids or []) == 150
        await wait_until(lambda: descriptors() == before)
    assert len(ending_lines.lines) == 3


async def stall(port: int, n: int, served: Served) -> None:
    """A client that sends, and then reads nothing until it has been given up."""
    socket = trio.socket.socket()
    socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
    await socket.connect(("127.0.0.1", port))
    asked = {"stream": True, "n": n, "max_tokens": ENDLESS, "logprobs": True, "top_logprobs": 20}
    async with trio.SocketStream(socket) as stream:
        await stream.send_all(request_bytes(asked))
        left = EndingKind.LEFT
        await wait_until(lambda: served.llm.statistics().endings.get(left, 0) == 2)
