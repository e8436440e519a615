"""Who is measured by the bench of the leg: our server, vLLM's, and the floor, each with an engine of its own.

Each is a program that serves at a port and has joined the bench's engine; from then on nobody asks who it is.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import TriolegError
from ..ipc.launch import private_ipc_dir
from . import leg_engine, leg_floor
from .client import is_healthy
from .leg_control import Remote, open_remote
from .processes import Program, pin, running, started_s, until

__all__ = ["FLOOR", "VLLM", "Leg", "Subject", "free_port", "serving"]

VLLM, FLOOR = "vllm", "floor"
# vLLM's imports take 7 s here; this is for a machine under load.
_READY_S = 180.0
_VLLM_SERVER = Path(__file__).with_name("vllm_api_server.py")
# Nothing is fetched and nobody told; lengths that the model has not been trained for are no concern of a script.
_VLLM_SURROUNDINGS = (
    "env",
    "HF_HUB_OFFLINE=1",
    "VLLM_NO_USAGE_STATS=1",
    "DO_NOT_TRACK=1",
    "PYTHONPATH=",
    # Our modules beside the script are not to be found by the names of the standard library's.
    "PYTHONSAFEPATH=1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
)
# Connecting to a server that is not there yet takes little, but of the same processor.
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Leg:
    """What every subject gets: the model's ``directory``, the engine's ``token_ids``, and whether programs are to
    stay on cores of their own (``is_pinned``). ``vllm_python``: an interpreter that has vLLM."""

    directory: Path
    token_ids: tuple[int, ...]
    vllm_python: str | None = None
    is_pinned: bool = False

    def pin_server(self, pid: int) -> None:
        """One core for the server, if programs are pinned at all."""
        if self.is_pinned:
            pin(pid, _cores()[:1])

    def pin_other(self, pid: int) -> None:
        """And the others for whoever it serves, and is served by."""
        if self.is_pinned:
            pin(pid, _cores()[1:])


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is ready, and its engine. ``start_s``: from its process's start until it was ready."""

    name: str
    program: Program
    engine: Remote
    port: int
    start_s: float


@asynccontextmanager
async def serving(name: str, leg: Leg) -> AsyncIterator[Subject]:
    """Start the engine, then the server, and wait until that is ready. The block's end ends both.

    Raises ``TriolegError``.
    """
    port = free_port()
    with private_ipc_dir() as folder:
        control = folder / "engine"
        engine = _engine_arguments(name, folder, leg)
        async with running("-m", "trioleg.bench.leg_engine", str(control), *engine) as program:
            await program.wait_for(re.compile(leg_engine.UP))
            async with (
                _server(name, folder, leg, port) as server,
                open_remote(control) as remote,
            ):
                start_s = await _wait_ready(name, server, port)
                leg.pin_server(server.pid)
                leg.pin_other(program.pid)
                yield Subject(name, server, remote, port, start_s)


def _engine_arguments(name: str, folder: Path, leg: Leg) -> list[str]:
    ids = ",".join(map(str, leg.token_ids))
    if name in (VLLM, FLOOR):
        return [ids, "--input", f"ipc://{folder}/in", "--output", f"ipc://{folder}/out"]
    return [ids, "--handshake", f"ipc://{folder}/handshake"]


@asynccontextmanager
async def _server(name: str, folder: Path, leg: Leg, port: int) -> AsyncIterator[Program]:
    at = ("--port", str(port))
    if name == VLLM:
        arguments = (
            str(_VLLM_SERVER),
            *("--model", str(leg.directory), "--host", "127.0.0.1", *at),
            *("--max-model-len", str(leg_engine.MAX_MODEL_LEN)),
            *("--uvicorn-log-level", "warning", "--served-model-name", leg_floor.MODEL),
            *("--engine-input", f"ipc://{folder}/in", "--engine-output", f"ipc://{folder}/out"),
        )
        assert leg.vllm_python is not None, "a peer that is asked for has its interpreter"
        program = running(*arguments, python=(*_VLLM_SURROUNDINGS, leg.vllm_python))
    elif name == FLOOR:
        legs = ("--input", f"ipc://{folder}/in", "--output", f"ipc://{folder}/out")
        tokenizer = str(leg.directory / "tokenizer.json")
        program = running("-m", "trioleg.bench.leg_floor", tokenizer, *at, *legs)
    else:
        attach = ("--attach", f"ipc://{folder}/handshake", "--log-level", "warning")
        named = ("--served-model-name", leg_floor.MODEL)
        program = running("-m", "trioleg", "serve", str(leg.directory), *at, *attach, *named)
    async with program as server:
        yield server


async def _wait_ready(name: str, server: Program, port: int) -> float:
    async def is_ready() -> bool:
        if not Path(f"/proc/{server.pid}").exists():
            raise TriolegError(f"{name} ended before it was ready; it said: {server.last_words}")
        return await is_healthy(port)

    if not await until(is_ready, _READY_S, every=_LOOK_EVERY_S):
        raise TriolegError(
            f"{name} was not ready within {_READY_S:g} s; it said: {server.last_words}"
        )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s(server.pid)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
