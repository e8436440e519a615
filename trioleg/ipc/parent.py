"""``wait_gone``: the end of a process that is not our child, such as the one that we must not outlive."""

from __future__ import annotations

import os
from contextlib import suppress

import trio

__all__ = ["wait_gone"]

# Where the system has no descriptor for a process (Linux has): how often we ask whether it is there.
_POLL_S = 0.5


async def wait_gone(pid: int) -> None:
    """Returns when process ``pid`` is gone, whoever's child it is. Cancel-safe."""
    if not hasattr(os, "pidfd_open"):
        await _poll_gone(pid)
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        await trio.lowlevel.checkpoint()
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def _poll_gone(pid: int) -> None:
    with suppress(ProcessLookupError):
        while True:
            await trio.sleep(_POLL_S)
            # Signal 0 reaches nobody; it only asks.
            os.kill(pid, 0)
