"""What benchmarks/stress.py does to a fleet: each scenario is a function from rules to figures, with its targets.

Loads are shares of the capacity that `potluck goodput` finds for the same fleet, objective and rules, but where a
scenario says otherwise. "Good" requests are those that keep both halves of the objective.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from parts import simulate_fleets as fleets
from parts import stress_fleets as fleet
from parts.common import DATA, cpu_s
from parts.stress_fleets import FAST, SEED, SMALL, Rules
from potluck.cli.common.workloads import WorkloadOptions, load
from potluck.core.values.types import Slo
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim import step_table
from potluck.sim.load.workload import Workload, first, labelled, merge
from potluck.sim.results.metrics import ModelSummary, summarise, tpot
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault

TRACES = {
    "mooncake_fast25_synthetic": 0.6,
    "mooncake_arxiv_first1000": 1.0,
    "mooncake_fast25_conversation": 1.0,
}
"""Traces with prefixes, and what their times to the first token may be at most, as a share of round robin's."""
SOURCES = ("west", "north", "south", "centre")
Figures = dict[str, float]


def four() -> ResolvedPlan:
    return fleet.alike(4)


def overload(rules: Rules) -> Figures:
    """More than the fleet can do, for good: 1.5 and 3 times its capacity; counted after the first minute."""
    capacity = fleet.capacity_per_s(four, rules)
    end_s = rules.span_s(150.0, 90.0)
    figures = {"overload_capacity_per_s": capacity}
    for factor in (1.5, 3.0):
        result = rules.run(four(), fleet.chat(factor * capacity, end_s))
        good_per_s = fleet.good_per_s(result, 60.0, end_s)
        figures |= {
            f"overload_{factor:g}x_good_per_s": good_per_s,
            f"overload_{factor:g}x_of_capacity": good_per_s / capacity,
            f"overload_{factor:g}x_refused_share": float(fleet.refused(result).mean()),
            f"overload_{factor:g}x_slowest_refusal_s": fleet.slowest_refusal_s(result),
        }
    return figures


def burst(rules: Rules) -> Figures:
    """A load of 0.4, ten times that for 30 s, and 0.4 again."""
    capacity = fleet.capacity_per_s(four, rules)
    calm, begin_s, after_s = 0.4 * capacity, 20.0, rules.span_s(240.0, 200.0)
    result = rules.run(four(), fleet.phases((calm, begin_s), (10 * calm, 30.0), (calm, after_s)))
    over_s = begin_s + 30.0
    return {
        "burst_good_per_s_during": fleet.good_per_s(result, begin_s, over_s),
        "burst_during_of_capacity": fleet.good_per_s(result, begin_s, over_s) / capacity,
        "burst_attainment_minute_after": fleet.attainment(result, over_s, over_s + 60.0),
        "burst_attainment_10_s_after": fleet.attainment(result, over_s + 10.0, over_s + 70.0),
        "burst_recovered_after_s": _recovered_s(result, over_s, over_s + after_s) - over_s,
        "burst_slowest_refusal_s": fleet.slowest_refusal_s(result),
    }


def _recovered_s(result: SimResult, from_s: float, to_s: float, bin_s: float = 5.0) -> float:
    """From when on no five seconds have an attainment below 0.95."""
    starts_s = np.arange(from_s, to_s - bin_s, bin_s)
    bad = [start for start in starts_s if fleet.attainment(result, start, start + bin_s) < 0.95]
    return float(bad[-1] + bin_s) if bad else from_s


def slow(rules: Rules) -> Figures:
    """One of four replicas takes twice as long as planned, at a load of 0.75."""
    rate = 0.75 * fleet.capacity_per_s(four, rules)
    span_s = rules.span_s(300.0, 120.0)
    result = rules.run(four(), fleet.chat(rate, span_s), [Fault(0.0, "slow", replica="*#0/0", factor=2.0)])
    summary = summarise(result).models[0]
    return {"slow_attainment": summary.attainment or 0.0, "slow_ttft_p90_s": _p90_s(summary)}


