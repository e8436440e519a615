"""What a scenario is: a question, and a small program that is played against one leg at a time.

    @scenario("client-leaves-in-mid-stream", "endings", asks="Who hears of a client that leaves, and how soon?")
    async def play(scene: Scene) -> None:
        async with scene.serving() as server:
            ...

``play`` gets a ``Scene`` and fills its ``outcome``. It is played several times; what differs between two runs comes from
``scene.random`` alone, which is seeded. A scenario that a leg has no way to play marks its outcome as absent; one that
meets something that it does not understand raises ``TriolegError``, and the run is a failure of the study, not of the leg.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import trio

from .legs import LEGS, Case, Running, consuming, serving
from .outcome import Outcome

__all__ = ["SCENARIOS", "Play", "Scenario", "Scene", "scenario"]

# Longer than what reacts to one cause is apart: see ``timeline.py``.
_REST_S = 0.3


class Scene:
    """One run against one leg. ``outcome`` is what comes of it."""

    def __init__(
        self, outcome: Outcome, case: Case, seed: int, *, lanes_to: Path | None = None
    ) -> None:
        self.outcome = outcome
        self.leg = outcome.leg
        self.random = random.Random(f"{seed} {outcome.scenario} {outcome.run}")
        self._case = case if lanes_to is None else replace(case, lanes=lanes_to)

    def case(self, **asked: Any) -> Case:
        """What the leg gets, with what the scenario asks for: see ``Case``."""
        return replace(self._case, **asked)

    @asynccontextmanager
    async def serving(self, **asked: Any) -> AsyncIterator[Running]:
        """The leg's server, ready: see ``legs.serving`` and ``Case``. One that is recorded is left alone for a moment
        before it is ended, so that the picture can leave its end out."""
        async with serving(self.leg, self.case(**asked)) as server:
            yield server
            if self._case.lanes is not None:
                await trio.sleep(_REST_S)

    def consuming(self, name: str, **asked: Any) -> AbstractAsyncContextManager[Running]:
        """The leg's consumer: see ``legs.consuming`` and ``Case``."""
        return consuming(self.leg, self.case(**asked), name)


Play: TypeAlias = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``name``: of lower-case words with hyphens. ``group``: the heading that it stands under. ``asks``: the question,
    one sentence. ``seconds``: roughly, how long one run takes beside the leg's start. ``has_lanes``: a picture of its
    tasks is worth while."""

    name: str
    group: str
    asks: str
    play: Play
    legs: Sequence[str] = LEGS
    seconds: float = 1.0
    has_lanes: bool = False


# In the order of their modules, which is the order of the tables.
SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    group: str,
    *,
    asks: str,
    legs: Sequence[str] = LEGS,
    seconds: float = 1.0,
    has_lanes: bool = False,
) -> Callable[[Play], Play]:
    """Make a function a scenario; see ``Scenario``."""

    def register(play: Play) -> Play:
        assert name not in SCENARIOS, f"two scenarios are named {name}"
        SCENARIOS[name] = Scenario(name, group, asks, play, legs, seconds, has_lanes)
        return play

    return register
