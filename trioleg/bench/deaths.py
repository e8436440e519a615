"""A process is killed or stopped: how long until those who must know, know, and what must end, has ended.

A try starts its programs anew (stopping an engine does not need that), waits until all streams have had a
token, strikes, and looks.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeAlias

import h11
import trio

from .client import CHAT, Exchange, ask, chat_body, is_healthy
from .measurement import Measurement
from .processes import Program, until, wait_gone
from .servers import ENDLESS, Server, attached_server, engine_of, own_server, starting_server

__all__ = ["measure_engine_kills", "measure_engine_stops", "measure_front_end_kills"]

_STREAMS = 16
# As long as the engine goes on: 1,500 tokens are 75 s of the script.
_MAX_TOKENS = 1500
# What has not come by then is missing.
_LOST_AFTER_S = 20.0
# A client counts as told when the answer is whole and says so.
_TOLD = b'data: {"error"'

_OpenServer: TypeAlias = Callable[[], AbstractAsyncContextManager[Server]]


# ---------------------------------------------------------------------------- the engine is killed


async def measure_engine_kills(model: str, tries: int) -> list[Measurement]:
    """SIGKILL to an engine that the server has started, and to one that has joined it."""
    goal = "p99 500 ms"
    own = Measurement(f"engine SIGKILL → last of {_STREAMS} streams told", goal)
    joined = Measurement(f"joined engine SIGKILL → last of {_STREAMS} streams told", goal)
    for _ in range(tries):
        own.note(await _kill_engine(partial(own_server, model, ENDLESS)))
        joined.note(await _kill_engine(partial(attached_server, model, ENDLESS)))
    return [own, joined]


async def _kill_engine(open_server: _OpenServer) -> float | None:
    async with open_server() as server, _streams(server.port, _STREAMS) as streams:
        told: list[float] = []
        struck_at = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        with trio.move_on_after(_LOST_AFTER_S):
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(_note_told, stream, told)
    return max(told) - struck_at if len(told) == _STREAMS else None


async def _note_told(stream: Exchange, told: list[float]) -> None:
    try:
        await stream.receive_all()
    except (OSError, h11.RemoteProtocolError):
        return
    if _TOLD in stream.body:
        told.append(time.monotonic())


# ---------------------------------------------------------------------------- the engine is stopped


async def measure_engine_stops(model: str, tries: int) -> list[Measurement]:
    """SIGSTOP to an engine without and with requests; it is let go on, and stopped again."""
    return [await _measure_stops(model, count, tries) for count in (0, _STREAMS)]


async def _measure_stops(model: str, num_streams: int, tries: int) -> Measurement:
    what = f"with {num_streams} streams" if num_streams else "idle"
    one = Measurement(f"engine SIGSTOP → /health 503, {what}", "1 s")
    async with own_server(model, ENDLESS) as server:
        for _ in range(tries):
            async with _streams(server.port, num_streams):
                one.note(await _stop_engine(server))
    return one


async def _stop_engine(server: Server) -> float | None:
    async def is_unhealthy() -> bool:
        return not await is_healthy(server.port)

    struck_at = time.monotonic()
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        seen = await until(is_unhealthy, _LOST_AFTER_S)
        seconds = time.monotonic() - struck_at
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    await until(partial(is_healthy, server.port), _LOST_AFTER_S)
    return seconds if seen else None


# ---------------------------------------------------------------------------- the front end is killed


async def measure_front_end_kills(model: str, tries: int) -> list[Measurement]:
    """SIGKILL to a server while it serves, and at random points of its engine's loading."""
    serving = Measurement("front end SIGKILL → engine gone, serving", "2 s")
    loading = Measurement("front end SIGKILL → engine gone, loading", "2 s")
    moments = random.Random(0)
    for _ in range(tries):
        async with own_server(model, ENDLESS) as server, _streams(server.port, 1):
            serving.note(await _kill_front_end(server.program, server.engine_pid))
        async with starting_server(model, {**ENDLESS, "load_s": _LOST_AFTER_S * 2}) as program:
            engine_pid = await engine_of(program)
            # An interpreter that starts, imports, HELLO, a model that loads: all within the first second.
            await trio.sleep(moments.uniform(0, 1))
            loading.note(await _kill_front_end(program, engine_pid))
    return [serving, loading]


async def _kill_front_end(program: Program, engine_pid: int) -> float | None:
    # Before it can be gone, so that a process that gets its number later is not taken for it.
    engine = os.pidfd_open(engine_pid)
    try:
        struck_at = time.monotonic()
        os.kill(program.pid, signal.SIGKILL)
        gone = await wait_gone(engine, _LOST_AFTER_S)
        return time.monotonic() - struck_at if gone else None
    finally:
        os.close(engine)


@asynccontextmanager
async def _streams(port: int, count: int) -> AsyncIterator[list[Exchange]]:
    """``count`` streams, each of which has had its first token; left at the block's end."""
    body = chat_body(stream=True, max_tokens=_MAX_TOKENS)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(ask(port, CHAT, body)) for _ in range(count)]
        for stream in streams:
            await stream.receive_some()
        yield streams
