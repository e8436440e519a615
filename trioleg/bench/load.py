"""``trioleg bench load``: many streams, and a prompt of megabytes among them.

The same things are measured while there is no big prompt and while there is one, turn by turn on one server: how
long ``/health`` takes, how evenly the streams' tokens come, and how long a small prompt waits for its first one.
The streams' clients are another process (``load_streams.py``). Probes are sent at fixed times, however long the
ones before them take, so that a server which stands still is not asked less often for it.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import h11
import trio

from ..errors import TriolegError
from ..ipc.launch import private_ipc_dir
from ..runtime.unwrap import unwrapped
from .client import CHAT, ask, chat_body
from .load_streams import ALL_OPEN, WRITTEN
from .measurement import Measurement
from .processes import Program, running
from .servers import own_server

__all__ = ["Load", "run_load"]

_HEALTH_EVERY_S = 0.02
_SMALL_EVERY_S = 0.25
# Far over any answer that is still one.
_LOST_AFTER_S = 30.0
# The first turn without a big prompt; each later one takes as long as the prompt before it.
_FIRST_QUIET_S = 3.0
# What a big prompt leaves behind is let go when it has been answered: part of its turn.
_AFTERMATH_S = 0.5
# More than any model here takes, and fewer tokens than 5 MB of text have: it is tokenized, then refused.
_MAX_MODEL_LEN = 65_536
# Places in the engine for small prompts, beside the streams.
_SPARE_PLACES = 64
_WORDS = "a few words "


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` that get a token every ``step`` seconds, and ``prompts`` of ``megabytes`` each, one after the
    other; all of it, start and end apart, within ``time_limit`` seconds."""

    streams: int = 1000
    step: float = 0.1
    prompts: int = 5
    megabytes: float = 5.0
    time_limit: float = 120.0


@dataclass(frozen=True, slots=True)
class _Turn:
    """A stretch of time, by ``time.monotonic``; ``is_big``: with a big prompt in it."""

    is_big: bool
    start: float
    end: float


async def run_load(model: str, load: Load, progress: Callable[[str], None]) -> list[Measurement]:
    """Start server and clients, measure, end them. ``progress`` is told now and then.

    Raises ``TriolegError`` if a program under test does not start, if a stream ended, or if there was no time
    for one prompt.
    """
    places = load.streams + _SPARE_PLACES
    script = {
        "token_ids": [504, 3575, 282],
        "step_interval_s": load.step,
        "max_num_seqs": places,
        "max_model_len": _MAX_MODEL_LEN,
    }
    with unwrapped():
        async with own_server(model, script) as server:
            run = _Run(server.port, load, progress)
            async with _streams(server.port, load.streams, progress) as gaps:
                await run.work()
    return run.measurements(gaps)


@asynccontextmanager
async def _streams(
    port: int, count: int, progress: Callable[[str], None]
) -> AsyncIterator[list[tuple[float, float]]]:
    """The streams, all begun. The list is filled at the block's end: when a piece came, and after how long."""
    gaps: list[tuple[float, float]] = []
    with private_ipc_dir() as folder:
        file = folder / "gaps"
        arguments = ("-m", "trioleg.bench.load_streams", str(port), str(count), str(file))
        async with running(*arguments, folder=folder) as program:
            await program.wait_for(re.compile(ALL_OPEN))
            progress(f"{count} streams are open")
            yield gaps
            gaps += await _written(program, file)


async def _written(program: Program, file: Path) -> list[tuple[float, float]]:
    os.kill(program.pid, signal.SIGTERM)
    ended = int((await program.wait_for(re.compile(rf"{WRITTEN}(\d+)")))[1])
    if ended:
        raise TriolegError(f"{ended} streams ended before their time")
    figures = array("d", file.read_bytes())
    return list(zip(figures[::2], figures[1::2], strict=True))


