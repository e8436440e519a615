"""How the bench of the leg tells its programs what to do: a word, some figures, and an answer.

A Unix socket that keeps messages apart, at a path in the bench's own folder. The program serves one peer, in its
own loop and in its own time; nothing is sent that was not asked for. Bodies are JSON.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from ..errors import TriolegError

__all__ = ["ANSWER_S", "Remote", "answer", "listen", "open_remote", "receive"]

# A word and a few figures.
_MESSAGE_BYTES = 16 * 1024
# The longest that a program may take for what it is told: windows and openings are bounded themselves.
ANSWER_S = 120.0


def listen(path: Path) -> socket.socket:
    """The program's side, before it says that it is there. What is at ``path`` can be connected to at once."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bound = path.with_name(f"{path.name}.bound")
    listener.bind(str(bound))
    listener.listen(1)
    bound.rename(path)
    return listener


def receive(peer: socket.socket) -> dict[str, Any]:
    """The next thing to do; waits for it. Raises ``SystemExit`` when the bench has gone."""
    data = peer.recv(_MESSAGE_BYTES)
    if not data:
        raise SystemExit(0)
    command: dict[str, Any] = msgspec.json.decode(data)
    return command


def answer(peer: socket.socket, **figures: Any) -> None:
    """What came of it."""
    peer.sendall(msgspec.json.encode(figures))


class Remote:
    """The bench's side, made by ``open_remote``."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock

    async def tell(self, word: str, **figures: Any) -> dict[str, Any]:
        """Have it do something, and wait for what came of it. Not cancel-safe: the answer would be the next one's.

        Raises ``TriolegError`` if the program has ended, or does not answer.
        """
        with trio.move_on_after(ANSWER_S):
            await self._socket.send(msgspec.json.encode({"do": word, **figures}))
            data = await self._socket.recv(_MESSAGE_BYTES)
            if not data:
                raise TriolegError(f"a program of the bench ended while it was to {word}")
            reply: dict[str, Any] = msgspec.json.decode(data)
            if "error" in reply:
                raise TriolegError(reply["error"])
            return reply
        raise TriolegError(f"a program of the bench was not done within {ANSWER_S:g} s: {word}")


@asynccontextmanager
async def open_remote(path: Path) -> AsyncIterator[Remote]:
    """Reach the program that listens at ``path``, for the length of the block. Raises ``OSError``."""
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        await sock.connect(str(path))
        yield Remote(sock)
