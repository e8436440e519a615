"""A client leaves: who hears of it, how soon, and what stays behind.

Beside each of them a witness has a stream of its own, which must come whole.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import trio

from ...bench.client import Exchange
from ...bench.processes import allow_open_files
from ...errors import TriolegError
from ..legs import Running
from ..observing import (
    Witness,
    asking,
    memory_kb,
    note_leaks,
    note_told,
    open_witness,
    receive_tokens,
    said,
    warm_up,
)
from ..scenario import Scene, scenario
from ..seen import Seen, phrase

__all__: list[str] = []

_GROUP = "leaving"
_TOKENS = 3
# Longer than all that a stream says before it is left: no token of it can be told yet.
_LONG_STOP = "a stop string that never comes " * 4
# It has no words that repeat, and takes about 0.2 s to turn into tokens here; within any leg's length.
_LONG_PROMPT = " ".join(map(str, range(35_000)))
_SUBMITS = 4
_TOKENIZING_S = 0.2
# Five times what it takes to tokenize: whatever has not come to the engine by then does not come.
_SUBMIT_BOUND_S = 1.0
_STORM = 1000

# Brings a request to the point where it is left: the engine's number of its first choice comes with it.
_Reach: TypeAlias = Callable[[Running, Exchange, int], Awaitable[None]]


@scenario(
    "client-leaves-before-the-first-token",
    _GROUP,
    asks="A stream is left while it waits for its first token: when does the engine hear of it?",
)
async def leave_before_first(scene: Scene) -> None:
    """The engine has the request, and says nothing."""
    await _play(scene, _reach_engine)


@scenario(
    "client-leaves-in-mid-stream",
    _GROUP,
    asks="A stream is left in its middle, by FIN: when does the engine hear of it?",
    has_lanes=True,
)
async def leave_in_mid_stream(scene: Scene) -> None:
    """Three tokens have been read."""
    await _play(scene, _reach_middle)


@scenario(
    "client-resets-in-mid-stream",
    _GROUP,
    asks="A stream is left in its middle, by RST, as by a client that is killed with unread data: who hears of it?",
)
async def reset_in_mid_stream(scene: Scene) -> None:
    """As by FIN."""
    await _play(scene, _reach_middle, reset=True)


@scenario(
    "client-leaves-while-text-is-held-back",
    _GROUP,
    asks="Tokens have come, but all text is held back for a stop string: does its client's leaving end the request?",
)
async def leave_while_held_back(scene: Scene) -> None:
    """``stop_hold_back``: by its length in every leg; vLLM knows no other way, and no such field."""
    await _play(scene, _reach_held_back, stop=[_LONG_STOP], stop_hold_back="fixed")


@scenario(
    "client-leaves-a-plain-request",
    _GROUP,
    asks="The client of a plain request leaves, to whom nothing is written before the end: who hears of it?",
)
async def leave_plain(scene: Scene) -> None:
    """The engine has said three tokens."""
    await _play(scene, _reach_held_back, stream=False)


@scenario(
    "client-leaves-three-choices",
    _GROUP,
    asks="A stream with n=3 is left: does the engine hear of all three?",
)
async def leave_three_choices(scene: Scene) -> None:
    """Each choice has had three tokens."""
    await _play(scene, _reach_middle, choices=3, n=3)


async def _reach_engine(_server: Running, _exchange: Exchange, _number: int) -> None:
    pass  # where all of them are


async def _reach_middle(server: Running, exchange: Exchange, number: int) -> None:
    # The choices of one request came one after the other, and nobody else asks meanwhile.
    choices = range(number, (await server.puppet.state()).arrived)
    for step in range(1, _TOKENS + 1):
        await server.puppet.say(choices)
        await receive_tokens(exchange, step * len(choices))


async def _reach_held_back(server: Running, _exchange: Exchange, number: int) -> None:
    await server.puppet.say([number], steps=_TOKENS)


async def _play(
    scene: Scene, reach: _Reach, *, reset: bool = False, choices: int = 1, **body: Any
) -> None:
    async with scene.serving() as server:
        before = await warm_up(server)
        async with open_witness(server) as witness:
            async with asking(server, **body) as exchange:
                number = (await server.puppet.wait_requests(witness.number + 1 + choices)).arrived
                await reach(server, exchange, number - choices)
                # Behind this the leg has dealt with all that the engine said before.
                await witness.hear()
                left_at = time.monotonic()
                seen = said(exchange, reset=reset)
                await note_told(scene.outcome, server, left_at, choices)
            scene.outcome.client = phrase(seen)
            await _finish(scene, witness)
        await note_leaks(scene.outcome, server, before)


async def _finish(scene: Scene, witness: Witness) -> None:
    seen = await witness.finish()
    if seen.finish != "length" or not seen.is_done:
        scene.outcome.remarks.append(f"a stream beside it saw: {phrase(seen)}")


@scenario(
    "client-leaves-during-submit",
    _GROUP,
    asks="Its client leaves while a long prompt is turned into tokens: does the request reach the engine all the same?",
    seconds=_SUBMITS * _SUBMIT_BOUND_S,
)
async def leave_during_submit(scene: Scene) -> None:
    """FIN right behind the body, and then at moments by chance. Told: of those that came to the engine, the slowest."""
    outcome, reached, slowest = scene.outcome, 0, 0.0
    async with scene.serving() as server:
        before = await warm_up(server)
        for moment in [0.0, *(scene.random.uniform(0, _TOKENIZING_S) for _ in range(_SUBMITS - 1))]:
            state = await server.puppet.state()
            async with asking(server, messages=_messages(_LONG_PROMPT)) as exchange:
                await trio.sleep(moment)
                left_at = time.monotonic()
                outcome.client = phrase(said(exchange))
            if not await _arrives(server, state.arrived + 1):
                continue
            reached += 1
            if not await note_told(outcome, server, left_at, state.aborted + 1):
                break
            slowest = max(slowest, outcome.told_engine_s or 0)
        await note_leaks(outcome, server, before)
    if outcome.has_told_engine:
        outcome.told_engine_s = slowest
    outcome.figures[f"of {_SUBMITS} reached the engine"] = reached


async def _arrives(server: Running, number: int) -> bool:
    try:
        await server.puppet.wait_requests(number, _SUBMIT_BOUND_S)
    except TriolegError:
        return False
    return True


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@scenario(
    "cancel-storm",
    _GROUP,
    asks="A thousand clients leave at once, as when a gateway dies: how long until the engine has heard of the last?",
    seconds=15.0,
)
async def cancel_storm(scene: Scene) -> None:
    """All have had a token. ``told_engine_s``: of the last one."""
    allow_open_files(_STORM, f"the scenario {scene.outcome.scenario}")
    async with scene.serving() as server:
        before, had_kb = await warm_up(server), memory_kb(server)
        async with open_witness(server) as witness:
            first = witness.number + 1
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(asking(server)) for _ in range(_STORM)]
                await server.puppet.wait_requests(first + _STORM, _STORM / 10)
                await server.puppet.say(range(first, first + _STORM))
                for exchange in clients:
                    await exchange.receive_some()
                scene.outcome.figures["memory a stream (KB)"] = (
                    memory_kb(server) - had_kb
                ) / _STORM
                await _leave_all(scene, server, clients)
            await _finish(scene, witness)
        left_at = time.monotonic()
        await note_leaks(scene.outcome, server, before)
        scene.outcome.figures["until nothing was left (s)"] = time.monotonic() - left_at
        scene.outcome.memory_kb = memory_kb(server) - had_kb


async def _leave_all(scene: Scene, server: Running, clients: list[Exchange]) -> None:
    left_at = time.monotonic()
    seen: list[Seen] = [said(exchange) for exchange in clients]
    scene.outcome.figures["leaving took (s)"] = time.monotonic() - left_at
    await note_told(scene.outcome, server, left_at, _STORM)
    state = await server.puppet.state()
    if state.first_abort is not None:
        scene.outcome.figures["engine heard of the first (s)"] = state.first_abort - left_at
    scene.outcome.client = phrase(seen[0])
