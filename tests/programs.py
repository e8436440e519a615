"""Real programs under test: started in a session of their own, watched line by line, ended whole."""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[1]
TRIOLEG = (sys.executable, "-m", "trioleg")

# Generous: they only bound how long a broken program holds up the tests.
START_S = 120.0
END_S = 30.0


class Program:
    """A process and what it printed; ``wait_for`` blocks on its output, never on a clock.

    Made by ``running``, which also ends it.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.argv = argv
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._texts = {self.process.stdout: "", self.process.stderr: ""}
        self._open_pipes = len(self._texts)
        self._readers = [
            threading.Thread(target=self._collect, args=[pipe]) for pipe in self._texts
        ]
        for reader in self._readers:
            reader.start()

    def _collect(self, pipe: BinaryIO) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := os.read(pipe.fileno(), 65536):
            with self._changed:
                self._texts[pipe] += decoder.decode(chunk)
                self._changed.notify_all()
        with self._changed:
            self._open_pipes -= 1
            self._changed.notify_all()

    @property
    def stdout(self) -> str:
        """What came so far."""
        return self._texts[self.process.stdout]

    @property
    def stderr(self) -> str:
        """What came so far."""
        return self._texts[self.process.stderr]

    def type(self, line: str) -> None:
        """One line to the program's standard input."""
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def wait_for(self, pattern: str, seconds: float = START_S) -> re.Match[str]:
        """The first match in either output; AssertionError once it can no longer come."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.stdout) or re.search(pattern, self.stderr)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._open_pipes, seconds)
            match = found()
        assert match, f"{pattern!r} did not come from {self.argv}:\n{self.said()}"
        return match

    def said(self) -> str:
        """The end of both outputs, for the message of a failed test."""
        return f"{self.stdout[-2000:]}\n-- stderr:\n{self.stderr[-4000:]}"

    def wait(self, seconds: float = END_S) -> int:
        """The exit code, once everything that was printed has been read."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        return code

    def end(self) -> None:
        """Asks, waits, kills: the program and all that came from it, as far as it is still there."""
        family = [self.process.pid, *descendants(self.process.pid)]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in family:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@contextmanager
def running(*argv: str, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Starts a program; leaving the block ends it and whatever came from it."""
    program = Program(argv, env or {})
    try:
        yield program
    finally:
        program.end()


def alive(pid: int) -> bool:
    """True if the process is there and no zombie."""
    return _stat(pid)[:1] not in ([], ["Z"])


def descendants(pid: int) -> list[int]:
    """The living processes that came from ``pid``, whatever their session, parents first."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    parents = {one: int(stat[1]) for one in pids if (stat := _stat(one)) and stat[0] != "Z"}
    family = [pid]
    for ancestor in family:
        family += [one for one, parent in parents.items() if parent == ancestor]
    return family[1:]


def _stat(pid: int) -> list[str]:
    """State, parent and so on, as /proc has them behind the name; empty if it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def wait_until(condition: Callable[[], object], seconds: float = END_S, what: str = "") -> None:
    """Asks again and again, with no pause but the asking: for what no pipe or socket announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what or f"not within {seconds} s: {condition}"
