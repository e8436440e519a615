"""``/metrics``: Prometheus text, made from statistics at the moment somebody asks.

Nothing is counted here and nothing is paid per token: every hop keeps its own figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..outputs import EndingKind
from ..runtime.engine_link import EngineLinkStatistics
from ..runtime.llm import LLM

__all__ = ["metrics_text"]

_ENGINE_GAUGES = (
    ("up", "1 while the engine lives.", lambda e: float(e.dead is None)),
    ("free_blocks", "Free blocks of the key/value cache.", lambda e: e.num_free_blocks),
    ("blocks", "Blocks of the key/value cache.", lambda e: e.num_gpu_blocks),
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
_ENGINE_COUNTERS = (
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
        yield from _engine_metrics(statistics.engines)


def _engine_metrics(engines: tuple[EngineLinkStatistics, ...]) -> Iterator[Metric]:
    for name, help_text, value in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(f"trioleg_engine_{name}", help_text, labels=["engine"])
        for engine in engines:
            gauge.add_metric([str(engine.engine)], value(engine))
        yield gauge
    for name, help_text, value in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(f"trioleg_engine_{name}", help_text, labels=["engine"])
        for engine in engines:
            counter.add_metric([str(engine.engine)], value(engine))
        yield counter
