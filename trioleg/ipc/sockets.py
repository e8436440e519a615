"""ZeroMQ sockets for Trio: one class round a socket, and the one way to close them.

Rules of this file: knows ZeroMQ and Trio, nothing of the messages. A socket belongs to one task that
receives; sends are synchronous, and may come from any task of the same thread.

ZeroMQ's file descriptor is edge-triggered, and it belongs to the whole socket: it becomes readable
when *something* about the socket may have changed, once. So a reader first takes what is there, then
asks for EVENTS (which also consumes the edge), and only then waits; and whoever sends on the socket
may have consumed the reader's edge, so it looks at EVENTS too and wakes the reader (pyzmq issues 1075
and 2173 are what happens otherwise).
"""

from __future__ import annotations

import os
import socket as stdlib_socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = [
    "Context",
    "PeerMonitor",
    "Refusal",
    "Socket",
    "ZmqSocket",
    "close_sockets",
    "make_context",
    "make_socket",
]

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# Two sockets with their monitors, a connection each, and the context's own: 14 were seen.
_DESCRIPTORS = 24
# Added to the linger as the bound on term: it has only to notice that the linger is over.
_TERM_MARGIN_S = 1.0


def make_context() -> Context:
    """A context of ZeroMQ's. Raises ``OSError`` if there are not the descriptors that it and a few sockets take:
    ZeroMQ itself ends the whole process when it finds none."""
    reserved: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            reserved.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in reserved:
            os.close(descriptor)
    return zmq.Context()


# A front end that falls behind its engine leaves what is more to the engine, which knows what to do: messages are
# up to 50 KB, and a hundred a second is a fast engine.
_MAX_UNREAD_OUTPUTS = 1000

# As plain integers: with the enumerations each look at a socket costs a microsecond more.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def make_socket(context: Context, kind: int, *, identity: bytes | None = None) -> Socket:
    """A socket without high-water marks: what it is handed it takes, at once, whoever is away. Only an engine's
    outputs have one on the side that reads them."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD_OUTPUTS if kind == zmq.PULL else 0)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


class ZmqSocket:
    """A ZeroMQ socket that a Trio task receives from.

    The raw socket stays reachable as ``raw`` for its options; it is closed by ``close`` or by
    ``close_sockets``, never by the garbage collector.
    """

    def __init__(self, raw: Socket) -> None:
        self.raw = raw
        self._descriptor = int(raw.getsockopt(zmq.FD))
        self._is_parked = False

    async def recv_multipart(self) -> list[bytes]:
        """The next message, as its frames.

        Always a checkpoint, data or not, so a socket that always has more starves nobody. A message
        is taken after the last checkpoint: a cancelled call loses nothing. Raises
        ``trio.ClosedResourceError`` when the socket is closed, and ``trio.BusyResourceError`` for a
        second reader.
        """
        if self.raw.closed or self.is_readable():
            await trio.lowlevel.checkpoint()
        else:
            # That is a checkpoint too, and one a message is enough: each goes round Trio's whole loop.
            await self._park()
        while (frames := self._take()) is None:
            await self._park()
        return frames

    def _take(self) -> list[bytes] | None:
        """A message; None if there is none, and the next one will be an edge."""
        while not self.raw.closed:
            try:
                return self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if not self.is_readable():
                    return None
        raise trio.ClosedResourceError("this ZeroMQ socket is closed")

    def is_readable(self) -> bool:
        """A message is there. For the task that receives, and behind a send."""
        events: Any = self.raw.get(_EVENTS)
        return bool(events & _POLLIN)

    async def _park(self) -> None:
        if self._is_parked:
            raise trio.BusyResourceError("another task is receiving from this ZeroMQ socket")
        self._is_parked = True
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
        except trio.ClosedResourceError:
            pass  # what ``_rouse`` wakes with; whether the socket is closed is looked at anyway
        finally:
            self._is_parked = False

    def _rouse(self) -> None:
        """Let the parked task look again. A cancel scope for each message would do it, too, for 4 µs."""
        if self._is_parked:
            trio.lowlevel.notify_closing(self._descriptor)

    def send_multipart(self, frames: Sequence[Any], **options: Any) -> zmq.MessageTracker | None:
        """Sends without blocking, and wakes this socket's reader if its edge went by.

        ``options`` are pyzmq's (copy, track). Raises ``zmq.ZMQError``: EHOSTUNREACH from a ROUTER
        for an identity that is not there, ENOTSOCK when closed, EAGAIN.
        """
        tracker = self.raw.send_multipart(frames, zmq.NOBLOCK, **options)
        if self._is_parked and self.is_readable():
            self._rouse()
        return tracker

    def close(self, linger: float) -> None:
        """Closes; what is unsent may still leave for ``linger`` seconds, while the process lives.

        A task that is receiving gets ``trio.ClosedResourceError``. May be called twice.
        """
        self._rouse()
        self.raw.close(linger=round(linger * 1000))


_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the key is not known there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection ended in the middle of the handshake, as it does "
    "if one side has no keys, or the wrong ones",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ's protocol",
}
_PROTOCOL_REFUSALS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has CURVE keys, and the other has none (as every "
    "engine and server of vLLM's own)",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "the public key that the engine has is not this front end's",
}
_monitor_numbers = count()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A connection that was given up in its handshake. ``peer``: its address; "" where that cannot be said for
    sure, and always of a socket that connects. ``event``: one of ZeroMQ's HANDSHAKE_FAILED ones, ``value`` its."""

    peer: str
    event: int
    value: int

    @property
    def why(self) -> str:
        return _PROTOCOL_REFUSALS.get(self.value, _REFUSALS[self.event])


