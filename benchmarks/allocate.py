"""The allocation program in CORAL's two settings, over the exact pipeline libraries, prices from the catalog.

Core: 3 models, 12 node types, 2 regions. Extended: 6 models, 20 node types, 3 regions, every pruned template
of every model and phase a column in every region. Rates are such that the plans need as many GPUs as the
paper says (20 to 40 and 100 to 300). Scarce: availability is drawn per region and type (log-normal), scaled
to the least that has a plan, then 25 % (core) or 75 % (extended) above it, one draw per seed. Warm: after a
plan, with that plan running and the paper's penalty for a new start, every demand changes by up to 10 %
either way.

`..._gap_max` and `..._cpu_s_max` are over all seeds; a run without a plan counts as a gap of 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from parts.common import Budget, run
from potluck.catalog import models, nodes, prices
from potluck.core.values.types import Slo
from potluck.plan.allocate.allocation import Allocation
from potluck.plan.allocate.colgen import relax
from potluck.plan.allocate.cover_data import prepare
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.program import ColumnCount, CoverDemand, CoverProgram, NodeSupply
from potluck.plan.allocate.solve import solve
from potluck.plan.templates.pipeline import pipeline_library
from potluck.plan.timing.stage_rates import stage_rates

AZURE_CONVERSATION, AZURE_CODE, BURST_GPT = (1155, 211), (2048, 28), (768, 195)
CORE = {
    "Phi-4": (Slo(1.2, 0.06), AZURE_CONVERSATION),
    "GPT-OSS-20B": (Slo(0.9, 0.03), AZURE_CODE),
    "Qwen3-32B": (Slo(1.6, 0.1), BURST_GPT),
}
EXTENDED = CORE | {
    "Llama-3-70B": (Slo(1.5, 0.08), BURST_GPT),
    "GPT-OSS-120B": (Slo(1.0, 0.04), AZURE_CONVERSATION),
    "Qwen3-235B-A22B": (Slo(1.8, 0.12), AZURE_CODE),
}
SEEDS = tuple(range(10))
QUICK_SEEDS = (0,)
QUICK_SCARCE_S = 12.0
"""About what a scarce program takes to be made and solved."""
SPREAD = 0.75
"""Standard deviation of the logarithm of availability."""
PENALTY = 0.1
"""Six minutes to start a node, an hour between two plans."""
LIMIT_S = 15.0
TARGETS = {
    "core_ample_gap": ("<=", 1e-6),
    "core_ample_cpu_s": ("<=", 0.3),
    "extended_ample_gap": ("<=", 0.001),
    "extended_ample_cpu_s": ("<=", 3.0),
    "core_scarce_gap_max": ("<=", 0.01),
    "core_scarce_cpu_s_max": ("<=", 15.0),
    "extended_scarce_gap_max": ("<=", 0.01),
    "extended_scarce_cpu_s_max": ("<=", 15.0),
    "warm_gap_max": ("<=", 0.01),
    "warm_cpu_s_max": ("<=", 2.0),
}


@dataclass(frozen=True)
class Setting:
    """One of CORAL's two."""

    asked: dict[str, tuple[Slo, tuple[int, int]]]
    gpus: tuple[str, ...]
    regions: tuple[str, ...]
    rate_per_s: float
    above: float
    """How far above the least that suffices availability is when scarce."""


SETTINGS = {
    "core": Setting(CORE, ("L40S", "L4", "A10G"), ("aws/us-east-2", "aws/ap-northeast-2"), 30.0, 0.25),
    "extended": Setting(
        EXTENDED,
        ("H100", "A100-40", "L40S", "L4", "A10G"),
        ("aws/us-east-2", "aws/ap-northeast-2", "gcp/us-central1"),
        75.0,
        0.75,
    ),
}


@cache
def program(name: str) -> CoverProgram:
    """A setting with more nodes than any plan could use, wherever a region rents the type."""
    setting = SETTINGS[name]
    types = tuple(nodes.node_type(f"{count}x{gpu}") for gpu in setting.gpus for count in (1, 2, 4, 8))
    demands = []
    for model, (slo, (prompt, output)) in setting.asked.items():
        for rates in stage_rates(models.model(model), types, slo, prompt, output):
            library = pipeline_library(rates)
            tokens = prompt if rates.phase == "prefill" else output
            demands.append(
                CoverDemand(
                    f"{model}/{rates.phase}",
                    setting.rate_per_s,
                    library.counts,
                    library.tokens_per_s / tokens,
                )
            )
    price = np.zeros((len(setting.regions), len(types)))
    for r, region in enumerate(setting.regions):
        listed = {each.node: each.price_usd_per_h for each in prices.in_region(region)}
        price[r] = [listed.get(node.name, 0.0) for node in types]
    ample = np.where(price > 0, 1000, 0)
    return CoverProgram(
        NodeSupply(setting.regions, tuple(node.name for node in types), price, ample), tuple(demands)
    )


