"""What a scenario sees of a leg: clients, each with a bound, and what the leg holds before and after.

The rules of the verdicts stand here, so that they are the same for all legs and all scenarios:

- a *leak* is what the leg holds (``Holding``) after ``SETTLE_S`` seconds, and did not hold after its first request;
- a *hang* is a client that was neither answered nor cut within ``BOUND_S`` seconds, where it should have been;
- a *swallow* is an error that reached nobody: no client, no line that the leg printed, no exit.

The engine's numbers and ours are of one clock (``time.monotonic``), which all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
import trio

from ..bench.client import CHAT, Exchange, ask, chat_body
from ..bench.processes import count_descriptors, resident_kb
from ..errors import TriolegError
from .legs import Running
from .outcome import HANG, LEAK, Outcome
from .puppet import PATIENCE_S
from .scenario import Scene
from .seen import Seen, phrase, read_answer

__all__ = [
    "BOUND_S",
    "EXIT_S",
    "SETTLE_S",
    "Holding",
    "Witness",
    "asking",
    "extra",
    "hold",
    "memory_kb",
    "note_exit",
    "note_hang",
    "note_leaks",
    "note_told",
    "open_witness",
    "port_of",
    "receive_tokens",
    "said",
    "serving_with",
    "settle",
    "warm_up",
    "watch",
]

# What takes milliseconds in good order, and a second on a machine under load.
BOUND_S = 10.0
SETTLE_S = 10.0
# Kubernetes waits so long before it kills.
EXIT_S = 30.0
# How far apart looks at a leg are: a look costs it a wake-up.
_LOOK_EVERY_S = 0.05
# So many looks that are the same are what a leg holds at rest.
_SAME_LOOKS = 3
# No scenario says as many.
_MAX_TOKENS = 65_536
_REFUSAL = "no such thing: "


@dataclass(frozen=True, slots=True)
class Holding:
    """What a leg holds at one moment. ``tasks`` and ``requests``: by its probe; ``descriptors``: of its process;
    ``blocks`` and ``live``: of its engine, 0 where that has gone; ``names``: its tasks by name."""

    tasks: int
    requests: int
    descriptors: int
    blocks: int
    live: int
    names: dict[str, int]


async def hold(server: Running, *, has_engine: bool = True) -> Holding:
    """Look. Raises ``TriolegError`` if the leg, or an engine that it should have, has gone."""
    census = await server.probe.tell("census")
    engine = await server.puppet.state() if has_engine else None
    return Holding(
        census["tasks"],
        census["requests"],
        count_descriptors(server.program.pid),
        engine.blocks if engine else 0,
        engine.live if engine else 0,
        census["names"],
    )


def extra(before: Holding, after: Holding) -> dict[str, int]:
    """What is there after and was not before, by its kind, as ``Outcome.leaked`` has it."""
    kinds = ("tasks", "requests", "blocks", "descriptors")
    more = {kind: getattr(after, kind) - getattr(before, kind) for kind in kinds}
    return {kind: count for kind, count in more.items() if count > 0}


async def settle(
    server: Running, before: Holding, seconds: float = SETTLE_S, *, has_engine: bool = True
) -> dict[str, int]:
    """Wait until the leg holds no more than ``before``; what is extra if it did not come to that in time."""
    # By a deadline, and not by a cancel: half a question to the probe would spoil the next one.
    deadline = time.monotonic() + seconds
    while more := extra(before, await hold(server, has_engine=has_engine)):
        if time.monotonic() > deadline:
            break
        await trio.sleep(_LOOK_EVERY_S)
    return more


async def warm_up(server: Running) -> Holding:
    """One stream to its end, and then what the leg holds at rest: what it makes at its first request is no leak.

    Raises ``TriolegError`` if the stream does not come as it should, or the leg does not come to rest.
    """
    arrived = (await server.puppet.state()).arrived
    async with asking(server) as exchange:
        await server.puppet.wait_requests(arrived + 1)
        await server.puppet.say([arrived], finish="length", steps=3)
        seen = await watch(exchange)
    if seen.finish != "length" or not seen.is_done:
        raise TriolegError(f"the first request of {server.leg} saw: {phrase(seen)}")
    return await _at_rest(server)


async def _at_rest(server: Running) -> Holding:
    deadline = time.monotonic() + SETTLE_S
    same, last = 0, await hold(server)
    while same < _SAME_LOOKS:
        if time.monotonic() > deadline:
            raise TriolegError(f"{server.leg} does not come to rest: {last}")
        await trio.sleep(_LOOK_EVERY_S)
        now = await hold(server)
        same, last = (same + 1 if now == last and not now.live else 0), now
    return last


# ---------------------------------------------------------------------- clients


def port_of(server: Running) -> int:
    """Of a leg that serves."""
    assert server.port is not None, "a consumer has no port"
    return server.port


@asynccontextmanager
async def asking(server: Running, *, stream: bool = True, **more: Any) -> AsyncIterator[Exchange]:
    """A chat request that has been sent, with ``more`` in its body. The block's end closes the connection."""
    body = chat_body(stream=stream, max_tokens=_MAX_TOKENS, return_token_ids=True, **more)
    async with ask(port_of(server), CHAT, body) as exchange:
        yield exchange


