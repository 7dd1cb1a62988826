"""PrfaaS's case study as files: its prefill and decode times as profiles, its instances as plans, its lengths.

Prefill of 8 H200 is its Table 5; of 8 H20 a + b T_H200, fixed by two throughputs of Table 6: nine instances at the
mean length give 2.11 requests/s, three at the mean below the threshold 1.64. One prompt at a time, as its throughput
model has it. Answers of 1,024 tokens at 25 ms are 256 at 100 ms here, with more than 20 at once in proportion longer:
five instances give the 3.91 requests/s of Table 6, and this machine has a quarter of the tokens to hand on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parts.common import ROOT
from potluck.catalog import models
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.planning.estimate import measured
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Role
from potluck.perf.memory import kv_bytes_per_token, state_bytes
from potluck.perf.step_timer import Floats
from potluck.perf.timers.profile import profile_to_json
from potluck.runtime.resolved_plan import EngineSetup, ResolvedPlan
from potluck.sim.load.workload import Workload, workload

sys.path.insert(0, str(ROOT / "lab"))
from papers.prfaas_case import FAR, LONGEST, MODEL, NAME, NEAR, OUTPUT, profile_of
from papers.prfaas_case import SLOTS as DECODE_SLOTS
from papers.prfaas_case import STEP_S as DECODE_STEP_S
from papers.prfaas_model import Curve, Lengths, Site, local_from_remote, truncated_lognormal

THRESHOLD = 19_400
SPEC = """models:
  - model: {model}
    name: {name}
    slo: {{ttft_ms: 60000, tpot_ms: 150}}
    traffic: {{rate_per_s: 3.24, input: {{mean: 27486, cv: 1.0}}, output: {output}}}
policy:
  classes: [{{name: standard, late: true, max_wait_s: 600}}]
fleet:
  regions:
    - {{name: far, nodes: [{{node: 8xH200, available: 4, price_usd_per_h: 30}}]}}
    - {{name: near, nodes: [{{node: 8xH20, available: 12, price_usd_per_h: 10}}]}}
links:
  - {{from: far, to: near, gbps: {gbps:g}, rtt_ms: 1}}
  - {{from: near, to: far, gbps: {gbps:g}, rtt_ms: 1}}
"""


@dataclass(frozen=True)
class Arrangement:
    """Instances, and from which length on prompts go to the far site; None: none do, 0: all."""

    far: int
    prefill: int
    decode: int
    threshold_tokens: int | None


SELECTIVE = Arrangement(4, 3, 5, THRESHOLD)
HOMOGENEOUS = Arrangement(0, 9, 3, None)
NAIVE = Arrangement(4, 0, 8, 0)


def kv_bytes(tokens: Floats, catalog: str = MODEL) -> Floats:
    known = models.model(catalog)
    return state_bytes(known) + kv_bytes_per_token(known) * np.asarray(tokens, np.float64)


def curves(catalog: str = MODEL) -> tuple[Curve, Curve, Curve]:
    """Seconds of prefill far and near, of the hybrid model, and bytes of a model's KV, by length."""
    rows = models.published(MODEL)
    prefill = rows["prefill_8xh200_s"]
    far = Curve(tuple(map(float, prefill)), tuple(prefill.values()))
    lengths = prompt_lengths()
    short = float(lengths.tokens[lengths.tokens <= THRESHOLD].mean())
    mean = float((lengths.tokens * lengths.share).sum())
    near = local_from_remote(far, ((short, 3 / 1.64), (mean, 9 / 2.11)))
    return far, near, Curve((0.0, 1e6), tuple(kv_bytes(np.array([0.0, 1e6]), catalog).tolist()))


def prompt_lengths() -> Lengths:
    return truncated_lognormal(9.90, 1.00, 128, LONGEST)


def site(arrangement: Arrangement, gbps: float, catalog: str = MODEL) -> Site:
    local = arrangement.prefill + arrangement.decode
    return Site(arrangement.far, local, gbps, *curves(catalog), OUTPUT * DECODE_STEP_S / DECODE_SLOTS)


