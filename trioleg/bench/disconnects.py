"""A client leaves: how long until the engine has the ABORT.

The bench is the client and the engine both, ``trioleg serve --attach`` is between them. A try is one request that
is left at one point; tries fall at random moments of the engine's steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from .client import CHAT, Exchange, ask, chat_body
from .measurement import Measurement
from .played_engine import PlayedEngine, open_played_engine
from .servers import open_attaching, ready_port

__all__ = ["measure_disconnects"]

_GOAL = "p50 1 ms, p99 5 ms"
# Processes are what the other measurements start for each try; here a try is a request.
_REQUESTS_PER_TRY = 10
_BUSY_STREAMS = 64
# 20 steps a second, as in the other measurements of this size.
_STEP_S = 0.05
_MAX_TOKENS = 2**19
_LOST_AFTER_S = 10.0
# Tokens of the busy streams collect in the kernel, which has room for far more, and the bench has its hands
# free for what it measures.
_DRAIN_INTERVAL_S = 0.5
# Before a try: long enough that the one before it is history.
_PAUSE_S = 0.01

_KINDS = {
    "queued": "a stream without a token yet",
    "stream": "a stream in the middle",
    "plain": "a plain request",
}


async def measure_disconnects(model: str, tries: int) -> list[Measurement]:
    """Every kind of request, alone and beside busy streams. Raises ``TriolegError``."""
    measurements = []
    async with open_attaching(model) as (program, address):
        async with open_played_engine(address) as engine:
            port = await ready_port(program)
            for beside in (0, _BUSY_STREAMS):
                async with _busy_streams(engine, port, beside):
                    for kind in _KINDS:
                        measurements.append(await _measure(engine, port, kind, beside, tries))
    return measurements


async def _measure(
    engine: PlayedEngine, port: int, kind: str, beside: int, tries: int
) -> Measurement:
    where = f"beside {beside} streams" if beside else "alone"
    one = Measurement(f"client leaves {_KINDS[kind]} → ABORT, {where}", _GOAL)
    moments = random.Random(kind)
    for _ in range(tries * _REQUESTS_PER_TRY):
        await trio.sleep(_PAUSE_S + moments.uniform(0, _STEP_S))
        one.note(await _try(engine, port, kind))
    return one


async def _try(engine: PlayedEngine, port: int, kind: str) -> float | None:
    body = chat_body(stream=kind != "plain", max_tokens=_MAX_TOKENS)
    with trio.move_on_after(_LOST_AFTER_S):
        async with ask(port, CHAT, body) as exchange:
            request_id = await engine.next_request()
            if kind != "queued":
                engine.say([request_id])
            if kind == "stream":
                await exchange.receive_some()
            left_at = time.monotonic()
            exchange.leave()
            return await engine.wait_aborted(request_id) - left_at
    return None


@asynccontextmanager
async def _busy_streams(engine: PlayedEngine, port: int, count: int) -> AsyncIterator[None]:
    """``count`` streams that get a token each step, and are read, for the length of the block."""
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        exchanges, ids = [], []
        for _ in range(count):
            request = ask(port, CHAT, chat_body(stream=True, max_tokens=_MAX_TOKENS))
            exchanges.append(await stack.enter_async_context(request))
            ids.append(await engine.next_request())
        if count:
            nursery.start_soon(_step, engine, ids)
            for exchange in exchanges:
                nursery.start_soon(_drain, exchange)
        yield
        nursery.cancel_scope.cancel(reason="nobody is left beside whom to measure")


async def _step(engine: PlayedEngine, ids: list[str]) -> None:
    at = trio.current_time()
    while True:
        engine.say(ids)
        at += _STEP_S
        await trio.sleep_until(at)


async def _drain(exchange: Exchange) -> None:
    while True:
        await exchange.discard()
        await trio.sleep(_DRAIN_INTERVAL_S)
