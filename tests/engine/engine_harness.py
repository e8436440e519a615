"""A head for the engine tests: starts a scripted engine process and talks to it on the wire."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from process_helpers import wait_until

from trioleg.engine.scripted import Script
from trioleg.ipc.codec import decode_outputs, encode_request, encode_utility, is_engine_dead
from trioleg.ipc.handshake import EngineListener, listen_for_engine
from trioleg.ipc.launch import EngineProcess, open_engine_process, private_ipc_dir
from trioleg.ipc.transport import ZmqTransport
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineReadyResponse,
    EngineSamplingParams,
    FinishReason,
    UtilityOutput,
)

GENEROUS_S = 60.0
ENGINE = Path(__file__).with_name("scripted_engine.py")
REPOSITORY = Path(__file__).parents[2]


def make_request(request_id: str, *, client_index: int = 0, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=params.pop("prompt", [1, 2, 3]),
        mm_features=None,
        sampling_params=EngineSamplingParams(**({"max_tokens": 5} | params)),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=client_index,
    )


@dataclass
class Answer:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None, "an output behind the last"
        self.token_ids += output.new_token_ids
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


@dataclass
class Head:
    """The head's end of one engine."""

    process: EngineProcess
    transport: ZmqTransport
    ready: EngineReadyResponse
    lines: list[str]
    answers: dict[str, Answer] = field(default_factory=dict)
    last: EngineCoreOutputs | None = None

    def add(self, request_id: str, **params: Any) -> None:
        body = encode_request(make_request(request_id, **params))
        assert self.transport.send(EngineCoreRequestType.ADD, body)

    def send_raw(self, *frames: bytes) -> None:
        self.transport._input.socket.send_multipart([self.transport.identity, *frames])

    async def receive(self) -> bool:
        """Takes one message in; False for the death sentinel."""
        frames = await self.transport.receive()
        if is_engine_dead(frames):
            return False
        self.last = decode_outputs(frames)
        for output in self.last.outputs:
            self.answers.setdefault(output.request_id, Answer()).add(output)
        return True

    async def receive_until_finished(self, request_ids: Iterable[str]) -> None:
        waited_for = set(request_ids)
        await trio.lowlevel.checkpoint()
        while not waited_for <= self._finished():
            assert await self.receive(), "the engine died"

    def _finished(self) -> set[str]:
        return {name for name, answer in self.answers.items() if answer.finish_reason is not None}

    async def call(self, method: str, *args: Any, call_id: int = 1) -> UtilityOutput:
        body = encode_utility(0, call_id, method, args)
        assert self.transport.send(EngineCoreRequestType.UTILITY, body)
        while True:
            assert await self.receive(), "the engine died"
            if self.last is not None and self.last.utility_output is not None:
                return self.last.utility_output


def engine_argv(script: Script, script_path: Path, address: str, *more: str) -> list[str]:
    script_path.write_bytes(msgspec.json.encode(script))
    return [sys.executable, str(ENGINE), str(script_path), address, *more]


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes find the package wherever they are started."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@asynccontextmanager
async def _start(
    script: Script, tmp_path: Path, stop_timeout: float, more: tuple[str, ...]
) -> AsyncIterator[tuple[EngineProcess, EngineListener, list[str]]]:
    lines: list[str] = []
    with trio.fail_after(GENEROUS_S), private_ipc_dir() as folder:
        async with AsyncExitStack() as stack:
            listener = await stack.enter_async_context(
                listen_for_engine(f"ipc://{folder}/handshake")
            )
            script_path = tmp_path / f"{folder.name}.json"
            argv = engine_argv(script, script_path, listener.address, *more)
            process = await stack.enter_async_context(
                open_engine_process(
                    argv, on_stderr_line=lines.append, stop_timeout=stop_timeout, ipc_dir=folder
                )
            )
            yield process, listener, lines


@asynccontextmanager
async def open_loading_engine(script: Script, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    """A scripted engine in a process of its own that has said HELLO and loads its model."""
    async with _start(script, tmp_path, GENEROUS_S, ()) as (process, listener, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept)
            folder = Path(listener.address.removeprefix("ipc://")).parent
            # The legs are bound when HELLO is here.
            await wait_until(lambda: len(list(folder.iterdir())) == 3)
            yield process
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_engine(
    script: Script, tmp_path: Path, *, stop_timeout: float = GENEROUS_S, more: tuple[str, ...] = ()
) -> AsyncIterator[Head]:
    """A scripted engine in a process of its own that has shaken hands; stopped at the end."""
    async with _start(script, tmp_path, stop_timeout, more) as (process, listener, lines):
        async with AsyncExitStack() as stack:
            accepted = await listener.accept()
            stack.push_async_callback(accepted.transport.aclose)
            yield Head(process, accepted.transport, accepted.ready, lines)
