"""The clients of ``stalled.py``: one that never reads, and one that reads all and knows what must come."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from .client import CHAT, Exchange, ask, chat_body

__all__ = ["Reader", "StalledClient", "open_stalled"]

# The least that Linux takes: what the server writes soon has no place but the server's own side.
_RECEIVE_BUFFER = 2048
_PIECE_BYTES = 2**20
_EVENT_END = b"\n\n"
_DATA = b"data: "

T = TypeVar("T")


class StalledClient:
    """A request whose answer is not read before its end is looked for. Made by ``open_stalled``."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock

    async def see_end(self) -> str:
        """Read what the kernels still hold; how the connection ended: "FIN", or "RST"."""
        try:
            while await self._socket.recv(_PIECE_BYTES):
                pass
        except ConnectionResetError:
            return "RST"
        return "FIN"


@asynccontextmanager
async def open_stalled(port: int, max_tokens: int) -> AsyncIterator[StalledClient]:
    """Ask for a stream, and read nothing of it. The block's end closes the connection."""
    with trio.socket.socket() as sock:
        # Before it connects: the window is agreed on with the first packet.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        await sock.connect(("127.0.0.1", port))
        await Exchange(sock).send(CHAT, chat_body(stream=True, max_tokens=max_tokens))
        yield StalledClient(sock)


class Reader:
    """Reads one stream to its end. ``num_tokens``: come so far; ``gaps``: seconds between two pieces of the body;
    ``fault``: what was not as it must be, "" if nothing; ``finish``: the finish reason or the error's message."""

    def __init__(self, token_ids: Sequence[int], text: str) -> None:
        self.num_tokens = 0
        self.gaps: list[float] = []
        self.fault = ""
        self.finish = ""
        self._token_ids = token_ids
        self._text = text
        self._num_characters = 0

    async def run(self, port: int, max_tokens: int) -> None:
        """Raises as ``Exchange.receive``."""
        body = chat_body(stream=True, max_tokens=max_tokens, return_token_ids=True)
        async with ask(port, CHAT, body) as exchange:
            await exchange.receive_some()
            at = time.monotonic()
            while await exchange.receive():
                before, at = at, time.monotonic()
                self.gaps.append(at - before)
                self._take(exchange.body)
            self._take(exchange.body)

    def _take(self, body: bytearray) -> None:
        """The events that are complete, which leave ``body``."""
        end = body.rfind(_EVENT_END)
        if end < 0:
            return
        for event in bytes(body[:end]).split(_EVENT_END):
            if event != b"data: [DONE]":
                self._take_event(json.loads(event.removeprefix(_DATA)))
        del body[: end + len(_EVENT_END)]

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.finish = event["error"]["message"]
            return
        (choice,) = event["choices"]
        self.finish = choice["finish_reason"] or self.finish
        self._check(choice.get("token_ids") or [], choice["delta"].get("content") or "")

    def _check(self, token_ids: Sequence[int], text: str) -> None:
        expected = _repeated(self._token_ids, self.num_tokens, len(token_ids))
        if list(token_ids) != expected:
            self.fault = f"token {self.num_tokens} and on: {token_ids!r:.80}, not {expected!r:.80}"
        letters = "".join(_repeated(self._text, self._num_characters, len(text)))
        if text != letters:
            self.fault = (
                f"character {self._num_characters} and on: {text!r:.80}, not {letters!r:.80}"
            )
        self.num_tokens += len(token_ids)
        self._num_characters += len(text)


def _repeated(cycle: Sequence[T], start: int, count: int) -> list[T]:
    """``count`` items of ``cycle`` from ``start`` on, as if it went on for ever."""
    return [cycle[place % len(cycle)] for place in range(start, start + count)]
