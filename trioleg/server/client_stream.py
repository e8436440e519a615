"""The bytes of one client's connection, plain or under TLS: two classes with one interface, ``ClientStream``.

What they promise alike:

- Only one task receives, and only one at a time writes. ``write_now`` never waits. ``write_some`` first hands the
  kernel what it takes, whatever has been cancelled, and waits (cancellable) only for the rest; it counts bytes of
  the answer, and returns 0 for progress that completes none.
- A ``write_some`` that did not return has cut the answer: the caller sends nothing behind it.
- ``finish`` is the end of a whole answer, and of nothing else. Under TLS it is a signed word (close_notify), by which
  a client tells a body that ends with its connection from one that was cut.
- Neither closes by itself; ``close`` is synchronous, and may come twice.

TLS is Trio's ``SSLStream``. What it does is not to be cancelled half way, or the session is lost; what a client
holds up must be. So it gets a transport that takes everything at once (``_Wire``), its steps are shielded, and the
waiting for the kernel is done outside of it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import trio
from trio.socket import SHUT_WR, SocketType

__all__ = ["ClientStream", "HandshakeFailed", "PlainStream", "TlsStream"]

RECEIVE_SIZE = 2**16  # Hypercorn's and Trio's own choice

# A TLS record (RFC 8446, 5.1): a client can read nothing of one before its end, so this is the piece in which
# progress is made.
_RECORD = 2**14
# Beyond one record only answers to a client's demands for new keys collect. One that makes them and never reads is
# not to fill our memory.
_MAX_UNSENT = 2**16

# To whoever asks in plain HTTP where TLS is spoken, as other servers say it.
_USE_HTTPS = b"Here TLS is spoken: ask with https://, not http://.\n"
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_USE_HTTPS), _USE_HTTPS)
)


class HandshakeFailed(Exception):
    """A client with which no TLS session could be agreed on; the text says why. ``left``: it just went away."""

    def __init__(self, why: str, *, left: bool = False) -> None:
        super().__init__(why)
        self.left = left


class ClientStream(Protocol):
    """What a connection needs of its stream."""

    is_tls: bool
    socket: SocketType

    async def shake_hands(self) -> None:
        """Before all else. Raises ``HandshakeFailed``. A cancel loses the session."""

    async def receive(self) -> bytes:
        """What the client sent; ``b""`` at its end, however it came. Cancel-safe."""

    async def receive_now(self) -> bytes:
        """As ``receive``; raises ``trio.WouldBlock`` where that would wait."""

    def write_now(self, data: bytes) -> int:
        """How many bytes the kernel took. Raises ``OSError`` for a client that is gone."""

    async def write_some(self, data: memoryview) -> int:
        """How many bytes of ``data`` are with the kernel now. Raises ``OSError`` or
        ``trio.ClosedResourceError`` for a client or a socket that is gone."""

    async def finish(self) -> None:
        """Say that nothing follows what was written. Raises ``OSError`` for a client that is gone."""

    def close(self) -> None:
        """The socket, at once."""


class PlainStream:
    """HTTP straight over the socket."""

    is_tls = False

    __slots__ = ("socket",)

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket

    async def shake_hands(self) -> None:
        """Nothing to agree on, and no checkpoint."""

    async def receive(self) -> bytes:
        # Not Trio's ``recv``: a client that says nothing would hold its frames, too.
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            with suppress(trio.WouldBlock):
                return _read_now(self.socket)

    async def receive_now(self) -> bytes:
        await trio.lowlevel.cancel_shielded_checkpoint()
        return _read_now(self.socket)

    def write_now(self, data: bytes) -> int:
        # A closed socket's descriptor is -1, never another's.
        try:
            return os.write(self.socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def write_some(self, data: memoryview) -> int:
        return await self.socket.send(data)

    async def finish(self) -> None:
        self.socket.shutdown(SHUT_WR)

    def close(self) -> None:
        self.socket.close()


class TlsStream:
    """HTTP over TLS over the socket."""

    is_tls = True

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext) -> None:
        self.socket = stream.socket
        self._wire = _Wire(stream.socket)
        # Not https_compatible: that is the mode without a close_notify of ours. Clients may leave without one.
        self._tls = trio.SSLStream(self._wire, context, server_side=True)
        self._encrypted = 0

    async def shake_hands(self) -> None:
        try:
            await self._tls.do_handshake()
        except OSError as error:
            raise HandshakeFailed(str(error), left=True) from error
        except trio.BrokenResourceError as error:
            if getattr(error.__cause__, "reason", None) == "HTTP_REQUEST":
                with suppress(OSError):
                    os.write(self.socket.fileno(), _BAD_REQUEST)
            raise HandshakeFailed(
                str(error.__cause__ or error), left=self._wire.has_ended
            ) from error
        self._wire.is_patient = False

    async def receive(self) -> bytes:
        try:
            return bytes(await self._tls.receive_some(RECEIVE_SIZE))
        except (OSError, trio.BrokenResourceError):
            return b""  # without a close_notify, which many clients leave out, or with something that is no TLS

    async def receive_now(self) -> bytes:
        self._wire.receive_now = partial(_read_now, self.socket)
        return await self._receive_shielded()

    async def _receive_shielded(self) -> bytes:
        try:
            with trio.CancelScope(shield=True):
                data = await self.receive()
        finally:
            self._wire.receive_now = None
        return data

    def write_now(self, data: bytes) -> int:  # noqa: ARG002 - encrypting passes a checkpoint
        return 0

    async def write_some(self, data: memoryview) -> int:
        try:
            if not self._encrypted:
                self._encrypted = await self._encrypt(data[:_RECORD])
            if self._wire.unsent:
                await self._wire.push_some()
        except trio.BrokenResourceError as error:
            raise OSError(str(error)) from error
        if self._wire.unsent:
            return 0
        done, self._encrypted = self._encrypted, 0
        return done

    async def _encrypt(self, piece: memoryview) -> int:
        with trio.CancelScope(shield=True):
            await self._tls.send_all(piece)
        return len(piece)

    async def finish(self) -> None:
        if self._wire.is_patient:
            await self._wire.aclose()  # there is no session that could end
            return
        await self._drop_received()
        with trio.CancelScope(shield=True):
            await self._tls.aclose()

    async def _drop_received(self) -> None:
        """What was read and not decrypted: before that is done, OpenSSL does not say its last word."""
        data = b"some"
        with suppress(trio.WouldBlock):
            while data:
                self._wire.receive_now = _nothing
                data = await self._receive_shielded()

    def close(self) -> None:
        self.socket.close()


class _Wire(trio.abc.Stream):
    """The socket as TLS sees it: it takes whatever is sent, and keeps in ``unsent`` what the kernel does not take.

    ``is_patient``: sending waits for the kernel, for the handshake, in which nobody else would push.
    ``receive_now``: takes the place of waiting for the client. ``has_ended``: the client will send no more.
    """

    def __init__(self, socket: SocketType) -> None:
        self.unsent = bytearray()
        self.is_patient = True
        self.receive_now: Callable[[], bytes] | None = None
        self.has_ended = False
        self._socket = socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.unsent += data
        if len(self.unsent) > _MAX_UNSENT:
            raise trio.BrokenResourceError("the client demands answers, and reads none")
        self._push_now()
        while self.is_patient and self.unsent:
            await self.push_some()

    def _push_now(self) -> None:
        try:
            sent = os.write(self._socket.fileno(), self.unsent)
        except BlockingIOError:
            return
        del self.unsent[:sent]

    async def push_some(self) -> None:
        """Wait until the kernel takes some of it. Cancel-safe."""
        await trio.lowlevel.wait_writable(self._socket)
        # Here and not in Trio's send, which lets others run between sending and saying how much.
        self._push_now()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self.receive_now is not None:
            data = self.receive_now()
        else:
            try:
                data = await self._socket.recv(max_bytes or RECEIVE_SIZE)
            except OSError:
                data = b""
        self.has_ended = not data
        return data

    async def aclose(self) -> None:
        """The session is over, and the client is told so; the socket itself is not ours to close."""
        self._socket.shutdown(SHUT_WR)


def _nothing() -> bytes:
    raise trio.WouldBlock


def _read_now(socket: SocketType) -> bytes:
    """What has come. Raises ``trio.WouldBlock``: nothing; a reset is an end like any other."""
    try:
        return os.read(socket.fileno(), RECEIVE_SIZE)
    except BlockingIOError:
        raise trio.WouldBlock from None
    except OSError:
        return b""
