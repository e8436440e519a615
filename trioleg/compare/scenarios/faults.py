"""A bug strikes within the leg, at a place that is the same for all: ``inside/faults.py`` says where exactly.

The first request of each leg is the warm-up, so the second, which a fault is for, is the first of two streams. Both have
had tokens when it strikes, and the engine itself is well.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import trio

from ...bench.client import Exchange
from ...errors import TriolegError
from ..aftermath import Family, error_told, note_again, note_end, note_surfaced
from ..legs import Running
from ..observing import (
    BOUND_S,
    Holding,
    note_hang,
    note_leaks,
    note_told,
    said,
    warm_up,
)
from ..outcome import SWALLOW, Outcome
from ..pair import Pair, open_two, speak
from ..phrases import exit_phrase
from ..scenario import Scene, scenario
from ..seen import Seen, phrase

__all__: list[str] = []

_GROUP = "faults"
# For an ABORT that takes milliseconds: behind it the stream beside is ended.
_TOLD_S = 2.0
# As for an engine's death: a server may stay for a while to say why it cannot serve.
_LINGER_S = 15.0
_FAULT = re.compile(r"the scenario's fault")
# The warm-up is three messages, and the fifth strikes.
_BEFORE_FIFTH = 1
_BEFORE_THIRD = 2


@scenario(
    "process-one",
    _GROUP,
    asks="One request's token cannot be made into text: what do it, its neighbour and the next request see?",
    seconds=_TOLD_S,
)
async def process_one(scene: Scene) -> None:
    """At its third token."""
    await _play(scene, "process-one", _BEFORE_THIRD, concerned=1)


@scenario(
    "process-step",
    _GROUP,
    asks="The processing of a whole step fails: what do its two streams and the next request see?",
    seconds=_TOLD_S,
    has_lanes=True,
)
async def process_step(scene: Scene) -> None:
    """Outside of the loop over its outputs, so nobody in particular is to blame."""
    await _play(scene, "process-step", _BEFORE_FIFTH, concerned=2)


@scenario(
    "frame",
    _GROUP,
    asks="An output cannot be made into its line: what do the stream, its neighbour and the next request see?",
    seconds=_TOLD_S,
)
async def frame(scene: Scene) -> None:
    """At its third output; the 200 has gone."""
    await _play(scene, "frame", _BEFORE_THIRD, concerned=1)


@scenario(
    "reader-crash",
    _GROUP,
    asks="The task that reads the engine's socket crashes: who learns of it, and is anybody served afterwards?",
    seconds=_LINGER_S,
)
async def reader_crash(scene: Scene) -> None:
    """Behind a message that it has received."""
    await _play(scene, "reader", _BEFORE_FIFTH, concerned=2)


async def _play(scene: Scene, fault: str, before: int, *, concerned: int) -> None:
    outcome = scene.outcome
    async with scene.serving(fault=fault) as server:
        held = await warm_up(server)
        family = Family(server.program)
        async with open_two(server) as (*clients, number):
            numbers = [number, number + 1]
            await speak(server, numbers, clients, before)
            cause = outcome.cause_at = time.monotonic()
            pair = Pair(clients)
            async with trio.open_nursery() as nursery:
                await server.puppet.say(numbers)
                nursery.start_soon(pair.watch, BOUND_S)
                await _end_the_rest(outcome, server, pair, number, concerned, cause)
            _note_clients(outcome, pair.seen, scene.case().token_ids)
        await _finish(outcome, server, family, held, cause, clients)


async def _end_the_rest(
    outcome: Outcome, server: Running, pair: Pair, number: int, concerned: int, cause: float
) -> None:
    """Wait for the ABORTs; then the engine ends those streams that are still there. It may be gone with its server."""
    with suppress(TriolegError, OSError):
        await note_told(outcome, server, cause, concerned, _TOLD_S)
        rest = [number + place for place in (0, 1) if not pair.is_over(place)]
        if rest:
            await server.puppet.say(rest, finish="length")


def _note_clients(outcome: Outcome, seen: Sequence[Seen], token_ids: Sequence[int]) -> None:
    outcome.client = f"it: {phrase(seen[0])}; the other: {phrase(seen[1])}"
    note_hang(outcome, seen)
    for who, one in zip(("its stream", "the other"), seen, strict=True):
        wanted = [token_ids[place % len(token_ids)] for place in range(len(one.tokens))]
        if list(one.tokens) != wanted:
            outcome.find(SWALLOW, f"{who} went on with a token missing, and was not told")


async def _finish(
    outcome: Outcome,
    server: Running,
    family: Family,
    held: Holding,
    cause: float,
    clients: Sequence[Exchange],
) -> None:
    """What a new request sees; then what is left, in the server that goes on, or behind the one that ends."""
    if await note_again(outcome, server):
        await note_leaks(outcome, server, held)
    else:
        await note_end(outcome, server, family, cause, _LINGER_S)
        if outcome.exit_s is not None and not outcome.has_told_engine:
            # It went with its server.
            outcome.has_told_engine = None
    note_surfaced(outcome, [error_told(one) for one in clients], server.program.lines, _FAULT)


@scenario(
    "abort-fails",
    _GROUP,
    asks="A client leaves, and its ABORT cannot be sent: does anybody learn of it, and who is served afterwards?",
    seconds=2.0,
)
async def abort_fails(scene: Scene) -> None:
    """The engine cannot be told, so it ends the request by its length: what the leg holds of it must go all the same."""
    outcome = scene.outcome
    async with scene.serving(fault="abort") as server:
        held = await warm_up(server)
        family = Family(server.program)
        async with open_two(server) as (left, other, number):
            await speak(server, [number, number + 1], [left, other])
            cause = outcome.cause_at = time.monotonic()
            gone = said(left)
            # Long enough for a leg that reacts; nothing announces that it has not.
            await server.puppet.wait_aborts(1, _TOLD_S / 4)
            await server.puppet.say(finish="length")
            pair = Pair([other])
            await pair.watch(BOUND_S)
            outcome.client = f"it: {phrase(gone)}; the other: {phrase(pair.seen[0])}"
            note_hang(outcome, pair.seen)
        await _finish(outcome, server, family, held, cause, [other])


@scenario(
    "two-at-once",
    _GROUP,
    asks="One request's token cannot be processed, and the engine is killed right behind it: is either error lost?",
    seconds=_LINGER_S,
)
async def two_at_once(scene: Scene) -> None:
    """The engine has said the token, and is killed before anybody has seen what comes of it."""
    outcome = scene.outcome
    async with scene.serving(fault="process-one") as server:
        await warm_up(server)
        family = Family(server.program)
        async with open_two(server) as (*clients, number):
            await speak(server, [number, number + 1], clients, _BEFORE_THIRD)
            so_far = len(server.program.lines)
            cause = outcome.cause_at = time.monotonic()
            await server.puppet.say([number, number + 1])
            await server.puppet.signal(signal.SIGKILL)
            pair = Pair(clients)
            await pair.watch(BOUND_S)
            _note_clients(outcome, pair.seen, scene.case().token_ids)
        await note_again(outcome, server)
        await note_end(outcome, server, family, cause, _LINGER_S)
        told, lines = [error_told(one) for one in clients], server.program.lines[so_far:]
        note_surfaced(outcome, told, lines, _FAULT)
        _note_both(outcome, [*told, *lines])


def _note_both(outcome: Outcome, texts: Sequence[str]) -> None:
    outcome.cause = exit_phrase(texts)
    has_fault = any(_FAULT.search(text) for text in texts)
    named = [
        name for name, is_so in (("the fault", has_fault), ("the signal", outcome.cause)) if is_so
    ]
    outcome.remarks.append(f"named to a client or in the log: {' and '.join(named) or 'neither'}")
    if not has_fault:
        outcome.find(SWALLOW, "the fault itself is named to nobody")
