"""A leg of the study as the benches measure theirs: the same engine, clients and figures (``bench/leg_streams.py``).

The puppet notes who hears of what and when; here the bench's engine takes its place, which is leaner and keeps to its
pace. The leg starts it as it would any other, so ``Subject.start_s`` has the engine's start in it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..bench.leg_control import Remote, open_remote
from ..bench.leg_streams import Run, open_clients
from ..bench.leg_subjects import Leg, Subject, free_port
from ..bench.processes import Program, started_s, until
from ..errors import TriolegError
from .legs import READY_S, Case, check_alive, started, wait_ready

__all__ = ["UVLOOP", "Measured", "measured", "measuring"]

# The option of a leg's program that asks for it.
UVLOOP = {"loop": "uvloop"}
_ENGINE = "trioleg.bench.leg_engine"
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Measured:
    """A leg's server that is ready, and the clients that it shares with nobody. ``probe_at``: its probe's socket."""

    subject: Subject
    probe_at: Path
    clients: Remote
    case: Leg

    def run(self) -> Run:
        """No streams yet. One run at a time."""
        return Run(self.subject, self.clients, self.case)


@asynccontextmanager
async def measured(leg: str, case: Case) -> AsyncIterator[tuple[Subject, Path]]:
    """A server that is ready, with the bench's engine, and the socket of its probe. Raises ``TriolegError``."""
    port = free_port()
    async with started(leg, replace(case, engine=_ENGINE), port) as (program, folder):
        await _wait_engine(leg, program, folder / "engine")
        # That engine answers nobody before it is reached.
        async with open_remote(folder / "engine") as engine:
            await wait_ready(leg, program, port)
            start_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s(program.pid)
            yield Subject(leg, program, engine, port, start_s), folder / "probe"


@asynccontextmanager
async def measuring(leg: str, case: Case) -> AsyncIterator[Measured]:
    """The same, with clients. Raises ``TriolegError``."""
    bench = Leg(case.directory, case.token_ids)
    async with open_clients(bench) as clients, measured(leg, case) as (subject, probe_at):
        yield Measured(subject, probe_at, clients, bench)


async def _wait_engine(leg: str, program: Program, path: Path) -> None:
    async def is_there() -> bool:  # noqa: ASYNC124 - what is asked again may wait
        check_alive(leg, program)
        return path.exists()

    if not await until(is_there, READY_S, every=_LOOK_EVERY_S):
        raise TriolegError(
            f"{leg} started no engine within {READY_S:g} s; it said: {program.last_words}"
        )
