"""The whole leg in this process, for a bench that takes it apart: engine's end, front end, server, and the clients.

The front end is the main thread's Trio run: an ``LLM``, the app and the connections of a server. The engine's end
is another thread (``hop_engine.py``), the clients are another process (``load_streams.py``). Streams are opened
once and stay; a step says a token for some of them, and the others cost nothing. Processor time is read from the
kernel's clock of each thread, by a thread that does nothing but let steps happen: nothing is added to the leg.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from hypercorn.config import Config

from ..errors import TriolegError
from ..heap import settle_heap
from ..ipc.launch import private_ipc_dir
from ..runtime.llm import LLM
from ..runtime.opening import open_llm
from ..server.app import create_app
from ..server.connection import serve_connections
from ..server.http1 import DIRECT_BODY, DirectBody
from .hop_engine import EngineEnd, step_message
from .load_streams import ALL_OPEN, WRITTEN
from .processes import START_S, running, until

__all__ = ["Cpu", "Leg", "Steps", "cpu_of_steps", "open_leg"]


@dataclass(frozen=True, slots=True)
class Steps:
    """``count`` steps, ``interval`` seconds apart, give or take a third: a rhythm must not meet a timer's."""

    count: int
    interval: float

    @property
    def seconds(self) -> float:
        """In all, about."""
        return self.count * self.interval

    def intervals(self) -> Iterator[float]:
        """Behind each step; the same ones every time."""
        choice = random.Random(self.count)
        return (self.interval * choice.uniform(2 / 3, 4 / 3) for _ in range(self.count))


@dataclass(frozen=True, slots=True)
class Cpu:
    """Nanoseconds of processor time: of the front end's thread, the engine's, and all others (ZeroMQ's own)."""

    front_end: int
    engine: int
    others: int

    @property
    def threads(self) -> int:
        """Of the two that run our code."""
        return self.front_end + self.engine

    def less(self, idle: Cpu) -> Cpu:
        return Cpu(
            self.front_end - idle.front_end, self.engine - idle.engine, self.others - idle.others
        )


async def cpu_of_steps(
    act: Callable[[int], None], steps: Steps, engine_clock: int | None = None
) -> Cpu:
    """What this process spends while another thread calls ``act(number)`` for each step, less what it spends
    while as much time goes by without."""
    front_end_clock = time.pthread_getcpuclockid(threading.get_ident())

    def clocks() -> Cpu:
        front_end = time.clock_gettime_ns(front_end_clock)
        engine = 0 if engine_clock is None else time.clock_gettime_ns(engine_clock)
        others = time.process_time_ns() - front_end - engine - time.thread_time_ns()
        return Cpu(front_end, engine, others)

    def go_through(act: Callable[[int], None]) -> Cpu:
        before = clocks()
        for number, interval in enumerate(steps.intervals()):
            act(number)
            time.sleep(interval)
        return clocks().less(before)

    idle = await trio.to_thread.run_sync(go_through, _do_nothing)
    return (await trio.to_thread.run_sync(go_through, act)).less(idle)


def _do_nothing(_number: int) -> None:
    """A step that does not come."""


class Leg:
    """Made by ``open_leg``. ``bodies``: of each open stream, its way to the connection."""

    def __init__(self, llm: LLM, engine: EngineEnd, bodies: Sequence[DirectBody]) -> None:
        self.bodies = bodies
        self._llm = llm
        self._engine = engine

    @property
    def num_merged(self) -> int:
        """Outputs so far that met an unread one: of those the client got fewer pieces than tokens."""
        return sum(one.statistics().num_merges for one in self._llm.live_requests())

    async def cpu(
        self,
        token_ids: Sequence[Sequence[int]],
        interval: float,
        beside: AbstractContextManager[None] | None = None,
    ) -> Cpu:
        """The whole leg's, for these steps: each is a token for each of so many streams. ``beside`` is entered for
        as long as they come."""
        # Made before: an engine's loop makes them, and the leg begins behind it.
        ids = self._engine.request_ids
        messages = [step_message(ids[: len(one)], one) for one in token_ids]
        steps = Steps(len(messages), interval)
        with beside or nullcontext():
            return await cpu_of_steps(
                lambda number: self._engine.step(messages[number]), steps, self._engine.cpu_clock
            )


@asynccontextmanager
async def open_leg(model: str, num_streams: int, token_id: int) -> AsyncIterator[Leg]:
    """The leg with so many streams, each of which has said ``token_id``; the block's end ends it all.

    Raises ``TriolegError`` if something of it does not start.
    """
    with private_ipc_dir() as folder:
        engine = EngineEnd(f"ipc://{folder}/handshake")
        async with trio.open_nursery() as thread:
            thread.start_soon(trio.to_thread.run_sync, engine.run)
            try:
                async with _front_end(model, engine, num_streams, folder, token_id) as leg:
                    yield leg
            finally:
                engine.stop()


@asynccontextmanager
async def _front_end(
    model: str, engine: EngineEnd, num_streams: int, folder: Path, token_id: int
) -> AsyncIterator[Leg]:
    bodies: list[DirectBody] = []
    async with open_llm(model, attach=engine.address, wait_until_ready=False) as llm:
        async with trio.open_nursery() as nursery:
            await llm.wait_ready()
            port = await _serve(llm, bodies, nursery)
            async with _clients(port, num_streams, folder, engine, token_id):
                settle_heap()
                yield Leg(llm, engine, bodies)
            nursery.cancel_scope.cancel(reason="the bench is over")


async def _serve(llm: LLM, bodies: list[DirectBody], nursery: trio.Nursery) -> int:
    """The port at which the app is served. The app gets what the server gives it, of which we only take note."""
    app: Any = create_app(llm)

    async def tapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            bodies.append(scope["extensions"][DIRECT_BODY]["body"])
        await app(scope, receive, send)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def serve() -> None:
        await serve_connections(tapped, Config(), [listener], shutdown=trio.Event())

    nursery.start_soon(serve)
    return int(listener.socket.getsockname()[1])


@asynccontextmanager
async def _clients(
    port: int, count: int, folder: Path, engine: EngineEnd, token_id: int
) -> AsyncIterator[None]:
    """All streams open, in a process that reads what comes."""
    arguments = ("-m", "trioleg.bench.load_streams", str(port), str(count), str(folder / "gaps"))
    async with running(*arguments) as program:

        async def all_asked() -> bool:
            await trio.lowlevel.checkpoint()
            return len(engine.request_ids) == count

        if not await until(all_asked, START_S):
            raise TriolegError(f"{len(engine.request_ids)} of {count} streams could be opened")
        engine.step(step_message(engine.request_ids, [token_id] * count))
        await program.wait_for(re.compile(ALL_OPEN))
        yield
        os.kill(program.pid, signal.SIGTERM)
        ended = int((await program.wait_for(re.compile(rf"{WRITTEN}(\d+)")))[1])
    if ended:
        raise TriolegError(f"{ended} streams ended before their time")
