"""CAUCHY's two scheduling experiments (its 4.4 and 4.5), in simulation.

Table 3: one H800 for prefill, one to three H20 for decode, ShareGPT's lengths; opportunistic scheduling against
round robin. Figure 9: several combos; turns by goodput against plain turns and against the most free tokens.

What the paper does not print, and what is taken here:

- The share of requests that must keep the objective (TTFT 10, 5, 1 s and TBT 50, 30, 30 ms for DailyMail, ShareGPT,
  LongWriter): 90 %, each by its own mean TBT.
- The network: 25 Gbps, which is what its Figure 11 comes to (the KV of 2048 tokens in 85 ms).
- Table 3's rate of the latencies: nine tenths of round robin's goodput, the same for both.
- Figure 9's combos. "Multiple identically configured" ones cannot differ in goodput, so weights would do nothing;
  these are the ones of its working example (3.3.3): 2 x <H800, A800>, <A800, H20>, <2 x A800> as one engine. The rate
  is 6 / 6.4 of their goodputs' sum, as LongWriter's 6 requests/s on a deployment for 6.4. Inside combos, turns.
- vLLM 0.6.5's host: as fitted for its sister 0.6.1 in `cronus.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from papers import fleets
from papers.cronus import FITTED_HOST
from potluck.catalog import named_workloads
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout
from potluck.core.values.plan import Template
from potluck.core.values.types import NodeType, Role, Slo
from potluck.perf.timers.engine_host import EngineHost
from potluck.runtime.resolved_plan import EngineSetup, ResolvedPlan
from potluck.sim.load.workload import Workload, synthetic
from potluck.sim.results.metrics import RunSummary, summarise
from potluck.sim.run import simulate

MODEL, NETWORK_GBPS, SLOTS = "Llama-3.1-8B", 25.0, 256
ATTAINMENT = 0.9
PRICES_USD_PER_H = {"1xH800": 2.69, "1xH20": 1.50, "1xA800-PCIe": 1.19, "2xA800-PCIe": 2.38}  # Its Table 1.
LOAD_SHARE = 6.0 / 6.4
LATENCY_SHARE = 0.9
DECODES = (1, 2, 3)
LEAST_REQUESTS = 200
WARM_UP = 0.2  # Share of the arrivals that is left out: the fleet is empty at first.
BALANCES: tuple[str, ...] = ("round-robin", "token", "goodput")
COMBOS = (("H800-A800", 2), ("A800-H20", 1), ("2xA800", 1))  # The working example's, with how many of each.


@dataclass(frozen=True, slots=True)
class Load:
    """A workload of the catalog with the paper's objective."""

    name: str
    ttft_s: float
    tbt_s: float
    span_s: float  # Of a short run: several times what a request takes.

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tbt_s, ATTAINMENT)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        lengths = named_workloads.workload(self.name).lengths
        return lengths.prompt.mean_tokens, lengths.output.mean_tokens

    def requests(self, rate_per_s: float, spans: float, seed: int) -> Workload:
        """Poisson arrivals for so many spans."""
        count = max(LEAST_REQUESTS, round(rate_per_s * self.span_s * spans))
        return synthetic(fleets.MODEL, named_workloads.workload(self.name).lengths, rate_per_s, count, seed)


LOADS = (
    Load("dailymail", 10.0, 0.05, 30.0),
    Load("sharegpt", 5.0, 0.03, 30.0),
    Load("longwriter", 1.0, 0.03, 180.0),
)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Means in seconds."""

    e2e_s: float
    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated for each figure."""

    spans: float = 4.0
    seeds: tuple[int, ...] = (1, 2)
    tolerance: float = 0.01  # Of a goodput.


PAGE, QUICK = Effort(2.0, (1,), 0.02), Effort(0.3, (1,), 0.1)


def table3_problem(decodes: int, place: int = 1, host: EngineHost = FITTED_HOST) -> ResolvedPlan:
    """1PxD: an H800 and so many H20."""
    return problem_of(LOADS[place], [(combo_of("1PxD", "H800", "H20", decodes), 1)], host)


def figure9_problem(load: Load, goodputs_per_s: Sequence[float]) -> ResolvedPlan:
    """All combos, weighted by these."""
    fleet = [
        (_named(name, weight), count) for (name, count), weight in zip(COMBOS, goodputs_per_s, strict=True)
    ]
    return problem_of(load, fleet)


