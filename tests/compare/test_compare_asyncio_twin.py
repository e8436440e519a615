"""The asyncio twin's own mechanisms: the slot, and what becomes of a request whose caller leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.compare.asyncio_common.engine_process import Engine
from trioleg.compare.asyncio_twin.llm import LLM, EngineGenerateError
from trioleg.compare.asyncio_twin.mailbox import Mailbox
from trioleg.errors import EngineDeadError
from trioleg.ipc.codec import decode_abort, decode_request, encode
from trioleg.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineReadyResponse,
    FinishReason,
)
from trioleg.outputs import CompletionOutput, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams

DELTA = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
GENEROUS_S = 20.0


class Sockets:
    """The wire, without an engine behind it."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> list[memoryview]:
        return [memoryview(await self.messages.get())]

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> Awaitable[Any]:
        if message_type is EngineCoreRequestType.ADD:
            self.added.append(decode_request(body).request_id)
        else:
            self.aborted += decode_abort(body)
        return asyncio.sleep(0)

    def say(self, *pieces: str, finish: FinishReason | None = None) -> None:
        outputs = [EngineCoreOutput(one, ids(*pieces), finish_reason=finish) for one in self.added]
        self.messages.put_nowait(encode(EngineCoreOutputs(outputs=outputs, timestamp=0.0)))

    def close(self) -> None:
        pass


class Process:
    def __init__(self) -> None:
        self._ended = threading.Event()

    def wait_in_thread(self) -> int:
        self._ended.wait()
        return 0

    def stop(self, _timeout: float = 0.0) -> None:
        self._ended.set()


def in_loop(test: Callable[[LLM, Sockets], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test with a twin, in a loop of its own."""

    async def run() -> None:
        sockets: Any = Sockets()
        process: Any = Process()
        ready = EngineReadyResponse(max_model_len=1000, num_gpu_blocks=10, vllm_version="0.33.0")
        llm = LLM(byte_fallback_tokenizer(), Engine(process, sockets, ready))
        try:
            async with asyncio.timeout(GENEROUS_S):
                await test(llm, sockets)
        finally:
            llm.shutdown()

    def test_in_loop() -> None:
        asyncio.run(run())

    return test_in_loop


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def begun(llm: LLM, sockets: Sockets) -> AsyncGenerator[RequestOutput, None]:
    """A stream that has had its first output."""
    stream = llm.generate([3], DELTA, llm.next_request_id())
    first = asyncio.create_task(anext(stream))
    await until(lambda: sockets.added)
    sockets.say("caf")
    assert (await first).outputs[0].text == "caf"
    return stream


async def _closed(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    await stream.aclose()
    assert (sockets.aborted, llm.num_unfinished_requests) == (sockets.added, 0)


async def _cancelled(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (sockets.aborted, llm.num_unfinished_requests) == (sockets.added, 0)


async def _dropped(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    del stream
    gc.collect()
    await until(lambda: sockets.aborted)
    assert (sockets.aborted, llm.num_unfinished_requests) == (sockets.added, 0)


async def _finished(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    sockets.say("a", finish=FinishReason.LENGTH)
    assert [one.finished async for one in stream] == [True]
    assert (sockets.aborted, llm.num_unfinished_requests) == ([], 0)


async def _engine_says_that_it_is_dead(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    sockets.messages.put_nowait(ENGINE_CORE_DEAD)
    with pytest.raises(EngineDeadError):
        await anext(stream)
    assert llm.errored
    with pytest.raises(EngineDeadError):
        await anext(llm.generate([3], DELTA, llm.next_request_id()))


async def _what_nobody_can_read_ends_all(llm: LLM, sockets: Sockets) -> None:
    stream = await begun(llm, sockets)
    sockets.messages.put_nowait(b"\xc1")
    with pytest.raises(EngineGenerateError) as caught:
        await anext(stream)
    assert "cannot be decoded" in str(caught.value.__cause__)
    assert sockets.aborted == sockets.added
    assert llm.errored


test_aclose_aborts = in_loop(_closed)
test_a_cancel_aborts = in_loop(_cancelled)
test_the_collector_aborts = in_loop(_dropped)
test_the_end_aborts_nothing = in_loop(_finished)
test_a_dead_engine = in_loop(_engine_says_that_it_is_dead)
test_a_garbled_message = in_loop(_what_nobody_can_read_ends_all)


def test_the_slot_merges_and_an_error_takes_the_place_of_what_is_unread() -> None:
    async def run() -> None:
        mailbox = Mailbox(RequestOutputKind.DELTA, "r")
        assert mailbox.get_nowait() is None
        for text in ("ca", "fé"):
            mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, text, [5])], False))
        assert (await mailbox.get()).outputs[0].text == "café"
        mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, "x", [5])], False))
        mailbox.put(ValueError("an error"))
        mailbox.put(RequestOutput("r", [1], [CompletionOutput(0, "y", [5])], False))
        with pytest.raises(ValueError, match="an error"):
            await mailbox.get()
        assert mailbox.get_nowait() is None

    asyncio.run(run())
