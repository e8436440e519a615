"""An engine that vLLM has started, and that comes to the two legs which vLLM hands to its front end.

There is no handshake here: vLLM does that. The engine sends its ready response on the input leg, and from then on
the wire is the same. The engine belongs to vLLM, our parent, and so do we: when that is gone, however it went, the
engine counts as dead. It would live on, with nobody to ask it anything or to end it, so it is told to end, in
vLLM's own words.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from ..errors import EngineStartError
from ..ipc.codec import encode
from ..ipc.handshake import receive_ready
from ..ipc.parent import wait_gone
from ..ipc.transport import ZmqTransport
from ..messages import EngineCoreRequestType, EngineReadyResponse, engine_identity
from .engine_watch import EngineWatch
from .engines import Engine
from .unwrap import unwrapped

__all__ = ["EngineLegs", "adopt_engine"]

_log = logging.getLogger("trioleg.engine")


@dataclass(frozen=True, slots=True)
class EngineLegs:
    """Where the engine comes to: for each leg an address to bind, or the descriptor of a socket that listens.

    ``rank``: the engine's. ``owner``: the process that we must not outlive, our parent.
    """

    input: str | int
    output: str | int
    rank: int
    owner: int


class _OwnerWatch(EngineWatch):
    """Of an engine whose process we do not see: its owner's end is the engine's."""

    _CAUSE = "the process that started it is gone"

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @property
    def is_gone(self) -> bool:
        # An orphan gets another parent.
        return os.getppid() != self._pid

    async def wait(self) -> str:
        await wait_gone(self._pid)
        return self._CAUSE

    @property
    def death(self) -> str | None:
        return self._CAUSE if self.is_gone else None


@asynccontextmanager
async def adopt_engine(legs: EngineLegs, start_timeout: float) -> AsyncIterator[Engine]:
    """Take the legs over, or bind them, and wait until the engine is ready.

    Raises ``EngineStartError`` for a leg that cannot be had, and if there is no engine within ``start_timeout``
    seconds or its owner has gone. The engine goes on when the block is left, unless its owner has gone.
    """
    owner = _OwnerWatch(legs.owner)
    transport = ZmqTransport(legs.input, legs.output, identity=engine_identity(legs.rank))
    try:
        _log.info("waiting for engine %d to come to %s", legs.rank, transport.input_address)
        ready = await _ready(transport, owner, start_timeout)
        yield Engine(legs.rank, ready, transport, owner)
    finally:
        if owner.is_gone:
            transport.send(EngineCoreRequestType.EXECUTOR_FAILED, encode(None))
        await transport.aclose()


async def _ready(
    transport: ZmqTransport, owner: _OwnerWatch, start_timeout: float
) -> EngineReadyResponse:
    found: list[EngineReadyResponse] = []
    cause = f"it was not ready within {start_timeout:g} s"

    async def receive() -> None:
        found.append(await receive_ready(transport))
        nursery.cancel_scope.cancel(reason="the engine is ready")

    async def watch() -> None:
        nonlocal cause
        cause = await owner.wait()
        nursery.cancel_scope.cancel(reason=cause)

    with unwrapped(), trio.move_on_after(start_timeout):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            nursery.start_soon(watch)
    if not found:
        raise EngineStartError(f"there is no engine: {cause}")
    return found[0]
