"""An engine that the bench plays itself, so that one clock sees the client leave and the ABORT arrive.

It says what it is told to, when it is told to, and notes when it hears of a request's end.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from ..errors import TriolegError
from ..ipc.codec import decode_abort, decode_request, decode_utility, encode
from ..ipc.joining import EngineSockets, join_head
from ..messages import (
    WIRE_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineReadyResponse,
    SchedulerStats,
    UtilityOutput,
)
from .processes import START_S

__all__ = ["PlayedEngine", "load_nothing", "open_played_engine"]

_TOKEN_ID = 504
# Requests of the bench are never at their own end: their max_tokens is below this, and out of reach.
_MAX_MODEL_LEN = 2**20


class PlayedEngine:
    """Made by ``open_played_engine``, which runs it."""

    def __init__(self, sockets: EngineSockets) -> None:
        self._input, self._output = sockets.inputs[0], sockets.outputs[0]
        self._put_id, self._ids = trio.open_memory_channel[str](math.inf)
        self._aborted: dict[str, float] = {}
        self._news = trio.Event()

    async def run(self) -> None:
        """Read the input leg for ever."""
        while True:
            message_type, body = await self._input.recv_multipart()
            arrived = time.monotonic()
            match EngineCoreRequestType(message_type):
                case EngineCoreRequestType.ADD:
                    self._put_id.send_nowait(decode_request(body).request_id)
                case EngineCoreRequestType.ABORT:
                    self._aborted |= dict.fromkeys(decode_abort(body), arrived)
                    self._news.set()
                case EngineCoreRequestType.UTILITY:
                    self._answer(decode_utility(body).call_id)

    def _answer(self, call_id: int) -> None:
        # The one question that a front end of ours asks: what the model can do.
        answer = UtilityOutput(call_id, result=[None, ["generate"]])
        self._send(EngineCoreOutputs(utility_output=answer, timestamp=time.monotonic()))

    async def next_request(self) -> str:
        """The id of the next request that has arrived."""
        return await self._ids.receive()

    def say(self, request_ids: Iterable[str]) -> None:
        """One step: a token for each of ``request_ids``. Synchronous."""
        outputs = [EngineCoreOutput(one, [_TOKEN_ID]) for one in request_ids]
        stats = SchedulerStats(num_running_reqs=len(outputs))
        self._send(
            EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic())
        )

    def _send(self, message: EngineCoreOutputs) -> None:
        self._output.send_multipart([encode(message)])

    async def wait_aborted(self, request_id: str) -> float:
        """When its ABORT was read, by the monotonic clock; waits for it."""
        while (at := self._aborted.pop(request_id, None)) is None:
            self._news = trio.Event()
            await self._news.wait()
        return at


@asynccontextmanager
async def open_played_engine(handshake_address: str) -> AsyncIterator[PlayedEngine]:
    """Join the head at ``handshake_address`` as its engine for the length of the block.

    Raises ``TriolegError`` if it does not answer.
    """
    sockets = None
    with trio.move_on_after(START_S):
        sockets = await join_head(handshake_address, load_nothing, engine_index=0)
    if sockets is None:
        raise TriolegError(f"the server under test let no engine join within {START_S:g} s")
    try:
        engine = PlayedEngine(sockets)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            yield engine
            nursery.cancel_scope.cancel(reason="the engine's block has been left")
    finally:
        await sockets.aclose()


async def load_nothing() -> EngineReadyResponse:
    """What an engine without a model says that it is: for ``join_head``."""
    await trio.lowlevel.checkpoint()
    return EngineReadyResponse(
        max_model_len=_MAX_MODEL_LEN,
        num_gpu_blocks=_MAX_MODEL_LEN,
        supports_lora=False,
        vllm_version=WIRE_VERSION,
        validates_requests=True,
    )
