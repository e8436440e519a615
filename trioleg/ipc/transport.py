"""What an engine link talks through: ``Transport``, and the one over ZeroMQ.

Rules of this file: frames, not meanings; what a body says is the codec's business.

One transport serves one engine: a ROUTER that carries requests out and a PULL that brings outputs in,
both bound by us. So the death sentinel, which names nobody, is attributable, and one engine is one
failure domain. Each transport has a ZeroMQ context of its own, because ending a context is how the
last messages are delivered, and one engine's end must not wait for another's.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio
import zmq

from ..errors import EngineStartError
from ..messages import EngineCoreRequestType
from .sockets import Context, PeerMonitor, Socket, ZmqSocket, close_sockets, make_socket

__all__ = ["Transport", "ZmqTransport", "ZmqTransportStatistics", "bind", "remove_socket_file"]

logger = logging.getLogger(__name__)

# ZeroMQ asks the peer's I/O thread (which answers without the interpreter) once a second, and takes
# it for gone after five unanswered: long enough for a machine under swap, short of a person's patience.
_HEARTBEAT_INTERVAL_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
# ABORTs to a living engine leave in microseconds; this bounds what a frozen one can cost.
_LINGER_S = 1.0
# Not death by themselves: a peer that is reconnecting, a full pipe, a transport that is closed.
_HARMLESS = frozenset({errno.EHOSTUNREACH, errno.EAGAIN, zmq.ENOTSOCK})


class Transport(Protocol):
    """What one engine link needs of the way to its engine."""

    async def receive(self) -> Sequence[bytes | memoryview]:
        """One message of the output leg. Always a checkpoint; a cancelled call loses nothing."""
        ...

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        """Sends at once; False if the message could not leave, which is recorded and not raised."""
        ...

    async def wait_unreachable(self) -> str:
        """Returns, with a sentence, once the engine has been out of reach for too long."""
        ...

    async def aclose(self) -> None:
        """Closes, after what was sent is out. Shields and bounds itself; may be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class ZmqTransportStatistics:
    """Messages since the transport was made; ``last_send_error`` is None if all could leave."""

    sent: int
    unsent: int
    received: int
    last_send_error: str | None


def bind(socket: Socket, address: str) -> str:
    """Binds, and returns the address that was bound (a port 0 becomes the one that was given).

    Raises ``EngineStartError`` with the address and what is allowed.
    """
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise EngineStartError(
            f"cannot listen on {address!r}: {error}; allowed: tcp://IP:PORT of this machine (port 0 "
            "takes a free one), or ipc://PATH of at most 107 bytes in a folder that exists"
        ) from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


def remove_socket_file(address: str) -> None:
    """Removes what ``bind`` left in the file system, which ZeroMQ does not."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        Path(path).unlink(missing_ok=True)


class _Leg:
    """One bound socket and the monitor that sees its connections come and go."""

    def __init__(self, context: Context, kind: int, name: str) -> None:
        self.name = name
        raw = make_socket(context, kind)
        raw.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if kind == zmq.ROUTER:
            # MANDATORY: an identity that is gone is an error, not silence. HANDOVER: an engine that
            # connects anew under its old identity is the engine.
            raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
            raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket = ZmqSocket(raw)
        self.peers = PeerMonitor(self.socket, bound=True)

    def bind(self, address: str) -> str:
        return bind(self.socket.raw, address)

    async def wait_gone(self, patience: float) -> None:
        """Returns when the leg had a connection and then none for ``patience`` seconds."""
        deadline = math.inf
        while True:
            with trio.move_on_at(deadline) as waited:
                await self.peers.wait_for_change()
            if waited.cancelled_caught:
                return
            if not self.peers.is_deserted():
                deadline = math.inf
            elif deadline == math.inf:
                deadline = trio.current_time() + patience


class ZmqTransport:
    """The ROUTER and PULL of one engine, bound by us.

    ``identity`` is the engine's, as its HELLO said. Addresses may hold a wildcard port; the bound
    ones are ``input_address`` and ``output_address``. Raises ``EngineStartError`` if one cannot be
    bound. Whoever makes a transport calls ``aclose``.
    """

    def __init__(
        self,
        input_address: str,
        output_address: str,
        *,
        identity: bytes,
        unreachable_timeout: float,
    ) -> None:
        self.identity = identity
        self._unreachable_timeout = unreachable_timeout
        self._context: Context = zmq.Context()
        self._input = _Leg(self._context, zmq.ROUTER, "input")
        self._output = _Leg(self._context, zmq.PULL, "output")
        self._sent = self._unsent = self._received = 0
        self._last_send_error: str | None = None
        try:
            self.input_address = self._input.bind(input_address)
            self.output_address = self._output.bind(output_address)
        except EngineStartError:
            self._context.destroy(linger=0)
            remove_socket_file(input_address)
            raise

    async def receive_ready(self) -> bytes:
        """The engine's ready response, its one message on the input leg. A handshake's business."""
        while True:
            identity, *frames = await self._input.socket.recv_multipart()
            if identity == self.identity and len(frames) == 1:
                return frames[0]
            logger.warning("input leg: %d frames of %r ignored", len(frames), identity)

    async def receive(self) -> list[bytes]:
        """As ``Transport.receive``. One task; ``trio.ClosedResourceError`` after ``aclose``."""
        frames = await self._output.socket.recv_multipart()
        self._received += 1
        return frames

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        """As ``Transport.send``."""
        try:
            self._input.socket.send_multipart([self.identity, message_type.value, body])
        except zmq.ZMQError as error:
            if error.errno not in _HARMLESS:
                raise
            self._unsent += 1
            self._last_send_error = str(error)
            return False
        self._sent += 1
        return True

    async def wait_unreachable(self) -> str:
        """As ``Transport.wait_unreachable``; call it once, from one task, from the start.

        Gone is: a leg that was connected has had no connection for longer than
        ``unreachable_timeout``. A peer that is frozen loses its connection by missed heartbeats.
        """
        gone: list[str] = []
        async with trio.open_nursery() as nursery:
            for leg in (self._input, self._output):
                nursery.start_soon(self._watch, leg, gone, nursery.cancel_scope)
        return (
            f"its {gone[0]} leg has been without a connection for {self._unreachable_timeout:g} s "
            "(the process is gone or frozen, or the network between is)"
        )

    async def _watch(self, leg: _Leg, gone: list[str], watching: trio.CancelScope) -> None:
        await leg.wait_gone(self._unreachable_timeout)
        gone.append(leg.name)
        watching.cancel()

    def statistics(self) -> ZmqTransportStatistics:
        """Counts of messages so far."""
        return ZmqTransportStatistics(
            self._sent, self._unsent, self._received, self._last_send_error
        )

    async def aclose(self) -> None:
        """As ``Transport.aclose``: at most a second of linger, then the context's end."""
        legs = (self._input, self._output)
        for leg in legs:
            leg.peers.close()
        await close_sockets(self._context, [leg.socket for leg in legs], linger=_LINGER_S)
        for address in (self.input_address, self.output_address):
            remove_socket_file(address)
