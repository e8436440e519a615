"""Engine processes as the front end has them: started under a guardian, owned by a block.

Rules of this file: knows processes, pipes and signals, nothing of the wire. ``guardian.py`` is run by
its path, and its docstring says what passes between it and us. An exit code tells how a process
ended and never whether an engine is well: a launcher may exit with 0 after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import trio

from ..errors import EngineStartError

__all__ = ["EngineExit", "EngineProcess", "last_error", "open_engine_process", "private_ipc_dir"]

_GUARDIAN = Path(__file__).with_name("guardian.py")
# A guardian is an interpreter that imports little (0.1 s here); this is for a machine under load.
_GUARDIAN_START_S = 30.0
# What a guardian may take beyond the time that it gives its group.
_GUARDIAN_MARGIN_S = 2.0
# Behind the guardian's end: what is still in the pipe is read at once, unless a process that left
# the group holds the other end.
_LAST_WORDS_S = 0.5
# Lines of stderr kept for ``last_error``; a Python traceback with its message rarely has more.
_LINES_KEPT = 200
# A longer line is passed on in pieces: nothing in the front end may grow with an engine's output.
_LINE_BYTES = 64 * 1024
_SHOWN_WITHOUT_TRACEBACK = 3
# sun_path holds 108 bytes with its terminator; the longest name that we put into the folder is
# "/handshake", and the kernel's limit is shared with ZeroMQ's own suffixes: none.
_FOLDER_BYTES = 107 - len("/handshake")
_TRACEBACK = "Traceback (most recent call last):"
# "ValueError: …", "pkg.mod.Error: …", a bare "KeyboardInterrupt"; frames and carets are indented.
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(:|$)")
# "(EngineCore pid=7) INFO 11-30 …", "INFO 11-30 …", "2026-11-30 …", "/a/file.py:254: UserWarning: …".
_LOG_LINE = re.compile(
    r"\(\w[\w-]* pid=\d+\)|(DEBUG|INFO|WARNING|ERROR|CRITICAL)[ :]|\d{4}-\d\d-\d\d[ T]|\S+:\d+: \w*Warning:"
)
# "prog: error: unrecognized arguments: …", behind the usage.
_USAGE_LINE = re.compile(r"[\w.-]+( \w+)*: error: ")
_SHOWN_CHARS = 1000


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How an engine's process ended; ``str`` of it is a clause for people.

    ``code`` is its exit code, or minus the signal that ended it; None if the guardian was killed
    and nobody could tell.
    """

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "its guardian was killed, and it was ended"
        if self.code >= 0:
            return f"it exited with status {self.code}"
        with suppress(ValueError):
            return f"it was killed by {signal.Signals(-self.code).name}"
        return f"it was killed by signal {-self.code}"


def last_error(lines: Sequence[str]) -> str:
    """What a process said last that matters: a traceback's exception with its whole message, up to the next line of
    a log.

    Without a traceback, what argparse says of a command line, or else the last three lines that are not blank, nor
    the log's. "" if there is nothing. At most 1,000 characters.
    """
    said = "\n".join(_exception(lines) or _complaint(lines)).strip()
    return said if len(said) <= _SHOWN_CHARS else f"{said[: _SHOWN_CHARS - 3]}..."


def _exception(lines: Sequence[str]) -> list[str]:
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    for index in range(starts[-1] + 1, len(lines)) if starts else ():
        if _EXCEPTION_LINE.match(lines[index]):
            message = takewhile(lambda line: not _LOG_LINE.match(line), lines[index + 1 :])
            return [lines[index], *message]
    return []


def _complaint(lines: Sequence[str]) -> list[str]:
    words = [line.strip() for line in lines if line.strip() and not _LOG_LINE.match(line)]
    for index, line in enumerate(words):
        if _USAGE_LINE.match(line):
            return words[index:]
    return words[-_SHOWN_WITHOUT_TRACEBACK:]


