"""The engine's process, as an asyncio program has it, and its start: a child that is asked, waited for, killed.

Rules of this file: no guardian. If the front end is killed its engine stays until it notices by itself, as vLLM's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import EngineStartError
from ...messages import EngineReadyResponse
from .sockets import EngineSockets

__all__ = ["STOP_S", "Engine", "EngineProcess", "start_engine"]

# Between asking and killing.
STOP_S = 5.0


class EngineProcess:
    """Started at once, with our own stderr. Whoever makes it calls ``stop``, or ``ask`` and ``kill``."""

    def __init__(self, command: Sequence[str]) -> None:
        # In a session of its own: Ctrl-C in a terminal is for the front end.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self.pid = self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def wait_in_thread(self) -> int:
        """Blocks until it has ended: its exit code."""
        return self._popen.wait()

    async def wait(self) -> int:
        """The same for a task. A cancel leaves it as it is."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        descriptor = os.pidfd_open(self.pid) if self.exit_code is None else None
        if descriptor is not None:
            try:
                loop.add_reader(descriptor, _set, ended)
                await ended
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._popen.wait()

    def ask(self) -> None:
        """To leave. Idempotent."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """It, and what it has started. Idempotent."""
        self._signal(signal.SIGKILL)

    def stop(self, timeout: float = STOP_S) -> None:
        """Blocks: ask, wait ``timeout`` seconds, kill. Idempotent."""
        self.ask()
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is ready. Whoever gets it ends ``process`` and closes ``sockets``."""

    process: EngineProcess
    sockets: EngineSockets
    ready: EngineReadyResponse


async def start_engine(command: Sequence[str]) -> Engine:
    """Start ``command`` and wait until the engine is ready. Raises ``EngineStartError`` if it ends before that, and
    leaves nothing behind then, nor after a cancel."""
    sockets = EngineSockets()
    process: EngineProcess | None = None
    try:
        process = EngineProcess([*command, "--handshake", sockets.handshake_address])
        return Engine(process, sockets, await _until_ready(process, sockets))
    except BaseException:
        if process is not None:
            process.kill()
            process.wait_in_thread()
        sockets.close()
        raise


async def _until_ready(process: EngineProcess, sockets: EngineSockets) -> EngineReadyResponse:
    ready = asyncio.create_task(sockets.let_engine_in(), name="handshake")
    ended = asyncio.create_task(process.wait(), name="watch process")
    try:
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            code = ended.result()
            raise EngineStartError(f"the engine did not become ready: it ended with {code}")
        return ready.result()
    finally:
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)
