"""The legs: who is compared, and how each is started.

A leg is two programs. The *server* answers HTTP as it would in service; the *consumer* uses the leg as a library, which
some scenarios are about. Both start and own their engine in the leg's own manner, so that its death is noticed as it
would be in service. They take the same arguments:

    PROGRAM MODEL_DIRECTORY --engine JSON --probe SOCKET (--port PORT | --consume NAME) [--fault NAME]
            [--lanes FILE] [--option NAME=VALUE …]

``--engine``: the engine's command as a JSON array, to which the leg adds ``--handshake ADDRESS``. ``--probe``: where it
answers ``census`` (``inside/probe.py``). ``--fault``: what is to go wrong (``inside/faults.py`` names them). ``--lanes``:
where it writes the lives of its tasks, at its end or when the probe is told ``lanes``. ``--option``: settings that a
scenario wants, which a leg that has no such thing refuses. The server says nothing in particular when it is ready:
GET /health answers 200. A consumer prints one line of JSON, its findings, and leaves as it would in service.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..bench.client import is_healthy
from ..bench.leg_control import Remote, open_remote
from ..bench.leg_subjects import free_port
from ..bench.processes import Program, running, until
from ..errors import TriolegError
from ..ipc.launch import private_ipc_dir
from .puppet import PUPPET, Puppet, puppet_command

__all__ = [
    "ASYNCIO",
    "LEGS",
    "TASKGROUP",
    "TRIOLEG",
    "VLLM",
    "Case",
    "Running",
    "check_alive",
    "consuming",
    "serving",
    "started",
    "wait_ready",
]

TRIOLEG, ASYNCIO, TASKGROUP, VLLM = "trioleg", "asyncio", "taskgroup", "vllm"
LEGS = (TRIOLEG, ASYNCIO, TASKGROUP, VLLM)

MODEL = "model"

_MODULES = {
    TRIOLEG: "trioleg.compare.programs.trioleg_leg",
    ASYNCIO: "trioleg.compare.programs.asyncio_leg",
    TASKGROUP: "trioleg.compare.programs.taskgroup_leg",
}
_VLLM_PROGRAM = Path(__file__).with_name("programs") / "vllm_leg.py"
# Nothing is fetched and nobody told.
_VLLM_SURROUNDINGS = (
    "env",
    "HF_HUB_OFFLINE=1",
    "VLLM_NO_USAGE_STATS=1",
    "DO_NOT_TRACK=1",
    "PYTHONPATH=",
    "PYTHONSAFEPATH=1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
    "VLLM_CPU_KVCACHE_SPACE=1",
)
# vLLM's imports take 7 s here; this is for a machine under load.
READY_S = 180.0
_LOOK_EVERY_S = 0.02
# Several tracebacks with their causes: errors surface there.
_LINES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """What every leg gets: the model's ``directory``, the engine's ``token_ids``; ``vllm_python``: an interpreter that
    has vLLM. And what a scenario asks for: ``fault``, ``options``, an engine that dies early (``die``), and
    ``lanes``, a file for the lives of the tasks; ``engine``, the module of another engine than the puppet."""

    directory: Path
    token_ids: tuple[int, ...]
    vllm_python: str | None = None
    fault: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    die: str | None = None
    lanes: Path | None = None
    engine: str = PUPPET


@dataclass(frozen=True, slots=True)
class Running:
    """A leg that runs. ``port``: where the server is ready; None for a consumer. ``probe``: see ``inside/probe.py``."""

    leg: str
    program: Program
    puppet: Puppet
    probe: Remote
    port: int | None = None


@asynccontextmanager
async def started(
    leg: str, case: Case, port: int, *, consume: str | None = None
) -> AsyncIterator[tuple[Program, Path]]:
    """The leg's program, just started; and the folder in which its engine and its probe can be reached, as ``engine``
    and ``probe``. The block's end ends both."""
    with private_ipc_dir() as folder:
        engine = puppet_command(
            folder / "engine",
            case.token_ids,
            die=case.die,  # type: ignore[arg-type]
            module=case.engine,
        )
        arguments = [str(case.directory), "--engine", json.dumps(engine)]
        arguments += ["--probe", str(folder / "probe")]
        arguments += ["--port", str(port)] if consume is None else ["--consume", consume]
        if case.fault is not None:
            arguments += ["--fault", case.fault]
        if case.lanes is not None:
            arguments += ["--lanes", str(case.lanes)]
        for name, value in case.options.items():
            arguments += ["--option", f"{name}={value}"]
        async with _program(leg, arguments, case) as program:
            yield program, folder


@asynccontextmanager
async def serving(leg: str, case: Case) -> AsyncIterator[Running]:
    """A server that is ready. Raises ``TriolegError`` if it does not get so."""
    port = free_port()
    async with started(leg, case, port) as (program, folder):
        await wait_ready(leg, program, port)
        async with _reached(leg, program, folder, port) as there:
            yield there


@asynccontextmanager
async def consuming(leg: str, case: Case, name: str) -> AsyncIterator[Running]:
    """A consumer that has its engine. Raises ``TriolegError`` if it does not get so."""
    async with started(leg, case, 0, consume=name) as (program, folder):

        async def is_there() -> bool:  # noqa: ASYNC124 - what is asked again may wait
            check_alive(leg, program)
            return (folder / "engine").exists() and (folder / "probe").exists()

        if not await until(is_there, READY_S, every=_LOOK_EVERY_S):
            raise TriolegError(f"{leg} was not ready within {READY_S:g} s")
        async with _reached(leg, program, folder, None) as there:
            yield there


@asynccontextmanager
async def _reached(
    leg: str, program: Program, folder: Path, port: int | None
) -> AsyncIterator[Running]:
    async with open_remote(folder / "engine") as engine, open_remote(folder / "probe") as probe:
        puppet = Puppet(engine)
        try:
            yield Running(leg, program, puppet, probe, port)
        finally:
            puppet.let_go_on()


@asynccontextmanager
async def _program(leg: str, arguments: Sequence[str], case: Case) -> AsyncIterator[Program]:
    if leg == VLLM:
        assert case.vllm_python is not None, "a leg that is asked for has its interpreter"
        program = running(
            str(_VLLM_PROGRAM),
            *arguments,
            python=(*_VLLM_SURROUNDINGS, case.vllm_python),
            lines_kept=_LINES_KEPT,
        )
    else:
        program = running("-m", _MODULES[leg], *arguments, lines_kept=_LINES_KEPT)
    async with program as started_program:
        yield started_program


async def wait_ready(leg: str, program: Program, port: int) -> None:
    """Until the server at ``port`` is healthy. Raises ``TriolegError`` if it has ended, or does not get so."""

    async def is_ready() -> bool:
        check_alive(leg, program)
        return await is_healthy(port)

    if not await until(is_ready, READY_S, every=_LOOK_EVERY_S):
        raise TriolegError(
            f"{leg} was not ready within {READY_S:g} s; it said: {program.last_words}"
        )


def check_alive(leg: str, program: Program) -> None:
    """Raises ``TriolegError`` if it has ended."""
    if not Path(f"/proc/{program.pid}").exists():
        raise TriolegError(f"{leg} ended before it was ready; it said: {program.last_words}")