async def watch(exchange: Exchange, seconds: float = BOUND_S) -> Seen:
    """Read to the answer's end, however it comes, for so long at most. It may be watched again after "nothing"."""
    with trio.move_on_after(seconds):
        try:
            await exchange.receive_all()
        except h11.RemoteProtocolError:
            return read_answer(exchange.status, bytes(exchange.body), "cut")
        except OSError:
            return read_answer(exchange.status, bytes(exchange.body), "reset")
        return read_answer(exchange.status, bytes(exchange.body), "whole")
    return read_answer(exchange.status, bytes(exchange.body), "nothing", within_s=seconds)


async def receive_tokens(exchange: Exchange, count: int) -> Seen:
    """Read a stream until so many tokens have come. Raises ``TriolegError`` if they do not."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            seen = read_answer(exchange.status, bytes(exchange.body), "left")
            if len(seen.tokens) >= count or not await exchange.receive():
                break
    if len(seen.tokens) < count:
        raise TriolegError(f"a stream has not had {count} tokens; it saw: {phrase(seen)}")
    return seen


def said(exchange: Exchange, *, reset: bool = False) -> Seen:
    """Leave, and what had been seen until then."""
    exchange.leave(reset=reset)
    return read_answer(exchange.status, bytes(exchange.body), "left")


class Witness:
    """A stream beside those that something happens to. ``number``: the engine's; ``seen``: when it is over."""

    def __init__(self, server: Running, exchange: Exchange, number: int) -> None:
        self.number = number
        self.seen: Seen | None = None
        self._server = server
        self._exchange = exchange

    async def hear(self) -> None:
        """One token, which the client has when this returns; so the leg has dealt with all that the engine said before.

        Raises ``TriolegError`` if it does not come.
        """
        so_far = len(self._exchange.body)
        await self._server.puppet.say([self.number])
        with trio.move_on_after(PATIENCE_S):
            while len(self._exchange.body) == so_far and await self._exchange.receive():
                pass
        if len(self._exchange.body) == so_far:
            raise TriolegError(f"a stream of {self._server.leg} beside the scenario heard nothing")

    async def finish(self) -> Seen:
        """Its end, by its length."""
        await self._server.puppet.say([self.number], finish="length")
        self.seen = await watch(self._exchange)
        return self.seen


@asynccontextmanager
async def open_witness(server: Running) -> AsyncIterator[Witness]:
    """One that has had its first token."""
    number = (await server.puppet.state()).arrived
    async with asking(server) as exchange:
        await server.puppet.wait_requests(number + 1)
        witness = Witness(server, exchange, number)
        await witness.hear()
        yield witness


# ---------------------------------------------------------------------- a leg that may lack something


@asynccontextmanager
async def serving_with(scene: Scene, **options: object) -> AsyncIterator[tuple[Running, bool]]:
    """The leg's server with these options; or, if it has no such thing, without: then the second is False, and a remark
    says what it lacks."""
    asked = {name: str(value) for name, value in options.items()}
    async with AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(scene.serving(options=asked))
        except TriolegError as error:
            _, found, lacks = str(error).partition(_REFUSAL)
            if not found:
                raise
            scene.outcome.remarks.append(f"it has no {lacks.partition(' / ')[0]}")
        else:
            yield server, True
            return
        yield await stack.enter_async_context(scene.serving()), False


# ---------------------------------------------------------------------- findings


async def note_told(
    outcome: Outcome, server: Running, cause: float, aborted: int, seconds: float = BOUND_S
) -> bool:
    """Wait until the engine has had ``aborted`` ABORTs in all, and note how long after ``cause`` the last one came."""
    state = await server.puppet.wait_aborts(aborted, seconds)
    outcome.has_told_engine = state.aborted >= aborted
    if outcome.has_told_engine and state.last_abort is not None:
        outcome.told_engine_s = state.last_abort - cause
    return outcome.has_told_engine


async def note_leaks(
    outcome: Outcome,
    server: Running,
    before: Holding,
    *,
    has_engine: bool = True,
    seconds: float = SETTLE_S,
) -> None:
    """Wait until the leg holds no more than ``before``; what it holds then is a leak."""
    outcome.leaked = await settle(server, before, seconds, has_engine=has_engine)
    if outcome.leaked:
        after = await hold(server, has_engine=has_engine)
        kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.leaked.items())
        names = _new_names(before.names, after.names)
        outcome.find(LEAK, f"{seconds:g} s later it still holds {kinds}{names}")


def _new_names(before: dict[str, int], after: dict[str, int]) -> str:
    new = [name for name, count in after.items() if count > before.get(name, 0)]
    return f" (tasks: {', '.join(new)})" if new else ""


async def note_exit(
    outcome: Outcome, server: Running, cause: float, seconds: float = EXIT_S
) -> None:
    """Wait for the end of the leg's process, and note how it ended, and how long after ``cause``."""
    with trio.move_on_after(seconds):
        outcome.exit_code = await server.program.wait_code()
        outcome.exit_s = time.monotonic() - cause
        return
    outcome.find(HANG, f"its process was still there {seconds:g} s later")


def note_hang(outcome: Outcome, clients: Sequence[Seen]) -> None:
    """Clients who should all know by now how their request has ended."""
    waiting = [one for one in clients if not one.is_over]
    if waiting:
        outcome.find(HANG, f"{len(waiting)} of {len(clients)} clients saw: {phrase(waiting[0])}")


def memory_kb(server: Running) -> int:
    """Resident, of the leg's own process."""
    return resident_kb(server.program.pid)
