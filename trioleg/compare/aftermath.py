"""What there is behind a cause, beyond what ``observing.py`` looks at: who is still served, who was told what, how the
leg's process ended, and which processes and files it has left.

Rules of this file: what goes away by itself is waited for, within a bound. Verdicts are as ``observing.py`` has them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import h11
import trio

from ..bench.client import Exchange, ask
from ..bench.processes import Program, descendants, until
from ..errors import TriolegError
from .legs import Running
from .observing import BOUND_S, SETTLE_S, asking, note_hang, port_of, watch
from .outcome import LEAK, SWALLOW, Outcome
from .phrases import error_phrase, exception_lines, plain
from .seen import phrase

__all__ = [
    "Family",
    "error_told",
    "health",
    "health_at",
    "is_there",
    "note_again",
    "note_end",
    "note_surfaced",
    "note_time_of_end",
]

# Of a scenario itself, in a folder that is removed with it.
_CONTROL = frozenset({"engine", "probe"})
# For a request that may never come to the engine.
_AGAIN_S = 3.0


async def note_again(outcome: Outcome, server: Running) -> bool:
    """A new request, which the engine ends if it gets it: whether it came whole. One that is left to wait is a hang."""
    number: int | None = None
    # The engine may be gone: that is what is asked.
    with suppress(TriolegError, OSError):
        number = (await server.puppet.state()).arrived
    try:
        async with asking(server) as exchange:
            if number is not None:
                with suppress(TriolegError, OSError):
                    await server.puppet.wait_requests(number + 1, _AGAIN_S)
                    await server.puppet.say([number], finish="length")
            seen = await watch(exchange)
    except OSError:
        outcome.remarks.append("a new request: no connection")
        return False
    outcome.remarks.append(f"a new request: {phrase(seen)}")
    note_hang(outcome, [seen])
    return seen.finish == "length"


async def health(server: Running) -> str:
    """What /health answers: its status, and the error that is in it."""
    return await health_at(port_of(server))


async def health_at(port: int) -> str:
    """The same of a server that is not ready, and may not get so."""
    with trio.move_on_after(BOUND_S):
        try:
            async with ask(port, "/health") as exchange:
                await exchange.receive_all()
        except (OSError, h11.RemoteProtocolError):
            return "no connection"
        return f"{exchange.status} {error_phrase(bytes(exchange.body))}".strip()
    return f"nothing within {BOUND_S:g} s"


def is_there(program: Program) -> bool:
    """Whether its process has not ended."""
    return _is_alive(program.pid)


# ---------------------------------------------------------------------- who was told


def error_told(exchange: Exchange) -> str:
    """The error of an answer, or the last one of a stream: its code and its message; "" if it tells of none."""
    events = [event for event in bytes(exchange.body).split(b"\n\n") if b'"error"' in event]
    return error_phrase(events[-1].removeprefix(b"data: ")) if events else ""


def note_surfaced(
    outcome: Outcome, told: Sequence[str], lines: Sequence[str], words: re.Pattern[str]
) -> None:
    """Where an error came to light: with a client (``told``: their errors), in those of ``lines`` that have ``words``,
    or in how the process ended, if ``note_end`` has found that out."""
    logged = [line for line in lines if words.search(line)]
    has_failed = outcome.exit_code not in (None, 0)
    places = {"the client": any(told), "the log": logged, "the exit": has_failed}
    outcome.surfaced = ", ".join(place for place, is_so in places.items() if is_so) or "nowhere"
    exceptions = [line for line in exception_lines(logged) if words.search(line)]
    outcome.error = next(filter(None, (*told, *exceptions[-1:], *map(plain, logged[-1:]))), "")
    if outcome.surfaced == "nowhere":
        outcome.find(SWALLOW, "no client was told, no line was printed, and no exit says so")


# ---------------------------------------------------------------------- how it ended


async def note_time_of_end(
    outcome: Outcome, program: Program, cause: float, seconds: float
) -> bool:
    """Wait for the end of a leg's process, and note how and when it came; False if it did not in so many seconds."""
    with trio.move_on_after(seconds):
        outcome.exit_code = await program.wait_code()
        outcome.exit_s = time.monotonic() - cause
        return True
    return False


async def note_end(
    outcome: Outcome, server: Running, family: Family, cause: float, seconds: float
) -> None:
    """The same, and who is left when it has ended. One that stays is a remark: whether it should is for its users."""
    if await note_time_of_end(outcome, server.program, cause, seconds):
        await family.note_left(outcome)
    else:
        outcome.remarks.append(f"its process is still there {seconds:g} s later")


class Family:
    """The processes that came from a program, and the socket files that it and they have bound: those that were there
    when this was made. What is in the folder of the scenario itself does not count."""

    def __init__(self, program: Program) -> None:
        self._pids = descendants(program.pid)
        bound = {path for pid in (program.pid, *self._pids) for path in _bound_sockets(pid)}
        self._files = [path for path in bound if path.name not in _CONTROL]

    async def left(self) -> dict[str, int]:
        """What is still ``there`` when it has had its time to go."""

        async def is_gone() -> bool:  # noqa: ASYNC124 - what is asked again may wait
            return not self.there()

        await until(is_gone, SETTLE_S)
        return self.there()

    async def note_left(self, outcome: Outcome) -> None:
        """A process that is left is a leak. A file is none, since nobody runs in it: a remark."""
        left = await self.left()
        if processes := left.get("processes"):
            outcome.leaked["processes"] = processes
            outcome.find(
                LEAK, f"{SETTLE_S:g} s after its end there are still {processes} processes"
            )
        if files := left.get("socket files"):
            outcome.remarks.append(f"behind its end there are still {files} socket files")

    def there(self) -> dict[str, int]:
        """Now: ``processes``, ``socket files``; kinds with nothing are left out."""
        counts = {
            "processes": sum(map(_is_alive, self._pids)),
            "socket files": sum(path.exists() for path in self._files),
        }
        return {kind: count for kind, count in counts.items() if count}


def _is_alive(pid: int) -> bool:
    """There, and not merely waiting to be waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _bound_sockets(pid: int) -> list[Path]:
    """The files of the Unix sockets that a process has open."""
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    # Num, RefCount, Protocol, Flags, Type, St, Inode, and, if it is bound, Path.
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [Path(row[7]) for row in rows if len(row) == 8 and row[6] in inodes and row[7][0] == "/"]