class _Run:
    def __init__(self, port: int, load: Load, progress: Callable[[str], None]) -> None:
        self._port = port
        self._load = load
        self._progress = progress
        self._turns: list[_Turn] = []
        self._answers: list[float] = []
        # When each was asked, and how long it took.
        self._health: list[tuple[float, float]] = []
        self._small: list[tuple[float, float]] = []

    async def work(self) -> None:
        with trio.move_on_after(self._load.time_limit):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._every, _HEALTH_EVERY_S, self._probe, nursery)
                nursery.start_soon(self._every, _SMALL_EVERY_S, self._ask_little, nursery)
                await self._take_turns()
                nursery.cancel_scope.cancel(reason="all turns are over")

    async def _take_turns(self) -> None:
        letters = _WORDS * math.ceil(self._load.megabytes * 1e6 / len(_WORDS))
        messages = [{"role": "user", "content": letters}]
        body = chat_body(stream=True, max_tokens=1, messages=messages)
        quiet = _FIRST_QUIET_S
        for number in range(1, self._load.prompts + 1):
            async with self._turn(is_big=False):
                await trio.sleep(quiet)
            async with self._turn(is_big=True):
                # It is taken, or too long: both are known only when it has been tokenized.
                took = await self._timed(CHAT, body, 200, 400)
                await trio.sleep(_AFTERMATH_S)
            self._answers.append(took)
            quiet = min(took, _LOST_AFTER_S)
            self._progress(f"prompt {number} was answered after {took:.2f} s")

    @asynccontextmanager
    async def _turn(self, *, is_big: bool) -> AsyncIterator[None]:
        start = time.monotonic()
        yield
        self._turns.append(_Turn(is_big, start, time.monotonic()))

    async def _every(
        self, seconds: float, ask_once: Callable[[], Awaitable[None]], nursery: trio.Nursery
    ) -> None:
        due = trio.current_time()
        while True:
            nursery.start_soon(ask_once)
            due += seconds
            await trio.sleep_until(due)

    async def _probe(self) -> None:
        self._health.append((time.monotonic(), await self._timed("/health", None, 200)))

    async def _ask_little(self) -> None:
        body = chat_body(stream=True, max_tokens=1)
        self._small.append((time.monotonic(), await self._timed(CHAT, body, 200)))

    async def _timed(self, path: str, body: bytes | None, *statuses: int) -> float:
        """Seconds to the first bytes of the answer's body; infinite if its status is none of ``statuses``."""
        started = time.monotonic()
        with trio.move_on_after(_LOST_AFTER_S):
            try:
                async with ask(self._port, path, body) as exchange:
                    await exchange.receive_some()
                    took = time.monotonic() - started
                    await exchange.receive_all()
            except (OSError, h11.RemoteProtocolError):
                return math.inf
            return took if exchange.status in statuses else math.inf
        return math.inf

    def measurements(self, gaps: list[tuple[float, float]]) -> list[Measurement]:
        """In pairs, without and with a big prompt. ``gaps``: when a piece came, and after how long.

        Raises ``TriolegError`` if the time was not enough for both.
        """
        step = self._load.step
        beyond = [(end, max(0.0, gap - step)) for end, gap in gaps]
        measured = [
            one
            for what, goal, figures in (
                ("/health", "p99 250 ms", self._health),
                ("between two pieces, beyond the step", "worst 100 ms", beyond),
                ("first token of a small prompt", "a step, and what one takes alone", self._small),
            )
            for one in self._side_by_side(what, goal, figures)
        ]
        whole = Measurement(f"answer to {self._load.megabytes:g} MB", "–")
        for took in self._answers:
            _note(whole, took)
        return [*measured, whole]

    def _side_by_side(
        self, what: str, goal: str, figures: list[tuple[float, float]]
    ) -> Iterator[Measurement]:
        for is_big in (False, True):
            turns = [turn for turn in self._turns if turn.is_big is is_big]
            if not turns:
                raise TriolegError(
                    f"{self._load.time_limit:g} s were not enough for one prompt of "
                    f"{self._load.megabytes:g} MB"
                )
            beside = f"beside {self._load.megabytes:g} MB" if is_big else "alone"
            one = Measurement(f"{what}, {beside}", goal)
            for at, took in figures:
                if any(turn.start <= at < turn.end for turn in turns):
                    _note(one, took)
            yield one


def _note(measurement: Measurement, took: float) -> None:
    measurement.note(None if math.isinf(took) else took)
