"""What ends a request from outside: its deadline, a signal to the server, a message that nobody can read."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import trio

from ...errors import TriolegError
from ..aftermath import is_there, note_again
from ..legs import Running
from ..observing import (
    BOUND_S,
    EXIT_S,
    asking,
    note_exit,
    note_hang,
    note_leaks,
    note_told,
    receive_tokens,
    serving_with,
    warm_up,
    watch,
)
from ..outcome import SWALLOW, Outcome
from ..pair import TOKENS, open_two, said_by, speak, watch_all
from ..phrases import exception_lines, plain
from ..scenario import Scene, scenario
from ..seen import Seen

__all__: list[str] = []

_GROUP = "ending"
# Long enough for the first request of a leg under load, which must not meet it.
_DEADLINE_S = 2.0
_RATE = 50.0
# Behind SIGTERM: less than a server that drains gives its streams.
_GO_ON_S = 1.0
_SECOND_SIGNAL_S = 0.5
# What libraries and legs say of such a message.
_MALFORMED = re.compile(r"DecodeError|malformed|cannot be read|truncated|invalid", re.IGNORECASE)


@scenario(
    "deadline",
    _GROUP,
    asks="The engine falls silent, and a request has two seconds: what does its client see, before and after a token?",
    seconds=_DEADLINE_S,
    has_lanes=True,
)
async def deadline(scene: Scene) -> None:
    """One stream has had no token, the other three. A leg without deadlines is played all the same, for what its clients
    see, and is absent."""
    outcome = scene.outcome
    async with serving_with(scene, total_timeout=_DEADLINE_S) as (server, has_deadlines):
        before = await warm_up(server)
        cause = time.monotonic()
        async with open_two(server, timeouts={"total": _DEADLINE_S}) as (silent, spoken, number):
            await speak(server, [number + 1], [spoken])
            seen = await watch_all((silent, spoken), 2 * _DEADLINE_S + 1)
            outcome.client = said_by(seen)
            if has_deadlines:
                outcome.noticed_s["both clients"] = time.monotonic() - cause
                note_hang(outcome, seen)
                await note_told(outcome, server, cause, 2)
        outcome.is_absent = not has_deadlines
        await note_leaks(outcome, server, before)


@scenario(
    "shutdown-in-mid-stream",
    _GROUP,
    asks="SIGTERM comes while two streams run, which would end a second later: do they come whole?",
    seconds=_GO_ON_S + 2,
    has_lanes=True,
)
async def shutdown_in_mid_stream(scene: Scene) -> None:
    """With the leg's own settings. A third client asks in between."""
    outcome = scene.outcome
    async with scene.serving() as server:
        await warm_up(server)
        async with open_two(server) as (*clients, _number):
            await server.puppet.pace(_RATE)
            for exchange in clients:
                await receive_tokens(exchange, TOKENS)
            cause = time.monotonic()
            os.kill(server.program.pid, signal.SIGTERM)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_finish_later, server, outcome)
                seen = await watch_all(clients, EXIT_S)
            outcome.client = said_by(seen)
            note_hang(outcome, seen)
        await note_exit(outcome, server, cause)


async def _finish_later(server: Running, outcome: Outcome) -> None:
    await trio.sleep(_GO_ON_S / 2)
    try:
        async with asking(server) as exchange:
            late = said_by([await watch(exchange, _GO_ON_S / 2)])
    except OSError:
        late = "refused"
    outcome.remarks.append(f"a client that asks {_GO_ON_S / 2:g} s after the signal: {late}")
    # A leg that does not drain has ended its engine by now.
    with suppress(TriolegError, OSError):
        await server.puppet.pace(0)
        await server.puppet.say(finish="length")


@scenario(
    "sigterm-twice",
    _GROUP,
    asks="Two streams do not end, and whoever sent SIGTERM sends it again: how soon does the server leave?",
    seconds=_SECOND_SIGNAL_S + 2,
)
async def sigterm_twice(scene: Scene) -> None:
    """``exit_s`` counts from the first signal; the second comes half a second later, if anybody is there to have it."""
    outcome = scene.outcome
    async with scene.serving() as server:
        await warm_up(server)
        async with open_two(server) as (*clients, _number):
            await server.puppet.pace(_RATE)
            for exchange in clients:
                await receive_tokens(exchange, TOKENS)
            cause = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_signal_twice, server.program.pid)
                seen = await watch_all(clients, EXIT_S)
                await note_exit(outcome, server, cause)
            outcome.client = said_by(seen)
            note_hang(outcome, seen)


async def _signal_twice(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    await trio.sleep(_SECOND_SIGNAL_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


@scenario(
    "message-that-nobody-can-read",
    _GROUP,
    asks="The engine sends a message that cannot be decoded: who hears of it, and does the server still serve?",
)
async def garbled(scene: Scene) -> None:
    """Two streams run; a third client asks behind it."""
    outcome = scene.outcome
    async with scene.serving() as server:
        before = await warm_up(server)
        async with open_two(server) as (*clients, number):
            await speak(server, [number, number + 1], clients)
            cause = time.monotonic()
            await server.puppet.garble()
            seen = await watch_all(clients, BOUND_S)
            outcome.noticed_s["both clients"] = time.monotonic() - cause
            outcome.client = said_by(seen)
            note_hang(outcome, seen)
            _note_surfaced(outcome, server, seen)
        if await note_again(outcome, server) or not await _leaves(server):
            await note_leaks(outcome, server, before)
        else:
            await note_exit(outcome, server, cause)


async def _leaves(server: Running) -> bool:
    """One that serves nobody may be about to, slowly."""
    with trio.move_on_after(BOUND_S):
        await server.program.wait_code()
        return True
    return False


def _note_surfaced(outcome: Outcome, server: Running, seen: Sequence[Seen]) -> None:
    logged = [line for line in server.program.lines if _MALFORMED.search(line)]
    if logged:
        outcome.error = [*map(plain, logged[-1:]), *exception_lines(logged)][-1]
    told = any(one.error for one in seen)
    places = [place for place, is_so in (("the client", told), ("the log", logged)) if is_so]
    outcome.surfaced = ", ".join(places) or "nowhere"
    if not places and is_there(server.program):
        outcome.find(SWALLOW, "no client was told why, no line was printed, and the server goes on")
