"""A program: the clients of many streams, all in one thread, who note when each piece of an answer comes.

    python -m trioleg.bench.load_streams PORT COUNT FILE

It says when every stream has begun, and reads on until SIGTERM. Then it writes to FILE, as pairs of doubles, when
each piece came (``time.monotonic``) and how long after the one before it of the same stream, and says that it has.
It is a process of its own, without a framework, so that what it costs to read ten thousand pieces a second is
not in what the bench measures beside it.
"""

from __future__ import annotations

import argparse
import resource
import selectors
import signal
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import click

from .client import CHAT, chat_body

__all__ = ["ALL_OPEN", "WRITTEN", "main"]

ALL_OPEN = "all streams are open"
WRITTEN = "streams that ended before their time: "

# An hour of ten tokens a second; within what the served model takes.
_MAX_TOKENS = 2**15
_PIECE_BYTES = 2**16
# How soon a SIGTERM is seen if no stream says anything.
_LOOK_UP_S = 0.1


class _Streams:
    """Each stream's socket is registered with the time of its last piece, 0 before its first."""

    def __init__(self, port: int, count: int) -> None:
        self.gaps = array("d")
        self.num_silent = count
        self.num_ended = 0
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            self._selector.register(_opened(port), selectors.EVENT_READ, [0.0])

    def read(self) -> None:
        """What has come, of all streams; returns soon if nothing does."""
        for key, _ in self._selector.select(_LOOK_UP_S):
            self._read_one(key.fileobj, key.data)

    def _read_one(self, sock: Any, last: list[float]) -> None:
        data = sock.recv(_PIECE_BYTES)
        now = time.monotonic()
        if not data:
            self._selector.unregister(sock)
            self.num_ended += 1
        elif last[0]:
            self.gaps.extend((now, now - last[0]))
        elif b"data: " in data:
            self.num_silent -= 1
        elif data.startswith(b"HTTP/1.1 200"):
            return  # the head alone
        else:
            sys.exit(f"a stream was refused: {data!r}")
        last[0] = now


def _opened(port: int) -> socket.socket:
    body = chat_body(stream=True, max_tokens=_MAX_TOKENS)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(head.encode() + body)
    return sock


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Reads many streams and notes when pieces come.")
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    streams = _Streams(options.port, options.count)
    while streams.num_silent and not asked_to_end:
        streams.read()
    click.echo(ALL_OPEN)
    while not asked_to_end:
        streams.read()
    options.file.write_bytes(streams.gaps.tobytes())
    click.echo(f"{WRITTEN}{streams.num_ended}")


if __name__ == "__main__":
    main()
