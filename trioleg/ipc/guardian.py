"""The guardian: runs one command, and sees to it that nothing of it outlives the front end.

    python guardian.py --stop-timeout 5 [--remove FOLDER] -- COMMAND ARGUMENT…

Rules of this file: standalone. It is run by its path, imports the standard library only, and nothing
imports it, so that nothing of the front end or of the engine can break it.

Its plan. The command runs in a process group of its own. Standard input is a pipe from the front end
that nobody writes to: when it ends, the front end is gone, however it went. Then, and on SIGTERM or
SIGINT, the group is asked to leave (SIGTERM), given a bounded time, and killed; on SIGQUIT it is given none. When
the command has ended, what is left of its group is killed, FOLDER is removed, and the guardian ends. Python's resource
trackers are killed last: they remove the shared memory that others leave, and then end by themselves.

It says on standard output, a line each: ``started PID`` (PID is the group's id too) and ``ended N``
(N is the command's exit code, or minus the signal that ended it), or ``died N`` if it went before it was
asked to, or by a signal that it did not have from here. The command does not run before the first line is
out, so whoever reads it can end the group even if the guardian is killed. No second line means just that. The
command's own output goes to standard error. Its environment has the process ids of guardian and front end as
TRIOLEG_GUARDIAN_PIDS, with a comma. The guardian's exit code is the command's, as a shell gives it (128 + N for signal N).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import shutil
import signal
import sys
import time

# The front end is gone, so nobody wants an orderly end any more: "no engine left after 2 s" is the
# goal, and this leaves half of it to the kernel.
ORPHAN_GRACE_S = 1.0
# Killed processes that are slow to go (in a driver, say) keep the folder no longer than this.
_GROUP_GONE_S = 5.0
# Of that, what a resource tracker may take for what others have left: removing 400 MB takes milliseconds.
_TRACKER_S = 2.0
# On its command line, as multiprocessing starts it.
_TRACKER = b"multiprocessing.resource_tracker"
_COMMAND_NOT_FOUND = 127  # as a shell has it
_RECEIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)


class Guardian:
    """Watches over the process group ``pid`` until it is gone."""

    def __init__(self, pid: int, stop_timeout: float, signals: int) -> None:
        self._pid = pid
        self._stop_timeout = stop_timeout
        self._signals = signals
        self._watched = [sys.stdin.fileno(), signals]
        self._sent: set[int] = set()
        self._kill_at = math.inf
        self._status: int | None = None

    def run(self) -> int:
        """Returns how the command ended: its exit code, or minus the signal."""
        while not self._has_ended():
            self._wait_for_news()
            # What came was perhaps its end, which was not our doing then.
            if time.monotonic() >= self._kill_at and not self._has_ended():
                self._kill_at = math.inf
                self._sent.add(signal.SIGKILL)
                self._kill_group()
        self._end_group()
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def is_own_doing(self, code: int) -> bool:
        """The command ended with ``code`` because it was asked or made to, by us."""
        return bool(self._sent) and (code >= 0 or -code in self._sent)

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def _wait_for_news(self) -> None:
        left = self._kill_at - time.monotonic()
        timeout = None if math.isinf(left) else max(0.0, left)
        ready, _, _ = select.select(self._watched, [], [], timeout)
        for descriptor in ready:
            news = os.read(descriptor, 4096)
            if descriptor != self._signals:
                if not news:
                    self._watched.remove(descriptor)
                    self._ask(ORPHAN_GRACE_S)
            elif signal.SIGQUIT in news:
                self._ask(0.0)
            elif signal.SIGTERM in news or signal.SIGINT in news:
                self._ask(self._stop_timeout)

    def _ask(self, grace: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        # Its end and the wish that it may end can come at once, and then the end was first.
        if not self._sent and not self._has_ended():
            self._sent.add(signal.SIGTERM)
            self._signal_group(signal.SIGTERM)

    def _signal_group(self, signum: int) -> bool:
        """False if nobody is left to get the signal."""
        try:
            os.killpg(self._pid, signum)
        except (ProcessLookupError, PermissionError):
            # PermissionError: on some systems, a group of which only zombies are left.
            return False
        return True

    def _kill_group(self) -> bool:
        """Kills all but resource trackers. False if nobody is left, not even one of those."""
        trackers = [pid for pid in _members(self._pid) if _TRACKER in _command_line(pid)]
        if not trackers:
            return self._signal_group(signal.SIGKILL)
        for pid in _members(self._pid):
            if pid not in trackers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return True

    def _end_group(self) -> None:
        now = time.monotonic()
        while self._kill_group() and time.monotonic() < now + _TRACKER_S:
            time.sleep(0.01)
        while self._signal_group(signal.SIGKILL) and time.monotonic() < now + _GROUP_GONE_S:
            time.sleep(0.01)


def _members(group: int) -> list[int]:
    """Of a process group those that run. None where the system has no /proc."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            # Behind its name, which may hold anything: state, parent, group.
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields and int(fields[2]) == group and fields[0] != b"Z":
                found.append(int(name))
    return found


def _command_line(pid: int) -> bytes:
    return _read(f"/proc/{pid}/cmdline")


def _read(path: str) -> bytes:
    """Of a file of /proc, which may be gone at any moment."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def start(command: list[str]) -> tuple[int, int]:
    """Forks the command's process, held back until a byte is written to the descriptor returned.

    If that is closed without one (the guardian was killed), the process leaves unstarted.
    """
    held, release = os.pipe()
    # Blocked until the command's side has its handlers off: one inherited would swallow the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, _RECEIVED)
    pids = f"{os.getpid()},{os.getppid()}"
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(release)
        for signum in (*_RECEIVED, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RECEIVED)
        if not os.read(held, 1):
            os._exit(0)
        os.environ["TRIOLEG_GUARDIAN_PIDS"] = pids
        run(command)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RECEIVED)
    os.close(held)
    # Both sides set the group: whoever is first, it exists when either goes on.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid, release


def run(command: list[str]) -> None:
    """Becomes the command, with no way to the pipes that belong to the guardian."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(sys.stderr.fileno(), f"cannot run {command[0]!r}: {error}\n".encode())
    os._exit(_COMMAND_NOT_FOUND)


def report(line: str) -> None:
    """Tells the front end; one that is gone is no reason to stop watching."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def receive_signals() -> int:
    """A descriptor that gives one byte, its number, for each signal that concerns the guardian."""
    received, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for signum in _RECEIVED:
        signal.signal(signum, lambda *_: None)
    return received


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command that must not outlive its caller.")
    parser.add_argument("--stop-timeout", type=float, required=True, help="seconds before the kill")
    parser.add_argument("--remove", default="", help="a folder to remove when the group is gone")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signals = receive_signals()
    pid, release = start(options.command)
    report(f"started {pid}")
    os.write(release, b"\n")
    guardian = Guardian(pid, options.stop_timeout, signals)
    code = guardian.run()
    if options.remove:
        shutil.rmtree(options.remove, ignore_errors=True)
    report(f"{'ended' if guardian.is_own_doing(code) else 'died'} {code}")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
