"""`GET /metrics`: Prometheus, with vLLM's names where the meaning is the same, ours (potluck:...) elsewhere.

Gauges and counters are read from the loop when they are asked for; histograms are filled as requests end. Labels
are vLLM's: `model_name`, and `engine`, which is always 0 here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from potluck.engine.loop.engine_status import EngineCounters, EngineStatus
from potluck.engine.loop.jobs import Job, JobEnded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
# fmt: off
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80, 160)
# fmt: on
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


Live = Callable[[], tuple[EngineStatus, EngineCounters]]  # Figures at the moment of asking.


class EngineMetrics:
    def __init__(self, model: str, live: Live, dropped: Counter[str]) -> None:
        names = (model, "0")
        self._registry = CollectorRegistry()
        self._registry.register(_LiveGauges(names, live, dropped))

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, registry=self._registry, buckets=buckets).labels(
                *names
            )

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.")
        self._gap = histogram("inter_token_latency_seconds", "Time between output tokens.")
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time per output token.")
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)

    def gap(self, gap_s: float) -> None:
        self._gap.observe(gap_s)

    def ended(self, job: Job, job_ended: JobEnded, output_tokens: int = 0) -> None:
        times = job_ended.times
        if times.began_s is None:
            return
        self._queue.observe(times.began_s - times.came_s)
        self._prompt.observe(len(job.prompt))
        if times.first_s is None or times.last_s is None:
            return
        self._ttft.observe(times.first_s - times.came_s)
        self._prefill.observe(times.first_s - times.began_s)
        self._decode.observe(times.last_s - times.first_s)
        self._whole.observe(times.last_s - times.came_s)
        self._output.observe(output_tokens)
        if output_tokens > 1:
            self._tpot.observe((times.last_s - times.first_s) / (output_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _LiveGauges(Collector):
    def __init__(self, names: tuple[str, str], live: Live, dropped: Counter[str]) -> None:
        self._names, self._live, self._dropped = names, live, dropped

    def describe(self) -> Iterable[Metric]:
        """Nothing: asking for figures while registering would be too early."""
        return ()

    def collect(self) -> Iterable[Metric]:
        status, counters = self._live()
        used = 1 - status.free_blocks / status.total_blocks
        gauges = [
            ("vllm:num_requests_running", "Requests in execution.", status.running),
            ("vllm:num_requests_waiting", "Requests that wait.", status.waiting),
            ("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all.", used),
            ("potluck:context_tokens", "KV tokens of running requests.", status.context_tokens),
            ("potluck:prefix_cache_bytes", "Size of the prefix cache.", status.prefix_bytes),
            ("potluck:step_seconds_mean", "Mean of the latest steps.", status.step_mean_s),
            *((f"potluck:{name}", "See /status.", value) for name, value in status.notes.items()),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._names, value)
            yield gauge
        counts = [
            ("vllm:num_preemptions", "Preemptions.", counters.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens processed.", counters.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", counters.output_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", counters.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", counters.prefix_hits),
            ("potluck:steps", "Steps computed.", counters.steps),
            ("potluck:computed_tokens", "Tokens put through the model.", counters.computed_tokens),
            ("potluck:kv_sent_bytes", "Cache handed on.", counters.sent_bytes),
            ("potluck:kv_received_bytes", "Cache received.", counters.received_bytes),
        ]
        for name, text, count in counts:
            yield self._counter(name, text, {"": count})
        ended = {REASONS.get(why, why): count for why, count in sorted(counters.ended.items())}
        yield self._counter("vllm:request_success", "Requests that ended.", ended, "finished_reason")
        dropped = dict(sorted(self._dropped.items()))
        yield self._counter("potluck:connections_dropped", "Connections that were ended.", dropped, "why")

    def _counter(self, name: str, text: str, counts: dict[str, int], label: str = "") -> Metric:
        counter = CounterMetricFamily(name, text, labels=(*LABELS, label) if label else LABELS)
        for own, count in counts.items():
            counter.add_metric((*self._names, own) if label else self._names, count)
        return counter