def weights(rules: Rules) -> Figures:
    """Two H100s and four L4s, which the plan thinks twice as good as they are, at 0.75 of the true sum.

    An L4 hardly keeps 60 ms a token; a second run asks for 150 ms.
    """
    rate = 0.75 * (2 * fleet.per_s(FAST) + 4 * fleet.per_s(SMALL))
    requests = fleet.chat(rate, rules.span_s(240.0, 120.0))
    figures = {}
    for name, slo in (("weights", fleet.SLO), ("weights_150_ms", Slo(2.0, 0.15))):
        parts = [(fleet.mixed(FAST), "east", 2), (fleet.mixed(SMALL, 2.0), "east", 4)]
        summary = summarise(rules.run(fleet.closed(parts, slo), requests)).models[0]
        figures |= {f"{name}_attainment": summary.attainment or 0.0, f"{name}_ttft_p90_s": _p90_s(summary)}
    return figures


def flood(rules: Rules) -> Figures:
    """A tenant sends 8 prompts of 14,000 tokens a second beside another's chat at a load of 0.4, for ever.

    The other one's pace is compared with what it has when it is alone.
    """
    span_s = rules.span_s(120.0, 60.0)
    load = 0.4
    other = labelled(fleet.chat(load * fleet.capacity_per_s(four, rules), span_s), "other")
    flooder = labelled(fleet.alike_requests(8.0, span_s, 14_000, 200), "flooder")
    alone = summarise(rules.run(four(), other)).models[0]
    rest = rules.run(four(), flooder)
    both = merge([other, flooder])
    result = rules.run(four(), both)
    assert both.labels is not None
    hers = both.labels.tenant == both.labels.tenants.index("other")
    met, records = fleet.good(result), result.records
    pace_s = tpot(records)
    assert alone.tpot_s is not None
    flooded = (records.outcome == ANSWERED) & ~hers
    good_per_s, alone_per_s = float(met[~hers].sum()) / span_s, float(fleet.good(rest).sum()) / span_s
    return {
        "flood_other_alone_attainment": alone.attainment or 0.0,
        "flood_other_attainment": float(met[hers].mean()),
        "flood_other_tpot_over_alone": float(np.nanmean(pace_s[hers])) / alone.tpot_s.mean,
        "flood_flooder_answered_per_s": float(flooded.sum()) / span_s,
        "flood_flooder_good_per_s": good_per_s,
        "flood_flooder_alone_good_per_s": alone_per_s,
        # What the other one leaves free of the fleet, in what the flooder makes of a whole one.
        "flood_flooder_of_the_rest": good_per_s / ((1.0 - load) * alone_per_s),
    }


def link(rules: Rules) -> Figures:
    """Prefill on two replicas in the west, decode on two in the east: 20 s of a tenth of the link, and of none of it.

    The rate is 0.3 of what the two decode replicas could do by themselves: their network cards carry no more.
    """
    rate, begin_s = 0.3 * 2 * fleet.per_s(FAST), 20.0
    requests = fleet.chat(rate, 80.0)
    figures = {}
    for name, factor in (("tenth", 0.1), ("dead", 0.0)):
        fault = Fault(begin_s, "link", source="west", target="east", factor=factor, duration_s=20.0)
        result = rules.run(fleet.apart([("west", 2)], ("east", 2), 100.0), requests, [fault])
        figures[f"link_{name}_attainment"] = fleet.attainment(result, begin_s, begin_s + 20.0)
        figures[f"link_{name}_attainment_after"] = fleet.attainment(result, begin_s + 20.0, 80.0)
    dead = max(1e-9, figures["link_dead_attainment"])
    figures["link_tenth_over_dead"] = figures["link_tenth_attainment"] / dead
    return figures


