"""CRONUS (section 5): five ways to serve with one high-end and one low-end GPU, in simulation.

As in the paper: A100 80 GB with an A10 or an A30, 100 Gbps between them, Llama-3-8B (Llama-3.1-8B here: the same
layers) and Qwen2-7B; the first 1000 requests of Azure's conversation trace, whose mean lengths are the 1014 and 247
that it prints. All at once for the highest throughput, at a fixed interval for latencies.

    DP+Chunked    an engine on each GPU, chunks of 512 and 256, behind the dispatcher of `cronus_dispatch.py`
    PP+Chunked    one engine over both, layers split 23/9, 21/11, 20/8, 18/10, chunks of 512
    Disagg. H-L   prefill on the high-end GPU, decode on the low-end one; prompts whole, one at a time
    Disagg. L-H   the other way round
    Cronus        partial prefill on the low-end GPU, chunks of 512 on the high-end one; the Brain's split

KV leaves after the prefill, not layer by layer, as the receiver fetches it. vLLM's limit of 256 sequences holds.

`FITTED_HOST_S`, the seconds of a step that vLLM 0.6.1's host took, is the one figure that was fitted: such that DP
on A100+A10 with Llama gives the published 7.28 requests/s (`fit_host_s` does it again). It holds for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from papers import fleets
from papers.cronus_dispatch import QueueLimited
from potluck.catalog import named_workloads
from potluck.core.errors import InputError
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Template
from potluck.core.values.types import NodeType
from potluck.perf.timers.engine_host import EngineHost
from potluck.runtime.brain_log import Decider
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import EngineSetup, ResolvedPlan
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import workload
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings

HIGH, NETWORK_GBPS = "A100-80", 100.0
TRACE = "azure_llm_2023_conv.csv.gz"
REQUESTS, MEAN_TOKENS = 1000, (1014.0, 247.0)
SLOTS = 256  # vLLM's max_num_seqs; a pipeline has as many for each of its two batches.
CHUNK_TOKENS, LOW_CHUNK_TOKENS = 512, 256
WHOLE_TOKENS = 16384  # A token budget that no prompt fills: prefill in one step.
FITTED_HOST_S = 0.007
FITTED_HOST = EngineHost(FITTED_HOST_S)
OLD_HOST = EngineHost(0.0005, 0.0001)
"""The host of engines of 2024, whose scheduler's time grows with the batch: rounded, not fitted to a row here."""
DP, PP, HIGH_LOW, LOW_HIGH, CRONUS = "DP+Chunked", "PP+Chunked", "Disagg. H-L", "Disagg. L-H", "Cronus"
APPROACHES = (DP, PP, HIGH_LOW, LOW_HIGH, CRONUS)
SERIAL_PP = "PP+Chunked, one batch at a time"  # Not in the paper: to see what would explain its PP.

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A column of Table 2."""

    name: str
    low: str
    model: str
    layers: tuple[int, int]  # Of a pipeline, on the high-end and the low-end GPU.
    published_per_s: Mapping[str, float]
    less_gb: float = 0.0  # Of the low-end GPU's memory.


SETTINGS = tuple(
    Setting(name, low, model, layers, dict(zip(APPROACHES, published, strict=True)))
    for name, low, model, layers, published in (
        ("A100+A10 LLaMA3-8B", "A10", "Llama-3.1-8B", (23, 9), (7.28, 3.86, 1.31, 4.11, 7.39)),
        ("A100+A10 Qwen2-7B", "A10", "Qwen2-7B", (20, 8), (8.70, 4.08, 3.45, 4.35, 8.29)),
        ("A100+A30 LLaMA3-8B", "A30", "Llama-3.1-8B", (21, 11), (8.54, 3.96, 2.93, 6.14, 8.70)),
        ("A100+A30 Qwen2-7B", "A30", "Qwen2-7B", (18, 10), (10.85, 3.97, 6.74, 6.59, 10.27)),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class RequestLengthList:
    """Lengths of the requests, in their order."""

    prompt_tokens: Ints
    output_tokens: Ints
    source: str

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, count: int) -> RequestLengthList:
        return RequestLengthList(self.prompt_tokens[:count], self.output_tokens[:count], self.source)


@dataclass(frozen=True, slots=True)
class Latency:
    """At one rate."""

    rate_per_s: float
    ttft_p99_s: float
    tbt_p99_s: float


def trace_requests(path: Path) -> RequestLengthList:
    """The first 1000 requests of the trace: those that the paper ran, by their mean lengths."""
    from potluck.spec.traces import load_trace

    trace = load_trace(path)
    if len(trace) < REQUESTS:
        raise InputError(str(path), f"has {len(trace)} requests, not {REQUESTS}")
    lengths = (trace.input_tokens[:REQUESTS], trace.output_tokens[:REQUESTS])
    prompt, output = (length.astype(np.int64) for length in lengths)
    return RequestLengthList(prompt, output, f"the first {REQUESTS} of {path.name}")


def synthetic_requests(seed: int = 0, count: int = REQUESTS) -> RequestLengthList:
    """Where the trace is not at hand: the catalog's lengths of the whole hour, stretched to the means printed."""
    lengths = named_workloads.workload("azure-conv").lengths
    prompt, output = draw(np.random.default_rng(seed), lengths, count)
    columns = []
    for drawn, mean in ((prompt, MEAN_TOKENS[0]), (output, MEAN_TOKENS[1])):
        columns.append(np.maximum(1, np.rint(drawn * mean / drawn.mean())).astype(np.int64))
    return RequestLengthList(columns[0], columns[1], f"synthetic, seed {seed}")


