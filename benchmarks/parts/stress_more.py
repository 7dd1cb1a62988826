"""Stress that has no target of its own, to find what the rules do badly: `benchmarks/stress.py --more`.

Each figure is an attainment unless its name says otherwise. Four H100s as in stress_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parts import simulate_fleets
from parts import stress_fleets as fleet
from parts.stress_fleets import FAST, SMALL, Rules
from parts.stress_scenarios import Figures, Scenario, four
from potluck.core.values.plan import Deployment
from potluck.core.values.service import Tenant
from potluck.core.values.types import NodeOffer, Region
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.request_labels import RequestLabels
from potluck.sim.load.workload import Workload, labelled, merge
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Fault

END_S = 120.0


def replicas(rules: Rules) -> Figures:
    """Replicas that are slow, change their speed, or take requests and never answer."""
    rate = fleet.capacity_per_s(four, rules)
    all_s = 1e9

    def slow(place: int, factor: float, from_s: float = 0.0, for_s: float = all_s) -> Fault:
        return Fault(from_s, "slow", replica=f"*#{place}/0", factor=factor, duration_s=for_s)

    cases: dict[str, tuple[float, Sequence[Fault]]] = {
        "two_slow_load_0.6": (0.6, [slow(0, 2.0), slow(1, 2.0)]),
        "slow_then_fast_load_0.7": (0.7, [slow(0, 3.0, 10.0, 40.0)]),
        "turns_slow_load_0.7": (0.7, [slow(n % 4, 2.0, 10.0 * n, 10.0) for n in range(12)]),
        "ten_times_slower_load_0.6": (0.6, [slow(0, 10.0)]),
        "stalls_for_good_load_0.6": (0.6, [slow(0, 1e4, 20.0)]),
        "stalls_a_while_load_0.6": (0.6, [slow(0, 1e3, 20.0, 15.0)]),
    }
    figures = {}
    for name, (load, faults) in cases.items():
        result = rules.run(four(), fleet.chat(load * rate, END_S), faults)
        figures[name] = fleet.attainment(result, 0.0, END_S)
        figures[f"{name}_last_30_s"] = fleet.attainment(result, END_S - 30.0, END_S)
    return figures


def reports(rules: Rules) -> Figures:
    """A slow replica and a slow link while reports come 5 s late, or do not come."""
    rate = fleet.capacity_per_s(four, rules)
    slow = Fault(0.0, "slow", replica="*#0/0", factor=2.0)
    mute = Fault(0.0, "reports", replica="*", duration_s=END_S)
    late = SimSettings(tick_s=rules.policy.tick_s, report_delay_s=5.0)
    tenth = Fault(20.0, "link", source="west", target="east", factor=0.1, duration_s=20.0)
    chat, few = fleet.chat(0.75 * rate, END_S), fleet.chat(0.3 * 2 * fleet.per_s(FAST), 60.0)
    apart = fleet.apart([("west", 2)], ("east", 2), 100.0)
    runs = {
        "slow_reports_5_s_late": rules.run(four(), chat, [slow], late),
        "slow_reports_lost": rules.run(four(), chat, [mute, slow]),
        "overload_reports_5_s_late": rules.run(four(), fleet.chat(2.0 * rate, END_S), [], late),
        "link_tenth_reports_5_s_late": rules.run(apart, few, [tenth], late),
        "link_tenth_reports_lost": rules.run(apart, few, [mute, tenth]),
    }
    return {name: fleet.attainment(result, 0.0, END_S) for name, result in runs.items()}


def links(rules: Rules) -> Figures:
    """Links that come and go, and cards that are too small for what the plan sends over them."""
    apart = fleet.apart([("west", 2)], ("east", 2), 100.0)
    figures = {}
    for name, load, faults in (
        ("flaps_down", 0.3, [_link(10.0 + 4.0 * n, 0.0, 2.0) for n in range(10)]),
        ("flaps_to_tenth", 0.3, [_link(10.0 + 4.0 * n, 0.1, 2.0) for n in range(10)]),
        ("half_for_good", 0.3, [_link(10.0, 0.5, 1e9)]),
        ("cards_too_small", 0.5, []),
    ):
        result = rules.run(apart, fleet.chat(load * 2 * fleet.per_s(FAST), 60.0), faults)
        figures[f"link_{name}"] = fleet.attainment(result, 0.0, 60.0)
    return figures


def _link(at_s: float, factor: float, duration_s: float) -> Fault:
    return Fault(at_s, "link", source="west", target="east", factor=factor, duration_s=duration_s)


def prompts(rules: Rules) -> Figures:
    """Twenty prompts of 30,000 tokens at one moment, every 10 s, beside chat at a load of 0.5."""
    chat = fleet.chat(0.5 * fleet.capacity_per_s(four, rules), 60.0)
    long = fleet.alike_requests(2.0, 60.0, 30_000, 100)
    long = replace(long, arrival_s=np.floor(long.arrival_s / 10.0) * 10.0 + 5.0)
    both = merge([chat, long])
    result = rules.run(four(), both)
    short = both.prompt_tokens != 30_000
    met = fleet.good(result)
    return {"long_bursts_chat": float(met[short].mean()), "long_bursts_long": float(met[~short].mean())}


def kinds(rules: Rules) -> Figures:
    """Combos, pairs, and prefill apart, at 0.7 of their capacity and at twice it; goodput of capacity."""
    figures = {}
    for name, make in (("combos", _combos), ("pairs", _pairs), ("apart", _apart)):
        capacity = fleet.capacity_per_s(make, rules)
        for load in (0.7, 2.0):
            result = rules.run(make(), fleet.chat(load * capacity, 90.0))
            figures[f"{name}_at_{load:g}_of_capacity"] = fleet.good_per_s(result, 30.0, 90.0) / capacity
            figures[f"{name}_at_{load:g}_slowest_refusal_s"] = fleet.slowest_refusal_s(result)
        figures[f"{name}_capacity_per_s"] = capacity
    return figures


def _combos() -> ResolvedPlan:
    return simulate_fleets.combos(2)


def _pairs() -> ResolvedPlan:
    pair = simulate_fleets.template(
        "chat: pair", "pair", [("prefill", SMALL), ("mixed", FAST)], (0.0, 0.0, 24.0)
    )
    return fleet.closed([(pair, "east", 2)])


def _apart() -> ResolvedPlan:
    return fleet.apart([("east", 2)], ("east", 2), 100.0)


def models(rules: Rules) -> Figures:
    """Three models with two replicas each; one is asked for three times what its two can do."""
    base = fleet.alike(2)
    names = ("a", "b", "c")
    plan, each = base.plan, base.plan.templates[0]
    templates = [replace(each, name=f"{name}: {FAST}", model=name) for name in names]
    plan = replace(
        plan,
        templates=tuple(templates),
        deployments=tuple(Deployment(t.name, "east", 2) for t in templates),
        buckets=tuple(replace(plan.buckets[0], model=name) for name in names),
        shares=tuple(replace(plan.shares[0], template=t.name) for t in templates),
        predictions=tuple(replace(plan.predictions[0], model=name) for name in names),
    )
    offers = Region("east", (NodeOffer(FAST, 2.0, 100),))
    problem = replace(
        base,
        plan=plan,
        models=dict.fromkeys(names, simulate_fleets.LLAMA),
        regions=(offers,),
        slos=dict.fromkeys(names, fleet.SLO),
        mean_tokens=dict.fromkeys(names, base.mean_tokens[fleet.MODEL]),
    )
    rate = 2 * fleet.per_s(FAST)
    loads = [
        replace(fleet.chat(share * rate, 60.0, 20 + place), models=(name,))
        for place, (name, share) in enumerate(zip(names, (3.0, 0.7, 0.7), strict=True))
    ]
    both = merge(loads)
    result = rules.run(problem, both)
    met, arrived = fleet.good(result), result.records.arrival_s >= 20.0
    shares = [float(met[(both.model == place) & arrived].mean()) for place in range(3)]
    return {"models_overloaded": shares[0], "models_second": shares[1], "models_third": shares[2]}


def cold(rules: Rules) -> Figures:
    """A replica is lost at 10 s and comes back cold; load 0.7. With prefixes shared, so that its cache is empty."""
    rate = 0.7 * fleet.capacity_per_s(four, rules)
    lost = [Fault(10.0, "replica", replica="*#0/0")]
    result = rules.run(four(), fleet.chat(rate, 300.0), lost)
    shared = simulate_fleets.with_prefixes(fleet.chat(rate, 300.0), 0.5, fleet.SEED)
    cached = rules.run(four(), shared, lost)
    return {"cold": fleet.attainment(result, 0.0, 300.0)} | {
        "cold_prefixes": fleet.attainment(cached, 0.0, 300.0),
        "cold_refused": float(fleet.refused(result).sum()),
        "cold_back_after_s": max((r.ready_s or 0.0) for r in result.replicas),
    }


def tenants(rules: Rules) -> Figures:
    """Two tenants of 100 to 1 who each ask for all there is; a thousand tenants at 0.7 and at 1.5 of capacity."""
    capacity = fleet.capacity_per_s(four, rules)
    weighed = replace(
        rules, policy=replace(rules.policy, tenants=(Tenant("big", 100.0), Tenant("small", 1.0)))
    )
    pair = merge(
        [labelled(fleet.chat(capacity, 60.0, seed), name) for seed, name in ((1, "big"), (2, "small"))]
    )
    result = weighed.run(four(), pair)
    assert pair.labels is not None
    figures = {
        f"tenants_100_to_1_{name}_good_per_s": _late_good(result, pair.labels.tenant == place) / 40.0
        for place, name in enumerate(pair.labels.tenants)
    }
    for load in (0.7, 1.5):
        many = _labelled_by_chance(fleet.chat(load * capacity, 60.0), 1000)
        result = rules.run(four(), many)
        figures[f"tenants_1000_at_{load:g}_of_capacity"] = fleet.good_per_s(result, 20.0, 60.0) / capacity
    # All together ask for twice what there is, three quarters of it by one of them.
    quiet_load = _labelled_by_chance(fleet.chat(0.5 * capacity, 60.0), 100)
    many = merge([quiet_load, labelled(fleet.chat(1.5 * capacity, 60.0, 9), "loud")])
    assert many.labels is not None
    quiet = many.labels.tenant != many.labels.tenants.index("loud")
    result = rules.run(four(), many)
    figures["tenants_100_quiet_beside_a_loud"] = float(fleet.good(result)[quiet].mean())
    figures["tenants_loud_answered_per_s"] = float((result.records.outcome == ANSWERED)[~quiet].sum()) / 60.0
    return figures


def _late_good(result: SimResult, chosen: fleet.Mask) -> float:
    """Good ones that arrived in [20, 60)."""
    return float((fleet.good(result) & chosen & fleet.between(result.records, 20.0, 60.0)).sum())


def _labelled_by_chance(load: Workload, count: int) -> Workload:
    who = np.random.default_rng(fleet.SEED).integers(count, size=len(load)).astype(np.int32)
    names = tuple(f"tenant {n}" for n in range(count))
    same = np.zeros(len(load), dtype=np.int32)
    return replace(load, labels=RequestLabels(names, who, ("standard",), same, np.full(len(load), np.inf)))


MORE = tuple(
    Scenario(run.__name__, run, {})
    for run in (replicas, reports, links, prompts, kinds, models, cold, tenants)
)
