"""``Observers``: who is told what passes through an ``LLM``, whichever engine it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from .stats_logger import StatsLogger
from .tracer import Tracer

__all__ = ["Observers"]


@dataclass(slots=True)
class Observers:
    """Each may be set and taken away at any time. Without a stats logger nothing is gathered."""

    stats_logger: StatsLogger | None = None
    tracer: Tracer | None = None
