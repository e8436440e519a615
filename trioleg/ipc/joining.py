"""The handshake, the engine's side: it finds its head, loads, and says that it is ready.

Rules of this file: what passes, and its source, are in ``handshake.py``, which is the other side. An engine has
nothing of the front end's: neither its transport nor its doorkeeper.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import trio
import zmq

from ..errors import EngineStartError, WireError
from ..messages import (
    ENGINE_CORE_DEAD,
    EngineHandshakeInit,
    EngineReadyResponse,
    engine_identity,
)
from .codec import decode_as, encode
from .curve import EngineKeys
from .sockets import Context, PeerMonitor, Refusal, ZmqSocket, close_sockets, make_socket

__all__ = ["EngineSockets", "join_head"]

logger = logging.getLogger(__name__)

# vLLM's engines wait as long for INIT before they give up.
_INIT_TIMEOUT_S = 300.0
# How long connections may end in the middle of their handshake before that is taken for a refusal.
_REFUSED_AFTER_S = 5.0
# vLLM's linger for its output sockets. A head that is there takes what is left in milliseconds.
_ENGINE_LINGER_S = 4.0
# The kernel may tell that a peer has left some milliseconds late (3 seen), and not to know it costs
# the whole linger.
_DESERTION_S = 0.05


class EngineSockets:
    """The engine's side of a finished handshake: index i of both lists belongs to client i.

    ``inputs`` are DEALERs that requests come from, ``outputs`` PUSHes that answers go to. Whoever
    gets it calls ``aclose``; ``linger`` is how many seconds that gives to what is still unsent.
    """

    def __init__(
        self, context: Context, handshake: ZmqSocket, keys: EngineKeys | None = None
    ) -> None:
        self._context = context
        self._handshake = handshake
        self._keys = keys
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
        if self._keys is not None:
            self._keys.set_up(socket.raw)
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
    handshake_address: str,
    load: Callable[[], Awaitable[EngineReadyResponse]],
    *,
    engine_index: int,
    keys: EngineKeys | None = None,
) -> EngineSockets:
    """The engine's side: says HELLO, takes INIT, awaits ``load``, connects the legs, says READY.

    HELLO goes out before the model loads, so that the head knows early that somebody is there. The
    head may start later: HELLO waits for it, up to 300 s. ``keys``: for a head that asks for them.
    Cancel-safe: what was opened is closed. Raises ``EngineStartError`` (no INIT, or one that cannot be
    followed, or a head that does not let us in) and what ``load`` raises.
    """
    identity = engine_identity(engine_index)
    context: Context = zmq.Context()
    handshake = ZmqSocket(make_socket(context, zmq.DEALER, identity=identity))
    sockets = EngineSockets(context, handshake, keys)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sockets.aclose)
        if keys is not None:
            keys.set_up(handshake.raw)
        head = _HeadWatch(handshake, handshake_address, has_keys=keys is not None)
        stack.callback(head.monitor.close)
        _connect(handshake, handshake_address, "the handshake address")
        handshake.send_multipart([_status("HELLO")])
        init = await _receive_init(handshake, head, handshake_address)
        head.monitor.close()
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


class _HeadWatch:
    """Whether the head lets an engine in, which ZeroMQ itself never says."""

    def __init__(self, handshake: ZmqSocket, address: str, *, has_keys: bool) -> None:
        self._address = address
        self._has_keys = has_keys
        # Connections that ended in their handshake, and when the first of them did.
        self._broken_since: float | None = None
        self._is_said = False
        self._why: str | None = None
        self.monitor = PeerMonitor(handshake, bound=False, on_refused=self._note)

    async def wait_refused(self) -> str:
        """Returns, with the reason, when it is certain that the head refuses us. Cancel-safe."""
        await trio.lowlevel.checkpoint()
        while self._why is None:
            await self.monitor.wait_for_change()
        return self._why

    def _note(self, refusal: Refusal) -> None:
        now = trio.current_time()
        self._broken_since = self._broken_since or now
        # Behind the other two ZeroMQ gives up.
        if refusal.event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._why = refusal.why
        elif now > self._broken_since + _REFUSED_AFTER_S:
            self._note_always_broken(refusal.why)

    def _note_always_broken(self, why: str) -> None:
        # All that a front end says to keys that are wrong for it. One that asks us for keys mostly does so, too, but
        # sooner or later ZeroMQ sees which it is; and it may be a proxy whose head is not up yet.
        if self._has_keys:
            self._why = why
        elif not self._is_said:
            self._is_said = True
            logger.warning(
                "the head at %r does not let this engine in so far: %s", self._address, why
            )


async def _receive_init(
    handshake: ZmqSocket, head: _HeadWatch, address: str
) -> EngineHandshakeInit:
    bodies: list[bytes] = []
    refusals: list[str] = []

    async def receive() -> None:
        bodies.append((await handshake.recv_multipart())[-1])
        nursery.cancel_scope.cancel(reason="INIT is here")

    async def watch() -> None:
        refusals.append(await head.wait_refused())
        nursery.cancel_scope.cancel(reason="the head refuses this engine")

    with trio.move_on_after(_INIT_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            nursery.start_soon(watch)
    if bodies:
        return _read_init(bodies[0])
    if refusals:
        raise EngineStartError(
            f"the front end at {address!r} does not let this engine in: {refusals[0]}"
        )
    raise EngineStartError(f"no head answered at {address!r} within {_INIT_TIMEOUT_S:g} s")


def _read_init(body: bytes) -> EngineHandshakeInit:
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
