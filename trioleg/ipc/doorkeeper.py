"""``Doorkeeper``: says which keys may come in, and logs who may not.

Rules of this file: one doorkeeper serves all sockets that belong to one handshake address. libzmq asks
about each peer's key at a fixed place inside each context (ZAP, ZeroMQ's RFC 27), so every context gets
a task that answers there. A peer that never gets as far as the question (no keys, or a wrong key for
us) is only to be seen in its socket's monitor.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

import trio
import zmq
from zmq.utils import z85

from .curve import FrontEndKeys
from .seldom_log import SeldomLog
from .sockets import Context, PeerMonitor, Refusal, Socket, ZmqSocket, make_socket

__all__ = ["Doorkeeper"]

logger = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class Doorkeeper:
    """``nursery``: where its tasks run. Without them nobody can come in any more; who is in stays in."""

    def __init__(self, keys: FrontEndKeys, nursery: trio.Nursery) -> None:
        self._keys = keys
        self._nursery = nursery
        self._seldom = SeldomLog(logger, "more refused")

    def open_door(self, context: Context) -> ZmqSocket:
        """Answer in ``context``, until the socket that is returned is closed, with the others of the context."""
        questions = ZmqSocket(make_socket(context, zmq.REP))
        questions.raw.bind(_ZAP_ADDRESS)
        self._nursery.start_soon(self._answer, questions, name="doorkeeper")
        return questions

    def guard(self, socket: Socket, leg: str) -> None:
        """Let only known keys come in. Before the socket is bound, and behind ``open_door``."""
        self._keys.set_up(socket, leg)

    def watch(self, socket: ZmqSocket, leg: str) -> PeerMonitor:
        """Follow the connections of a socket that nobody else watches, until the monitor is closed."""
        monitor = PeerMonitor(socket, bound=True, on_refused=partial(self.note_refused, leg))
        self._nursery.start_soon(self._follow, monitor, name="doorkeeper's watch")
        return monitor

    def note_refused(self, leg: str, refusal: Refusal) -> None:
        """Log it, unless a question was answered with no, which has been logged."""
        if refusal.event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._log(
                leg, refusal.peer or "an address that was gone too soon to be seen", refusal.why
            )

    async def _answer(self, questions: ZmqSocket) -> None:
        with suppress(trio.ClosedResourceError):
            while True:
                reply = self._reply(await questions.recv_multipart())
                questions.send_multipart(reply)

    def _reply(self, question: list[bytes]) -> list[bytes]:
        """ZAP's answer: version, number of the question, status, its text, user, metadata."""
        _, number, leg, address, _, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        if key in self._keys.engines:
            return [_ZAP_VERSION, number, b"200", b"OK", key, b""]
        why = f"its public key {key.decode()!r} is not among those that may come in"
        self._log(leg.decode(), address.decode(), why)
        return [_ZAP_VERSION, number, b"400", b"unknown key", b"", b""]

    async def _follow(self, monitor: PeerMonitor) -> None:
        with suppress(trio.ClosedResourceError):
            while True:
                await monitor.wait_for_change()

    def _log(self, leg: str, peer: str, why: str) -> None:
        self._seldom.warn(leg, f"somebody at {peer} is not let in: {why}")
