"""Engine processes under their guardian: how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
import trio
from process_helpers import open_front_end, python, wait_until
from programs import alive

from trioleg.errors import EngineStartError
from trioleg.ipc.launch import EngineExit, last_error, open_engine_process, private_ipc_dir
from trioleg.ipc.parent import wait_gone

GENEROUS_S = 30.0
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
STUBBORN = DEAF + SLEEP
POLITE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
    "print('up', flush=True); signal.pause()"
)
# Says its child's process id, which is in its group and ignores SIGTERM, and ends by itself or not.
PARENT = (
    "import subprocess, sys, time; "
    f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE); "
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(float(sys.argv[1]))"
)


class Lines:
    """The engine's lines, and a way to wait for one."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._send, self._receive = trio.open_memory_channel[str](1_000)

    def __call__(self, line: str) -> None:
        self.all.append(line)
        self._send.send_nowait(line)

    async def next(self) -> str:
        with trio.fail_after(GENEROUS_S):
            return await self._receive.receive()


@pytest.mark.parametrize(
    ("code", "expected", "sentence"),
    [
        ("raise SystemExit(0)", 0, "it exited with status 0"),
        ("raise SystemExit(3)", 3, "it exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "it was killed by SIGKILL"),
        ("import os; os.abort()", -6, "it was killed by SIGABRT"),
    ],
)
async def test_how_an_engine_ended_is_told(code: str, expected: int, sentence: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(code), on_stderr_line=Lines(), stop_timeout=5.0
        ) as engine:
            ended = await engine.wait()
    assert (ended.code, str(ended)) == (expected, sentence)


def test_an_unknown_end_is_told_too() -> None:
    assert str(EngineExit(None)) == "its guardian was killed, and it was ended"
    assert str(EngineExit(-64)) == "it was killed by SIGRTMAX"
    assert str(EngineExit(-200)) == "it was killed by signal 200"


async def test_a_command_that_cannot_be_run() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            ["/nonexistent/engine"], on_stderr_line=Lines(), stop_timeout=5.0
        ) as engine:
            assert (await engine.wait()).code == 127
        assert "cannot run '/nonexistent/engine'" in engine.last_error


async def test_a_guardian_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioleg.ipc.launch._GUARDIAN", Path("/nonexistent/guardian.py"))
    with pytest.raises(EngineStartError, match=r"can't open file .*/nonexistent/guardian.py"):
        async with open_engine_process(["true"], on_stderr_line=Lines(), stop_timeout=5.0):
            raise AssertionError("not reached")


async def test_leaving_the_block_stops_an_engine_that_listens() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(POLITE), on_stderr_line=lines, stop_timeout=600.0
        ) as engine:
            assert await lines.next() == "up"
        assert await engine.wait() == EngineExit(7)


async def test_an_engine_that_does_not_listen_is_killed_with_its_children() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(DEAF + PARENT, "600"), on_stderr_line=lines, stop_timeout=0.2
        ) as engine:
            child = int(await lines.next())
            assert (await engine.stop()).code == -9
        await wait_gone(child)


async def test_what_an_engine_leaves_of_its_group_goes_with_it() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(PARENT, "0"), on_stderr_line=lines, stop_timeout=600.0
        ) as engine:
            child = int(await lines.next())
            assert (await engine.wait()).code == 0
            await wait_gone(child)


# Two processes with shared memory, whose names they say; the second is the first one's child.
SHARING = (
    "import os, signal, sys; from multiprocessing.shared_memory import SharedMemory; "
    "from multiprocessing import resource_tracker; resource_tracker.ensure_running(); "
    "child = os.fork(); memory = SharedMemory(create=True, size=1 << 20); "
    "os.write(1, f'{memory.name} {os.getpid()}\\n'.encode()); signal.pause()"
)


@pytest.mark.parametrize("end", ["the command is killed", "it is asked to leave", "it is stuck"])
async def test_shared_memory_that_an_engine_leaves_goes_with_it(end: str) -> None:
    """Its resource tracker removes it, which must not be killed before."""
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(SHARING), on_stderr_line=lines, stop_timeout=5.0
        ) as engine:
            said = [(await lines.next()).split() for _ in range(2)]
            memories = [Path("/dev/shm", name) for name, _ in said]
            assert all(one.exists() for one in memories)
            if end == "the command is killed":
                os.kill(engine.engine_pid, signal.SIGKILL)
                await engine.wait()
            elif end == "it is stuck":
                engine.hurry()
    assert not any(alive(int(pid)) for _, pid in said)
    assert not any(one.exists() for one in memories)


