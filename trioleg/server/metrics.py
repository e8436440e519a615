"""``/metrics``: Prometheus text, made from statistics at the moment somebody asks.

Nothing is counted here and nothing is paid per token: every hop keeps its own figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..errors import OVERLOAD_CODES
from ..outputs import EndingKind
from ..runtime.engine_link import EngineLinkStatistics
from ..runtime.health import LLMState
from ..runtime.llm import LLM

__all__ = ["metrics_text"]

_Figures: TypeAlias = tuple[tuple[str, str, Callable[[EngineLinkStatistics], float]], ...]

_ENGINE_GAUGES: _Figures = (
    ("free_blocks", "Free blocks of the key/value cache.", lambda e: e.num_free_blocks),
    ("blocks", "Blocks of the key/value cache.", lambda e: e.num_gpu_blocks),
    (
        "live_requests",
        "Requests whose outputs are awaited from the engine.",
        lambda e: e.processor.requests,
    ),
    (
        "running_requests",
        "Requests in the engine's running batch.",
        lambda e: e.scheduler.num_running_reqs,
    ),
    (
        "waiting_requests",
        "Requests that wait in the engine.",
        lambda e: e.scheduler.num_waiting_reqs,
    ),
)
_ENGINE_COUNTERS: _Figures = (
    ("messages", "Messages received from the engine.", lambda e: e.messages),
    ("output_tokens", "Tokens received for live requests.", lambda e: e.processor.tokens),
    (
        "stale_outputs",
        "Outputs for requests that had just ended.",
        lambda e: e.stale_outputs,
    ),
    ("failed_sends", "Messages that could not leave for the engine.", lambda e: e.failed_sends),
    (
        "prefix_cache_queries",
        "Tokens looked for in the engine's prefix cache.",
        lambda e: e.prefix_cache_queries,
    ),
    (
        "prefix_cache_hits",
        "Tokens found in the engine's prefix cache.",
        lambda e: e.prefix_cache_hits,
    ),
)


def metrics_text(llm: LLM) -> bytes:
    """The Prometheus text for one LLM."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_LLMCollector(llm))
    return generate_latest(registry)


class _LLMCollector(Collector):
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        statistics = self._llm.statistics()
        yield GaugeMetricFamily(
            "trioleg_open_streams", "Requests being read.", value=statistics.open_streams
        )
        requests = CounterMetricFamily(
            "trioleg_requests", "Requests ended, by reason.", labels=["reason"]
        )
        for kind in EndingKind:
            requests.add_metric([kind.value], statistics.endings.get(kind, 0))
        yield requests
        turned_away = CounterMetricFamily(
            "trioleg_requests_turned_away",
            "Requests that no engine took, by the state at that moment.",
            labels=["state"],
        )
        for state in LLMState:
            turned_away.add_metric([state.value], statistics.turned_away.get(state, 0))
        yield turned_away
        overloaded = CounterMetricFamily(
            "trioleg_requests_overloaded",
            "Requests for which there was no room, by the code of their 429.",
            labels=["code"],
        )
        for code in OVERLOAD_CODES:
            overloaded.add_metric([code], statistics.overloaded.get(code, 0))
        yield overloaded
        yield GaugeMetricFamily(
            "trioleg_inflight_requests",
            "Requests that have begun and not ended, each of n choices counted.",
            value=statistics.num_inflight_requests,
        )
        yield GaugeMetricFamily(
            "trioleg_queued_prompt_tokens",
            "Tokens of prompts whose first token has not come.",
            value=statistics.num_queued_prompt_tokens,
        )
        yield GaugeMetricFamily(
            "trioleg_unread_requests",
            "Requests with output that waits for its reader.",
            value=statistics.num_unread_requests,
        )
        yield GaugeMetricFamily(
            "trioleg_unread_bytes",
            "Output that waits for its readers, estimated.",
            value=statistics.num_unread_bytes,
        )
        yield _state_metric(self._llm.health().state)
        yield GaugeMetricFamily(
            "trioleg_engine_up",
            "1 while there is an engine, and it answers.",
            value=any(one.dead is None and one.lost is None for one in statistics.engines),
        )
        yield CounterMetricFamily(
            "trioleg_engine_restarts",
            "Engines that became ready after the first one.",
            value=statistics.engine_restarts,
        )
        yield from _engine_metrics(statistics.engines)


def _state_metric(now: LLMState) -> Metric:
    states = GaugeMetricFamily(
        "trioleg_state", "1 for the state that /health tells, 0 for the others.", labels=["state"]
    )
    for state in LLMState:
        states.add_metric([state.value], float(state is now))
    return states


def _engine_metrics(engines: tuple[EngineLinkStatistics, ...]) -> Iterator[Metric]:
    for name, help_text, value in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(f"trioleg_engine_{name}", help_text, labels=["engine"])
        # What a dead engine had said last is true no more.
        for engine in (one for one in engines if one.dead is None):
            gauge.add_metric([str(engine.engine)], value(engine))
        yield gauge
    for name, help_text, value in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(f"trioleg_engine_{name}", help_text, labels=["engine"])
        for engine in engines:
            counter.add_metric([str(engine.engine)], value(engine))
        yield counter
