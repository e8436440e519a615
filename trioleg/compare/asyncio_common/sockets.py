"""``EngineSockets``: the front end's end of the wire to one engine, over ``zmq.asyncio``.

The same wire as ``ipc/transport.py`` and, for the handshake, ``ipc/handshake.py``: a ROUTER for requests, a PULL for
outputs, bound before the engine is started, in a folder that only this user can enter.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ...errors import WireError
from ...ipc.codec import decode_as, decode_ready, encode
from ...messages import (
    EngineCoreRequestType,
    EngineHandshakeInit,
    EngineHandshakeStatus,
    EngineReadyResponse,
    HandshakeAddresses,
    engine_identity,
)

__all__ = ["EngineSockets"]


class EngineSockets:
    """Bound at once; whoever makes them calls ``close``. To be made where a loop runs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trioleg-"))
        self._context = zmq.asyncio.Context()
        self.handshake_address = f"ipc://{self._folder}/handshake"
        self._handshake = self._bound(zmq.ROUTER, "handshake")
        self._input = self._bound(zmq.ROUTER, "in")
        self._output = self._bound(zmq.PULL, "out")
        self._identity = engine_identity(0)

    def _bound(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        # No bound: a send then never waits, and who reads too slowly is nobody's business on the wire.
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(limit, 0)
        if kind == zmq.ROUTER:
            # An engine that is not there is an error, not silence.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    async def let_engine_in(self) -> EngineReadyResponse:
        """Answer the engine's HELLO, and wait until its model is loaded: no bound of its own. Raises ``WireError``."""
        self._identity = await self._hear("HELLO")
        addresses = HandshakeAddresses(
            inputs=[f"ipc://{self._folder}/in"], outputs=[f"ipc://{self._folder}/out"]
        )
        init = encode(EngineHandshakeInit(addresses=addresses))
        await self._handshake.send_multipart([self._identity, init])
        _, body = await self._input.recv_multipart()
        await self._hear("READY")
        self._handshake.close(linger=0)
        return decode_ready(body)

    async def _hear(self, status: str) -> bytes:
        """Returns the identity of who says it."""
        identity, body = await self._handshake.recv_multipart()
        said = decode_as(EngineHandshakeStatus, body, "a handshake message").status
        if said != status:
            raise WireError(f"the engine's handshake says {said!r}; allowed: {status!r}")
        return identity

    async def receive(self) -> Sequence[memoryview]:
        """The frames of the next message of outputs."""
        frames: Any = await self._output.recv_multipart(copy=False)
        return [frame.buffer for frame in frames]

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> Awaitable[Any]:
        """Begun at once, also if nobody awaits what is returned. Raises ``zmq.ZMQError``."""
        message = [self._identity, message_type.value, body]
        sent: Awaitable[Any] = self._input.send_multipart(message, copy=False)
        return sent

    def close(self) -> None:
        """In the loop's thread, or when its loop is closed. What waits in ``receive`` is cancelled; what has not left
        is lost. May be called twice."""
        for socket in (self._handshake, self._input, self._output):
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