async def test_a_killed_engine_is_reported_and_its_folder_removed() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S), private_ipc_dir() as folder:
        async with open_engine_process(
            python(SLEEP), on_stderr_line=lines, stop_timeout=600.0, ipc_dir=folder
        ) as engine:
            await lines.next()
            os.kill(engine.engine_pid, signal.SIGKILL)
            assert (await engine.wait()).code == -9
            await wait_gone(engine.pid)
        assert not folder.exists()


@pytest.mark.parametrize("numbers", [(9,), (9, 15), (9, 3), (15,)])
async def test_a_death_is_told_from_an_end_that_was_asked_for(numbers: tuple[int, ...]) -> None:
    """Others may end it, too; and our own wish may come when it is dead already, before that is seen."""
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(POLITE), on_stderr_line=lines, stop_timeout=600.0
        ) as engine:
            await lines.next()
            os.kill(engine.pid, signal.SIGSTOP)
            os.kill(engine.engine_pid, numbers[0])
            if numbers[0] == signal.SIGKILL:
                # Dead before our wish comes: a zombie until the guardian looks.
                await wait_until(lambda: not alive(engine.engine_pid))
            if len(numbers) > 1:
                os.kill(engine.pid, numbers[1])
            os.kill(engine.pid, signal.SIGCONT)
            ended = await engine.wait()
        assert engine.death == ended


async def test_an_end_that_was_asked_for_is_no_death() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        for code in (POLITE, STUBBORN):
            async with open_engine_process(
                python(code), on_stderr_line=lines, stop_timeout=0.2
            ) as engine:
                await lines.next()
            assert (await engine.wait()).code in (7, -9)
            assert engine.death is None


async def test_one_that_is_stuck_is_killed_at_once_and_that_is_no_death() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        for at_once in (True, False):
            async with (
                open_engine_process(
                    python(STUBBORN), on_stderr_line=lines, stop_timeout=600.0
                ) as engine,
                trio.open_nursery() as nursery,
            ):
                await lines.next()
                if not at_once:
                    nursery.start_soon(engine.stop)
                    await trio.testing.wait_all_tasks_blocked()
                engine.hurry()
                assert (await engine.stop()).code == -9
            assert engine.death is None


async def test_if_the_guardian_is_killed_the_front_end_ends_the_group() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S), private_ipc_dir() as folder:
        async with open_engine_process(
            python(PARENT, "600"), on_stderr_line=lines, stop_timeout=600.0, ipc_dir=folder
        ) as engine:
            child = int(await lines.next())
            os.kill(engine.pid, signal.SIGKILL)
            assert await engine.wait() == EngineExit(None)
            await wait_gone(engine.engine_pid)
            await wait_gone(child)
        assert not folder.exists()


async def test_a_guardian_that_is_frozen_does_not_hold_up_the_exit() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(SLEEP), on_stderr_line=lines, stop_timeout=0.1
        ) as engine:
            await lines.next()
            os.kill(engine.pid, signal.SIGSTOP)
        assert await engine.wait() == EngineExit(None)
        await wait_gone(engine.engine_pid)


async def test_a_front_end_that_is_killed_leaves_no_engine_and_no_folder() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_front_end(python(STUBBORN)) as front_end:
            assert front_end.folder.is_dir()
            front_end.process.kill()
            with trio.fail_after(2.0):
                await wait_gone(front_end.engine_pid)
            await wait_gone(front_end.guardian_pid)
        assert not front_end.folder.exists()


