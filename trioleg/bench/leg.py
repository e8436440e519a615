"""``trioleg bench leg``: what the way from the engine to the client costs, beside others who go it.

The subjects get the same frames of the same engine and the same client, on the same machine, and take turns.

    cost        processor a token, gaps, first frames and memory, by the number of streams
    saturation  the most tokens a second that still come one by one
    start       from the process's start until it is ready, and its memory then
    idle        memory that an open stream takes which says nothing
    length      processor a token at a stream's beginning, and far behind it
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .. import model_store
from ..errors import InvalidRequestError
from ..runtime.unwrap import unwrapped
from .leg_control import Remote
from .leg_figures import (
    Figures,
    note_cost,
    note_idle,
    note_length,
    note_saturation,
    note_start,
    of_streams,
)
from .leg_saturation import find_saturation
from .leg_streams import Run, leg_token_ids, open_clients
from .leg_subjects import FLOOR, VLLM, Leg, Subject, serving
from .machine import FRONT_END_PACKAGES, read_machine
from .measurement import about_minutes
from .processes import allow_open_files
from .report import OURS, Report
from .vllm_python import read_vllm_version

__all__ = ["PARTS", "PEERS", "AskedLeg", "run_leg"]

PEERS = (VLLM, FLOOR)
PARTS = ("cost", "saturation", "start", "idle", "length")
# How many streams stand open and silent; the last is what any subject must be able to hold.
_IDLE = (1000, 4000, 4096)
# Many enough that a step has work for its loop, few enough that no client is what is slow.
_SATURATED_STREAMS = 256
# A stream that is measured at its beginning and far behind it, and how it gets there.
_LONG_STREAMS = 16
_LENGTHS = (100, 20_000)
_LONG_RATE = 500.0
_LONG_AFTER_S = 0.2
_LONG_SECONDS = 2.0
_HURRY_RATE = 1500.0
# Slower steps would look like a pause to those who wait for the end of a burst.
_LEAST_SEARCH_RATE = 10.0
# So many steps are in any window: a gap lies between two of them.
_LEAST_STEPS = 2
# Seconds, for people who wonder whether to wait: a start, a search for the limit, a stream of 20,000 tokens, and what
# it takes to open, warm up, pause and end some streams, and for each of them.
_START_S, _SEARCH_S, _LONG_S, _AROUND_S, _STREAM_S = 3.0, 25.0, 20.0, 3.0, 0.005


@dataclass(frozen=True, slots=True)
class AskedLeg:
    """What to measure: ``parts`` of it, with ``streams`` at a time, ``rate`` steps a second but no more than
    ``token_rate`` tokens a second in all, each ``runs`` times for ``seconds``, beside ``peers``. ``vllm_python``: an
    interpreter that has vLLM. ``is_pinned``: the server on a core of its own."""

    streams: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
    rate: float = 50.0
    token_rate: float = 12_800.0
    runs: int = 5
    seconds: float = 5.0
    parts: tuple[str, ...] = PARTS
    peers: tuple[str, ...] = (FLOOR,)
    vllm_python: str | None = None
    is_pinned: bool = False

    def check(self) -> None:
        """Raises ``InvalidRequestError`` for what cannot be measured."""
        if VLLM in self.peers and self.vllm_python is None:
            raise InvalidRequestError(
                "--peer is vllm, but --vllm-python is not given; allowed: an interpreter that has vLLM",
                parameter="vllm_python",
            )
        if self.is_pinned and (cores := len(os.sched_getaffinity(0))) < 2:
            raise InvalidRequestError(
                f"--pin needs 2 cores; this process may use {cores}", parameter="pin"
            )
        for streams in self.streams if "cost" in self.parts else ():
            self._check_window(streams)

    def _check_window(self, streams: int) -> None:
        rate = self.rate_of(streams)
        if self.seconds * rate < _LEAST_STEPS:
            raise InvalidRequestError(
                f"--seconds is {self.seconds:g}, and with {of_streams(streams)} there are {rate:g} steps a second (by "
                f"--rate or --token-rate); allowed: {_LEAST_STEPS} steps or more, so {_LEAST_STEPS / rate:g} seconds, "
                "or a higher rate",
                parameter="seconds",
            )

    def allow_open_files(self) -> None:
        """Raises ``InvalidRequestError`` if there may not be enough for the streams of every part."""
        if "cost" in self.parts:
            allow_open_files(max(self.streams), f"--streams is {max(self.streams)}")
        if "saturation" in self.parts:
            allow_open_files(_SATURATED_STREAMS, "--only is saturation")
        if "idle" in self.parts:
            allow_open_files(max(_IDLE), "--only is idle")
        if "length" in self.parts:
            allow_open_files(_LONG_STREAMS, "--only is length")

    @property
    def expected_s(self) -> float:
        """Roughly, how long it takes."""
        took = {
            "cost": sum(self.seconds + _AROUND_S + _STREAM_S * one for one in self.streams),
            "saturation": _SEARCH_S,
            "start": _START_S,
            "idle": _START_S + _STREAM_S * max(_IDLE),
            "length": _LONG_S,
        }
        return self.runs * (1 + len(self.peers)) * sum(took[part] for part in self.parts)

    def rate_of(self, streams: int) -> float:
        """Steps a second with so many streams."""
        return min(self.rate, self.token_rate / streams)


async def run_leg(model: str, asked: AskedLeg, progress: Callable[[str], None]) -> Report:
    """Start everything, measure, end it. ``progress`` is told now and then.

    Raises ``TriolegError`` if a program under test does not start, or if anything of a stream was lost.
    """
    asked.check()
    asked.allow_open_files()
    versions = await _versions(asked)
    directory = model_store.resolve(model, weights=False)
    progress(about_minutes(asked.expected_s))
    leg = Leg(directory, leg_token_ids(directory), asked.vllm_python, asked.is_pinned)
    with unwrapped():
        async with open_clients(leg) as clients:
            bench = _Bench(leg, asked, clients, progress)
            await bench.work()
    return Report(
        title="From the engine to the client",
        settings={"model": model, **_settings(asked)},
        machine=read_machine(FRONT_END_PACKAGES, versions),
        series=bench.figures.series,
        notes=list(_notes(asked)),
    )


def _notes(asked: AskedLeg) -> Iterator[str]:
    if not {"cost", "length"}.isdisjoint(asked.parts):
        yield "Processor: user and system of the server's process alone, for each frame that came to a client."
    for streams in asked.streams if "cost" in asked.parts else ():
        if (rate := asked.rate_of(streams)) < asked.rate:
            yield f"{of_streams(streams)}: {rate:g} steps a second, not {asked.rate:g}."
    if asked.is_pinned:
        yield "The server had a core of its own; engine and clients had the rest."


async def _versions(asked: AskedLeg) -> dict[str, str]:
    """vLLM's, which is where its interpreter is. Raises ``InvalidRequestError`` if it is not."""
    if VLLM not in asked.peers or asked.vllm_python is None:
        return {}
    return {VLLM: await read_vllm_version(asked.vllm_python)}


