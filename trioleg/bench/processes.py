"""Programs under test, each owned by a block, and what can be learned of processes from outside.

Linux only, as far as it reads /proc.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from ..errors import InvalidRequestError, TriolegError
from ..ipc.launch import EngineProcess, open_engine_process

__all__ = [
    "START_S",
    "Program",
    "allow_open_files",
    "count_descriptors",
    "descendants",
    "pin",
    "processor_seconds",
    "resident_kb",
    "resident_mb",
    "running",
    "started_s",
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
# What a process opens besides a connection for each stream: libraries, sockets of its own, tokenizers.
_OTHER_FILES = 128


def allow_open_files(streams: int, asked: str) -> None:
    """Have this process, and those that it starts, be allowed a file for each of so many streams.

    Raises ``InvalidRequestError``, in which ``asked`` says what they are for, if the system does not allow that many.
    """
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], streams + _OTHER_FILES
    # Without a limit it is below 0.
    if 0 <= most < needed:
        raise InvalidRequestError(
            f"{asked}: {streams} streams need {needed} open files in a process; allowed here: {most} (ulimit -Hn)",
            parameter="streams",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Program:
    """A running program, and the lines that it has printed. Made by ``running``."""

    def __init__(self, lines_kept: int = _LINES_KEPT) -> None:
        self._lines: deque[str] = deque(maxlen=lines_kept)
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

    @property
    def last_words(self) -> str:
        """What it has printed of late, in one line."""
        return " / ".join(self._lines) or "nothing"

    @property
    def lines(self) -> Sequence[str]:
        """What it has printed of late."""
        return tuple(self._lines)

    async def wait(self) -> str:
        """Wait for its end; a clause that says how it ended. Cancel-safe."""
        return str(await self._running.wait())

    async def wait_code(self) -> int | None:
        """Wait for its end: its exit code, a signal's number below 0, None if that is not known. Cancel-safe."""
        return (await self._running.wait()).code

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
            raise TriolegError(
                f"a program under test did not say {pattern.pattern!r}; it said: {self.last_words}"
            )
        return match

    def _find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next(filter(None, map(pattern.search, self._lines)), None)

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await self._running.wait()
        scope.cancel(reason="the program has ended")


@asynccontextmanager
async def running(
    *arguments: str,
    folder: Path | None = None,
    python: Sequence[str] = (sys.executable,),
    lines_kept: int = _LINES_KEPT,
) -> AsyncIterator[Program]:
    """Run ``python ARGUMENTS``; the block's end ends it: asked, waited for, killed; then ``folder`` is
    removed. If the bench itself is killed, a guardian does the same. ``lines_kept``: of what it prints."""
    program = Program(lines_kept)
    async with open_engine_process(
        [*python, *arguments],
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


def started_s(pid: int) -> float:
    """When a process started, in seconds of CLOCK_BOOTTIME; to 10 ms, as the kernel counts it."""
    # Field 22 of stat; those behind the name count from 3.
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keep every thread of a process on ``cores``; those that it starts later inherit that."""
    cores = list(cores)
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), cores)


def resident_kb(pid: int) -> int:
    """A process's own memory (RssAnon): without the files that it has mapped, which others share."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes)


def resident_mb(pid: int) -> float:
    """All of a process that is in memory (VmRSS), mapped files included, in 2**20 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_seconds(pid: int) -> float:
    """Of the processor, user and system, that the threads of ``pid`` have used which are there now; to the
    nanosecond, where ``stat`` counts ticks of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def count_descriptors(pid: int) -> int:
    """The open files and sockets of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
