"""vLLM starts its engine and watches it, as in service; what runs in that process is the command that we are told.

vLLM starts a child for its engine and calls a function there. Ours puts the command in the child's place, with the same
process id, so that everything which vLLM knows of its engine's process holds: that it is a child, the descriptor that
tells of its end, its exit code. The child is forked, where vLLM's own for a CPU is a fresh interpreter: what would be
imported there is not wanted, and the front end sees no difference.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import stat
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["end_words", "take_engine"]


def take_engine(command: Sequence[str]) -> None:
    """From now on every engine of this process is ``command``, with ``--handshake ADDRESS``."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    def run_engine_core(*_: Any, handshake_address: str, **__: Any) -> NoReturn:
        _keep_pipes_open()
        os.execvp(command[0], [*command, "--handshake", handshake_address])

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def end_words(drain_timeout: int) -> list[str]:
    """For the engine's command: on SIGTERM vLLM's own engine does what ``--shutdown-timeout`` says."""
    return ["--local", "--on-term", "drain" if drain_timeout else "abort"]


def _keep_pipes_open() -> None:
    """The parent takes it for this process's end when the pipe between them closes, as a new program would have it."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(entry)).st_mode
            access = fcntl.fcntl(int(entry), fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            continue  # the listing's own
        if stat.S_ISFIFO(mode) and access == os.O_WRONLY:
            os.set_inheritable(int(entry), True)