class EngineProcess:
    """A running engine, behind its guardian. Made and ended by ``open_engine_process``."""

    def __init__(
        self,
        guardian: trio.Process,
        on_stderr_line: Callable[[str], None],
        stop_timeout: float,
        ipc_dir: Path | None,
    ) -> None:
        self._guardian = guardian
        self._on_stderr_line = on_stderr_line
        self._stop_timeout = stop_timeout
        self._ipc_dir = ipc_dir
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._engine_pid: int | None = None
        self._code: int | None = None
        self._died = False
        # It answers nothing, so there is no use in asking it to leave.
        self.is_stuck = False
        self._is_stopping = False
        self._started = trio.Event()
        self._ended = trio.Event()

    @property
    def pid(self) -> int:
        """The guardian's process id. The engine's own parent."""
        return self._guardian.pid

    @property
    def engine_pid(self) -> int:
        """The process id of the engine itself, which is its process group's id too."""
        if self._engine_pid is None:
            raise EngineStartError("the engine's guardian has not started it")
        return self._engine_pid

    @property
    def last_error(self) -> str:
        """``last_error`` of what came on stderr so far; complete once ``wait`` has returned."""
        return last_error(list(self._lines))

    @property
    def death(self) -> EngineExit | None:
        """How the engine ended, if that was not what its guardian asked or made it do."""
        return EngineExit(self._code) if self._died else None

    def forget_output(self) -> None:
        """What it said so far (of its loading, say) has nothing to do with how it will end."""
        self._lines.clear()

    async def wait(self) -> EngineExit:
        """Returns when the engine, its group and its guardian are gone and its stderr is read.

        Cancel-safe; any number of tasks may wait.
        """
        await self._ended.wait()
        return EngineExit(self._code)

    def hurry(self) -> None:
        """From now on it is not asked but killed; at once if it is being asked already. Synchronous."""
        self.is_stuck = True
        if self._is_stopping:
            self._guardian.send_signal(signal.SIGQUIT)

    async def stop(self) -> EngineExit:
        """Asks the engine to leave (SIGTERM, through the guardian), waits, kills its group; if it ``is_stuck``,
        kills it at once.

        Bounded by ``stop_timeout`` and about two seconds. May be called twice. A cancelled call
        has asked, and has not waited.
        """
        self._is_stopping = True
        self._guardian.send_signal(signal.SIGQUIT if self.is_stuck else signal.SIGTERM)
        with trio.move_on_after(self._stop_timeout + _GUARDIAN_MARGIN_S):
            return await self.wait()
        # The guardian itself is stuck (stopped, say). SIGKILL reaches stopped processes too.
        self._guardian.kill()
        return await self.wait()

    async def _wait_started(self) -> None:
        with trio.move_on_after(_GUARDIAN_START_S):
            await self._started.wait()
        if self._engine_pid is None:
            raise EngineStartError(
                f"the guardian of an engine did not start it: {self.last_error or 'no reason given'}"
            )

    async def _supervise(self, scope: trio.CancelScope) -> None:
        """Follows the guardian from its first line to its end, or until ``scope`` is cancelled."""
        with scope:
            await self._follow_guardian()
        self._started.set()
        self._ended.set()

    async def _follow_guardian(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_stderr)
            await self._read_reports()
            await self._guardian.wait()
            if self._code is None:
                self._end_orphans()
            nursery.cancel_scope.deadline = trio.current_time() + _LAST_WORDS_S

    async def _read_reports(self) -> None:
        assert self._guardian.stdout is not None
        await _each_line(self._guardian.stdout, self._take_report)

    def _take_report(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "started":
            self._engine_pid = int(number)
            self._started.set()
        elif word in ("ended", "died"):
            self._code = int(number)
            self._died = word == "died"

    async def _read_stderr(self) -> None:
        assert self._guardian.stderr is not None
        await _each_line(self._guardian.stderr, self._take_line)

    def _take_line(self, line: str) -> None:
        self._lines.append(line)
        self._on_stderr_line(line)

    def _end_orphans(self) -> None:
        """The guardian was killed before it could end the group and the folder; we do it."""
        if self._engine_pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._engine_pid, signal.SIGKILL)
        if self._ipc_dir is not None:
            shutil.rmtree(self._ipc_dir, ignore_errors=True)


async def _each_line(pipe: trio.abc.ReceiveStream, take: Callable[[str], None]) -> None:
    """Calls ``take`` with every line of ``pipe`` until its end; the last may lack a newline."""
    rest = b""
    while data := await pipe.receive_some():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        for line in lines:
            take(_text(line))
    if rest:
        take(_text(rest))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


@asynccontextmanager
async def open_engine_process(
    argv: Sequence[str],
    *,
    on_stderr_line: Callable[[str], None],
    stop_timeout: float,
    ipc_dir: Path | None = None,
) -> AsyncIterator[EngineProcess]:
    """Runs the engine ``argv`` for the length of the block; leaving it stops the engine.

    ``on_stderr_line`` gets each line of its output, without the newline; it must not raise.
    ``stop_timeout``: seconds between asking and killing. ``ipc_dir`` is removed when the engine is
    gone, even if this process was killed. The exit is shielded and bounded as ``stop`` is. A command
    that cannot be run is an exit with status 127 and a line that says so.

    Raises ``EngineStartError`` if the guardian cannot be started. An error of the body leaves as
    itself, not in a group.
    """
    guardian = await _start_guardian(argv, stop_timeout, ipc_dir)
    engine = EngineProcess(guardian, on_stderr_line, stop_timeout, ipc_dir)
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    assert guardian.stderr is not None
    failure: Exception | None = None
    # Shielded: whatever cancels the block, the engine's end is still followed, until it is stopped.
    supervision = trio.CancelScope(shield=True)
    async with guardian.stdin, guardian.stdout, guardian.stderr, trio.open_nursery() as nursery:
        nursery.start_soon(engine._supervise, supervision)
        try:
            await engine._wait_started()
            yield engine
        except Exception as error:  # noqa: BLE001 (raised again, outside of the nursery's group)
            failure = error
        finally:
            try:
                with trio.move_on_after(stop_timeout + 2 * _GUARDIAN_MARGIN_S, shield=True):
                    await engine.stop()
            finally:
                supervision.cancel()
    if failure is not None:
        raise failure


async def _start_guardian(
    argv: Sequence[str], stop_timeout: float, ipc_dir: Path | None
) -> trio.Process:
    options = [f"--stop-timeout={stop_timeout}"]
    if ipc_dir is not None:
        options.append(f"--remove={ipc_dir}")
    return await trio.lowlevel.open_process(
        # Isolated, without site: it starts faster, and no variable of ours can break it.
        [sys.executable, "-I", "-S", str(_GUARDIAN), *options, "--", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C in a terminal is for the front end, which ends its engines in order.
        start_new_session=True,
    )


@contextmanager
def private_ipc_dir() -> Iterator[Path]:
    """A new folder that only this user can enter, for ``ipc://`` sockets; removed at the end.

    Its path is short enough for a unix socket in it: where the usual temporary folder's is not,
    it is made in /tmp.
    """
    path = Path(tempfile.mkdtemp(prefix="trioleg-"))
    if len(os.fsencode(path)) > _FOLDER_BYTES:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="trioleg-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
