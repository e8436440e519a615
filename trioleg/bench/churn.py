"""``trioleg bench churn``: many requests whose clients leave at random points, and engines that are killed.

What must come of it: every request ends in one of the ways that a request may end in, and when all have left,
nothing of them is left in the server: no stream, no state, no descriptor, no memory. The server is looked at from
outside, by what it answers and what /proc says of it.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import h11
import trio
from rich.console import Console
from rich.table import Table

from ..errors import InvalidRequestError
from ..runtime.unwrap import unwrapped
from .churn_client import ENDS, Plan, judge
from .client import CHAT, ask, chat_body, is_healthy
from .metrics import read_metrics
from .processes import count_descriptors, resident_kb, until
from .servers import Server, engine_of, engine_of_pid, own_server

__all__ = ["Churn", "ChurnReport", "run_churn", "show_churn"]

# Fast, so that the front end is what is busy; fewer places than clients, so that some requests wait.
_SCRIPT = {"token_ids": [504, 3575, 282, 4649], "step_interval_s": 0.005, "max_num_seqs": 48}
_MAX_TOKENS = 32
# How many of the requests are to be left, and of the streams among these, how many at a certain token.
_SHARE_LEFT = 0.5
_SHARE_LEFT_AT_TOKEN = 0.5
# Of those that leave: how many do it by RST.
_SHARE_RESET = 0.3
# A server waits for the end of a connection that it has closed for at most a second.
_CLOSED_AFTER_S = 1.5
# What must become 0 and flat does so when the last connections are closed.
_SETTLE_S = 15.0
# Back-off and loading, on a machine under load.
_RESTART_S = 60.0
# Looking for a process reads all of /proc, which is not to be what the machine is busy with.
_LOOK_AGAIN_S = 0.1
_SAMPLE_EVERY = 1000
# Of all requests: what pools, caches and the allocator take in the beginning is no leak.
_WARM_UP_SHARE = 0.25

# What /metrics must say is 0 when all have left.
_LEFTOVERS = (
    "trioleg_open_streams",
    "trioleg_engine_live_requests",
    "trioleg_engine_running_requests",
    "trioleg_engine_waiting_requests",
    "trioleg_inflight_requests",
    "trioleg_queued_prompt_tokens",
    "trioleg_unread_bytes",
)


@dataclass(frozen=True, slots=True)
class Churn:
    """What to do: ``requests`` by ``clients`` at a time, with ``kills`` of the engine in between, all within
    ``time_limit`` seconds. ``seed``: of who leaves when. Raises ``InvalidRequestError``."""

    requests: int = 20_000
    clients: int = 64
    kills: int = 3
    seed: int = 0
    time_limit: float = 600.0

    def __post_init__(self) -> None:
        if self.kills >= self.requests:
            raise InvalidRequestError(
                f"kills is {self.kills}; allowed: fewer than requests, which is {self.requests}",
                parameter="kills",
            )


@dataclass(slots=True)
class ChurnReport:
    """What came of it. ``memory``: (requests ended, KB of the front end); ``descriptors``: before and after;
    ``leftovers``: metrics that must be 0; ``restarts``: killed engines that were followed by another."""

    ends: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    descriptors: tuple[int, int] = (0, 0)
    leftovers: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    seconds: float = 0.0

    @property
    def slope(self) -> float | None:
        """KB per 1,000 requests after the warm-up; None with fewer than two figures."""
        last = self.memory[-1][0] if self.memory else 0
        points = [(x / 1000, kb) for x, kb in self.memory if x >= last * _WARM_UP_SHARE]
        if len(points) < 2:
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope

    def faults(self, churn: Churn) -> list[str]:
        """What must not be, a sentence each."""
        faults = [f"{count} requests: {end}" for end, count in self.ends.items() if end not in ENDS]
        if (ended := self.ends.total()) < churn.requests:
            faults.append(f"{ended} of {churn.requests} requests within {churn.time_limit:g} s")
        if self.restarts < churn.kills:
            faults.append(f"{self.restarts} restarts after {churn.kills} kills")
        faults += [f"{name} is {value:g}" for name, value in self.leftovers.items() if value]
        before, after = self.descriptors
        if after > before:
            faults.append(f"{after} descriptors, where there were {before}")
        return faults

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ends": dict(self.ends),
            "memory_kb": self.memory,
            "slope_kb_per_1000_requests": self.slope,
            "descriptors": self.descriptors,
            "leftovers": self.leftovers,
            "restarts": self.restarts,
            "seconds": self.seconds,
        }


async def run_churn(model: str, churn: Churn, progress: Callable[[str], None]) -> ChurnReport:
    """Start a server, do it, look, end the server. ``progress`` is told now and then.

    Raises ``TriolegError`` if the server does not start, or does not answer when all have left.
    """
    with unwrapped():
        async with own_server(model, _SCRIPT, "--restart-engine") as server:
            run = _Run(server, churn, progress)
            # What a first request loads is no leak either.
            await run.warm_up()
            await run.work()
            await run.look()
    return run.report


class _Run:
    def __init__(self, server: Server, churn: Churn, progress: Callable[[str], None]) -> None:
        self.report = ChurnReport()
        self._server = server
        self._churn = churn
        self._progress = progress
        self._begun = 0
        self._random = random.Random(churn.seed)
        self._typical_s = 0.05
        part = churn.requests // (churn.kills + 1)
        self._kills = {part * (number + 1): trio.Event() for number in range(churn.kills)}

    async def warm_up(self) -> None:
        async with ask(self._server.port, "/metrics") as exchange:
            await exchange.receive_all()
        await self._one(Plan(stream=True, max_tokens=1))
        await trio.sleep(_CLOSED_AFTER_S)
        self.report.descriptors = (self._descriptors(), 0)

    async def work(self) -> None:
        started = time.monotonic()
        with trio.move_on_after(self._churn.time_limit):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._kill_engines)
                for _ in range(self._churn.clients):
                    nursery.start_soon(self._client)
        self.report.seconds = time.monotonic() - started

    # ------------------------------------------------------------------ clients

    async def _client(self) -> None:
        while self._begun < self._churn.requests:
            self._begun += 1
            end, wait = await self._one(self._plan())
            self._note(end)
            await trio.sleep(wait)

    def _plan(self) -> Plan:
        choice = self._random
        plan = Plan(stream=choice.random() < 0.5, max_tokens=choice.randint(1, _MAX_TOKENS))
        if choice.random() >= _SHARE_LEFT:
            return plan
        reset = choice.random() < _SHARE_RESET
        if plan.stream and choice.random() < _SHARE_LEFT_AT_TOKEN:
            token = choice.randint(1, plan.max_tokens)
            return replace(plan, leaves=True, reset=reset, leave_at_token=token)
        after = choice.uniform(0, self._typical_s)
        return replace(plan, leaves=True, reset=reset, leave_after=after)

    async def _one(self, plan: Plan) -> tuple[str, float]:
        """How one request ended, and how long its client shall wait before the next."""
        body = chat_body(stream=plan.stream, max_tokens=plan.max_tokens)
        started = time.monotonic()
        try:
            async with ask(self._server.port, CHAT, body) as exchange:
                with trio.move_on_after(plan.leave_after):
                    if await plan.read(exchange):
                        self._learn(time.monotonic() - started)
                        return judge(exchange, plan)
                exchange.leave(reset=plan.reset)
                return plan.left(exchange), 0.0
        except (OSError, h11.RemoteProtocolError) as error:
            return f"the connection broke: {error}", 0.0

    def _learn(self, seconds: float) -> None:
        # So that whoever leaves does so within the time that an answer takes, on whatever machine.
        self._typical_s += (seconds - self._typical_s) / 100

    def _note(self, end: str) -> None:
        report = self.report
        report.ends[end] += 1
        ended = report.ends.total()
        if ended in self._kills:
            self._kills[ended].set()
        if ended % _SAMPLE_EVERY == 0:
            kilobytes = resident_kb(self._server.program.pid)
            report.memory.append((ended, kilobytes))
            self._progress(f"{ended} requests, {kilobytes} KB")

    # ------------------------------------------------------------------ the engine

    async def _kill_engines(self) -> None:
        for at in self._kills.values():
            await at.wait()
            # The one before may still be on its way.
            await until(self._is_healthy, _RESTART_S)
            killed = await engine_of(self._server.program)
            self._progress(f"killing engine {killed}")
            os.kill(killed, signal.SIGKILL)
            if await until(partial(self._has_another, killed), _RESTART_S, every=_LOOK_AGAIN_S):
                self.report.restarts += 1

    async def _is_healthy(self) -> bool:
        return await is_healthy(self._server.port)

    async def _has_another(self, killed: int) -> bool:
        current = engine_of_pid(self._server.program.pid)
        return current not in (None, killed) and await self._is_healthy()

    # ------------------------------------------------------------------ what is left

    async def look(self) -> None:
        """Wait until nothing is left, and put down what there is if that does not come."""
        await until(self._has_nothing_left, _SETTLE_S)
        await until(self._has_closed_all, _SETTLE_S)
        self.report.descriptors = (self.report.descriptors[0], self._descriptors())

    async def _has_nothing_left(self) -> bool:
        self.report.leftovers = await read_metrics(self._server.port, _LEFTOVERS)
        return not any(self.report.leftovers.values())

    async def _has_closed_all(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self._descriptors() <= self.report.descriptors[0]

    def _descriptors(self) -> int:
        return count_descriptors(self._server.program.pid)


def show_churn(report: ChurnReport, console: Console) -> None:
    """Print it, for people."""
    table = Table("requests", "ended", box=None, pad_edge=False, header_style="bold")
    table.columns[0].justify = "right"
    for end, count in report.ends.most_common():
        table.add_row(str(count), end)
    console.print(table)
    steps = "  ".join(f"{requests}: {kilobytes}" for requests, kilobytes in report.memory)
    slope = "–" if report.slope is None else f"{report.slope:.1f}"
    before, after = report.descriptors
    for line in (
        f"memory of the front end, KB, at each {_SAMPLE_EVERY} requests: {steps or '–'}",
        f"slope after the first quarter: {slope} KB per 1,000 requests",
        f"descriptors: {before} before, {after} after",
        *(f"{name}: {value:g}" for name, value in report.leftovers.items()),
        f"engine restarts: {report.restarts}",
        f"duration: {report.seconds:.1f} s",
    ):
        console.print(line, highlight=False, soft_wrap=True)