def with_nodes(base: CoverProgram, available: np.ndarray) -> CoverProgram:
    return replace(base, fleet=replace(base.fleet, available=np.rint(available).astype(np.int64)))


def scarce(name: str, seed: int) -> CoverProgram:
    """Availability of a random pattern, so far above the least multiple of it that has a plan."""
    base = program(name)
    rng = np.random.default_rng(seed)
    pattern = rng.lognormal(0.0, SPREAD, base.fleet.available.shape) * (base.fleet.available > 0)

    def relaxed(scale: float) -> bool:
        found = relax(prepare(with_nodes(base, pattern * scale)), Deadline(60.0, time.process_time))
        return found is not None and found.theta >= 1 - 1e-6

    low, high = 0.0, 1.0
    while not relaxed(high):
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (low, middle) if relaxed(middle) else (middle, high)
    # The relaxation may suffice where whole copies do not.
    while not timed(with_nodes(base, pattern * high), 0.5, 2.0).found:
        high *= 1.04
    return with_nodes(base, pattern * high * (1 + SETTINGS[name].above))


def timed(
    asked: CoverProgram, gap_target: float, limit_s: float = LIMIT_S, warm: Allocation | None = None
) -> Allocation:
    return solve(asked, time_limit_s=limit_s, gap_target=gap_target, warm=warm, clock=time.process_time)


def gap(found: Allocation) -> float:
    return min(found.gap, 1.0)


def spread_of(key: str, found: list[Allocation]) -> dict[str, float]:
    """Distributions, not the best."""
    figures: dict[str, float] = {}
    measures: dict[str, Callable[[Allocation], float]] = {"gap": gap, "cpu_s": lambda each: each.cpu_s}
    for measure, read in measures.items():
        values = [read(each) for each in found]
        figures[f"{key}_{measure}_median"] = statistics.median(values)
        figures[f"{key}_{measure}_max"] = max(values)
    figures[f"{key}_runs"] = len(found)
    figures[f"{key}_without_plan"] = sum(not each.found for each in found)
    return figures


def ample(name: str, gap_target: float, repeats: int) -> dict[str, float]:
    """The median of some solves: nothing in it is random."""
    runs = [timed(program(name), gap_target) for _ in range(repeats)]
    found = runs[0]
    kinds = [int(node.split("x")[0]) for node in program(name).fleet.nodes]
    gpus = sum(
        int(program(name).demands[key.group].uses[key.template] @ kinds) * n for key, n in found.counts
    )
    return {
        f"{name}_columns": found.columns_seen,
        f"{name}_ample_cost_usd_per_h": found.cost_usd_per_h,
        f"{name}_ample_gpus": gpus,
        f"{name}_ample_gap": gap(found),
        f"{name}_ample_cpu_s": statistics.median(each.cpu_s for each in runs),
    }


def changed(before: CoverProgram, plan: tuple[ColumnCount, ...], seed: int) -> CoverProgram:
    """Every demand up to 10 % up or down, with the plan running."""
    rng = np.random.default_rng(seed)
    demands = tuple(replace(demand, rate=demand.rate * rng.uniform(0.9, 1.1)) for demand in before.demands)
    return replace(before, demands=demands, running=plan, init_penalty=PENALTY)


def rewarmed(before: CoverProgram, plan: Allocation, seeds: tuple[int, ...]) -> list[Allocation]:
    return [timed(changed(before, plan.counts, seed), 0.01, warm=plan) for seed in seeds]


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    budget = Budget(quick)
    seeds = QUICK_SEEDS if quick else SEEDS
    repeats = 1 if quick else 3
    if quick:
        print(f"left out: all seeds but {len(seeds)}, warm starts of scarce programs", file=sys.stderr)
    start_s = time.process_time()
    for name in SETTINGS:
        program(name)
    figures["libraries_cpu_s"] = time.process_time() - start_s
    figures |= ample("core", 0.0, repeats)
    figures |= ample("extended", 0.001, repeats)
    warm: list[Allocation] = []
    warm_scarce: list[Allocation] = []
    for name in SETTINGS:
        first = timed(program(name), 0.001)
        warm += rewarmed(program(name), first, seeds)
        if not budget.allows(f"{name}, scarce", QUICK_SCARCE_S):
            continue
        asked = [scarce(name, seed) for seed in seeds]
        plans = [timed(each, 0.01) for each in asked]
        figures |= spread_of(f"{name}_scarce", plans)
        if not quick:
            for seed, before, plan in zip(seeds, asked, plans, strict=True):
                if plan.found:
                    warm_scarce += rewarmed(before, plan, (seed,))
    figures |= spread_of("warm", warm)
    if warm_scarce:
        figures |= spread_of("warm_scarce", warm_scarce)
    return figures


if __name__ == "__main__":
    sys.exit(run("allocate", measure, TARGETS, seeds=SEEDS))
