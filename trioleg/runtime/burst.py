"""``Burst``: what the outputs of a step became, written in one go.

A client that sleeps is woken by the write that reaches it, and the wake-up is the dearest part of that write: 9 to
19 µs of processor, where a write to a client that is awake costs 2 to 4 (loopback, two cores). So an output's bytes
do not leave as soon as they are made, with 20 µs of work between one write and the next, in which the reader falls
asleep again. They wait for the end of the slice, and then all leave back to back.

Rules of this file: nothing waits, and nothing is kept beyond the slice. The link opens the burst, hands the outputs
out and flushes, all without a checkpoint; so no reader runs in between, and no write can overtake another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Burst"]

_log = logging.getLogger("trioleg.burst")


class Burst:
    """Single thread. ``is_open``: a link is handing outputs out, and will flush."""

    __slots__ = ("_writes", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []

    def open(self) -> None:
        """From now on until ``flush``, ``add`` may be called."""
        self.is_open = True

    def add(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Have ``write(data)`` called by ``flush``; ``write`` must neither wait nor raise."""
        self._writes.append((write, data))

    def flush(self) -> None:
        """Write what was added, in that order. Never raises: a write that does is logged, and no other suffers."""
        self.is_open = False
        if not self._writes:
            return
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except Exception:  # noqa: BLE001 - it is logged, and others have tokens to write
                _log.exception("a write of %d bytes failed", len(data))
