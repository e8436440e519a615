"""The handshake, both sides of it: how a head and an engine find each other.

    engine                                   head
      DEALER connects ── HELLO ───────────►  ROUTER, bound first
                      ◄── INIT ────────────  addresses of the two legs, bound for this engine
      loads its model
      DEALER, PUSH connect ── ready ──────►  the input leg learns the engine's route
                           ── READY ──────►  on the handshake leg

Rules of this file: the source of the sequence is vLLM's engine core (its ``headless`` start), which
both sides here can stand in for. Nothing on this wire is authenticated: keep it on loopback or on a
trusted network. The wire has no word for "no": what is wrong is logged, and its sender left waiting.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

import trio
import zmq

from ..errors import EngineStartError, WireError
from ..messages import (
    ENGINE_CORE_DEAD,
    EngineHandshakeInit,
    EngineHandshakeStatus,
    EngineReadyResponse,
    HandshakeAddresses,
    engine_identity,
)
from .codec import decode_as, encode
from .sockets import Context, PeerMonitor, ZmqSocket, close_sockets, make_context, make_socket
from .transport import ZmqTransport, bind, remove_socket_file

__all__ = ["AcceptedEngine", "EngineListener", "EngineSockets", "join_head", "listen_for_engine"]

logger = logging.getLogger(__name__)

_IDENTITY_BYTES = len(engine_identity(0))
_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "[::]"})
# vLLM's engines wait as long for INIT before they give up.
_INIT_TIMEOUT_S = 300.0
# vLLM's linger for its output sockets. A head that is there takes what is left in milliseconds.
_ENGINE_LINGER_S = 4.0
# The kernel may tell that a peer has left some milliseconds late (3 seen), and not to know it costs
# the whole linger.
_DESERTION_S = 0.05
# Engines that may be loading at once for one place: one is wanted, a few may have come and gone.
_MAX_LOADING = 8
# INIT to an engine that has just left is worth no wait.
_HEAD_LINGER_S = 0.5


@dataclass(frozen=True, slots=True)
class AcceptedEngine:
    """An engine that is ready. Whoever gets it closes ``transport``."""

    transport: ZmqTransport
    ready: EngineReadyResponse
    rank: int


class EngineListener:
    """The head's side: a bound handshake address, and ``accept``. Made by ``listen_for_engine``."""

    def __init__(self, socket: ZmqSocket, address: str) -> None:
        self.address = address
        self._socket = socket
        self._accepted = 0

    async def accept(self) -> AcceptedEngine:
        """Waits for the next engine, and for as long as its model takes to load.

        Of several that have said HELLO (one may have left again, and says nothing of that), the first
        that is ready is taken, and the legs of the others are closed. No bound of its own: an engine
        that fails while loading says nothing on this wire, so the caller watches its process beside
        this call. Cancel-safe: what was opened is closed. Raises ``EngineStartError`` if the engine's
        ready response cannot be read.
        """
        loading: dict[bytes, ZmqTransport] = {}
        try:
            identity = await self._first_ready(loading)
            ready = await _receive_ready(loading[identity])
            transport = loading.pop(identity)
        finally:
            with trio.CancelScope(shield=True):
                for other in loading.values():
                    await other.aclose()
        return AcceptedEngine(transport, ready, int.from_bytes(identity, "little"))

    async def _first_ready(self, loading: dict[bytes, ZmqTransport]) -> bytes:
        """The identity of the first engine that says READY; INIT for each that says HELLO before.

        An engine that says HELLO again is one that was started anew while it loaded: INIT again.
        """
        while True:
            identity, *frames = await self._socket.recv_multipart()
            status = _read_status(identity, frames)
            if status == "READY" and identity in loading:
                return identity
            if status == "HELLO" and (identity in loading or len(loading) < _MAX_LOADING):
                if identity not in loading:
                    loading[identity] = self._open_legs(identity)
                self._send_init(loading[identity])
            else:
                awaited = " or ".join(["HELLO", *(f"READY of {one.hex()}" for one in loading)])
                logger.warning(
                    "handshake: %s of engine %s ignored, since %s is awaited",
                    status,
                    identity.hex(),
                    awaited,
                )

    def _open_legs(self, identity: bytes) -> ZmqTransport:
        return ZmqTransport(*self._leg_addresses(), identity=identity)

    def _leg_addresses(self) -> tuple[str, str]:
        scheme, _, rest = self.address.partition("://")
        if scheme == "tcp":
            host = rest.rpartition(":")[0]
            return f"tcp://{host}:0", f"tcp://{host}:0"
        # Beside the handshake's socket, in the folder that is ours and is removed as a whole.
        folder = PurePosixPath(rest).parent
        number, self._accepted = self._accepted, self._accepted + 1
        return f"ipc://{folder}/in{number}", f"ipc://{folder}/out{number}"

    def _send_init(self, transport: ZmqTransport) -> None:
        addresses = HandshakeAddresses(
            inputs=[transport.input_address], outputs=[transport.output_address]
        )
        init = EngineHandshakeInit(addresses=addresses)
        self._socket.send_multipart([transport.identity, encode(init)])


