"""An engine dies, or stands still: what two open streams see, what a later request does, and how the server ends.

Every death has the cause that the system knows (a signal, an exit status); whether it is named to anybody is noted.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import trio

from ...bench.client import Exchange, is_healthy
from ...bench.leg_subjects import free_port
from ...bench.processes import Program, until
from ...errors import TriolegError
from ..aftermath import (
    Family,
    error_told,
    health,
    health_at,
    is_there,
    note_again,
    note_end,
    note_surfaced,
    note_time_of_end,
)
from ..legs import READY_S, Running, started
from ..observing import BOUND_S, EXIT_S, note_hang, note_leaks, port_of, warm_up
from ..outcome import HANG, Outcome
from ..pair import Pair, open_two, said_by, speak
from ..phrases import exit_phrase
from ..scenario import Scene, scenario

__all__: list[str] = []

_GROUP = "engine"
# Longer than a server may stay to tell whoever asks why it cannot serve.
_LINGER_S = 15.0
_LOOK_EVERY_S = 0.01
# For streams that went on with their engine.
_GO_ON_S = 5.0
# What servers say of an engine that is gone, or does not come; not what an access log says of a 500.
_SAYS_SO = re.compile(
    r"\b\w*(?:Error|Exception)\b|(?i:engine.*\b(?:dead|died|exited|ended|killed|gone|failed)\b"
    r"|\b(?:dead|died|exited|killed)\b.*engine)"
)

_Kill: TypeAlias = Callable[[Running], Awaitable[None]]


@scenario(
    "engine-raises",
    _GROUP,
    asks="The engine's loop raises; it says that it is dead, and leaves: who learns of it, and how does the server end?",
    seconds=_LINGER_S,
)
async def engine_raises(scene: Scene) -> None:
    """Status 1 behind its last word."""
    await _play(scene, lambda server: server.puppet.fail("raise"))


@scenario(
    "engine-sigkill",
    _GROUP,
    asks="The engine is killed, as by the kernel when memory is short: who learns of it, and is the signal named?",
    seconds=_LINGER_S,
    has_lanes=True,
)
async def engine_sigkill(scene: Scene) -> None:
    """Two streams run, three tokens each."""
    await _play(scene, lambda server: server.puppet.signal(signal.SIGKILL))


@scenario(
    "engine-exits",
    _GROUP,
    asks="The engine leaves with status 3 and without a word: who learns of it, and is the status named?",
    seconds=_LINGER_S,
)
async def engine_exits(scene: Scene) -> None:
    """Two streams run, three tokens each."""
    await _play(scene, lambda server: server.puppet.fail("exit"))


async def _play(scene: Scene, kill: _Kill) -> None:
    outcome = scene.outcome
    async with scene.serving() as server:
        await warm_up(server)
        family = Family(server.program)
        async with open_two(server) as (*clients, number):
            await speak(server, [number, number + 1], clients)
            so_far = len(server.program.lines)
            cause = outcome.cause_at = time.monotonic()
            await kill(server)
            said = await _watch_death(outcome, server, clients, cause)
        outcome.remarks.append(f"/health behind it: {said}")
        await note_again(outcome, server)
        await note_end(outcome, server, family, cause, _LINGER_S)
        told = [error_told(exchange) for exchange in clients]
        lines = server.program.lines[so_far:]
        note_surfaced(outcome, told, lines, _SAYS_SO)
        _note_cause(outcome, told, said, lines)


async def _watch_death(
    outcome: Outcome, server: Running, clients: list[Exchange], cause: float
) -> str:
    """Until both clients know, and /health does, which is asked all the while: what it says then."""
    pair = Pair(clients)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_note_health, outcome, server, cause)
        await pair.watch(BOUND_S)
        said = await health(server)
    outcome.client = said_by(pair.seen)
    note_hang(outcome, pair.seen)
    if pair.is_over(0) and pair.is_over(1):
        outcome.noticed_s["client"] = pair.over_at - cause
    return said


async def _note_health(outcome: Outcome, server: Running, cause: float) -> None:
    async def is_bad() -> bool:
        return not await is_healthy(port_of(server))

    if await until(is_bad, BOUND_S, every=_LOOK_EVERY_S):
        outcome.noticed_s["health"] = time.monotonic() - cause
    else:
        outcome.remarks.append(f"/health was 200 for {BOUND_S:g} s")


def _note_cause(outcome: Outcome, told: list[str], said: str, lines: Sequence[str]) -> None:
    outcome.cause = exit_phrase([*told, said, *lines])
    places = {"a client": told, "/health": [said], "the log": lines}
    named = [place for place, texts in places.items() if exit_phrase(texts)]
    outcome.remarks.append(f"how the engine ended is named by: {', '.join(named) or 'nobody'}")


# ---------------------------------------------------------------------- one that stands still


@scenario(
    "engine-sigstop",
    _GROUP,
    asks="The engine is stopped for ten seconds, and then goes on: what do clients and /health see meanwhile?",
    seconds=BOUND_S + 2,
)
async def engine_sigstop(scene: Scene) -> None:
    """An engine that stands still for good looks the same, so a client that knows nothing by then would hang."""
    outcome = scene.outcome
    async with scene.serving() as server:
        before = await warm_up(server)
        async with open_two(server) as (*clients, number):
            await speak(server, [number, number + 1], clients)
            so_far = len(server.program.lines)
            cause = outcome.cause_at = time.monotonic()
            await server.puppet.signal(signal.SIGSTOP)
            said = await _watch_death(outcome, server, clients, cause)
            await server.puppet.signal(signal.SIGCONT)
            await _go_on(outcome, server, clients, number)
        outcome.remarks.append(f"/health meanwhile: {said}")
        await note_again(outcome, server)
        told = [error_told(exchange) for exchange in clients]
        # Where all wait nobody has met an error.
        if HANG not in outcome.verdicts:
            note_surfaced(outcome, told, server.program.lines[so_far:], _SAYS_SO)
        await note_leaks(outcome, server, before)


async def _go_on(outcome: Outcome, server: Running, clients: list[Exchange], number: int) -> None:
    """Whoever is still there may have the rest."""
    if HANG not in outcome.verdicts:
        return
    await server.puppet.say([number, number + 1], finish="length")
    pair = Pair(clients)
    await pair.watch(_GO_ON_S)
    outcome.remarks.append(f"once the engine goes on, its clients saw: {said_by(pair.seen)}")


# ---------------------------------------------------------------------- one that does not come


@scenario(
    "engine-dies-loading",
    _GROUP,
    asks="The engine leaves with status 3 while it loads: how soon does the server end, and does it say why?",
    seconds=2.0,
)
async def engine_dies_loading(scene: Scene) -> None:
    """Before a word of the handshake."""
    await _play_start(scene, "loading")


@scenario(
    "engine-dies-when-ready",
    _GROUP,
    asks="The engine leaves with status 3 as soon as it is ready: how soon does the server end, and does it say why?",
    seconds=_LINGER_S,
)
async def engine_dies_when_ready(scene: Scene) -> None:
    """Right behind its last word of the handshake."""
    await _play_start(scene, "ready")


async def _play_start(scene: Scene, die: str) -> None:
    outcome, port = scene.outcome, free_port()
    async with started(scene.leg, scene.case(die=die), port) as (program, folder):

        async def has_begun() -> bool:  # noqa: ASYNC124 - what is asked again may wait
            return (folder / "engine").exists() or not is_there(program)

        if not await until(has_begun, READY_S) or not is_there(program):
            raise TriolegError(f"{scene.leg} has not started its engine: {program.last_words}")
        cause, family = time.monotonic(), Family(program)
        outcome.client = await _health_until_end(outcome, program, port, cause)
        if outcome.exit_s is None:
            outcome.find(HANG, f"its process was still there {EXIT_S:g} s later")
        else:
            await family.note_left(outcome)
        note_surfaced(outcome, [], program.lines, _SAYS_SO)
        _note_cause(outcome, [], outcome.client, program.lines)


async def _health_until_end(outcome: Outcome, program: Program, port: int, cause: float) -> str:
    """What whoever asks for /health all the while is told: each answer that differs from the one before."""
    told: list[str] = []

    async def ask_on() -> None:
        while True:
            if (said := await health_at(port)) not in told[-1:]:
                told.append(said)
            await trio.sleep(_LOOK_EVERY_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_on)
        await note_time_of_end(outcome, program, cause, EXIT_S)
        nursery.cancel_scope.cancel(reason="the server has ended, or stays")
    return f"/health: {', then '.join(told)}"