async def test_a_command_whose_guardian_dies_before_telling_of_it_never_runs() -> None:
    code = (
        "import os; from trioleg.ipc.guardian import start; "
        "pid, release = start(['echo', 'it ran']); os.close(release); os.waitpid(pid, 0)"
    )
    with trio.fail_after(GENEROUS_S):
        ended = await trio.run_process(python(code), capture_stdout=True, capture_stderr=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")


async def test_an_error_of_the_body_leaves_as_itself() -> None:
    error = KeyError("mine")
    with trio.fail_after(GENEROUS_S), pytest.raises(KeyError) as caught:
        async with open_engine_process(python(SLEEP), on_stderr_line=Lines(), stop_timeout=5.0):
            raise error
    assert caught.value is error


async def test_a_cancelled_body_still_stops_the_engine() -> None:
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        with trio.CancelScope() as scope:
            async with open_engine_process(
                python(POLITE), on_stderr_line=lines, stop_timeout=600.0
            ) as engine:
                await lines.next()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert await engine.wait() == EngineExit(7)


async def test_lines_come_whole_and_endless_ones_in_pieces() -> None:
    code = (
        "import sys; w = sys.stderr.buffer.write; w('é\\r\\n\\n'.encode() + b'\\xff\\n'); "
        "w(b'x' * 200_000 + b'\\n'); w(b'no newline')"
    )
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(code), on_stderr_line=lines, stop_timeout=5.0
        ) as engine:
            await engine.wait()
    assert lines.all[:3] == ["é", "", "\ufffd"]
    assert lines.all[-1] == "no newline"
    assert "".join(lines.all[3:-1]) == "x" * 200_000
    assert max(map(len, lines.all)) < 200_000


async def test_an_engine_learns_who_guards_it_and_has_no_pipe_of_ours() -> None:
    code = (
        "import os, sys; print(os.environ['TRIOLEG_GUARDIAN_PIDS'], os.getppid(), os.getpgid(0), "
        "os.getpid(), sys.stdin.read() == '', len(os.listdir('/proc/self/fd')))"
    )
    lines = Lines()
    with trio.fail_after(GENEROUS_S):
        async with open_engine_process(
            python(code), on_stderr_line=lines, stop_timeout=5.0
        ) as engine:
            guardians, parent, group, own, stdin_is_empty, descriptors = (
                await lines.next()
            ).split()
    assert guardians == f"{engine.pid},{os.getpid()}"
    assert int(parent) == engine.pid
    assert int(group) == int(own) == engine.engine_pid
    assert stdin_is_empty == "True"
    # The three standard ones and the folder that is being listed.
    assert int(descriptors) == 4


TRACEBACK = """noise before
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    load()
KeyError: 'inner'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise RuntimeError(text)
    ^^^^^^^^^^^^^^^^^^^^^^^^
pkg.errors.ModelStoreError: model.safetensors is cut short:
  expected 100 bytes

  got 10"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            TRACEBACK,
            "pkg.errors.ModelStoreError: model.safetensors is cut short:\n"
            "  expected 100 bytes\n\n  got 10",
        ),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt", "KeyboardInterrupt"),
        ("one\ntwo\n\n  three  \nfour\n", "two\nthree\nfour"),
        ("Traceback (most recent call last):\n  File 'cut short", None),
        (
            f"{TRACEBACK}\n(MainProcess pid=7) INFO 11-30 17:21:16 [serve.py:266] Shutting down.",
            None,
        ),
        (f"{TRACEBACK}\n/lib/tracker.py:254: UserWarning: leaked\n  warnings.warn('leaked')", None),
        ("INFO 11-30 17:21 loading\n(EngineCore pid=7) WARNING 11-30 17:22 no libtcmalloc\n", ""),
        (
            "usage: main.py [-h]\n  {chat,serve} ...\nmain.py: error: unrecognized arguments: --x\n",
            "main.py: error: unrecognized arguments: --x",
        ),
        ("ValueError", "ValueError"),
        ("", ""),
    ],
)
def test_last_error(text: str, expected: str | None) -> None:
    if expected is None and text.startswith(TRACEBACK):
        expected = last_error(TRACEBACK.splitlines())
    elif expected is None:
        expected = "\n".join(line.strip() for line in text.splitlines())
    assert last_error(text.splitlines()) == expected


def test_a_last_error_has_an_end() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        f"ValueError: {'model, ' * 2000}",
    ]
    said = last_error(lines)
    assert len(said) == 1000
    assert said.startswith("ValueError: model, ")
    assert said.endswith("...")


def test_the_private_folder_is_private_short_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_ipc_dir() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(os.fsencode(folder / "handshake")) <= 107
        (folder / "handshake").touch()
        assert not list(long.iterdir())
    assert not folder.exists()
