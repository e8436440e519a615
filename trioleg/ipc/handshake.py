"""The handshake, the head's side: it lets engines in. The engine's is ``joining.py``.

    engine                                   head
      DEALER connects ── HELLO ───────────►  ROUTER, bound first
                      ◄── INIT ────────────  addresses of the two legs, bound for this engine
      loads its model
      DEALER, PUSH connect ── ready ──────►  the input leg learns the engine's route
                           ── READY ──────►  on the handshake leg

Rules of this file: the source of the sequence is vLLM's engine core (its ``headless`` start), which both of our
sides can stand in for. By itself nothing on this wire is authenticated; between our own two sides CURVE does that
(``curve.py``). The wire has no word for "no": what is wrong is logged, and its sender left waiting.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from secrets import token_hex

import trio
import zmq

from ..errors import EngineStartError, WireError
from ..messages import (
    EngineHandshakeInit,
    EngineHandshakeStatus,
    EngineReadyResponse,
    HandshakeAddresses,
    engine_identity,
)
from .codec import decode_as, decode_ready, encode
from .doorkeeper import Doorkeeper
from .seldom_log import SeldomLog
from .socket_file import remove_socket_file
from .sockets import ZmqSocket, close_sockets, make_context, make_socket
from .transport import ZmqTransport, bind
from .versions import shown

__all__ = ["AcceptedEngine", "EngineListener", "listen_for_engine", "receive_ready"]

logger = logging.getLogger(__name__)

_IDENTITY_BYTES = len(engine_identity(0))
_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "[::]"})
# Engines that may be loading at once for one place: one is wanted, a few may have come and gone.
_MAX_LOADING = 8
# vLLM's are 41 bytes. What strangers send while an engine serves waits until that has gone: so little of it for each
# connection.
_MAX_HANDSHAKE_BYTES = 64 * 1024
_MAX_WAITING_HANDSHAKES = 8
# Enough that no two pairs of legs in a folder share it by chance: "in" and "out" with twice as many letters are no
# longer than "handshake".
_LEG_NAME_BYTES = 3
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

    def __init__(
        self,
        socket: ZmqSocket,
        address: str,
        folder: Path | None,
        doorkeeper: Doorkeeper | None,
    ) -> None:
        self.address = address
        self._folder = folder
        self._socket = socket
        self._doorkeeper = doorkeeper
        self._seldom = SeldomLog(logger)

    async def accept(self) -> AcceptedEngine:
        """Waits for the next engine, and for as long as its model takes to load.

        Of several that have said HELLO (one may have left again, and says nothing of that), the first
        that is ready is taken, and the legs of the others are closed. No bound of its own: an engine
        that fails while loading says nothing on this wire, so the caller watches its process beside
        this call. Cancel-safe: what was opened is closed. Raises ``EngineStartError`` if the engine's
        ready response cannot be read, or its vLLM is too old.
        """
        loading: dict[bytes, ZmqTransport] = {}
        try:
            identity = await self._first_ready(loading)
            ready = await receive_ready(loading[identity])
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
            if status == "HELLO":
                if identity not in loading:
                    await self._make_room(loading)
                    loading[identity] = self._open_legs(identity)
                self._send_init(loading[identity])
            else:
                self._complain(status, identity, loading)

    async def _make_room(self, loading: dict[bytes, ZmqTransport]) -> None:
        """Let the engine that has been loading for longest give way, if there are too many: it may have left, or be
        somebody who says HELLO and nothing more."""
        if len(loading) < _MAX_LOADING:
            return
        oldest = next(iter(loading))
        self._seldom.warn(
            "handshake",
            f"engine {oldest.hex()} gives way: {_MAX_LOADING} others said HELLO after it",
        )
        await loading[oldest].aclose()
        del loading[oldest]

    def _complain(self, status: str, identity: bytes, loading: dict[bytes, ZmqTransport]) -> None:
        awaited = " or ".join(["HELLO", *(f"READY of {one.hex()}" for one in loading)])
        engine = shown(identity.hex())
        self._seldom.warn(
            "handshake", f"{status} of engine {engine} ignored, since {awaited} is awaited"
        )

    def _open_legs(self, identity: bytes) -> ZmqTransport:
        return ZmqTransport(*self._leg_addresses(), identity=identity, doorkeeper=self._doorkeeper)

    def _leg_addresses(self) -> tuple[str, str]:
        scheme, _, rest = self.address.partition("://")
        if scheme == "tcp" and self._folder is None:
            host = rest.rpartition(":")[0]
            return f"tcp://{host}:0", f"tcp://{host}:0"
        # Beside the handshake's socket, which may not be the only one there. "@": among Linux's own names.
        is_nameless = self._folder is None and rest.startswith("@")
        beside = "@" if is_nameless else f"{self._folder or PurePosixPath(rest).parent}/"
        name = token_hex(_LEG_NAME_BYTES)
        return f"ipc://{beside}in{name}", f"ipc://{beside}out{name}"

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
        return shown(decode_as(EngineHandshakeStatus, frames[0], "a handshake message").status)
    except WireError as error:
        return ascii(str(error))[1:-1]


async def receive_ready(transport: ZmqTransport) -> EngineReadyResponse:
    """What the engine says of itself, once it has loaded. Raises ``EngineStartError`` if it cannot be read."""
    body = await transport.receive_ready()
    try:
        return decode_ready(body)
    except WireError as error:
        raise EngineStartError(str(error)) from error


@asynccontextmanager
async def listen_for_engine(
    handshake_address: str, folder: Path | None = None, *, doorkeeper: Doorkeeper | None = None
) -> AsyncIterator[EngineListener]:
    """Binds ``handshake_address`` for the length of the block; the bound one is ``.address``. ``folder``: one that
    only this user can enter, for the legs' sockets, whatever the handshake's address is.

    ``ipc://PATH``, or ``tcp://IP:PORT`` with an IP that engines can reach (port 0 takes a free one);
    the legs are bound beside it. Engines that were accepted outlive the block. ``doorkeeper``: who may
    come in, at this address and at the legs; None: whoever reaches them. Raises
    ``EngineStartError`` for an address that cannot be bound, or that says nothing to an engine.
    """
    _check_address(handshake_address)
    try:
        context = make_context()
        raw = make_socket(context, zmq.ROUTER)
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        raw.setsockopt(zmq.MAXMSGSIZE, _MAX_HANDSHAKE_BYTES)
        # More INITs than that are for somebody who does not read them, and are dropped.
        for limit in (zmq.RCVHWM, zmq.SNDHWM):
            raw.setsockopt(limit, _MAX_WAITING_HANDSHAKES)
        socket = ZmqSocket(raw)
    except (OSError, zmq.ZMQError) as error:
        raise EngineStartError(f"cannot open a socket for engines to join at: {error}") from error
    async with AsyncExitStack() as stack:
        sockets = [socket]
        stack.push_async_callback(close_sockets, context, sockets, linger=_HEAD_LINGER_S)
        if doorkeeper is not None:
            sockets.append(doorkeeper.open_door(context))
            doorkeeper.guard(raw, "handshake")
            stack.callback(doorkeeper.watch(socket, "handshake").close)
        address = bind(raw, handshake_address)
        stack.callback(remove_socket_file, address)
        yield EngineListener(socket, address, folder, doorkeeper)


def _check_address(address: str) -> None:
    scheme, _, rest = address.partition("://")
    # ZeroMQ would make a folder of its own for "*", and leave it behind.
    if scheme not in ("tcp", "ipc") or (scheme == "ipc" and rest in ("", "*")):
        raise EngineStartError(
            f"the handshake address is {address!r}; allowed: tcp://IP:PORT, ipc://PATH"
        )
    host = rest.rpartition(":")[0]
    if scheme == "tcp" and host in _WILDCARD_HOSTS:
        raise EngineStartError(
            f"the handshake address is {address!r}, which would tell engines to connect to "
            f"{host!r}; allowed: the one IP address that they reach this machine by"
        )
