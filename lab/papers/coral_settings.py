"""CORAL's two settings (its 6.1), the strategies that it compares, and how many nodes there are.

Every model has the paper's rate at its trace's mean lengths, prices are the catalog's of its regions. Baselines *as
printed*: a replica is one whole node that does one phase; Homo takes for each model and phase the type that does most
for a dollar, Cauchy combos of such nodes by CO-LP. *Strong*: all degrees of tensor parallelism, several replicas on a
node, both phases on one node, and counts by the same integer program as ours (`single`; `cauchy-mc`).

The paper scales a production trace to what is available; of that trace no times are published. Here each node type of
each region has a stretch of its own of the counts of spot nodes that were there when 16 were asked for (`TRACE`) plus
one, or of a made-up series, times a scale.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from potluck.catalog import models, named_workloads, nodes, prices
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import Planner, solve_over
from potluck.sim.load.arrivals import draw

LENGTHS = {"conv": (1155, 211), "code": (2048, 28), "burst": (768, 195)}
CORE = {
    "Phi-4": (1.2, 0.060, "conv"),
    "GPT-OSS-20B": (0.9, 0.030, "code"),
    "Qwen3-32B": (1.6, 0.100, "burst"),
}
EXTENDED = CORE | {
    "Llama-3-70B": (1.5, 0.080, "burst"),
    "GPT-OSS-120B": (1.0, 0.040, "conv"),
    "Qwen3-235B-A22B": (1.8, 0.120, "code"),
}
ASKED = {"core": CORE, "extended": EXTENDED}
COUNTS = (1, 2, 4, 8)
SAMPLE = 1000
AMPLE = 200
RATES_PER_S = {"core": 10.0, "extended": 25.0}
REGIONS = ("aws/us-east-2", "aws/ap-northeast-2", "gcp/us-central1")
PAPER = {"core": {"homo": 1.62, "cauchy": 1.60}, "extended": {"homo": 3.14, "cauchy": 2.66}}
LARGE = {"core": ("Qwen3-32B",), "extended": ("Qwen3-235B-A22B", "GPT-OSS-120B")}
SMALL = {"core": ("Phi-4",), "extended": ("Phi-4", "GPT-OSS-20B")}
HEAVY_SHARE = 0.8
TRACE, PROBED = "spot_v100_k80_traces_rle.csv.gz", 16
EPOCHS, EPOCH_S = 5, 360.0
Supply = Mapping[tuple[str, str], int]  # (region, node type) to how many there are.


def problem(
    setting: str, rates_per_s: Mapping[str, float] | None = None, supply: Supply | None = None
) -> PlanningProblem:
    """CORAL's setting: some models, GPU types times 1, 2, 4, 8, and regions with the catalog's prices."""
    gpus = ("L40S", "L4", "A10G") if setting == "core" else ("H100", "A100", "L40S", "L4", "A10G")
    asks = []
    for name, (ttft_s, tpot_s, trace) in ASKED[setting].items():
        rate_per_s = RATES_PER_S[setting] if rates_per_s is None else rates_per_s[name]
        traffic = Traffic(name, rate_per_s, (LengthBin(*LENGTHS[trace], 1.0),))
        asks.append(model_demand(name, models.model(name), Slo(ttft_s, tpot_s), traffic))
    types = [nodes.node_type(f"{count}x{gpu}") for gpu in gpus for count in COUNTS]
    regions = []
    for place in REGIONS[:2] if setting == "core" else REGIONS:
        usd = {price.node: price.price_usd_per_h for price in reversed(list(prices.in_region(place)))}
        there = [node.name for node in types if node.name in usd]
        offers = [NodeOffer(n, usd[n], AMPLE if supply is None else supply[place, n]) for n in there]
        regions.append(Region(place, tuple(offers)))
    return PlanningProblem(tuple(asks), tuple(regions), tuple(types), codecs=CODECS)


def heavy_rates_per_s(setting: str, heavy: Sequence[str]) -> dict[str, float]:
    """These models have four fifths of all requests, each as many; the others share the rest."""
    names, total = list(ASKED[setting]), RATES_PER_S[setting] * len(ASKED[setting])
    light = total * (1 - HEAVY_SHARE) / (len(names) - len(heavy))
    return {name: total * HEAVY_SHARE / len(heavy) if name in heavy else light for name in names}


def with_lengths(each: PlanningProblem) -> PlanningProblem:
    """Prompts of three lengths, the means of thirds of Azure's, in place of their mean; answers are as they were."""
    asks, chance = [], np.random.default_rng(0)
    for demand in each.demands:
        trace = ASKED["extended"][demand.name][2]
        law = named_workloads.workload("azure-code" if trace == "code" else "azure-conv").lengths
        prompts = np.sort(draw(chance, law, 3 * SAMPLE)[0]).reshape(3, SAMPLE).mean(axis=1)
        mean, output = LENGTHS[trace]
        bins = tuple(LengthBin(round(n * mean / prompts.mean()), output, 1 / 3) for n in prompts.tolist())
        traffic = Traffic(demand.name, demand.rate_per_s, bins)
        asks.append(model_demand(demand.name, demand.model, demand.slo, traffic))
    return replace(each, demands=tuple(asks))


def slower(each: PlanningProblem, times: float) -> PlanningProblem:
    """With GPUs that compute so many times slower; memory is as fast as it was."""
    made = (replace(n, gpu=replace(n.gpu, fp16_tflops=n.gpu.fp16_tflops / times)) for n in each.nodes)
    return replace(each, nodes=tuple(made))


