"""What a gateway's metrics say of the last seconds: differences between two readings.

Counters and histograms only ever grow, so that of two readings the difference is what happened between them. A
gateway that was restarted begins at nothing again; its first reading then counts alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

Labels = tuple[tuple[str, str], ...]
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """All samples at one moment: name and labels to the value."""

    at_s: float
    values: Mapping[tuple[str, Labels], float]

    def of(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for (known, labels), value in self.values.items():
            if known == name:
                yield dict(labels), value

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for own, value in self.of(name) if labels.items() <= own.items())


def read(text: str, at_s: float) -> MetricsReading:
    """What `/metrics` answered."""
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return MetricsReading(at_s, values)


class RecentMetrics:
    """The readings of the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[MetricsReading] = deque()

    def add(self, reading: MetricsReading) -> None:
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].at_s <= reading.at_s - self._window_s:
            self._readings.popleft()

    @property
    def now(self) -> MetricsReading:
        return self._readings[-1]

    @property
    def span_s(self) -> float:
        return self.now.at_s - self._readings[0].at_s

    def grown(self, name: str, **labels: str) -> float:
        """By how much a counter grew in the window."""
        before, now = self._readings[0].sum(name, **labels), self.now.sum(name, **labels)
        return now - before if now >= before else now

    def per_s(self, name: str, **labels: str) -> float:
        return self.grown(name, **labels) / self.span_s if self.span_s > 0 else 0.0

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """Of a histogram's values in the window, by straight lines between its bounds; None when there are none."""
        bounds = {
            float(own["le"]): self.grown(f"{name}_bucket", **{**labels, "le": own["le"]})
            for own, _ in self.now.of(f"{name}_bucket")
            if labels.items() <= own.items()
        }
        ranked = sorted(bounds.items())
        if not ranked or ranked[-1][1] <= 0:
            return None
        wanted = share * ranked[-1][1]
        low, below = 0.0, 0.0
        for bound, count in ranked:
            if count >= wanted:
                if bound == inf:
                    return low
                return low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low
