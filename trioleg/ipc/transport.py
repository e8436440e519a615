"""What an engine link talks through: ``Transport``, and the one over ZeroMQ.

Rules of this file: frames, not meanings; what a body says is the codec's business.

One transport serves one engine: a ROUTER that carries requests out and a PULL that brings outputs in,
both bound by us. So the death sentinel, which names nobody, is attributable, and one engine is one
failure domain. Each transport has a ZeroMQ context of its own, because ending a context is how the
last messages are delivered, and one engine's end must not wait for another's.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio
import zmq

from ..errors import EngineStartError
from ..messages import EngineCoreRequestType
from .codec import encode_abort
from .doorkeeper import Doorkeeper
from .seldom_log import SeldomLog
from .socket_file import make_way, remove_socket_file
from .sockets import (
    Context,
    PeerMonitor,
    Socket,
    ZmqSocket,
    close_sockets,
    make_context,
    make_socket,
)
from .versions import shown

__all__ = [
    "Transport",
    "ZmqTransport",
    "ZmqTransportStatistics",
    "adopt",
    "bind",
    "is_local",
]

logger = logging.getLogger(__name__)

# ZeroMQ asks the peer's I/O thread (which answers without the interpreter), and gives the connection up
# when it does not answer: a stopped process is noticed within 0.75 s. Only on the input leg. What a given-up
# connection was carrying is lost, and on the way in that can be made good (the link sends it anew); tokens
# on their way out could not, and whoever is too slow may be us: we were stopped, and wake up to timers that
# have long run out.
_HEARTBEAT_INTERVAL_MS = 150
_HEARTBEAT_TIMEOUT_MS = 600
# A connection that is there again has a route as soon as ZeroMQ has seen the peer's identity.
_ROUTE_POLL_S = 0.02
# ABORTs to a living engine leave in microseconds; this bounds what a frozen one can cost.
_LINGER_S = 1.0
# All that comes in there is the ready response, once for each connection, of some hundred bytes. Nobody reads what
# else a stranger sends.
_MAX_READY_BYTES = 4 * 1024 * 1024
_MAX_UNREAD_READY = 2
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

    async def wait_lost(self) -> str:
        """Returns, with a clause that says why, once the engine is out of contact: a leg has lost its
        connection, or a message could not leave. Not death by itself. Cancel-safe."""
        ...

    async def wait_back(self) -> None:
        """Returns once both legs are connected and a message can leave. Cancel-safe."""
        ...

    @property
    def is_local(self) -> bool:
        """The engine is on this machine, where a connection does not break by itself."""
        ...

    @property
    def is_output_lost(self) -> bool:
        """The output leg has lost its connection. Only a peer that closes does that: it has no heartbeats."""
        ...

    @property
    def output_breaks(self) -> int:
        """How often that has happened: outputs may have been lost each time."""
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

    Raises ``EngineStartError`` with the address and what is allowed; also for a path at which somebody listens, or at
    which there is anything but a socket.
    """
    scheme, _, path = address.partition("://")
    # ZeroMQ itself would remove whatever is there. Linux's own names, with "@", are no files.
    if scheme == "ipc" and not path.startswith("@"):
        try:
            make_way(path)
        except (OSError, ValueError) as error:
            raise _cannot_listen(address, error) from error
    return _bind(socket, address)


def _bind(socket: Socket, address: str) -> str:
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise _cannot_listen(address, error) from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


def _cannot_listen(address: str, error: Exception) -> EngineStartError:
    return EngineStartError(
        f"cannot listen on {address!r}: {getattr(error, 'strerror', None) or error}; allowed: tcp://IP:PORT of this "
        "machine (port 0 takes a free one), or ipc://PATH of at most 107 bytes in a folder that exists"
    )


def adopt(socket: Socket, descriptor: int) -> str:
    """Takes over a listening socket that somebody else has bound, and returns its address. ZeroMQ closes it.

    Raises ``EngineStartError`` if the descriptor is none of a listening TCP or Unix socket.
    """
    address = _listener_address(descriptor)
    os.set_inheritable(descriptor, False)
    socket.setsockopt(zmq.USE_FD, descriptor)
    return _bind(socket, address)


def _listener_address(descriptor: int) -> str:
    allowed = "allowed: a listening TCP or Unix socket's"
    try:
        with stdlib_socket.socket(fileno=os.dup(descriptor)) as seen:
            is_listening = seen.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ACCEPTCONN)
            family, name = seen.family, seen.getsockname()
    except OSError as error:
        raise EngineStartError(
            f"descriptor {descriptor} is no socket's ({error}); {allowed}"
        ) from None
    if not is_listening or not name:
        raise EngineStartError(
            f"descriptor {descriptor} is of a socket that does not listen; {allowed}"
        )
    if family == stdlib_socket.AF_UNIX:
        return f"ipc://{name}"
    host = f"[{name[0]}]" if family == stdlib_socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"