def write_profiles(folder: Path, catalog: str = MODEL) -> tuple[Path, Path]:
    paths = []
    for gpu, curve in zip(("H200", "H20"), curves(), strict=False):
        paths.append(folder / f"{gpu}.json")
        paths[-1].write_text(profile_to_json(profile_of(gpu, curve, catalog)), "utf-8")
    return paths[0], paths[1]


def write_plan(folder: Path, what: Arrangement, gbps: float, catalog: str = MODEL) -> tuple[Path, Path]:
    """Files of a plan and its spec. Rates are what the throughput model gives each kind of instance."""
    kinds: list[tuple[str, Role, str, str, int]] = [
        ("far", "prefill", FAR, "8xH200", what.far),
        ("prefill", "prefill", NEAR, "8xH20", what.prefill),
        ("decode", "decode", NEAR, "8xH20", what.decode),
    ]
    cut = what.threshold_tokens
    ends = [LONGEST] if not cut else [cut, LONGEST]
    templates, deployments, shares, flows = [], [], [], []
    for name, role, region, node, count in kinds:
        if not count:
            continue
        rates = (1.0, 0.0, 0.0) if role == "prefill" else (0.0, 1.0, 0.0)
        mine = [
            n
            for n in range(len(ends))
            if role == "decode" or (name == "far") == (cut is not None and n == len(ends) - 1)
        ]
        capacity = tuple(plans.BucketCapacity(n, *rates, 1.0, DECODE_STEP_S) for n in mine)
        replicas = (plans.PlannedReplica(role, single(node, 8, models.model(catalog).layer_count)),)
        about = (name, "homogeneous", NAME, (plans.NodeCount(node, 1),), replicas, capacity, "measured")
        templates.append(plans.Template(*about))
        deployments.append(plans.Deployment(name, region, count))
        shares += [plans.PlannedShare(name, region, n, role, 1.0) for n in mine]
        if role == "prefill":
            flows += [plans.PlannedFlow(NAME, n, region, NEAR, 1.0) for n in mine]
    buckets = tuple(plans.LengthBucket(NAME, n, longest, 1.0) for n, longest in enumerate(ends))
    parts = (tuple(templates), tuple(deployments), buckets, tuple(shares), tuple(flows), ())
    stated = (plans.PlannedThreshold(NAME, FAR, NEAR, float(cut)),) if cut else ()
    plan_path, spec_path = folder / "plan.json", folder / "potluck.yaml"
    made = plans.Plan("by hand", *parts, 1.0, 0.0, thresholds=stated)
    plan_path.write_text(plans.plan_to_json(made), "utf-8")
    spec_path.write_text(SPEC.format(model=catalog, name=NAME, output=OUTPUT, gbps=gbps), "utf-8")
    return plan_path, spec_path


def scene(plan: Path, spec_path: Path, profiles: Sequence[Path]) -> ResolvedPlan:
    """The same for the simulator."""
    spec = read_spec(spec_path)
    problem = measured(load_problem(spec, 0.8, None, (), 0.0), tuple(profiles))
    resolved = scene_of(SimulationInputs(spec, problem, plans.plan_from_json(plan.read_text("utf-8"))))
    return replace(resolved, engines={(name, 0): EngineSetup(LONGEST, 1) for name in ("far", "prefill")})


def load(rate_per_s: float, lasts_s: float, seed: int, output: int = OUTPUT) -> Workload:
    """Lengths in an order in which any few in a row are like all of them (golden ratio); Poisson arrivals."""
    count = round(rate_per_s * lasts_s)
    chance = np.random.default_rng(seed)
    lengths = prompt_lengths().tokens
    places = (chance.random() + np.arange(count) * 0.6180339887498949) % 1.0
    prompts = np.minimum(
        lengths[(places * len(lengths)).astype(int)].round().astype(int), LONGEST - output - 1
    )
    arrivals = np.sort(chance.uniform(0.0, lasts_s, count))
    return workload(NAME, arrivals, prompts, np.full(count, output))