def shared_link(rules: Rules) -> Figures:
    """Two tenants on a link of 25 Gbit/s: one's chat takes 0.3 of it, the other asks for 1.7 of it, for ever.

    Compared with what the chat has when it is alone on half of the link: its share. Once with the rules as given,
    which also send prompts elsewhere when a link is late; once with weights by goodput, which leave it to the link.
    """
    span_s, figures = rules.span_s(120.0, 60.0), {}
    chat = labelled(fleet.chat(6.0, span_s), "other")
    flood = labelled(fleet.alike_requests(10.0, span_s, 4_000, 50), "flooder")
    both = merge([chat, flood])
    assert both.labels is not None
    hers = both.labels.tenant == both.labels.tenants.index("other")
    goodput = replace(rules, policy=replace(rules.policy, balance="goodput"))
    for name, item in (("shared_link", rules), ("shared_link_goodput", goodput)):
        half = item.run(fleet.apart([("west", 2)], ("east", 2), 12.5), chat)
        result = item.run(fleet.apart([("west", 2)], ("east", 2), 25.0), both)
        ttft_s, half_s = (run.records.first_token_s - run.records.arrival_s for run in (result, half))
        p99_s = float(np.nanpercentile(ttft_s[hers], 99))
        answered = float((result.records.outcome == ANSWERED)[~hers].sum())
        figures |= {
            f"{name}_attainment": float(fleet.good(result)[hers].mean()),
            f"{name}_ttft_p99_s": p99_s,
            f"{name}_ttft_p99_over_half": p99_s / float(np.nanpercentile(half_s, 99)),
            f"{name}_flooder_answered_per_s": answered / span_s,
        }
    return figures


def prefix(rules: Rules) -> Figures:
    """Mooncake's traces at their own pace on four replicas: to where the prefix lies, against round robin.

    Times are compared without an objective, as both must answer the same requests for that: with one, whoever is
    slower refuses more and its times are of those that are left. Attainments are with the objective.
    """
    plain = replace(rules, policy=replace(rules.policy, balance="round-robin", affinity=0.0))
    figures = {}
    for trace in TRACES:
        if not _path(trace).exists():
            continue
        requests = load(str(_path(trace)), fleet.MODEL, WorkloadOptions())
        if rules.quick and len(requests) > 4000:
            requests = first(requests, 2000)
        key, both, free = _key(trace), (rules, plain), replace(four(), slos={})
        ours, theirs = (summarise(item.run(free, requests)).total for item in both)
        assert ours.ttft_s is not None
        assert theirs.ttft_s is not None
        held = [fleet.attainment(item.run(four(), requests), 0.0, inf) for item in both]
        figures |= {
            f"{key}_mean_over_round_robin": ours.ttft_s.mean / theirs.ttft_s.mean,
            f"{key}_p99_over_round_robin": ours.ttft_s.p99 / theirs.ttft_s.p99,
            f"{key}_attainment": held[0],
            f"{key}_round_robin_attainment": held[1],
            f"{key}_attainment_over_round_robin": held[0] / max(1e-9, held[1]),
            f"{key}_cached_share": ours.cached_tokens / ours.prompt_tokens,
        }
    return figures


def _path(trace: str) -> Path:
    return DATA / f"{trace}.jsonl.gz"


def _key(trace: str) -> str:
    return "prefix_" + trace.removeprefix("mooncake_").removeprefix("fast25_").split("_")[0]


def losses(rules: Rules) -> Figures:
    """Half of the fleet lost at a load of 0.45, at once, as a region or by itself; links lost under transfers.

    Counted are requests that were taken on and then refused, though what is left could serve them.
    """
    sixteen = [(fleet.mixed(FAST), "east", 8), (fleet.mixed(FAST), "west", 8)]
    rate = 0.45 * 16 * fleet.per_s(FAST)
    requests = fleet.chat(rate, rules.span_s(60.0, 30.0))
    region = rules.run(fleet.closed(sixteen), requests, [Fault(10.0, "region", region="west")])
    half = rules.run(fleet.alike(16), requests, [Fault(10, "replica", replica=f"*#{n}/0") for n in range(8)])
    torn = [
        Fault(10.0 + 2.0 * n, "link", source=source, target="east", factor=0.0, duration_s=0.5)
        for n in range(5)
        for source in SOURCES
    ]
    across = fleet.apart([(source, 1) for source in SOURCES], ("east", 4), 50.0)
    links = rules.run(across, fleet.chat(0.3 * 4 * fleet.per_s(FAST), 30.0), torn)
    figures = {}
    for name, result in (("region", region), ("half", half), ("links", links)):
        figures |= {
            f"losses_{name}_requests": float(len(result.records)),
            f"losses_{name}_refused": float(fleet.refused(result).sum()),
            f"losses_{name}_broken_promises": float(fleet.broken_promises(result, rules.policy.tick_s)),
            f"losses_{name}_attainment": fleet.attainment(result, 0.0, result.end_s),
        }
    return figures


