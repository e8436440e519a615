"""More requests than there is room for: who is served, who is turned away, who waits."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from ...bench.client import is_healthy
from ...bench.processes import allow_open_files
from ..legs import Running
from ..observing import (
    asking,
    memory_kb,
    note_leaks,
    port_of,
    receive_tokens,
    serving_with,
    warm_up,
    watch,
)
from ..scenario import Scene, scenario
from ..seen import phrase

__all__: list[str] = []

_ROOM, _ASKING = 64, 256
# The engine works on so many, and the others wait.
_SERVED = 16
# A client that is turned away learns it in milliseconds.
_LATE_S = 3.0


@scenario(
    "overload",
    "load",
    asks="256 ask at once an engine that serves 16: what does a late client see, and what do those who wait cost?",
    seconds=_LATE_S + 3,
)
async def overload(scene: Scene) -> None:
    """With room for 64 (``max_inflight_requests``) where there is such a bound. ``memory_kb``: of all who wait."""
    allow_open_files(_ASKING, f"the scenario {scene.outcome.scenario}")
    outcome = scene.outcome
    async with serving_with(scene, max_inflight_requests=_ROOM) as (server, has_bound):
        before, had_kb = await warm_up(server), memory_kb(server)
        number, cause = (await server.puppet.state()).arrived, time.monotonic()
        async with AsyncExitStack() as stack:
            served = [await stack.enter_async_context(asking(server)) for _ in range(_SERVED)]
            # Before the others ask: so it is known which of them the engine had first.
            await server.puppet.wait_requests(number + _SERVED)
            for _ in range(_ASKING - _SERVED):
                await stack.enter_async_context(asking(server))
            taken = _ROOM if has_bound else _ASKING
            await server.puppet.wait_requests(number + taken)
            await server.puppet.say(range(number, number + _SERVED))
            for exchange in served:
                await receive_tokens(exchange, 1)
            outcome.figures["first tokens of the first 16 (s)"] = time.monotonic() - cause
            outcome.memory_kb = memory_kb(server) - had_kb
            await _come_late(scene, server)
            outcome.figures["came to the engine"] = (await server.puppet.state()).arrived - number
        await note_leaks(outcome, server, before)


async def _come_late(scene: Scene, server: Running) -> None:
    async with asking(server) as exchange:
        scene.outcome.client = phrase(await watch(exchange, _LATE_S))
    at = time.monotonic()
    if not await is_healthy(port_of(server)):
        scene.outcome.remarks.append("/health does not answer 200 meanwhile")
    scene.outcome.figures["/health (ms)"] = (time.monotonic() - at) * 1000
