"""What joint planning saves: CORAL's two settings at its rates, beside the paper's figures.

    python benchmarks/savings.py [--quick] [--json] [--only core|extended]... [--limit 60]

CORAL reports the hourly cost of Homo and Cauchy over that of its own plans, for traces and prices that are not
published. Here every model has the paper's rate at its trace's mean lengths, nodes are ample, prices are the
catalog's. Baselines are made twice. *As printed*: a replica is one whole node that does one phase; Homo takes for
each model and phase the type that does most for a dollar, Cauchy combos of such nodes by CO-LP. *As strong as there
are*: all degrees of tensor parallelism, several replicas on a node, both phases on one node, and counts by the same
integer program as ours (`single`); Cauchy's combos for the least cost (`cauchy-mc`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from parts.common import options, run
from potluck.catalog import models, nodes, prices
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import allocated
from potluck.plan.verify import verify

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
COUNTS = (1, 2, 4, 8)
AMPLE = 200
RATES_PER_S = {"core": 10.0, "extended": 25.0}
REGIONS = ("aws/us-east-2", "aws/ap-northeast-2", "gcp/us-central1")
PAPER = {"core": {"homo": 1.62, "cauchy": 1.60}, "extended": {"homo": 3.14, "cauchy": 2.66}}
RIVALS = {
    "homo": ("homo as printed", "homo", "single"),
    "cauchy": ("cauchy as printed", "cauchy", "cauchy-mc"),
}


def problem(setting: str) -> PlanningProblem:
    """CORAL's setting: some models, GPU types times 1, 2, 4, 8, and regions with the catalog's prices."""
    core = setting == "core"
    asked = CORE if core else EXTENDED
    gpus = ("L40S", "L4", "A10G") if core else ("H100", "A100", "L40S", "L4", "A10G")
    asks = []
    for name, (ttft_s, tpot_s, trace) in asked.items():
        traffic = Traffic(name, RATES_PER_S[setting], (LengthBin(*LENGTHS[trace], 1.0),))
        asks.append(model_demand(name, models.model(name), Slo(ttft_s, tpot_s), traffic))
    types = [nodes.node_type(f"{count}x{gpu}") for gpu in gpus for count in COUNTS]
    regions = []
    for place in REGIONS[:2] if core else REGIONS:
        usd = {price.node: price.price_usd_per_h for price in reversed(list(prices.in_region(place)))}
        offers = tuple(NodeOffer(node.name, usd[node.name], AMPLE) for node in types if node.name in usd)
        regions.append(Region(place, offers))
    return PlanningProblem(tuple(asks), tuple(regions), tuple(types), codecs=CODECS)


def as_printed(each: PlanningProblem) -> TemplateFactory:
    factory = TemplateFactory(each)
    for one in each.asks:
        whole = [t for t in factory.phased(one) if len(t.replicas) == 1]
        there = {t.replicas[0].role for t in whole}
        rest = [t for t in factory.phased(one) if t.replicas[0].role not in there]
        factory.made["homogeneous", one.key] = whole + rest
    return factory


def homo_as_printed(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """For each model and phase the type that does most for a dollar."""

    def worth(template: Template) -> float:
        (rates,) = template.capacity
        return (rates.prefill_per_s + rates.decode_per_s) / factory.prices[template.nodes[0].node]

    chosen = {}
    for one in factory.problem.asks:
        made = factory.homogeneous(one)
        phases = [[t for t in made if t.replicas[0].role == role] for role in ("prefill", "decode")]
        chosen[one.name] = [max(phase, key=worth) for phase in phases if phase]
    return allocated(factory, settings, "homo", chosen)


def single(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    made = {one.name: factory.homogeneous(one) for one in factory.problem.asks}
    return allocated(factory, settings, "single", made)


def plans(each: PlanningProblem, limit_s: float) -> Iterator[tuple[str, Plan, float]]:
    """(name, plan, CPU-seconds) of every strategy."""
    ours, theirs = TemplateFactory(each), as_printed(each)
    ways = {
        "homo as printed": (theirs, homo_as_printed),
        "cauchy as printed": (theirs, STRATEGIES["cauchy"]),
        "single": (ours, single),
        **{name: (ours, STRATEGIES[name]) for name in ("homo", "cauchy", "cauchy-mc", "coral", "auto")},
    }
    for name, (factory, strategy) in ways.items():
        start_s = time.process_time()
        yield name, strategy(factory, SolveSettings(time_limit_s=limit_s)).plan, time.process_time() - start_s


def key_of(strategy: str) -> str:
    return strategy.replace(" ", "_")


def measure(quick: bool, settings: Sequence[str], limit_s: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for setting in settings[:1] if quick else settings:
        item = problem(setting)
        for name, plan, cpu_s in plans(item, 4.0 if quick else limit_s):
            key = f"{setting}_{key_of(name)}"
            figures |= {
                f"{key}_usd_per_h": plan.cost_usd_per_h,
                f"{key}_gap": plan.gap,
                f"{key}_served": plan.fraction,
                f"{key}_cpu_s": cpu_s,
                f"{key}_gpus": sum(item.node(node).gpus * count for (_, node), count in plan.nodes.items()),
                f"{key}_violations": len(verify(item, plan)),
            }
            for (model, role), usd in sorted(by_phase(item, plan).items()):
                figures[f"{key}_{model}_{role}_usd_per_h"] = usd
        for baseline, published in PAPER[setting].items():
            figures[f"{setting}_{baseline}_over_coral_published"] = published
            for rival in RIVALS[baseline]:
                for mine in ("coral", "auto"):
                    theirs, own = (figures[f"{setting}_{key_of(one)}_usd_per_h"] for one in (rival, mine))
                    figures[f"{setting}_{key_of(rival)}_over_{mine}"] = theirs / own
    return figures


def by_phase(each: PlanningProblem, plan: Plan) -> dict[tuple[str, str], float]:
    """Rent of each model's prefill, decode and other nodes."""
    paid = {(at.name, offer.node): offer.price_usd_per_h for at in each.regions for offer in at.offers}
    phase: dict[tuple[str, str], float] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        roles = {replica.role for replica in template.replicas}
        key = (template.model, roles.pop() if len(roles) == 1 else "both")
        rents = [paid[deployment.region, item.node] * item.count for item in template.nodes]
        usd = deployment.count * sum(rents)
        phase[key] = phase.get(key, 0.0) + usd
    return phase


if __name__ == "__main__":
    given = options(only=tuple(PAPER), limit=60.0)
    targets = {f"{one}_{item}_over_auto": (">=", 1.0) for one in given.only for item in PAPER[one]}
    run(
        "savings",
        lambda quick: measure(quick, given.only, given.limit),
        targets,
        quick_without="the extended setting",
    )