def _settings(asked: AskedLeg) -> dict[str, Any]:
    """Without paths, which are nobody's business."""
    return {name: value for name, value in asdict(asked).items() if name != "vllm_python"}


class _Bench:
    def __init__(
        self, leg: Leg, asked: AskedLeg, clients: Remote, progress: Callable[[str], None]
    ) -> None:
        self.figures = Figures(asked.peers)
        self._leg = leg
        self._asked = asked
        self._clients = clients
        self._progress = progress
        self._names = (OURS, *asked.peers)

    async def work(self) -> None:
        """All parts that are asked for: first those that need a fresh server each time."""
        parts = self._asked.parts
        if "start" in parts or "idle" in parts:
            await self._take_turns("start and idle", self._start_and_idle)
        if not {"cost", "saturation", "length"}.isdisjoint(parts):
            async with self._all_servers() as subjects:
                await self._with_servers(subjects)

    @asynccontextmanager
    async def _all_servers(self) -> AsyncIterator[dict[str, Subject]]:
        """All at once: one without streams takes memory, and next to nothing of the processor."""
        async with AsyncExitStack() as stack:
            yield {
                name: await stack.enter_async_context(serving(name, self._leg))
                for name in self._names
            }

    async def _with_servers(self, subjects: dict[str, Subject]) -> None:
        if "cost" in self._asked.parts:
            for streams in self._asked.streams:
                what = f"cost, {of_streams(streams)}"
                await self._take_turns(what, self._cost, subjects, streams)
        if "saturation" in self._asked.parts:
            await self._take_turns("saturation", self._saturation, subjects)
        if "length" in self._asked.parts:
            await self._take_turns("length", self._length, subjects)

    async def _take_turns(self, what: str, measure: Callable[..., Any], *arguments: Any) -> None:
        for number in range(1, self._asked.runs + 1):
            for name in self._names:
                self._progress(f"{what}: run {number} of {self._asked.runs}, {name}")
                await measure(name, *arguments)

    # ------------------------------------------------------------------ the parts

    async def _cost(self, name: str, subjects: dict[str, Subject], streams: int) -> None:
        run = Run(subjects[name], self._clients, self._leg)
        first = await run.open(streams)
        window = await run.window(self._asked.rate_of(streams), self._asked.seconds)
        memory = run.memory_mb()
        ended = await run.finish()
        note_cost(self.figures, name, streams, first, window, memory, ended)

    async def _saturation(self, name: str, subjects: dict[str, Subject]) -> None:
        run = Run(subjects[name], self._clients, self._leg)
        await run.open(_SATURATED_STREAMS)
        tokens = await find_saturation(run, max(self._asked.rate, _LEAST_SEARCH_RATE))
        await run.finish()
        note_saturation(self.figures, name, _SATURATED_STREAMS, tokens)

    async def _start_and_idle(self, name: str) -> None:
        async with serving(name, self._leg) as subject:
            run = Run(subject, self._clients, self._leg)
            if "start" in self._asked.parts:
                note_start(self.figures, name, subject.start_s, run.memory_mb())
            if "idle" in self._asked.parts:
                await self._idle(name, run)

    async def _idle(self, name: str, run: Run) -> None:
        # What a first request loads is no stream's.
        await run.open(1)
        before, opened = run.memory_mb(), 1
        for streams in _IDLE:
            await run.open(streams - opened)
            opened = streams
            note_idle(self.figures, name, streams, (run.memory_mb() - before) / (streams - 1))
        await run.finish()

    async def _length(self, name: str, subjects: dict[str, Subject]) -> None:
        run = Run(subjects[name], self._clients, self._leg)
        await run.open(_LONG_STREAMS)
        seconds = min(self._asked.seconds, _LONG_SECONDS)
        for length in _LENGTHS:
            await run.burst(_HURRY_RATE, length - await run.length())
            window = await run.window(_LONG_RATE, seconds, _LONG_AFTER_S)
            note_length(self.figures, name, length, window)
        await run.finish()
