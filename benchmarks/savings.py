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

import sys
import time
from collections.abc import Iterator, Sequence

from parts.common import ROOT, options, run
from potluck.core.values.plan import Plan
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies import SolveSettings, TemplateFactory
from potluck.plan.verify import verify

sys.path.insert(0, str(ROOT / "lab"))
from papers.coral_settings import PAPER, WAYS, as_printed, by_phase, problem

RIVALS = {
    "homo": ("homo as printed", "homo", "single"),
    "cauchy": ("cauchy as printed", "cauchy", "cauchy-mc"),
}


def plans(each: PlanningProblem, limit_s: float) -> Iterator[tuple[str, Plan, float]]:
    """(name, plan, CPU-seconds) of every strategy."""
    ours, theirs = TemplateFactory(each), as_printed(each)
    for name, (printed, strategy) in WAYS.items():
        factory = theirs if printed else ours
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


if __name__ == "__main__":
    given = options(only=tuple(PAPER), limit=60.0)
    targets = {f"{one}_{item}_over_auto": (">=", 1.0) for one in given.only for item in PAPER[one]}
    run(
        "savings",
        lambda quick: measure(quick, given.only, given.limit),
        targets,
        quick_without="the extended setting",
    )
