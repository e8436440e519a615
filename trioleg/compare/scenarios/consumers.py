"""A program uses the leg as a library, and leaves a stream, forgets it, or fails: what stays, and which error is heard of.

The rules are the same for all legs. A program that goes on holds no state of a request that it has left, and no more
tasks and descriptors than when it had its stream; its engine holds no block. What a program itself keeps is its own
doing, and only a figure. Behind a program's end its engine has gone; one that has not is a leak. An error is swallowed
if it is neither in what came out of the library (as the error, its cause, its context, a member) nor in a printed line.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import trio

from ...bench.processes import wait_gone
from ...errors import TriolegError
from ..legs import Running
from ..observing import BOUND_S, EXIT_S, SETTLE_S, hold, note_exit, note_leaks
from ..outcome import LEAK, SWALLOW, Outcome
from ..phrases import plain
from ..scenario import Scene, scenario

__all__: list[str] = []

_GROUP = "library"
# Apart from each other, so that a consumer at rest has each step as an output of its own.
_RATE = 50.0
# For a consumer to have three steps, and be busy with other work: ten times what that takes.
_KEPT_S = 1.0
_ENGINE = "until its engine had gone (s)"
# So its one line begins.
_LINE = '{"cause_at"'


@dataclass(frozen=True, slots=True)
class _Found:
    """A consumer's line. ``cause_at``: by the monotonic clock. ``cause``: that the ``error`` names; ``others``: that were
    in it, or there when it was raised. ``remark``: what has to be known of how this library is used."""

    cause_at: float
    error: str = ""
    cause: str = ""
    others: Sequence[str] = ()
    remark: str = ""


@scenario(
    "consumer-breaks",
    _GROUP,
    asks="A program leaves its loop by break, and goes on with other work: when does the engine hear of it?",
    has_lanes=True,
)
async def consumer_breaks(scene: Scene) -> None:
    """At the third output. The exit counts from the end of its other work."""
    outcome = scene.outcome
    async with _working(scene, "break") as (server, engine, over):
        with_stream = await hold(server)
        await server.puppet.pace(_RATE)
        told_at = (await server.puppet.wait_aborts(1, BOUND_S)).last_abort
        await note_leaks(outcome, server, replace(with_stream, requests=0, blocks=0))
        found = await _note_end(outcome, server, engine, over)
        outcome.has_told_engine = told_at is not None
        if told_at is not None:
            outcome.told_engine_s = told_at - found.cause_at


@scenario(
    "consumer-forgets",
    _GROUP,
    asks="A program takes three outputs and keeps the stream, never to close it: what is left once the program has ended?",
    seconds=_KEPT_S + 1,
)
async def consumer_forgets(scene: Scene) -> None:
    """The exit counts from the end of its other work."""
    outcome = scene.outcome
    async with _working(scene, "forget") as (server, engine, over):
        await server.puppet.pace(_RATE)
        await trio.sleep(_KEPT_S)
        await server.puppet.pace(0)
        seen_at, kept = time.monotonic(), await hold(server)
        outcome.figures["requests held while kept"] = kept.requests
        outcome.figures["blocks held while kept"] = kept.blocks
        found = await _note_end(outcome, server, engine, over)
        if found.cause_at > seen_at:
            raise TriolegError(f"{scene.leg} had not had three outputs after {_KEPT_S:g} s")


@scenario(
    "consumer-crashes",
    _GROUP,
    asks="The body of a program's loop raises: does its error surface as it is, and does its engine end?",
)
async def consumer_crashes(scene: Scene) -> None:
    """At the third output."""
    await _fail(scene, "crash", ["ValueError: the body"])


@scenario(
    "error-in-cleanup",
    _GROUP,
    asks="The body of a program's loop raises, and then its clean-up does: are both errors told?",
)
async def error_in_cleanup(scene: Scene) -> None:
    """At the third output."""
    await _fail(scene, "error-in-cleanup", ["ValueError: the body", "KeyError: 'the clean-up'"])


@scenario(
    "errors-in-two-places",
    _GROUP,
    asks="Two streams are read side by side, and both readers raise at the same step: are both errors told?",
)
async def errors_in_two_places(scene: Scene) -> None:
    """At the second output; the program has what its shape offers for two readers."""
    await _fail(scene, "two-errors", ["ValueError: first", "KeyError: 'second'"], streams=2)


async def _fail(scene: Scene, name: str, errors: Sequence[str], *, streams: int = 1) -> None:
    async with _consuming(scene, name, streams) as (server, engine):
        await server.puppet.pace(_RATE)
        found = await _note_end(scene.outcome, server, engine)
        _note_errors(scene.outcome, server, found, errors)


# ---------------------------------------------------------------------- programs


@asynccontextmanager
async def _working(scene: Scene, name: str) -> AsyncIterator[tuple[Running, int, Path]]:
    """One that goes on with other work, until the third is a file."""
    with tempfile.TemporaryDirectory() as folder:
        over = Path(folder, "over")
        async with _consuming(scene, name, options={"until": str(over)}) as (server, engine):
            yield server, engine, over


@asynccontextmanager
async def _consuming(
    scene: Scene, name: str, streams: int = 1, **asked: Any
) -> AsyncIterator[tuple[Running, int]]:
    """One whose streams the engine has, which has said nothing yet; and a pidfd of the engine."""
    async with scene.consuming(name, **asked) as server:
        with _pidfd((await server.puppet.wait_requests(streams)).pid) as engine:
            yield server, engine


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- findings


async def _note_end(
    outcome: Outcome, server: Running, engine: int, over: Path | None = None
) -> _Found:
    """Wait for its end, and note how it and its engine have ended. ``over``: the file that ends its other work."""
    over_at = time.monotonic()
    if over is not None:
        over.touch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_note_engine, outcome, engine)
        await note_exit(outcome, server, 0.0)
    found = _read_line(outcome, server)
    # Nobody knew before when the cause had been, so what was noted are times of the clock.
    since = found.cause_at if over is None else over_at
    if outcome.exit_s is not None:
        outcome.exit_s -= since
    if _ENGINE in outcome.figures:
        outcome.figures[_ENGINE] -= since
    outcome.cause_at = found.cause_at
    outcome.error, outcome.cause = plain(found.error), plain(found.cause)
    outcome.remarks += filter(None, [found.remark])
    return found


async def _note_engine(outcome: Outcome, engine: int) -> None:
    """A program that hangs is one finding, an engine that outlives its program another."""
    if await wait_gone(engine, EXIT_S + SETTLE_S):
        outcome.figures[_ENGINE] = time.monotonic()
    elif outcome.exit_s is not None:
        outcome.leaked["processes"] = 1
        outcome.find(LEAK, f"{SETTLE_S:g} s after the program's end its engine was still there")


def _read_line(outcome: Outcome, server: Running) -> _Found:
    """Raises ``TriolegError`` if it has ended without one; of one that hangs nothing is known."""
    line = next((one for one in server.program.lines if one.startswith(_LINE)), None)
    if line is not None:
        return msgspec.json.decode(line, type=_Found)
    if outcome.exit_s is None:
        return _Found(time.monotonic())
    raise TriolegError(f"a consumer told nothing; it said: {server.program.last_words}")


def _note_errors(outcome: Outcome, server: Running, found: _Found, raised: Sequence[str]) -> None:
    """Where each error that was ``raised`` in the program came to."""
    printed = [line for line in server.program.lines if not line.startswith(_LINE)]
    reached = {
        "what came out of the library": [found.error, found.cause, *found.others],
        "the traceback": [error for error in raised if any(error in line for line in printed)],
    }
    lost = [error for error in raised if not any(error in there for there in reached.values())]
    outcome.surfaced = ", ".join(
        f"{place} ({count} of {len(raised)})"
        for place, there in reached.items()
        if (count := sum(error in there for error in raised))
    )
    if lost:
        outcome.find(SWALLOW, f"neither came out of the library nor was printed: {', '.join(lost)}")