def _p90_s(summary: ModelSummary) -> float:
    return summary.ttft_s.p90 if summary.ttft_s else 0.0


def _prefix_targets() -> dict[str, tuple[str, float]]:
    targets: dict[str, tuple[str, float]] = {}
    for trace, most in TRACES.items():
        if _path(trace).exists():
            for figure in ("mean", "p99"):
                targets[f"{_key(trace)}_{figure}_over_round_robin"] = ("<=", most)
            targets[f"{_key(trace)}_attainment_over_round_robin"] = (">=", 1.0)
    return targets


COMPILED = not step_table.__file__.endswith(".py")


def growth(rules: Rules) -> Figures:
    """CPU per request with 1,000 and 10,000 replicas, over that with one; from the plan to the records."""
    count, repeats = (20_000, 1) if rules.quick else (50_000, 3)
    each_s = {
        n: _least_s(rules, fleets.aggregated(n), count, repeats + (n == 1)) / count for n in (1, 1000, 10_000)
    }
    return {
        "growth_1_us": 1e6 * each_s[1],
        _named("growth_1_to_1000"): each_s[1000] / each_s[1],
        _named("growth_1_to_10000"): each_s[10_000] / each_s[1],
    }


def lookup(rules: Rules) -> Figures:
    """Speed with caches of blocks of 512 tokens and prefix-aware routing, over that of the same eight without."""
    count, repeats = (10_000, 2) if rules.quick else (50_000, 3)
    problem = fleets.aggregated(8)
    plain_s = _least_s(rules, problem, count, repeats)
    return {
        "lookup_requests_per_cpu_s": count / _least_s(rules, problem, count, repeats, 512),
        "lookup_without_requests_per_cpu_s": count / plain_s,
        _named("lookup_over_without"): plain_s / _least_s(rules, problem, count, repeats, 512),
    }


def _least_s(rules: Rules, problem: ResolvedPlan, count: int, repeats: int, block_tokens: int = 0) -> float:
    workload: Workload = fleets.requests(problem, count, SEED, block_tokens)

    def once() -> None:
        gc.collect()
        simulate(problem, workload, rules.policy, seed=SEED)

    return cpu_s(once, repeats)


def _named(figure: str) -> str:
    """The targets are for compiled code; figures of interpreted code have another name."""
    return figure if COMPILED else f"interpreted_{figure}"


TARGETS: dict[str, dict[str, tuple[str, float]]] = {
    "overload": {
        **{f"overload_{factor}x_of_capacity": (">=", 0.9) for factor in ("1.5", "3")},
        **{f"overload_{factor}x_slowest_refusal_s": ("<=", 1.0) for factor in ("1.5", "3")},
    },
    "burst": {"burst_during_of_capacity": (">=", 0.8), "burst_attainment_10_s_after": (">=", 0.95)},
    "slow": {"slow_attainment": (">=", 0.98)},
    "weights": {"weights_attainment": (">=", 0.98)},
    "flood": {
        "flood_other_attainment": (">=", 0.95),
        "flood_other_tpot_over_alone": ("<=", 1.1),
        "flood_flooder_answered_per_s": (">", 0.0),
        "flood_flooder_of_the_rest": (">=", 0.9),
    },
    "link": {"link_tenth_over_dead": (">=", 0.995)},
    "shared_link": {
        "shared_link_ttft_p99_over_half": ("<=", 1.0),
        "shared_link_goodput_ttft_p99_over_half": ("<=", 1.0),
        "shared_link_goodput_attainment": (">=", 0.98),
    },
    "prefix": _prefix_targets(),
    "losses": {f"losses_{name}_broken_promises": ("<=", 0.0) for name in ("region", "half", "links")},
    "growth": {"growth_1_to_1000": ("<=", 2.0), "growth_1_to_10000": ("<=", 3.0)} if COMPILED else {},
    "lookup": {"lookup_over_without": (">=", 0.5)} if COMPILED else {},
}
SCENARIOS: dict[str, Callable[[Rules], Figures]] = {
    one.__name__: one
    for one in (overload, burst, slow, weights, flood, link, shared_link, prefix, losses, growth, lookup)
}