def table3_policy(opportunistic: bool) -> Policy:
    return Policy(balance="goodput", admission=False, opportunistic=opportunistic)


def goodput_per_s(problem: ResolvedPlan, load: Load, policy: Policy, effort: Effort) -> float:
    """The highest rate at which enough requests keep the objective, averaged over seeds."""
    return float(np.mean([_goodput(problem, load, policy, effort, seed) for seed in effort.seeds]))


def latencies(
    problem: ResolvedPlan, load: Load, policy: Policy, rate_per_s: float, effort: Effort
) -> Latencies:
    """At one rate, averaged over seeds."""
    result = []
    for seed in effort.seeds:
        total_summary = _summary(problem, load.requests(rate_per_s, effort.spans, seed), policy).total
        assert total_summary.e2e_s is not None
        assert total_summary.ttft_s is not None
        assert total_summary.tbt_s is not None
        result.append((total_summary.e2e_s.mean, total_summary.ttft_s.mean, total_summary.tbt_s.mean))
    return Latencies(*np.mean(result, axis=0).tolist())


def combo_goodputs(load: Load, effort: Effort) -> list[float]:
    """Figure 9's weights: what each kind of combo does by itself, as profiled before the deployment."""
    policy = Policy(balance="goodput", admission=False, opportunistic=False)
    return [
        goodput_per_s(problem_of(load, [(_named(name, 1.0), 1)]), load, policy, effort) for name, _ in COMBOS
    ]


def figure9_latencies(load: Load, effort: Effort) -> tuple[float, dict[str, Latencies]]:
    """The rate, and the mean latencies of each way to choose a combo."""
    goodputs = combo_goodputs(load, effort)
    total_per_s = sum(goodput * count for goodput, (_, count) in zip(goodputs, COMBOS, strict=True))
    problem = figure9_problem(load, goodputs)
    rate_per_s = LOAD_SHARE * total_per_s
    result: dict[str, Latencies] = {}
    for balance in BALANCES:
        policy = Policy(balance=balance, admission=False, opportunistic=False)
        result[balance] = latencies(problem, load, policy, rate_per_s, effort)
    return rate_per_s, result


def _goodput(problem: ResolvedPlan, load: Load, policy: Policy, effort: Effort, seed: int) -> float:
    """Double until it breaks, then halve the gap."""

    def holds(rate_per_s: float) -> bool:
        summary = _summary(problem, load.requests(rate_per_s, effort.spans, seed), policy)
        return bool(summary.models[0].holds)

    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2.0 * high
    while high - low > effort.tolerance * high:
        middle = (low + high) / 2.0
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _summary(problem: ResolvedPlan, requests: Workload, policy: Policy) -> RunSummary:
    return summarise(simulate(problem, requests, policy), WARM_UP * requests.span_s)


@cache
def node_of(gpu: str, gpus: int = 1) -> NodeType:
    return fleets.node(gpu, NETWORK_GBPS, gpus)


def combo_of(name: str, prefill: str, decode: str, decodes: int = 1, weight_per_s: float = 1.0) -> Template:
    first_layout, second_layout = fleets.alone(node_of(prefill), MODEL), fleets.alone(node_of(decode), MODEL)
    parts: list[tuple[Role, Layout]] = [("prefill", first_layout)]
    parts += [("decode", second_layout)] * decodes
    return fleets.template(name, "combo", parts, weight_per_s)


def _named(name: str, weight_per_s: float) -> Template:
    if name == "H800-A800":
        return combo_of(name, "H800", "A800-PCIe", weight_per_s=weight_per_s)
    if name == "A800-H20":
        return combo_of(name, "A800-PCIe", "H20", weight_per_s=weight_per_s)
    layout = fleets.alone(node_of("A800-PCIe", 2), MODEL)
    return fleets.template(name, "homogeneous", [("mixed", layout)], weight_per_s)


def problem_of(
    load: Load, fleet: Sequence[tuple[Template, int]], host: EngineHost = FITTED_HOST
) -> ResolvedPlan:
    where = [node_of("H800"), node_of("H20"), node_of("A800-PCIe"), node_of("A800-PCIe", 2)]
    engine = EngineSetup(slots=SLOTS, host=host)
    engines = {(item.name, index): engine for item, _ in fleet for index in range(len(item.replicas))}
    return fleets.problem(
        MODEL, where, fleet, engines, load.mean_tokens, slo=load.slo, price_usd_per_h=PRICES_USD_PER_H
    )
