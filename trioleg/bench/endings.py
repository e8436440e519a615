"""``trioleg bench endings``: from what ends a request to those who must hear of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from ..runtime.unwrap import unwrapped
from .deaths import measure_engine_kills, measure_engine_stops, measure_front_end_kills
from .disconnects import measure_disconnects
from .measurement import Measurement

__all__ = ["ENDINGS", "measure_endings"]

ENDINGS: Mapping[str, Callable[[str, int], Awaitable[list[Measurement]]]] = {
    "disconnect": measure_disconnects,
    "kill-engine": measure_engine_kills,
    "stop-engine": measure_engine_stops,
    "kill-front-end": measure_front_end_kills,
}


async def measure_endings(
    model: str, tries: int, only: Collection[str], progress: Callable[[str], None]
) -> list[Measurement]:
    """Those of ``ENDINGS`` that ``only`` names, or all; ``progress`` is called with the name of each.

    Raises ``TriolegError`` if a program under test does not start. Every program has ended when it returns.
    """
    measurements: list[Measurement] = []
    with unwrapped():
        for name, measure in ENDINGS.items():
            if not only or name in only:
                progress(name)
                measurements += await measure(model, tries)
    return measurements
