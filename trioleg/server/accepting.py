"""Accepting: every connection gets a task of its own, or an answer that says why not.

Two things can be used up. Connections have a bound of ours, below what the system's limit on open files leaves;
beyond it a client gets a 503 at once. Should files run out all the same (something else has them), one that was
kept for this moment takes the next client from the queue, to tell it the same: without that the queue would stay
as it is, and the system say so without a pause.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio

from .http1 import SERVER
from .protocol import error_body

__all__ = [
    "Acceptor",
    "Listener",
    "TlsListener",
    "connections_within_limits",
    "raise_descriptor_limit",
]

_log = logging.getLogger("trioleg.server")

# What accept says when there is no room for one more, by Trio's own list.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

# Descriptors that are not for clients: those who are told to come back, an engine that is started again, threads.
_SPARE_DESCRIPTORS = 64
# Who is turned away and has to read that; with so many of them, others wait in the system's queue meanwhile.
_MAX_REFUSALS = 16
_REFUSAL_TIMEOUT = 1.0
# Without the kept descriptor there is nothing to do but to wait.
_PAUSE = 0.1
# Clients taken at one turn, beside the first: a burst of a thousand is in within a few dozen turns.
_MORE_AT_ONCE = 31
# A listener's whole queue: more than Linux lets us have (net.core.somaxconn).
_MORE_AT_THE_END = 2**16
# A server that is full is full for every client that comes.
_LOG_INTERVAL = 60.0
# One process, one core: more connections than it can serve. Some programs walk through all possible descriptors.
_MOST_DESCRIPTORS = 2**16


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files as far as the system lets us. For a program's start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within_limits() -> int:
    """How many connections the limit on open files leaves room for; 1 at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    return max(1, soft - _num_open_files() - _SPARE_DESCRIPTORS)


def _num_open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0  # a system without /proc; they are among the spare ones then


@dataclass(frozen=True, slots=True)
class TlsListener:
    """A listener whose clients speak TLS."""

    plain: trio.SocketListener
    context: ssl.SSLContext

    @property
    def socket(self) -> trio.socket.SocketType:
        return self.plain.socket


Listener = trio.SocketListener | TlsListener


class Acceptor:
    """Accepts on all listeners of a server. ``serve`` is a connection's life; it closes what it is given, and
    shakes hands itself where TLS is spoken, so that nobody else waits for that.

    ``has_room``: whether one more may come. ``num_refused``: those who were told to come back.
    """

    def __init__(
        self,
        serve: Callable[[trio.SocketStream, ssl.SSLContext | None], Coroutine[Any, Any, None]],
        has_room: Callable[[], bool],
    ) -> None:
        self.num_refused = 0
        self._serve = serve
        self._has_room = has_room
        self._num_refusals = 0
        self._fewer_refusals = trio.lowlevel.ParkingLot()
        self._logged_at = -_LOG_INTERVAL
        self._kept: int | None = None

    async def run(self, listener: Listener, connections: trio.Nursery) -> None:
        """Accept for ever. On a cancel the listener is closed, once those who wait in its queue are served, too: with
        the queue their connections would be reset. Raises ``OSError`` if the listener breaks."""
        if isinstance(listener, TlsListener):
            plain, tls = listener.plain, listener.context
        else:
            plain, tls = listener, None
        async with plain:
            try:
                while True:
                    while self._num_refusals >= _MAX_REFUSALS:
                        await self._fewer_refusals.park()
                    self._keep_one()
                    stream = await self._next(plain, tls)
                    if stream is not None:
                        # Each wait for a turn is as long as a thousand streams' work, under load.
                        for one in [stream, *_queued(plain, _MORE_AT_ONCE)]:
                            connections.start_soon(self._take, one, tls, name="connection")
                        # So that those who are refused count before the next ones are taken.
                        await trio.lowlevel.checkpoint()
            finally:
                self._give_up_kept()
                for stream in _queued(plain, _MORE_AT_THE_END):
                    connections.start_soon(self._serve, stream, tls, name="connection")

    async def _take(self, stream: trio.SocketStream, tls: ssl.SSLContext | None) -> None:
        # Asked here, where those before it count already.
        await (self._serve if self._has_room() else self._refuse)(stream, tls)

    async def _next(
        self, listener: trio.SocketListener, tls: ssl.SSLContext | None
    ) -> trio.SocketStream | None:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._note_refusal(f"the system has no room for it ({error.strerror})")
        if self._kept is None:
            await trio.sleep(_PAUSE)
            return None
        self._give_up_kept()
        # Whoever was first in the queue may have left it meanwhile.
        with trio.move_on_after(_PAUSE), suppress(OSError):
            async with await listener.accept() as stream:
                if tls is None:
                    await _tell(stream)
        return None

    def _keep_one(self) -> None:
        if self._kept is None:
            with suppress(OSError):
                self._kept = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_kept(self) -> None:
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

    async def _refuse(self, stream: trio.SocketStream, tls: ssl.SSLContext | None) -> None:
        self._note_refusal("there are as many as there may be")
        self._num_refusals += 1
        try:
            async with stream:
                # To say it under TLS would cost more than most answers do.
                if tls is None:
                    with trio.move_on_after(_REFUSAL_TIMEOUT):
                        await _tell(stream)
        finally:
            self._num_refusals -= 1
            self._fewer_refusals.unpark()

    def _note_refusal(self, why: str) -> None:
        self.num_refused += 1
        if trio.current_time() >= self._logged_at + _LOG_INTERVAL:
            self._logged_at = trio.current_time()
            _log.warning("connections are refused: %s (%d so far)", why, self.num_refused)


def _queued(listener: trio.SocketListener, most: int) -> list[trio.SocketStream]:
    """Those that the system has accepted, and we have not. Does not wait."""
    streams: list[trio.SocketStream] = []
    with suppress(OSError), socket.socket(fileno=os.dup(listener.socket.fileno())) as queue:
        queue.setblocking(False)
        while len(streams) < most:
            one, _ = queue.accept()
            one.setblocking(False)
            streams.append(trio.SocketStream(trio.socket.from_stdlib_socket(one)))
    return streams


async def _tell(stream: trio.SocketStream) -> None:
    """Say why not, and wait until the client has left; the caller bounds it."""
    with suppress(OSError, trio.BrokenResourceError):
        await stream.receive_some()
        os.write(stream.socket.fileno(), _FULL)
        await stream.send_eof()
        # To close over unread input would reset the connection, and lose the answer.
        while await stream.receive_some():
            pass


def _full() -> bytes:
    message = "the server has as many connections as it can; close some, or come back later"
    body = error_body(
        {
            "message": message,
            "type": "service_unavailable_error",
            "param": None,
            "code": "too_many_connections",
        }
    )
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        f"server: {SERVER.decode()}",
        "connection: close",
    )
    return "\r\n".join([*head, "", ""]).encode() + body


_FULL = _full()
