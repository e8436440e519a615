"""A client reads slowly, or not at all: what it gets, what others notice, and how long it may keep the server busy."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from ...bench.client import CHAT, Exchange, chat_body
from ..legs import Running
from ..observing import (
    BOUND_S,
    EXIT_S,
    asking,
    memory_kb,
    note_exit,
    note_hang,
    note_leaks,
    note_told,
    port_of,
    serving_with,
    warm_up,
    watch,
)
from ..outcome import HANG
from ..scenario import Scene, scenario
from ..seen import phrase, without_count

__all__: list[str] = []

_GROUP = "reading"
# The least that Linux takes, so that what is not read soon has no place but the server's own side.
_RECEIVE_BUFFER = 2048
_RATE, _STEPS = 500.0, 2000
# A twentieth of what the stream needs, which is about 100 KB a second.
_SIP_BYTES, _SIP_EVERY_S = 512, 0.1
# A kernel takes up to 4 MB for a client that reads nothing (tcp_wmem) before its server has to wait. A token with 20
# logprobs is over 2 KB.
_FAT = {"logprobs": True, "top_logprobs": 20}
_FULL_STEPS, _FULL_RATE = 4000, 1000.0
_PACE_BESIDE = 20.0
_MAX_TOKENS = 65_536


@asynccontextmanager
async def _narrow(
    server: Running, **more: Any
) -> AsyncIterator[tuple[trio.socket.SocketType, Exchange]]:
    with trio.socket.socket() as sock:
        # Before it connects: the window is agreed on with the first packet.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        await sock.connect(("127.0.0.1", port_of(server)))
        exchange = Exchange(sock)
        body = chat_body(stream=True, max_tokens=_MAX_TOKENS, return_token_ids=True, **more)
        await exchange.send(CHAT, body)
        yield sock, exchange


@scenario(
    "slow-reader",
    _GROUP,
    asks="A client reads a twentieth of what its stream says: does it lose anything, and does its neighbour wait?",
    seconds=_STEPS / _RATE + 1,
)
async def slow_reader(scene: Scene) -> None:
    """It is slow for as long as the engine speaks, and then reads what is left."""
    async with scene.serving() as server:
        before, had_kb = await warm_up(server), memory_kb(server)
        at_first = await server.puppet.state()
        gaps: list[float] = []
        async with asking(server) as beside, _narrow(server) as (_, slow):
            await server.puppet.wait_requests(at_first.arrived + 2)
            await server.puppet.pace(_RATE, _STEPS)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_note_gaps, beside, gaps)
                await _sip(slow)
                scene.outcome.memory_kb = memory_kb(server) - had_kb
                await server.puppet.pace(0)
                state = await server.puppet.say(finish="length")
                seen = await watch(slow)
        note_hang(scene.outcome, [seen])
        scene.outcome.client = without_count(phrase(seen), seen)
        # Both streams were told the same.
        _check_whole(scene, seen.tokens, (state.tokens - at_first.tokens) // 2)
        scene.outcome.figures["tokens in a chunk"] = len(seen.tokens) / max(1, seen.chunks)
        scene.outcome.figures["neighbour's gap, p99 (ms)"] = _p99(gaps) * 1000
        await note_leaks(scene.outcome, server, before)


async def _sip(exchange: Exchange) -> None:
    """Until the engine has said all that it was told to."""
    until = time.monotonic() + _STEPS / _RATE + _SIP_EVERY_S
    while time.monotonic() < until:
        await exchange.receive(_SIP_BYTES)
        await trio.sleep(_SIP_EVERY_S)


async def _note_gaps(exchange: Exchange, gaps: list[float]) -> None:
    times = []
    while await exchange.receive():
        times.append(time.monotonic())
    gaps += [later - sooner for sooner, later in itertools.pairwise(times)]


def _p99(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100)[-1]


def _check_whole(scene: Scene, tokens: tuple[int, ...], count: int) -> None:
    ids = scene.case().token_ids
    if tokens != tuple(itertools.islice(itertools.cycle(ids), count)):
        scene.outcome.remarks.append(f"{len(tokens)} tokens came of {count}, or others")
        scene.outcome.client = "tokens were lost or changed"


@scenario(
    "stalled-reader-and-shutdown",
    _GROUP,
    asks="A client has stopped reading when SIGTERM comes: does the server leave, and does it tell the others?",
    seconds=15.0,
)
async def stalled_reader_and_shutdown(scene: Scene) -> None:
    """With ``drain_timeout`` 1 where there is one. The engine goes on, so that no stream ends by itself."""
    outcome = scene.outcome
    async with serving_with(scene, drain_timeout=1) as (server, _):
        await warm_up(server)
        number = (await server.puppet.state()).arrived
        async with asking(server) as beside, _narrow(server, **_FAT):
            await server.puppet.wait_requests(number + 2)
            await server.puppet.say([number + 1], steps=_FULL_STEPS)
            await server.puppet.pace(_PACE_BESIDE)
            await beside.receive_some()
            cause = time.monotonic()
            os.kill(server.program.pid, signal.SIGTERM)
            seen = await watch(beside, EXIT_S)
            outcome.noticed_s["the other client"] = time.monotonic() - cause
            outcome.client = without_count(phrase(seen), seen)
            note_hang(outcome, [seen])
            await note_exit(outcome, server, cause)


@scenario(
    "stalled-reader-for-long",
    _GROUP,
    asks="A client has stopped reading for good: is it cut, after how long, and what does it cost until then?",
    seconds=BOUND_S,
)
async def stalled_reader_for_long(scene: Scene) -> None:
    """With ``write_timeout`` 1 where there is one. ``memory_kb``: what its unread stream took at most."""
    outcome = scene.outcome
    async with serving_with(scene, write_timeout=1) as (server, has_bound):
        before, had_kb = await warm_up(server), memory_kb(server)
        number = (await server.puppet.state()).arrived
        async with _narrow(server, **_FAT):
            await server.puppet.wait_requests(number + 1)
            cause = time.monotonic()
            await server.puppet.pace(_FULL_RATE)
            is_cut = await note_told(outcome, server, cause, 1, BOUND_S)
            outcome.memory_kb = memory_kb(server) - had_kb
            outcome.client = "cut" if is_cut else f"not cut within {BOUND_S:g} s"
            outcome.figures["tokens for a client that reads none"] = (
                await server.puppet.state()
            ).tokens
            if has_bound and not is_cut:
                outcome.find(HANG, f"it was to be cut after 1 s; {outcome.client}")
        await server.puppet.pace(0)
        await note_leaks(outcome, server, before)
