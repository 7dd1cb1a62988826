"""PrfaaS's case study in simulation, past the paper: queues, bursts, cached prefixes and a link that fluctuates.

Instances take the times of Tables 5 and 6 (`prfaas.case_site`) as profiles, one prompt at a time. Answers of 1,024
tokens at 25 ms a token are 256 at 100 ms here, more than 20 at once in proportion longer: the same 3.91 requests/s of
five instances for a quarter of the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from papers.prfaas_model import Curve, Lengths, Operating, Site
from papers.rows import ProgressReporter, Row, Rows
from potluck.catalog import models, nodes
from potluck.core.state.policy import Policy
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Link, NodeOffer, Region, Slo
from potluck.perf.timers.profile import Profile, ProfilePoint
from potluck.runtime.resolved_plan import EngineSetup, ResolvedPlan
from potluck.sim.load import arrivals
from potluck.sim.load.workload import PrefixBlocks, Workload, workload
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

MODEL, NAME, FAR, NEAR = "prfaas-1t-hybrid", "m", "far", "near"
LONGEST, OUTPUT, STEP_S, SLOTS = 128 * 1024, 256, 0.1, 20
POINTS = (128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 20480, 32768, 49152, 65536, 98304, 131072)
CHUNKS = (512, 2048, 8192)
SITES = {"PrfaaS-PD": (4, 8), "homogeneous": (0, 12), "naive": (4, 8)}  # Instances of H200 and H20.
OVERLOAD, LOAD, BURST_CV, TURN_S, BLOCK = 1.2, 0.8, 4.0, 30.0, 512
THIN_GBPS, THIN_S = 4.0, 60.0
"""The link's bandwidth every other minute: less than a third of what crosses on average."""
SERVED_PER_S = {"PrfaaS-PD": 3.24, "homogeneous": 2.11, "naive": 2.45}
Found = Mapping[str, Operating]


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the case, past the paper."""

    name: str
    cv: float = 1.0
    turns: bool = False  # Every other prompt goes on where an earlier one ended.
    thin: bool = False
    adapt: bool = True  # A threshold that follows the link; else whoever is done first, by the plan's shares.


CASES = (
    Case("Poisson arrivals"),
    Case("bursts", cv=BURST_CV),
    Case("bursts, by shares alone", cv=BURST_CV, adapt=False),
    Case("second turns of conversations", turns=True),
    Case("a link that fluctuates", thin=True),
    Case("a link that fluctuates, by shares alone", thin=True, adapt=False),
)


def rows(
    sites: Mapping[str, Site],
    lengths: Lengths,
    found: Found,
    lasts_s: float,
    seed: int,
    report_progress: ProgressReporter,
) -> list[Row]:
    """What the fleets serve when more comes than they can, then how they fare below that."""
    served: dict[str, float] = {}
    made = Rows(
        "Case study, simulated",
        f"{OVERLOAD:g} times the requests offered; the paper's have no queues",
    )
    for name, best in found.items():
        report_progress(f"PrfaaS, simulated: {name}")
        resolved_plan = fleet(best, sites[name])
        result = simulate(
            resolved_plan, load(lengths, OVERLOAD * best.rate_per_s, lasts_s, seed), _policy(Case(""))
        )
        first_s = result.records.first_token_s
        served[name] = float(((first_s >= lasts_s / 3) & (first_s < lasts_s)).sum() / (lasts_s * 2 / 3))
        note = "idle decode instances take prompts in place here" if name == "naive" else None
        made.add(name, "served, requests/s", SERVED_PER_S[name], served[name], note)
    for name in ("PrfaaS-PD", "naive"):
        theirs, ours = (rates[name] / rates["homogeneous"] for rates in (SERVED_PER_S, served))
        made.add(f"{name} over homogeneous", "served, times", theirs, ours)
    best = found["PrfaaS-PD"]
    rate = LOAD * best.rate_per_s
    for case in CASES:
        report_progress(f"PrfaaS, simulated: {case.name}")
        requests = load(lengths, rate, lasts_s, seed, case.cv)
        if case.turns:
            requests = conversations(requests, round(TURN_S * rate))
        thin = [
            Fault(at, "link", source=FAR, target=NEAR, gbps=THIN_GBPS, duration_s=THIN_S)
            for at in np.arange(THIN_S, lasts_s, 2 * THIN_S)
        ]
        faults = Faults(tuple(thin)) if case.thin else None
        result = simulate(fleet(best, sites["PrfaaS-PD"]), requests, _policy(case), seed=seed, faults=faults)
        made += _figures(case, result, rate)
    return made


def _figures(case: Case, result: SimResult, rate_per_s: float) -> list[Row]:
    records = result.records
    answered = records.outcome == ANSWERED
    ttft_s = (records.first_token_s - records.arrival_s)[answered]
    regions = np.array([replica.region for replica in result.replicas])
    far = float((regions[records.prefill_replica[answered]] == FAR).mean())
    crossed = sum(link.sent_bytes for link in result.links if (link.source, link.target) == (FAR, NEAR))
    made = Rows("Past the paper", f"{rate_per_s:.3g} requests/s, {LOAD:.0%} of the model's rate")
    made.add(case.name, "mean TTFT, s", None, float(ttft_s.mean()))
    made.add(case.name, "P90 TTFT, s", None, float(np.percentile(ttft_s, 90)))
    made.add(case.name, "sent away, share", None, far)
    made.add(case.name, "egress, Gbps", None, crossed * 8e-9 / result.end_s)
    made.add(
        case.name, "cached, share", None, float(records.cached_tokens.sum() / records.prompt_tokens.sum())
    )
    return made


def load(lengths: Lengths, rate_per_s: float, lasts_s: float, seed: int, cv: float = 1.0) -> Workload:
    """Lengths in an order in which any few in a row are like all of them (golden ratio)."""
    count, chance = round(rate_per_s * lasts_s), np.random.default_rng(seed)
    places = (chance.random() + np.arange(count) * 0.6180339887498949) % 1.0
    prompts = lengths.tokens[(places * len(lengths.tokens)).astype(int)].round().astype(int)
    when_s = arrivals.gamma(chance, rate_per_s, cv, count)
    return workload(NAME, when_s, np.minimum(prompts, LONGEST - OUTPUT - 1), np.full(count, OUTPUT))


def conversations(workload: Workload, later: int) -> Workload:
    """So many requests later the same user asks on: the shorter prompt of a pair comes first, and begins the longer.

    Blocks are whole ones: states are kept after the last of a prompt, so a prefix is found whole or not at all.
    """
    prompts, count = workload.prompt_tokens.copy(), len(workload)
    first = np.flatnonzero((np.arange(count) // later % 2 == 0) & (np.arange(count) + later < count))
    pair = np.sort(np.stack([prompts[first], prompts[first + later]]), axis=0)
    prompts[first], prompts[first + later] = pair
    whole, opens = prompts // BLOCK, dict(zip((first + later).tolist(), first.tolist(), strict=True))
    starts = np.concatenate(([0], np.cumsum(whole)))
    ids = np.arange(starts[-1], dtype=np.int64)
    for second, begun in opens.items():
        ids[starts[second] : starts[second] + whole[begun]] = ids[
            starts[begun] : starts[begun] + whole[begun]
        ]
    return replace(workload, prompt_tokens=prompts, blocks=PrefixBlocks(starts, ids, BLOCK))


def fleet(best: Operating, site: Site) -> ResolvedPlan:
    """A plan of these instances and this threshold, written by hand."""
    cut = best.threshold_tokens if best.remote_share > 0 else None
    ends = [LONGEST] if not cut else [round(cut), LONGEST]
    kinds: tuple[tuple[str, Literal["prefill", "decode"], str, str, int], ...] = (
        ("far", "prefill", FAR, "8xH200", best.remote if best.remote_share > 0 else 0),
        ("prefill", "prefill", NEAR, "8xH20", best.prefill),
        ("decode", "decode", NEAR, "8xH20", best.decode),
    )
    templates, deployments, shares, flows = [], [], [], []
    for name, role, region, node, count in kinds:
        if not count:
            continue
        last = len(ends) - 1
        mine = [
            n
            for n in range(len(ends))
            if role == "decode" or (name == "far") == (cut is not None and n == last)
        ]
        rates = (1.0, 0.0, 0.0) if role == "prefill" else (0.0, 1.0, 0.0)
        capacity = tuple(plans.BucketCapacity(n, *rates, 1.0, STEP_S) for n in mine)
        replicas = (plans.PlannedReplica(role, single(node, 8, models.model(MODEL).layer_count)),)
        used = (plans.NodeCount(node, 1),)
        templates.append(plans.Template(name, "homogeneous", NAME, used, replicas, capacity, "measured"))
        deployments.append(plans.Deployment(name, region, count))
        shares += [plans.PlannedShare(name, region, n, role, 1.0) for n in mine]
        flows += [plans.PlannedFlow(NAME, n, region, NEAR, 1.0) for n in mine if role == "prefill"]
    buckets = tuple(plans.LengthBucket(NAME, n, longest, 1.0) for n, longest in enumerate(ends))
    parts = (tuple(templates), tuple(deployments), buckets, tuple(shares), tuple(flows), ())
    thresholds = (plans.PlannedThreshold(NAME, FAR, NEAR, cut),) if cut else ()
    types = {name: nodes.node_type(name) for name in ("8xH200", "8xH20")}
    where = ((FAR, "8xH200"), (NEAR, "8xH20"))
    return ResolvedPlan(
        plans.Plan("by hand", *parts, 1.0, 0.0, thresholds=thresholds),
        {NAME: models.model(MODEL)},
        types,
        tuple(Region(name, (NodeOffer(node, 1.0, 100),)) for name, node in where),
        tuple(Link(a, b, site.egress_gbps, 1e-3) for a, b in ((FAR, NEAR), (NEAR, FAR))),
        slos={NAME: Slo(60.0, 1.5 * STEP_S)},
        mean_tokens={NAME: (27_000.0, float(OUTPUT))},
        engines={(name, 0): EngineSetup(LONGEST, 1) for name in ("far", "prefill")},
        profiles={NAME: (profile_of("H200", site.remote_prefill_s), profile_of("H20", site.local_prefill_s))},
    )


def profile_of(gpu: str, curve: Curve, model: str = MODEL) -> Profile:
    """Steps of eight GPUs that take `curve` for a prompt. The paper has no chunks: one takes what the curve rises by,
    and beside answers a step of theirs longer."""
    points = [ProfilePoint(tokens, 0, 0, 0, float(curve.at(tokens))) for tokens in POINTS]
    for count, context in product((0, 1, 4, 12, 20, 30, 40, 60), (1000, 10_000, 30_000, 130_000)):
        decodes, step_s = (count, count * context), STEP_S * max(1.0, count / SLOTS)
        points += [ProfilePoint(0, 0, *decodes, step_s)] if count else []
        points += [ProfilePoint(new, context, *decodes, step_s) for new in (1, 16)]
    for new, cached, count in product(CHUNKS, (0, *POINTS[4::2]), (0, 1, 4, 8, 12, 20, 30, 40)):
        if (count or cached) and cached + new <= LONGEST:
            step_s = STEP_S * max(1.0, count / SLOTS) if count else 0.0
            chunk_s = float(curve.at(cached + new) - (curve.at(cached) if cached else 0.0))
            points.append(ProfilePoint(new, cached, count, count * 30_000, chunk_s + step_s))
    return Profile(gpu, model, 8, "PrfaaS, tables 5 and 6", {}, "2026-11-18", tuple(points))


def _policy(case: Case) -> Policy:
    return Policy(admission=False, max_wait_s=1e9, adapt_threshold=case.adapt)