class PeerMonitor:
    """The connections that a socket has, as ZeroMQ's own thread sees them come and go.

    ``bound``: the socket is bound and may have several. One that connects has one at a time, and
    counts as connected only when the peer has answered: the kernel completes a connection to a
    listener that is about to close, too. ``on_refused`` is told of handshakes that failed, when they are read.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        *,
        bound: bool,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> None:
        self._socket = socket
        self._bound = bound
        self._on_refused = on_refused
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        if bound:
            wanted |= zmq.EVENT_ACCEPTED
        if on_refused is not None:
            for event in _REFUSALS:
                wanted |= event
        # pyzmq's get_monitor_socket leaves the high-water mark, and ZeroMQ's thread, with all connections of the
        # context, stops there when nobody reads: a thousand strangers would do.
        address = f"inproc://trioleg.monitor.{next(_monitor_numbers)}"
        socket.raw.monitor(address, wanted)
        monitor = make_socket(socket.raw.context, zmq.PAIR)
        monitor.connect(address)
        self._events = ZmqSocket(monitor)
        # Descriptors, and whose they are as far as that is known.
        self._connections: dict[int, str] = {}
        self._failed: tuple[int, int] | None = None
        self._had_any = False
        self._awaits_peer = True
        # Since the start: there was a connection, and then none; or a peer came while there was one, as one does
        # whose old connection has broken without our knowing.
        self.num_breaks = 0

    async def wait_for_change(self) -> None:
        """Returns after the next connection that came or went. Cancel-safe."""
        self._note(await self._events.recv_multipart())

    async def wait_break(self, seen: int) -> None:
        """Returns when it is deserted, or there are more breaks than ``seen``. Cancel-safe."""
        await trio.lowlevel.checkpoint()
        while not self.is_deserted() and self.num_breaks <= seen:
            await self.wait_for_change()

    async def wait_deserted(self) -> None:
        """Returns when ``is_deserted``. Cancel-safe."""
        await trio.lowlevel.checkpoint()
        while not self.is_deserted():
            await self.wait_for_change()

    async def wait_connected(self) -> None:
        """Returns when not ``is_deserted``. Cancel-safe."""
        await trio.lowlevel.checkpoint()
        while self.is_deserted():
            await self.wait_for_change()

    def is_deserted(self) -> bool:
        """True if there were connections and now there are none."""
        while not self._events.raw.closed:
            try:
                self._note(self._events.raw.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return self._had_any and not self._connections

    def _note(self, frames: list[bytes]) -> None:
        # A reconnected peer's new connection may be there before the old one is given up, so those
        # of a bound socket are told apart, by descriptor, and not merely noted as up or down.
        event = parse_monitor_message(frames)
        descriptor = event["value"] if self._bound else 0
        if event["event"] in _REFUSALS:
            # Its DISCONNECTED comes next: one thread sees to all connections.
            self._failed = event["event"], event["value"]
            return
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._note_end(descriptor)
            return
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_breaks += not self._awaits_peer
            self._awaits_peer = False
        if not self._bound or event["event"] == zmq.EVENT_ACCEPTED:
            self._connections[descriptor] = self._peer_of(descriptor)
            self._had_any = True

    def _note_end(self, descriptor: int) -> None:
        peer = self._connections.pop(descriptor, "")
        if self._had_any and not self._connections:
            self.num_breaks += not self._awaits_peer
            self._awaits_peer = True
        if self._failed is not None and self._on_refused is not None:
            event, value = self._failed
            self._on_refused(Refusal(peer, event, value))
        self._failed = None

    def _peer_of(self, descriptor: int) -> str:
        """The address of a connection that was just accepted, while it is certain whose descriptor that is."""
        if self._on_refused is None or not self._bound:
            return ""
        try:
            # A copy, which closing does not take from ZeroMQ.
            with stdlib_socket.socket(fileno=os.dup(descriptor)) as connection:
                peer = connection.getpeername()
        except OSError:
            return ""
        # ZeroMQ tells of an end before it closes: with nothing more to be told, the descriptor was still the one.
        if self._events.is_readable():
            return ""
        return f"{peer[0]} port {peer[1]}" if isinstance(peer, tuple) else ""

    def close(self) -> None:
        """Stops watching; the socket stays open. Before the socket is closed; may be called twice."""
        if not self._socket.raw.closed:
            self._socket.raw.monitor(None, 0)
        self._events.close(0.0)


async def close_sockets(context: Context, sockets: Iterable[ZmqSocket], *, linger: float) -> None:
    """Closes every socket of ``context`` and ends it; returns when what was unsent is out.

    Ending the context is what delivers: a process that leaves after closing alone takes the last
    messages with it. That call blocks for up to ``linger`` seconds, so it runs in a thread. Shields
    itself from cancellation, and is bounded by ``linger`` and a second. ``sockets`` must be all that
    the context has. May be called twice.
    """
    for socket in sockets:
        socket.close(linger)
    with trio.move_on_after(linger + _TERM_MARGIN_S, shield=True):
        await trio.to_thread.run_sync(context.term, abandon_on_cancel=True)
