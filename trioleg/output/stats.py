"""Where the time goes: of one request, and of one step.

Pure, and without a clock: the link that received a message says when that was. Everything here is
written by the one loop over the batch, as it passes; nothing goes over the batch a second time.

Two clocks are in play. The engine's timestamps compare with each other; ours with each other. Only what
a client feels (time to first token, end to end) is by our clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..messages import EngineCoreEvent
from ..outputs import EndingKind, RequestMetrics

__all__ = ["FinishedRequest", "IterationStats", "RequestTimes"]


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that this step finished; ``num_output_tokens`` of all its choices."""

    request_id: str
    kind: EndingKind
    num_prompt_tokens: int
    num_output_tokens: int
    metrics: RequestMetrics


@dataclass(slots=True)
class IterationStats:
    """What one message of an engine brought. Durations are seconds.

    ``batch_size``: requests with an output in it (n > 1: choices). ``num_prompt_tokens``: of prompts
    that were finished by it. The lists have an entry for each first and each later token that came.
    """

    batch_size: int = 0
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    times_to_first_token: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequest] = field(default_factory=list)


@dataclass(slots=True)
class RequestTimes:
    """The moments of one choice. ``arrival`` and ``time_to_first_token`` are by our clock, the
    others by the engine's; None: not yet, or unknown."""

    arrival: float | None
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    time_to_first_token: float | None = None

    def note_events(self, events: Sequence[EngineCoreEvent]) -> None:
        """Take in what the engine says of the request's way; the first of each kind counts."""
        for event in events:
            if event.type == EngineCoreEvent.QUEUED and self.queued is None:
                self.queued = event.timestamp
            elif event.type == EngineCoreEvent.SCHEDULED and self.scheduled is None:
                self.scheduled = event.timestamp

    def note_tokens(self, engine_time: float, now: float) -> float | None:
        """Tokens have come. Returns the time since those before them; None if they are the first."""
        last, self.last_token = self.last_token, engine_time
        if last is not None:
            return engine_time - last
        self.first_token = engine_time
        if self.arrival is not None:
            self.time_to_first_token = now - self.arrival
        return None

    def metrics(self, num_tokens: int, now: float) -> RequestMetrics:
        """The figures of a choice that ``num_tokens`` tokens make, finished ``now``."""
        between = _between(self.first_token, self.last_token)
        return RequestMetrics(
            queue=_between(self.queued, self.scheduled),
            prefill=_between(self.scheduled, self.first_token),
            time_to_first_token=self.time_to_first_token,
            inter_token=None if between is None or num_tokens < 2 else between / (num_tokens - 1),
            end_to_end=None if self.arrival is None else now - self.arrival,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
