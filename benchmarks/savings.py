"""What joint planning saves: CORAL's two settings, every strategy, beside the paper's figures.

CORAL reports the hourly cost of its plans against Homo and Cauchy: 1.62 and 1.60 times less in its core setting,
3.14 and 2.66 times less in the extended one, averaged over epochs of traces that are not published. Here every model
gets the same steady rate at its trace's mean lengths, nodes are ample, and prices are the catalog's, so the ratios
need not agree; that `auto` and `coral` are cheaper must.
"""

from __future__ import annotations

import sys
import time

from parts.common import run
from potluck.catalog import models, nodes, prices
from potluck.core.values.types import LengthBin, Offer, Region, Slo, Traffic
from potluck.plan.check.verify import verify
from potluck.plan.problem import Problem, ask
from potluck.plan.strategies import STRATEGIES, Settings, Workshop

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
AMPLE = 60
RATE_PER_S = 40.0
PAPER = {"core": {"homo": 1.62, "cauchy": 1.60}, "extended": {"homo": 3.14, "cauchy": 2.66}}


def problem(
    asked: dict[str, tuple[float, float, str]], gpus: tuple[str, ...], places: tuple[str, ...]
) -> Problem:
    """CORAL's setting: some models, GPU types times 1, 2, 4, 8, and regions with the catalog's prices."""
    asks = []
    for name, (ttft_s, tpot_s, trace) in asked.items():
        traffic = Traffic(name, RATE_PER_S, (LengthBin(*LENGTHS[trace], 1.0),))
        asks.append(ask(name, models.model(name), Slo(ttft_s, tpot_s), traffic))
    types = [nodes.node_type(f"{count}x{gpu}") for gpu in gpus for count in COUNTS]
    regions = []
    for place in places:
        offers = []
        for node in types:
            found = [price for price in prices.in_region(place) if price.node == node.name]
            if found:
                offers.append(Offer(node.name, found[0].price_usd_per_h, AMPLE))
        regions.append(Region(place, tuple(offers)))
    return Problem(tuple(asks), tuple(regions), tuple(types))


def measure(quick: bool) -> dict[str, float]:
    settings = {"core": problem(CORE, ("L40S", "L4", "A10G"), ("aws/us-east-2", "aws/ap-northeast-2"))}
    if not quick:
        everywhere = ("aws/us-east-2", "aws/ap-northeast-2", "gcp/us-central1")
        settings["extended"] = problem(EXTENDED, ("H100", "A100", "L40S", "L4", "A10G"), everywhere)
    figures: dict[str, float] = {}
    for setting, each in settings.items():
        workshop = Workshop(each)
        for name in ("homo", "melange", "cauchy", "coral", "auto"):
            start = time.process_time()
            plan = STRATEGIES[name](workshop, Settings(time_limit_s=60.0)).plan
            figures[f"{setting}_{name}_usd_per_h"] = plan.cost_usd_per_h
            figures[f"{setting}_{name}_gap"] = plan.gap
            figures[f"{setting}_{name}_served"] = plan.fraction
            figures[f"{setting}_{name}_cpu_s"] = time.process_time() - start
            figures[f"{setting}_{name}_violations"] = len(verify(each, plan))
        for baseline, published in PAPER[setting].items():
            for mine in ("coral", "auto"):
                ratio = figures[f"{setting}_{baseline}_usd_per_h"] / figures[f"{setting}_{mine}_usd_per_h"]
                figures[f"{setting}_{baseline}_over_{mine}"] = ratio
            figures[f"{setting}_{baseline}_over_coral_published"] = published
    return figures


if __name__ == "__main__":
    sys.exit(
        run(
            "savings",
            measure,
            {"core_homo_over_auto": (">=", 1.0), "core_cauchy_over_auto": (">=", 1.0)},
            quick_without="the extended setting",
        )
    )