@dataclass(frozen=True, slots=True)
class Availability:
    """By epoch, region and node type: the share of its nodes that is there."""

    shares: tuple[Mapping[tuple[str, str], float], ...]
    source: str

    def supply(self, epoch: int, scale: float) -> Supply:
        """With as many GPUs of each type and size in a region, by `scale`."""
        return {
            (region, node): round(scale * share / nodes.node_type(node).gpus)
            for (region, node), share in self.shares[epoch].items()
        }


def availability(each: PlanningProblem, folder: Path | None, seed: int) -> Availability:
    keys = [(region.name, offer.node) for region in each.regions for offer in region.offers]
    path = None if folder is None else folder / TRACE
    if path is None or not path.is_file():
        drawn = np.random.default_rng(seed).lognormal(-0.3, 0.75, (EPOCHS, len(keys))).clip(0.0, 1.0)
        return Availability(tuple(dict(zip(keys, row, strict=True)) for row in drawn.tolist()), "made up")
    series = list(_counts(path))
    step = len(series[0]) // len(keys)
    shares = []
    for epoch in range(EPOCHS):
        there = [
            series[n % len(series)][(seed + n * step + epoch) % len(series[0])] for n in range(len(keys))
        ]
        shares.append({key: (count + 1) / (PROBED + 1) for key, count in zip(keys, there, strict=True)})
    return Availability(tuple(shares), f"spot counts of {path.name}")


def _counts(path: Path) -> list[list[float]]:
    """The zones where 16 nodes were asked for: nodes there, by epochs of the paper's length."""
    runs: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["kind"] == "availability" and row["nodes_probed"] == f"{PROBED}-node":
                span_s = float(row["run_length_ticks"]) * float(row["gap_seconds"])
                runs.setdefault(row["zone"], []).append((span_s, float(row["value"])))
    result = []
    for zone in sorted(runs):
        ends_s = np.cumsum([span_s for span_s, _ in runs[zone]])
        at_s = np.arange(0.0, float(ends_s[-1]), EPOCH_S)
        values = [value for _, value in runs[zone]]
        result.append([values[place] for place in np.searchsorted(ends_s, at_s, side="right")])
    shortest = min(len(values) for values in result)
    return [values[:shortest] for values in result]


def as_printed(each: PlanningProblem, factory: TemplateFactory | None = None) -> TemplateFactory:
    """A factory whose replicas are whole nodes that do one phase."""
    made = TemplateFactory(each) if factory is None else replace(factory, problem=each, templates_by_kind={})
    for one in each.demands:
        whole = [t for t in made.phased(one) if len(t.replicas) == 1]
        there = {t.replicas[0].role for t in whole}
        rest = [t for t in made.phased(one) if t.replicas[0].role not in there]
        made.templates_by_kind["homogeneous", one.key] = whole + rest
    return made


def homo_as_printed(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """For each model and phase the type that does most for a dollar, the next where a region has too few of it.

    Models choose by themselves: each as if all nodes were there for it.
    """
    supplies = [
        {offer.node: offer.available for offer in region.offers} for region in factory.problem.regions
    ]

    def rate_per_s(template: Template) -> float:
        return template.capacity[0].prefill_per_s + template.capacity[0].decode_per_s

    def worth(template: Template) -> float:
        return rate_per_s(template) / factory.prices.get(template.nodes[0].node, float("inf"))

    chosen: dict[str, list[Template]] = {one.name: [] for one in factory.problem.demands}
    for one, role, there in product(factory.problem.demands, ("prefill", "decode"), supplies):
        phase = [
            t for t in factory.homogeneous(one) if t.replicas[0].role == role and there.get(t.nodes[0].node)
        ]
        left_per_s = one.rate_per_s
        for template in sorted(phase, key=worth, reverse=True):
            if left_per_s > 0:
                chosen[one.name].append(template)
                left_per_s -= there[template.nodes[0].node] * rate_per_s(template) * factory.problem.headroom
    chosen = {name: list(dict.fromkeys(templates)) for name, templates in chosen.items()}
    return solve_over(factory, settings, "homo", chosen)


def single(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    made = {one.name: factory.homogeneous(one) for one in factory.problem.demands}
    return solve_over(factory, settings, "single", made)


def by_phase(each: PlanningProblem, plan: Plan) -> dict[tuple[str, str], float]:
    """Rent of each model's prefill, decode and other nodes."""
    paid = {(at.name, offer.node): offer.price_usd_per_h for at in each.regions for offer in at.offers}
    phase: dict[tuple[str, str], float] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        roles = {replica.role for replica in template.replicas}
        key = (template.model, roles.pop() if len(roles) == 1 else "both")
        rents = [paid[deployment.region, item.node] * item.count for item in template.nodes]
        phase[key] = phase.get(key, 0.0) + deployment.count * sum(rents)
    return phase


WAYS: Mapping[str, tuple[bool, Planner]] = {
    "homo as printed": (True, homo_as_printed),
    "cauchy as printed": (True, STRATEGIES["cauchy"]),
    "single": (False, single),
    **{name: (False, STRATEGIES[name]) for name in ("homo", "cauchy", "cauchy-mc", "coral", "auto")},
}
"""A strategy's name to whether its replicas are whole nodes, and itself."""
