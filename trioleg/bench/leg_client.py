"""A program: the clients of many streams in one thread, as cheap as Python has them.

    python -m trioleg.bench.leg_client CONTROL

CONTROL takes, as ``leg_control`` has it:

    open    port, count: so many streams more, a few at a time; how long each waited for its first frame
    window  after, seconds, pid, step: ``after`` so many seconds, how many frames came in so many ``seconds``, what
            the server ``pid`` used of the processor meanwhile, and how much longer than ``step`` the gaps were
    drain   until nothing has come for a while: frames since the last of these, and when the last of them came
    close   all streams, which must have ended in order; the text of some of them

Rules of this file: raw sockets and epoll. A frame is counted by its ``data: ``, and nothing is parsed but, at the
end, the few streams that were kept.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import resource
import select
import socket
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import h11

from .client import CHAT, chat_body
from .leg_control import answer, listen, receive
from .measurement import percentile
from .processes import processor_seconds

__all__ = ["LISTENING", "main", "text_digest"]

LISTENING = "the clients are here"

# Out of reach: the engine ends a stream when it is told to.
_MAX_TOKENS = 2**16
# Connections that wait for their first frame at a time; no server's backlog is shorter.
_OPENING = 64
_OPEN_S = 90.0
_PIECE_BYTES = 2**16
# Nothing for so long, and whoever is behind has caught up.
_QUIET_S = 0.25
_CLOSE_S = 60.0
# Streams whose bytes are kept, to be looked at.
_KEPT = 2
_FRAME = b"data: "
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class _Stream:
    sock: socket.socket
    sent: float
    kept: bytearray | None
    last: float = 0.0
    # The end of what came, if that is in the middle of a line.
    rest: bytes = b""


class _Clients:
    def __init__(self) -> None:
        # Of tokens: the frames that tell a stream's role and its end are not among them.
        self.frames = 0
        self._streams: dict[int, _Stream] = {}
        self._num_done = 0
        self._waits: list[float] = []
        self._gaps = array("d")
        self._is_recording = False
        self._broken = ""
        self._last = 0.0
        self._drained = 0
        self._poll = select.epoll()

    # ------------------------------------------------------------------ what it is told

    def open(self, port: int, count: int) -> dict[str, Any]:
        """Returns when each of them has its first token."""
        ends_at = time.monotonic() + _OPEN_S
        self._waits = []
        opened, before = 0, self.frames
        while self.frames - before < count:
            while opened < count and opened - len(self._waits) < _OPENING:
                self._open_one(port, is_kept=len(self._streams) < _KEPT)
                opened += 1
            self._read_until(ends_at, f"{count} streams did not all begin")
        return _both("first", self._waits)

    def window(self, after: float, seconds: float, pid: int, step: float) -> dict[str, Any]:
        """All streams are to be running, from before it until behind it."""
        self._read_for(after)
        self._gaps = array("d")
        self._is_recording = True
        started, used, frames = time.monotonic(), processor_seconds(pid), self.frames
        self._read_for(seconds)
        used = processor_seconds(pid) - used
        self._is_recording = False
        if not self._gaps:
            raise _BrokenRun(f"no token came within {seconds:g} s")
        beyond = [max(0.0, gap - step) for gap in self._gaps]
        return {
            "frames": self.frames - frames,
            "seconds": time.monotonic() - started,
            "processor_s": used,
            **_both("gap", beyond),
        }

    def drain(self, within: float) -> dict[str, Any]:
        """The engine pauses, or will, so that what was sent comes to an end, ``within`` so many seconds."""
        ends_at = time.monotonic() + within
        while self._read(_QUIET_S):
            if time.monotonic() > ends_at:
                raise _BrokenRun("streams went on that were to pause")
        frames = self.frames - self._drained
        self._drained = self.frames
        return {"frames": frames, "last": self._last}

    def close(self) -> dict[str, Any]:
        """The engine has said its last word; returns when all streams have ended."""
        ends_at = time.monotonic() + _CLOSE_S
        count = len(self._streams)
        while self._num_done < count:
            self._read_until(ends_at, f"{self._num_done} of {count} streams have ended")
        # What follows the last frame is no frame.
        self._read(_QUIET_S)
        texts = [_digest_of(one.kept) for one in self._streams.values() if one.kept is not None]
        for stream in self._streams.values():
            self._poll.unregister(stream.sock)
            stream.sock.close()
        figures = {"frames": self.frames, "texts": texts}
        self._streams.clear()
        self.frames = self._num_done = self._drained = 0
        return figures

    # ------------------------------------------------------------------ reading

    def _open_one(self, port: int, *, is_kept: bool) -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(_request())
        self._streams[sock.fileno()] = _Stream(
            sock, time.monotonic(), bytearray() if is_kept else None
        )
        self._poll.register(sock, select.EPOLLIN)

    def _read_for(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            self._read(left)

    def _read_until(self, ends_at: float, why: str) -> None:
        self._read(max(0.0, ends_at - time.monotonic()))
        if time.monotonic() >= ends_at:
            raise _BrokenRun(why)

    def _read(self, timeout: float) -> bool:
        """What has come, of all streams; False if nothing did in ``timeout`` seconds."""
        ready = self._poll.poll(timeout)
        for descriptor, _ in ready:
            self._read_one(self._streams[descriptor])
        return bool(ready)

    def _read_one(self, stream: _Stream) -> None:
        data = stream.sock.recv(_PIECE_BYTES)
        now = time.monotonic()
        if stream.kept is not None:
            stream.kept += data
        frames = data.count(_FRAME)
        if stream.rest or not data.endswith(b"\n"):
            if not data:
                raise _BrokenRun("a stream ended before its time")
            data = stream.rest + data
            frames = data.count(_FRAME) - stream.rest.count(_FRAME)
            stream.rest = b"" if data.endswith(b"\n") else data[-len(_DONE) :]
        if not frames:
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                raise _BrokenRun(f"a stream was refused: {data!r:.300}")
            return
        self.frames += frames
        if not stream.last:
            self.frames -= 1
            self._waits.append(now - stream.sent)
        elif self._is_recording:
            self._gaps.append(now - stream.last)
        stream.last = self._last = now
        if _DONE in data:
            self.frames -= 1
            self._num_done += 1


class _BrokenRun(Exception):
    """What must not be; whoever asked is told."""


@functools.cache
def _request() -> bytes:
    body = chat_body(stream=True, max_tokens=_MAX_TOKENS)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _both(name: str, figures: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p50": statistics.median(figures), f"{name}_p99": percentile(figures, 0.99)}


def _digest_of(answer: bytearray) -> str:
    """What ``text_digest`` makes of a whole stream's text."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("Host", "bench")]))
    http.receive_data(bytes(answer))
    body = bytearray()
    while isinstance(event := http.next_event(), h11.Response | h11.Data):
        body += event.data if isinstance(event, h11.Data) else b""
    events = [one.removeprefix(_FRAME) for one in bytes(body).split(b"\n\n")]
    chunks = [json.loads(one) for one in events if one.startswith(b"{")]
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    return text_digest("".join(delta.get("content") or "" for delta in deltas))


def text_digest(text: str) -> str:
    """As good as the text to compare it by, and shorter."""
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The clients of many streams.")
    parser.add_argument("control", type=Path)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = listen(options.control)
    click.echo(LISTENING)
    peer, _ = listener.accept()
    clients = _Clients()
    while True:
        command = receive(peer)
        try:
            figures = getattr(clients, command.pop("do"))(**command)
        except (_BrokenRun, OSError) as error:
            figures = {"error": str(error)}
        answer(peer, **figures)


if __name__ == "__main__":
    main()