def is_local(address: str) -> bool:
    """Only this machine can reach it: a path, or a loopback address."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return bool(rest)
    try:
        ip = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
        return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
    except ValueError:
        return False


def _make_context() -> Context:
    try:
        return make_context()
    except OSError as error:
        raise EngineStartError(f"cannot open sockets for an engine: {error}") from error


class _Leg:
    """One bound socket and the monitor that sees its connections come and go."""

    def __init__(
        self, context: Context, kind: int, name: str, doorkeeper: Doorkeeper | None
    ) -> None:
        self.name = name
        raw = make_socket(context, kind)
        on_refused = None
        if doorkeeper is not None:
            doorkeeper.guard(raw, name)
            on_refused = partial(doorkeeper.note_refused, name)
        if kind == zmq.ROUTER:
            raw.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
            raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            # MANDATORY: an identity that is gone is an error, not silence. HANDOVER: an engine that
            # connects anew under its old identity is the engine.
            raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
            raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
            raw.setsockopt(zmq.MAXMSGSIZE, _MAX_READY_BYTES)
            raw.setsockopt(zmq.RCVHWM, _MAX_UNREAD_READY)
        self.socket = ZmqSocket(raw)
        self.peers = PeerMonitor(self.socket, bound=True, on_refused=on_refused)

    def listen(self, where: str | int) -> str:
        raw = self.socket.raw
        return bind(raw, where) if isinstance(where, str) else adopt(raw, where)


class ZmqTransport:
    """The ROUTER and PULL of one engine, bound by us.

    ``identity`` is the engine's, as its HELLO said. ``doorkeeper``: who may connect; None: whoever
    reaches the addresses. Addresses may hold a wildcard port; the bound ones are ``input_address`` and
    ``output_address``. In place of one, the descriptor of a socket that listens already. Raises
    ``EngineStartError`` if one cannot be bound. Whoever makes a transport calls ``aclose``.
    """

    def __init__(
        self,
        input_address: str | int,
        output_address: str | int,
        *,
        identity: bytes,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        self.identity = identity
        self._context: Context = _make_context()
        self._seen_breaks = {"input": 0, "output": 0}
        self._sent = self._unsent = self._received = 0
        self._last_send_error: str | None = None
        self._send_failed = trio.Event()
        self._seldom = SeldomLog(logger)
        self.input_address = self.output_address = ""
        try:
            self._doors = [] if doorkeeper is None else [doorkeeper.open_door(self._context)]
            self._input = _Leg(self._context, zmq.ROUTER, "input", doorkeeper)
            self._output = _Leg(self._context, zmq.PULL, "output", doorkeeper)
            self.input_address = self._input.listen(input_address)
            self.output_address = self._output.listen(output_address)
        except (EngineStartError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            if isinstance(input_address, str):
                remove_socket_file(self.input_address)
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(f"cannot open sockets for an engine: {error}") from error

    async def receive_ready(self) -> bytes:
        """The engine's ready response, its one message on the input leg. A handshake's business."""
        while True:
            identity, *frames = await self._input.socket.recv_multipart()
            if identity == self.identity and len(frames) == 1:
                return frames[0]
            self._seldom.warn("input", f"{len(frames)} frames of {shown(identity.hex())} ignored")

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
            self._send_failed.set()
            return False
        self._sent += 1
        return True

    async def wait_lost(self) -> str:
        """As ``Transport.wait_lost``; for one task, the one that calls ``wait_back``."""
        causes: list[str] = []

        async def until(happens: Callable[[], Awaitable[None]], cause: str) -> None:
            await happens()
            causes.append(cause)
            nursery.cancel_scope.cancel(reason=cause)

        async with trio.open_nursery() as nursery:
            for leg in (self._input, self._output):
                lost = f"its {leg.name} connection is lost"
                broken = partial(leg.peers.wait_break, self._seen_breaks[leg.name])
                nursery.start_soon(until, broken, lost)
            nursery.start_soon(until, self._send_failed.wait, "a message to it could not leave")
        return causes[0]

    async def wait_back(self) -> None:
        """As ``Transport.wait_back``."""
        await trio.lowlevel.checkpoint()
        while True:
            for leg in (self._input, self._output):
                await leg.peers.wait_connected()
            # An ABORT of nothing asks whether there is a route. The engine takes no notice.
            if not self.is_output_lost and self.send(EngineCoreRequestType.ABORT, encode_abort([])):
                self._send_failed = trio.Event()
                for leg in (self._input, self._output):
                    self._seen_breaks[leg.name] = leg.peers.num_breaks
                return
            await trio.sleep(_ROUTE_POLL_S)

    @property
    def is_local(self) -> bool:
        """As ``Transport.is_local``."""
        return is_local(self.output_address)

    @property
    def is_output_lost(self) -> bool:
        """As ``Transport.is_output_lost``."""
        return self._output.peers.is_deserted()

    @property
    def output_breaks(self) -> int:
        """As ``Transport.output_breaks``."""
        return self._output.peers.num_breaks

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
        sockets = [*(leg.socket for leg in legs), *self._doors]
        await close_sockets(self._context, sockets, linger=_LINGER_S)
        for address in (self.input_address, self.output_address):
            remove_socket_file(address)
