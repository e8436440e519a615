"""A client of one request: its own connection, which it may leave at any point and in any way.

Rules of this file: h11 over a Trio socket, nothing between them, so that it is known when a byte comes
and how the connection ends.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio

__all__ = ["CHAT", "Exchange", "ask", "chat_body", "is_healthy"]

CHAT = "/v1/chat/completions"

# SO_LINGER on, with a time of 0: close sends RST in place of FIN.
_RESET = struct.pack("ii", 1, 0)
_PIECE_BYTES = 64 * 1024
_DISCARDED_BYTES = 1024 * 1024


class Exchange:
    """A request that was sent, and what has come of its answer. Made by ``ask``."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self._socket = sock
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, path: str, body: bytes | None) -> None:
        """The request: a POST of ``body``, or a GET."""
        headers = [("Host", "bench"), ("Connection", "close")]
        if body is not None:
            # vLLM's server takes nothing else.
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(body))))
        method = "GET" if body is None else "POST"
        data = self._http.send(h11.Request(method=method, target=path, headers=headers)) or b""
        if body is not None:
            data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        while data:
            data = data[await self._socket.send(data) :]

    async def receive(self, at_most: int = _PIECE_BYTES) -> bool:
        """Take in what comes next, ``at_most`` so many bytes at a time; False when the answer is whole.

        Raises ``OSError`` or ``h11.RemoteProtocolError`` if the connection ends before that.
        """
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._socket.recv(at_most))
        if isinstance(event, h11.Response):
            self.status, self.headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            self.body += event.data
        # Behind the end h11 says that nothing comes any more, for ever.
        return not isinstance(event, h11.EndOfMessage | h11.ConnectionClosed)

    async def receive_all(self) -> None:
        """Returns when the answer is whole. Raises as ``receive``."""
        while await self.receive():
            pass

    async def receive_some(self) -> None:
        """Returns at the first bytes of the body, or when the answer is whole. Raises as ``receive``."""
        while not self.body and await self.receive():
            pass

    async def discard(self) -> None:
        """Throw away what has come, unread: for a stream that only has to be there."""
        await self._socket.recv(_DISCARDED_BYTES)

    def leave(self, *, reset: bool = False) -> None:
        """Close the connection, with FIN, or with RST. Synchronous; may be called twice."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()


@asynccontextmanager
async def ask(port: int, path: str, body: bytes | None = None) -> AsyncIterator[Exchange]:
    """Connect to ``port`` of this machine and send a request; the block's end closes the connection.

    Raises ``OSError`` if there is no server.
    """
    with trio.socket.socket() as sock:
        await sock.connect(("127.0.0.1", port))
        exchange = Exchange(sock)
        await exchange.send(path, body)
        yield exchange


def chat_body(*, stream: bool, max_tokens: int, **more: Any) -> bytes:
    """A chat completion request that no end token ends."""
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
    return json.dumps(body).encode()


async def is_healthy(port: int) -> bool:
    """Whether ``/health`` answers 200; False also if nobody answers."""
    try:
        async with ask(port, "/health") as exchange:
            await exchange.receive_all()
    except (OSError, h11.RemoteProtocolError):
        return False
    return exchange.status == 200
