"""`/metrics`: what was counted, and what is so at the moment, in Prometheus's text."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from potluck.gateway.admin import families as known
from potluck.gateway.admin.counters import Counters, Histogram, Labels
from potluck.gateway.admin.families import FAMILIES, Family
from potluck.gateway.admin.operations import Operations

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 300.0


class TokenCosts:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, Counter[str]]] = deque()

    def look(self, counters: Counters, now_s: float) -> None:
        tokens: Counter[str] = Counter()
        for family in (known.PROMPTS, known.OUTPUTS):
            for labels, value in counters.counted(family).items():
                tokens[labels[0]] += int(value)
        self._seen.append((now_s, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    def usd_per_million(self, usd_per_h: float, model: str) -> float | None:
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        tokens = last[model] - first[model]
        return None if tokens <= 0 else usd_per_h * (last_s - first_s) / 3600 / tokens * 1e6


class GatewayMetrics(Collector):
    def __init__(
        self,
        counters: Counters,
        operations: Operations,
        gauges: Callable[[], dict[Family, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self._operations = operations
        self._gauges, self._clock = gauges, clock
        self._costs = TokenCosts()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def look(self) -> None:
        self._costs.look(self.counters, self._clock())

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for family in FAMILIES.values():
            if family.kind == "counter":
                counter = CounterMetricFamily(family.name, family.meaning, labels=family.labels)
                for labels, value in self.counters.counted(family).items():
                    counter.add_metric(labels, value)
                yield counter
            elif family.kind == "histogram":
                yield _histogram(family, self.counters.seen(family))
        now = self._now()
        for family in FAMILIES.values():
            if family.kind == "gauge":
                gauge = GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
                for labels, value in now.get(family.name, {}).items():
                    gauge.add_metric(labels, value)
                yield gauge

    def _now(self) -> dict[str, dict[Labels, float]]:
        result: dict[str, Counter[Labels]] = {}

        def add(family: Family, labels: Labels, value: float) -> None:
            result.setdefault(family.name, Counter())[labels] += value  # type: ignore[assignment]

        for replica in self._operations.replicas():
            add(known.REPLICAS, (replica.model, replica.state), 1)
            add(known.REPLICA_RUNNING, (replica.replica, replica.model), replica.running)
            add(known.REPLICA_WAITING, (replica.replica, replica.model), replica.waiting)
            add(known.REPLICA_KV, (replica.replica, replica.model), replica.kv_usage)
            add(known.REPLICA_AGE, (replica.replica,), replica.age_s)
        for queue in self._operations.queues():
            add(known.QUEUED, (queue.model, queue.tenant), queue.waiting)
            add(known.WAITING, (queue.model,), queue.waiting)
            add(known.RUNNING, (queue.model,), queue.running)
        for model, usd in self._operations.usd_per_h().items():
            add(known.USD_PER_H, (model,), usd)
            item = self._costs.usd_per_million(usd, model)
            if item is not None:
                add(known.USD_PER_M, (model,), item)
        for family, value in self._gauges().items():
            add(family, (), value)
        if known.OPEN.name not in result:
            add(known.OPEN, (), self.counters.open)
        return {name: dict(series) for name, series in result.items()}


def _histogram(family: Family, series: dict[Labels, Histogram]) -> HistogramMetricFamily:
    made = HistogramMetricFamily(family.name, family.meaning, labels=family.labels)
    for labels, histogram in series.items():
        below, buckets = 0, []
        for bound, count in zip([*map(str, family.buckets), "+Inf"], histogram.counts, strict=True):
            below += count
            buckets.append((bound, below))
        made.add_metric(labels, buckets=buckets, sum_value=histogram.total)
    return made


def figures(counters: Counters) -> dict[str, Any]:
    return {
        family.name: [
            {**dict(zip(family.labels, labels, strict=True)), "value": value}
            for labels, value in counters.counted(family).items()
        ]
        for family in FAMILIES.values()
        if family.kind == "counter"
    }
