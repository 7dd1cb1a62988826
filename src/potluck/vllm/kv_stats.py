"""What came over the wire, in vLLM's own `/metrics`: potluck:kv_received_bytes_total and its like."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTS = {
    "received_bytes": "Bytes of KV that came from other engines, as they crossed.",
    "received_tokens": "Tokens whose KV came from other engines.",
    "failed_fetches": "Hand-overs that did not come; what they would have brought was computed.",
}


class KvStats(KVConnectorStats):
    """Counts since the last step."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KvStats:
        names = self.data.keys() | other.data.keys()
        return KvStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, config: Any, kinds: Any, labels: list[str], engines: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, labels, engines)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"potluck:kv_{name}", documentation=said, labelnames=labels), engines
            )
            for name, said in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
