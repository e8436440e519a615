"""Who is told what each step brought: a ``StatsLogger``, which may be swapped at any time.

A link asks for its logger anew with each message, so ``llm.stats_logger = other`` holds from the next one
on; with None nothing is gathered at all. A logger is called between two messages and must not block; one
that raises is dropped, and its error logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..messages import SchedulerStats
from ..output.stats import IterationStats

__all__ = ["LoggingStatsLogger", "StatsLogger"]

_log = logging.getLogger("trioleg.stats")


class StatsLogger(Protocol):
    """``record`` is called once for each message of engine number ``engine``."""

    def record(
        self, engine: int, scheduler: SchedulerStats | None, iteration: IterationStats
    ) -> None:
        """``scheduler``: the engine's figures, if they came with it; ``iteration``: ours, of what came.
        Both are the logger's to keep."""
        ...


@dataclass(slots=True)
class _Sums:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    first_tokens: int = 0
    seconds_to_first_token: float = 0.0
    gaps: int = 0
    seconds_between_tokens: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class LoggingStatsLogger:
    """A line in the log (``trioleg.stats``, level INFO) every ``interval`` seconds while tokens come, and one
    when the engines have nothing left to do, unless they had for less than a second.

    No timer runs: a line comes with a message. What it is about begins with the first message behind the
    line before, so a silence is no part of it.
    """

    def __init__(
        self, interval: float = 10.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._since = self._last = clock()
        self._sums = _Sums()
        self._scheduler: dict[int, SchedulerStats] = {}

    def record(
        self, engine: int, scheduler: SchedulerStats | None, iteration: IterationStats
    ) -> None:
        """See ``StatsLogger.record``."""
        if scheduler is not None:
            self._scheduler[engine] = scheduler
        now = self._clock()
        if now - self._last >= self._interval:
            # What a silence cut short is told before what came behind it.
            self._tell(self._last - self._since)
        self._last = now
        if self._sums == _Sums():
            self._since = now
        self._add(iteration)
        if scheduler is not None and scheduler.prefix_cache_stats is not None:
            self._sums.prefix_cache_queries += scheduler.prefix_cache_stats.queries
            self._sums.prefix_cache_hits += scheduler.prefix_cache_stats.hits
        elapsed = now - self._since
        if elapsed >= self._interval or (elapsed >= 1 and self._is_idle()):
            self._tell(elapsed)

    def _is_idle(self) -> bool:
        engines = self._scheduler.values()
        return not any(one.num_running_reqs or one.num_waiting_reqs for one in engines)

    def _tell(self, elapsed: float) -> None:
        if self._sums.generation_tokens and elapsed > 0:
            _log.info("%s", self._line(elapsed))
        self._sums = _Sums()

    def _add(self, iteration: IterationStats) -> None:
        sums = self._sums
        sums.prompt_tokens += iteration.num_prompt_tokens
        sums.generation_tokens += iteration.num_generation_tokens
        sums.finished += len(iteration.finished_requests)
        sums.first_tokens += len(iteration.times_to_first_token)
        sums.seconds_to_first_token += sum(iteration.times_to_first_token)
        sums.gaps += len(iteration.inter_token_latencies)
        sums.seconds_between_tokens += sum(iteration.inter_token_latencies)

    def _line(self, elapsed: float) -> str:
        sums, engines = self._sums, self._scheduler.values()
        parts = [
            f"prompt {sums.prompt_tokens / elapsed:.1f} tokens/s",
            f"generation {sums.generation_tokens / elapsed:.1f} tokens/s",
            f"running {sum(one.num_running_reqs for one in engines)}",
            f"waiting {sum(one.num_waiting_reqs for one in engines)}",
            f"finished {sums.finished}",
            f"cache {max((one.kv_cache_usage for one in engines), default=0.0):.1%}",
        ]
        if sums.prefix_cache_queries:
            parts.append(f"prefix hits {sums.prefix_cache_hits / sums.prefix_cache_queries:.1%}")
        if sums.first_tokens:
            mean = sums.seconds_to_first_token / sums.first_tokens
            parts.append(f"first token after {1000 * mean:.0f} ms")
        if sums.gaps:
            parts.append(f"{1000 * sums.seconds_between_tokens / sums.gaps:.1f} ms between tokens")
        return ", ".join(parts)
