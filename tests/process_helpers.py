"""What the process tests share: waiting for processes that are not our children, a front end to kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY)}

# A front end that starts the engine named on its command line and waits to be killed.
_FRONT_END = """
import sys, trio
from trioleg.ipc.launch import open_engine_process, private_ipc_dir

async def main():
    with private_ipc_dir() as folder:
        argv = [word.replace("FOLDER", str(folder)) for word in sys.argv[1:]]
        async with open_engine_process(
            argv, on_stderr_line=lambda line: None, stop_timeout=60.0, ipc_dir=folder
        ) as engine:
            print(engine.pid, engine.engine_pid, folder, flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


async def wait_until(condition: Callable[[], object]) -> None:
    """Returns when ``condition()`` is true; the caller bounds the wait."""
    while True:
        await trio.lowlevel.checkpoint()
        if condition():
            return


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@dataclass
class FrontEnd:
    process: trio.Process
    guardian_pid: int
    engine_pid: int
    folder: Path


@asynccontextmanager
async def open_front_end(argv: list[str]) -> AsyncIterator[FrontEnd]:
    """A front end in a process of its own, its engine started; killed at the end."""
    process = await trio.lowlevel.open_process(
        python(_FRONT_END, *argv), stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    async with process.stdout:
        try:
            line = b""
            while not line.endswith(b"\n"):
                line += await process.stdout.receive_some() or b"it ended\n"
            words = line.decode().split()
            yield FrontEnd(process, int(words[0]), int(words[1]), Path(words[2]))
        finally:
            process.kill()
            with trio.move_on_after(30.0, shield=True):
                await process.wait()