def run(
    setting: Setting,
    approach: str,
    requests: RequestLengthList,
    rate_per_s: float = inf,
    host: EngineHost = FITTED_HOST,
) -> SimResult:
    """One run; without a rate all requests come at once."""
    when_s = np.arange(len(requests)) / rate_per_s
    load = workload(fleets.MODEL, when_s, requests.prompt_tokens, requests.output_tokens)
    mind = _dispatcher if approach == DP else None
    settings, problem = SimSettings(overlap=False), _problem(setting, approach, host)
    result = simulate(problem, load, policy_of(approach), settings=settings, mind=mind)
    if not (result.records.outcome == ANSWERED).all():
        raise InputError(f"{setting.name}: {approach}", "not all requests were answered")
    return result


def policy_of(approach: str) -> Policy:
    return Policy(
        admission=False,
        balance="goodput",
        opportunistic=False,
        split=approach == CRONUS,
        split_overflow=False,
        low_decodes=False,
        max_wait_s=inf,
    )


def throughput_per_s(
    setting: Setting, approach: str, requests: RequestLengthList, host: EngineHost = FITTED_HOST
) -> float:
    """All requests sent at the start, over the time until the last is answered."""
    return len(requests) / run(setting, approach, requests, host=host).end_s


def latency(setting: Setting, approach: str, requests: RequestLengthList, rate_per_s: float) -> Latency:
    """RequestLengthList at a fixed interval."""
    total_summary = summarise(run(setting, approach, requests, rate_per_s)).total
    assert total_summary.ttft_s is not None
    assert total_summary.tbt_s is not None
    return Latency(rate_per_s, total_summary.ttft_s.p99, total_summary.tbt_s.p99)


def fit_host_s(requests: RequestLengthList, precision_s: float = 1e-4) -> float:
    """The host's seconds per step with which DP on the first setting has its published throughput."""
    setting = SETTINGS[0]
    low_s, high_s = 0.0, 0.05
    while high_s - low_s > precision_s:
        middle_s = (low_s + high_s) / 2
        if throughput_per_s(setting, DP, requests, EngineHost(middle_s)) > setting.published_per_s[DP]:
            low_s = middle_s
        else:
            high_s = middle_s
    return (low_s + high_s) / 2


@cache
def _nodes(low: str, less_gb: float) -> tuple[NodeType, NodeType]:
    slow = fleets.node(low, NETWORK_GBPS)
    slow = replace(slow, gpu=replace(slow.gpu, memory_gb=slow.gpu.memory_gb - less_gb))
    return fleets.node(HIGH, NETWORK_GBPS), slow


def _problem(setting: Setting, approach: str, host: EngineHost) -> ResolvedPlan:
    where = _nodes(setting.low, setting.less_gb)
    fleet, engines = fleet_of(approach, where, setting.layers, host)
    return fleets.problem(setting.model, where, [(item, 1) for item in fleet], engines, MEAN_TOKENS)


def fleet_of(
    approach: str, where: tuple[NodeType, NodeType], layers: tuple[int, int], host: EngineHost, scale: int = 1
) -> tuple[list[Template], dict[tuple[str, int], EngineSetup]]:
    """On a high-end and a low-end node, with so many layers of a pipeline on each; engines by `scale` smaller."""
    high_node_type, low_node_type = where
    on_high, on_low = (single(item.name, item.gpus, sum(layers)) for item in where)
    slots = SLOTS // scale
    chunked = EngineSetup(CHUNK_TOKENS // scale, slots, host)
    if approach == DP:
        fleet = [
            fleets.template(name, "homogeneous", [("mixed", layout)])
            for name, layout in (("high", on_high), ("low", on_low))
        ]
        return fleet, {("high", 0): chunked, ("low", 0): EngineSetup(LOW_CHUNK_TOKENS // scale, slots, host)}
    if approach in (PP, SERIAL_PP):
        places = (StageNode(high_node_type.name, 1), StageNode(low_node_type.name, 1))
        layout = Layout(tuple(Stage(n, (node,)) for n, node in zip(layers, places, strict=True)))
        engine = EngineSetup(CHUNK_TOKENS // scale, 2 * slots, host, pipelined=approach == PP)
        return [fleets.template("both", "pipeline", [("mixed", layout)])], {("both", 0): engine}
    first_layout, second_layout = (on_high, on_low) if approach == HIGH_LOW else (on_low, on_high)
    pair = fleets.template("pair", "pair", [("prefill", first_layout), ("mixed", second_layout)])
    return [pair], {("pair", 0): EngineSetup(WHOLE_TOKENS // scale, 1, host), ("pair", 1): chunked}


def _dispatcher(replica_models: ReplicaModels, policy: Policy) -> Decider:
    return QueueLimited(replica_models.facts(), policy, [("high", 3, 3), ("low", 1, 1)])
