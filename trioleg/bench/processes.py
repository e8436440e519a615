"""Programs under test, each owned by a block, and what can be learned of processes from outside.

Linux only, as far as it reads /proc.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from ..errors import TriolegError
from ..ipc.launch import EngineProcess, open_engine_process

__all__ = [
    "START_S",
    "Program",
    "count_descriptors",
    "descendants",
    "resident_kb",
    "running",
    "until",
    "wait_gone",
]

# Interpreters and imports: 1 to 2 s here; this is for a machine under load.
START_S = 60.0
# An orderly end of a server and its engine takes about 1 s; behind that it is killed.
_STOP_S = 5.0
# How often a condition is looked at that nothing announces. It is the resolution of what is measured so.
_POLL_S = 0.005
_LINES_KEPT = 50


class Program:
    """A running program, and the lines that it has printed. Made by ``running``."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: EngineProcess | None = None
        self._news = trio.Event()

    def take_line(self, line: str) -> None:
        self._lines.append(line)
        self._news.set()

    def attach(self, process: EngineProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Of the program itself, not of its guardian."""
        return self._running.engine_pid

    async def wait(self) -> str:
        """Wait for its end; a clause that says how it ended. Cancel-safe."""
        return str(await self._running.wait())

    @property
    def _running(self) -> EngineProcess:
        assert self._process is not None, "running gives it its process"
        return self._process

    async def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first line that matches. Raises ``TriolegError`` if it cannot come, or not in time."""
        with trio.move_on_after(START_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
                while self._find(pattern) is None:
                    self._news = trio.Event()
                    await self._news.wait()
                nursery.cancel_scope.cancel(reason="it was said")
        match = self._find(pattern)
        if match is None:
            said = " / ".join(self._lines) or "nothing"
            raise TriolegError(
                f"a program under test did not say {pattern.pattern!r}; it said: {said}"
            )
        return match

    def _find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next(filter(None, map(pattern.search, self._lines)), None)

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await self._running.wait()
        scope.cancel(reason="the program has ended")


@asynccontextmanager
async def running(*arguments: str, folder: Path | None = None) -> AsyncIterator[Program]:
    """Run ``python ARGUMENTS``; the block's end ends it: asked, waited for, killed; then ``folder`` is
    removed. If the bench itself is killed, a guardian does the same."""
    program = Program()
    async with open_engine_process(
        [sys.executable, *arguments],
        on_stderr_line=program.take_line,
        stop_timeout=_STOP_S,
        ipc_dir=folder,
    ) as process:
        program.attach(process)
        yield program


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float, *, every: float = _POLL_S
) -> bool:
    """Ask again and again, ``every`` so many seconds; False if it did not come true in ``seconds``."""
    with trio.move_on_after(seconds):
        while True:
            if await condition():
                return True
            await trio.sleep(every)
    return False


async def wait_gone(pidfd: int, seconds: float) -> bool:
    """Wait for the end of the process behind ``os.pidfd_open``; False if it did not end in ``seconds``."""
    with trio.move_on_after(seconds):
        await trio.lowlevel.wait_readable(pidfd)
        return True
    return False


def descendants(pid: int) -> list[int]:
    """The living processes that came from ``pid``, parents first."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    parents = {one: parent for one in pids if (parent := _parent(one)) is not None}
    family = [pid]
    for ancestor in family:
        family += [one for one, parent in parents.items() if parent == ancestor]
    return family[1:]


def _parent(pid: int) -> int | None:
    """None for a process that has ended, whether somebody has waited for it or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)


def resident_kb(pid: int) -> int:
    """A process's own memory (RssAnon): without the files that it has mapped, which others share."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes)


def count_descriptors(pid: int) -> int:
    """The open files and sockets of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
