"""``Health``: what can be said of an ``LLM`` at this moment, for probes and for people.

Rules of this file: plain values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Health", "LLMState"]


class LLMState(enum.StrEnum):
    """In ``READY`` requests are taken. In the first second of ``FROZEN`` they wait, for a connection that broke is
    mostly back at once; in all others they are refused. The values are what ``/health`` says."""

    LOADING = "loading"  # the first engine is being started, or waited for
    READY = "ready"
    FROZEN = "frozen"  # the engine does not answer; it may come back
    RESTARTING = "restarting"  # the engine is gone, and another one is on its way
    DEAD = "dead"  # the engine is gone, and no other will come
    DRAINING = "draining"  # no more requests are taken: the LLM is being shut down


@dataclass(frozen=True, slots=True)
class Health:
    """``cause``: why it is not ready, a sentence; "" when ready. ``retry_after``: seconds after which it may be
    worth asking again, a guess; None when ready, and when it never will be."""

    state: LLMState
    cause: str = ""
    retry_after: float | None = None
