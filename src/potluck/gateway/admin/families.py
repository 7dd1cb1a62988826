"""Every metric. Names are vLLM's where the meaning is the same, so that dashboards and autoscalers for it work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "histogram", "gauge"]

# fmt: off
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0,
)
# fmt: on
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # Without the `_total` that counters get.
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _seconds(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "histogram", meaning, labels, SECONDS)


def _tokens(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "histogram", meaning, labels, TOKENS)


def _count(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "gauge", meaning, labels)


TTFT = _seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.", "model_name")
GAP = _seconds("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", "model_name")
TPOT = _seconds(
    "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", "model_name"
)
WHOLE = _seconds("vllm:e2e_request_latency_seconds", "From arrival to the last token.", "model_name")
PROMPT = _tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.", "model_name")
OUTPUT = _tokens("vllm:request_generation_tokens", "Output tokens of a request.", "model_name")
PROMPTS = _count("vllm:prompt_tokens", "Prompt tokens of requests that were answered.", "model_name")
OUTPUTS = _count("vllm:generation_tokens", "Output tokens that were passed on.", "model_name")
SUCCESS = _count(
    "vllm:request_success", "Requests that were answered, by why they ended.", "model_name", "finished_reason"
)
QUERIED = _count("vllm:prefix_cache_queries", "Prompt tokens looked for in prefix caches.", "model_name")
HITS = _count("vllm:prefix_cache_hits", "Prompt tokens found in prefix caches.", "model_name")
RUNNING = _gauge("vllm:num_requests_running", "Requests that were sent to replicas.", "model_name")
WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait before the replicas.", "model_name")

REQUESTS = _count(
    "potluck_requests", "Requests that were let in, by how they ended.", "model", "class", "outcome"
)
TENANT_REQUESTS = _count(
    "potluck_tenant_requests", "Requests that were let in, by tenant.", "model", "tenant"
)
TENANT_TOKENS = _count(
    "potluck_tenant_tokens", "Tokens by tenant; kind is prompt, cached or output.", "model", "tenant", "kind"
)
TENANT_TTFT = _seconds(
    "potluck_tenant_time_to_first_token_seconds", "From arrival to the first token.", "tenant"
)
TURNED_AWAY = _count("potluck_turned_away", "Requests that were not let in.", "status", "code")
ROUTES = _count(
    "potluck_routes",
    "Attempts sent on their way; kind is in_place, prefill_decode, split, remote or recovered.",
    "model",
    "kind",
)
RETRIES = _count("potluck_retries", "Attempts beyond a request's first.", "model")
SPLITS = _tokens("potluck_split_tokens", "Tokens that a prompt's first replica computed.", "model")
FAILURES = _count("potluck_failures", "Attempts that were lost, by what failed.", "where", "kind")
SEGMENTS = _count("potluck_segments", "Segments that ended, by replica.", "replica", "outcome")
SEGMENT_TOKENS = _count(
    "potluck_replica_tokens",
    "Tokens of a replica; kind is prompt (computed) or output (streamed).",
    "replica",
    "kind",
)
SEGMENT_TIME = _seconds("potluck_segment_seconds", "Time of a segment at its replica.", "replica")
KV_BYTES = _count("potluck_kv_bytes", "KV that crossed between replicas.", "source", "target", "codec")
KV_TIME = _count("potluck_kv_seconds", "Time that KV took to cross.", "source", "target", "codec")
DECISIONS = _count("potluck_decisions", "Decisions about the fleet.")
REPLAYED = _count("potluck_replayed", "Requests that were answered by what was computed for an earlier one.")

OPEN = _gauge("potluck_open_requests", "Requests that were let in and have not ended.")
QUEUED = _gauge("potluck_queued_requests", "Requests that wait before the replicas.", "model", "tenant")
REPLICAS = _gauge("potluck_replicas", "Replicas by state.", "model", "state")
REPLICA_RUNNING = _gauge("potluck_replica_running", "Requests that a replica works on.", "replica", "model")
REPLICA_WAITING = _gauge("potluck_replica_waiting", "Requests that wait in a replica.", "replica", "model")
REPLICA_KV = _gauge("potluck_replica_kv_usage", "Share of a replica's KV blocks in use.", "replica", "model")
REPLICA_AGE = _gauge("potluck_replica_status_age_seconds", "Age of what is known of a replica.", "replica")
USD_PER_H = _gauge("potluck_usd_per_hour", "What a model's replicas cost.", "model")
USD_PER_M = _gauge(
    "potluck_usd_per_million_tokens",
    "Cost per million tokens, prompt and output, of the last minutes.",
    "model",
)
KEYS = _gauge("potluck_keys", "API keys that are known.")
KEYS_BROKEN = _gauge("potluck_keys_file_broken", "1 while the file of keys cannot be used as it is.")

FAMILIES: dict[str, Family] = {
    family.name: family for family in list(vars().values()) if isinstance(family, Family)
}