def _read_status(identity: bytes, frames: list[bytes]) -> str:
    """The status in a message of the handshake leg; for one that has none, what is wrong with it."""
    if len(identity) != _IDENTITY_BYTES:
        return f"a message under an identity of {len(identity)} bytes instead of {_IDENTITY_BYTES}"
    if len(frames) != 1:
        return f"a message of {len(frames)} frames instead of 1"
    try:
        return decode_as(EngineHandshakeStatus, frames[0], "a handshake message").status
    except WireError as error:
        return str(error)


async def _receive_ready(transport: ZmqTransport) -> EngineReadyResponse:
    body = await transport.receive_ready()
    try:
        return decode_as(EngineReadyResponse, body, "the engine's ready response")
    except WireError as error:
        raise EngineStartError(str(error)) from error


@asynccontextmanager
async def listen_for_engine(handshake_address: str) -> AsyncIterator[EngineListener]:
    """Binds ``handshake_address`` for the length of the block; the bound one is ``.address``.

    ``ipc://PATH``, or ``tcp://IP:PORT`` with an IP that engines can reach (port 0 takes a free one);
    the legs are bound beside it. Engines that were accepted outlive the block. Raises
    ``EngineStartError`` for an address that cannot be bound, or that says nothing to an engine.
    """
    _check_address(handshake_address)
    try:
        context = make_context()
        raw = make_socket(context, zmq.ROUTER)
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket = ZmqSocket(raw)
    except (OSError, zmq.ZMQError) as error:
        raise EngineStartError(f"cannot open a socket for engines to join at: {error}") from error
    async with AsyncExitStack() as stack:
        stack.push_async_callback(close_sockets, context, [socket], linger=_HEAD_LINGER_S)
        address = bind(raw, handshake_address)
        stack.callback(remove_socket_file, address)
        yield EngineListener(socket, address)


def _check_address(address: str) -> None:
    scheme, _, rest = address.partition("://")
    if scheme not in ("tcp", "ipc"):
        raise EngineStartError(
            f"the handshake address is {address!r}; allowed: tcp://IP:PORT, ipc://PATH"
        )
    host = rest.rpartition(":")[0]
    if scheme == "tcp" and host in _WILDCARD_HOSTS:
        raise EngineStartError(
            f"the handshake address is {address!r}, which would tell engines to connect to "
            f"{host!r}; allowed: the one IP address that they reach this machine by"
        )


class EngineSockets:
    """The engine's side of a finished handshake: index i of both lists belongs to client i.

    ``inputs`` are DEALERs that requests come from, ``outputs`` PUSHes that answers go to. Whoever
    gets it calls ``aclose``; ``linger`` is how many seconds that gives to what is still unsent.
    """

    def __init__(self, context: Context, handshake: ZmqSocket) -> None:
        self._context = context
        self._handshake = handshake
        # Nothing that is sent before READY is worth a wait.
        self.linger = 0.0
        self._clients: list[PeerMonitor] = []
        self.inputs: list[ZmqSocket] = []
        self.outputs: list[ZmqSocket] = []

    def connect(self, init: EngineHandshakeInit, identity: bytes, ready: bytes) -> None:
        """Connects to every client of INIT and sends each the ready response."""
        for address in init.addresses.inputs:
            socket = self._add(self.inputs, zmq.DEALER, address, identity)
            socket.send_multipart([ready])
        for address in init.addresses.outputs:
            self._add(self.outputs, zmq.PUSH, address, None)

    def _add(
        self, sockets: list[ZmqSocket], kind: int, address: str, identity: bytes | None
    ) -> ZmqSocket:
        socket = ZmqSocket(make_socket(self._context, kind, identity=identity))
        # Held before it is connected: what the caller closes after an error includes this one.
        sockets.append(socket)
        if kind == zmq.PUSH:
            self._clients.append(PeerMonitor(socket, bound=False))
        _connect(socket, address, "INIT")
        return socket

    async def _wait_deserted(self) -> None:
        await trio.lowlevel.checkpoint()
        for client in self._clients:
            await client.wait_deserted()

    def say_dead(self) -> None:
        """Sends ENGINE_CORE_DEAD to every client, behind whatever was sent before."""
        for socket in self.outputs:
            socket.send_multipart([ENGINE_CORE_DEAD])

    async def aclose(self) -> None:
        """Closes all sockets, after what was sent is out. Shields and bounds itself.

        A client that has gone is not waited for: heads leave before the engines that they stop.
        """
        if self.linger:
            with trio.move_on_after(_DESERTION_S, shield=True):
                await self._wait_deserted()
        for socket, client in zip(self.outputs, self._clients, strict=True):
            if client.is_deserted():
                socket.close(0.0)
            client.close()
        sockets = [self._handshake, *self.inputs, *self.outputs]
        await close_sockets(self._context, sockets, linger=self.linger)


async def join_head(
    handshake_address: str, load: Callable[[], Awaitable[EngineReadyResponse]], *, engine_index: int
) -> EngineSockets:
    """The engine's side: says HELLO, takes INIT, awaits ``load``, connects the legs, says READY.

    HELLO goes out before the model loads, so that the head knows early that somebody is there. The
    head may start later: HELLO waits for it, up to 300 s. Cancel-safe: what was opened is closed.
    Raises ``EngineStartError`` (no INIT, or one that cannot be followed) and what ``load`` raises.
    """
    identity = engine_identity(engine_index)
    context: Context = zmq.Context()
    handshake = ZmqSocket(make_socket(context, zmq.DEALER, identity=identity))
    sockets = EngineSockets(context, handshake)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sockets.aclose)
        _connect(handshake, handshake_address, "the handshake address")
        handshake.send_multipart([_status("HELLO")])
        init = await _receive_init(handshake, handshake_address)
        ready = await load()
        sockets.connect(init, identity, encode(ready))
        handshake.send_multipart([_status("READY")])
        sockets.linger = _ENGINE_LINGER_S
        stack.pop_all()
    return sockets


def _status(status: str) -> bytes:
    # Not local, headless: what vLLM's head expects of an engine that it did not start itself.
    return encode({"status": status, "local": False, "headless": True})


def _connect(socket: ZmqSocket, address: str, source: str) -> None:
    try:
        socket.raw.setsockopt(zmq.IPV6, int("[" in address))
        socket.raw.connect(address)
    except zmq.ZMQError as error:
        raise EngineStartError(
            f"cannot connect to {address!r} ({source}): {error}; allowed: tcp://HOST:PORT, ipc://PATH"
        ) from error


async def _receive_init(handshake: ZmqSocket, address: str) -> EngineHandshakeInit:
    with trio.move_on_after(_INIT_TIMEOUT_S) as waited:
        body = (await handshake.recv_multipart())[-1]
    if waited.cancelled_caught:
        raise EngineStartError(f"no head answered at {address!r} within {_INIT_TIMEOUT_S:g} s")
    try:
        init = decode_as(EngineHandshakeInit, body, "INIT")
    except WireError as error:
        raise EngineStartError(str(error)) from error
    addresses = init.addresses
    if addresses.coordinator_input or addresses.coordinator_output:
        raise EngineStartError(
            "INIT names a data-parallel coordinator, which this engine does not speak to; allowed: "
            "a head that leaves coordinator_input and coordinator_output out"
        )
    if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
        raise EngineStartError(
            f"INIT has {len(addresses.inputs)} input and {len(addresses.outputs)} output addresses; "
            "allowed: one of each for every client, and at least one client"
        )
    return init
