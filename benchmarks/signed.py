"""Whether `auto` keeps its word: random specs, ample to scarce, one to twenty models, each in so much CPU time.

    python benchmarks/signed.py [--quick] [--json] [--specs 60] [--limit 10] [--only 3,17] [--workers 16]

Every strategy plans every spec within the limit, templates included and nothing kept from before. Targets: `auto`
never worse than any strategy (serves as much, and for as much costs no more), sound; CPU time within the limit + 10
%; gap to its bound 0.5 % in the median, 3 % at worst.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

from parts.common import options, say
from potluck.catalog import models, nodes
from potluck.core.values.types import LengthBin, Link, NodeOffer, Region, Slo, Traffic
from potluck.plan.assemble.codecs import served
from potluck.plan.problem import CODECS, ModelDemand, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

KINDS = "1xL4 4xL4 1xL40S 4xL40S 1xA10G 2xRTX4090 1xA100-80 8xA100-80 1xH100 8xH100"
NODES = tuple(KINDS.split())
MODELS = ("Llama-3.1-8B", "Qwen2-7B", "Phi-4", "Qwen3-32B", "Llama-3-70B")
PRICES = {"L4": 0.8, "L40S": 1.9, "A10G": 1.0, "RTX4090": 0.6, "A100-80": 3.5, "H100": 7.0}
SAME = 1e-6
LEFT_OUT = ("thunderserve",)
"""For a pool of one model; not compared here."""


def problem_of(seed: int) -> PlanningProblem:
    """A spec by its number: models, traffic, fleet and links at random; supply from plenty to far too little."""
    draw = random.Random(seed)
    count = draw.choice((1, 1, 2, 2, 3, 4, 6, 10, 20))
    asks = tuple(_ask(draw, place) for place in range(count))
    plenty = draw.choice((0.3, 0.7, 1.0, 2.0, 6.0)) * count
    regions = []
    for name in ("east", "west")[: draw.randint(1, 2)]:
        kinds = draw.sample(NODES, draw.randint(2, 6))
        regions.append(Region(name, tuple(_offer(draw, kind, plenty) for kind in kinds)))
    used = {offer.node for region in regions for offer in region.offers}
    links = (Link("east", "west", 10.0, 0.02),) if len(regions) == 2 and draw.random() < 0.5 else ()
    types = tuple(nodes.node_type(kind) for kind in NODES if nodes.canonical(kind) in used)
    return PlanningProblem(asks, tuple(regions), types, links, codecs=CODECS)


def _ask(draw: random.Random, place: int) -> ModelDemand:
    name = f"model-{place}"
    mean_in, mean_out = draw.choice((300, 1000, 3000)), draw.choice((100, 300))
    lengths = (LengthBin(mean_in / 2, mean_out, 0.6), LengthBin(2 * mean_in, mean_out, 0.4))
    slo = Slo(draw.choice((0.8, 2.0, 5.0)), draw.choice((0.05, 0.1)))
    model = models.model(draw.choice(MODELS))
    traffic = Traffic(name, draw.uniform(0.3, 10.0), lengths)
    return model_demand(name, model, slo, traffic)


def _offer(draw: random.Random, kind: str, plenty: float) -> NodeOffer:
    count, gpu = kind.split("x", 1)
    usd_per_h = round(int(count) * PRICES[gpu] * draw.uniform(0.7, 1.4), 3)
    return NodeOffer(nodes.canonical(kind), usd_per_h, max(1, round(plenty * draw.uniform(0.5, 3.0))))


@dataclass(frozen=True, slots=True)
class Made:
    served: tuple[float, ...]
    fraction: float
    usd_per_h: float
    gap: float
    cpu_s: float
    sound: bool


def made(task: tuple[int, str, float]) -> Made:
    """Plan a spec by one strategy, in this process, as if for the first time."""
    seed, strategy, limit_s = task
    problem = problem_of(seed)
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        start_s = time.process_time()
        result = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(limit_s))
        cpu_s = time.process_time() - start_s
    plan = result.plan
    sound = strategy != "auto" or not verify(problem, plan)
    shares = served(problem, plan)
    return Made(shares, plan.fraction, plan.total_usd_per_h, _gap(result), cpu_s, sound)


def plans_of(tasks: list[tuple[int, str, float]], workers: int) -> Iterator[Made]:
    """In order. A process for each plan: what one has loaded and timed is of no use to another."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(made, tasks)


def row_of(seed: int, plans: dict[str, Made]) -> dict[str, Any]:
    best = plans["auto"]
    return {
        "seed": seed,
        "models": len(problem_of(seed).asks),
        "served": best.fraction,
        "cost_usd_per_h": best.usd_per_h,
        "gap": best.gap,
        "cpu_s": best.cpu_s,
        "worse_than": [name for name, other in plans.items() if _beaten(best, other)],
        "sound": best.sound,
    }


def _beaten(best: Made, other: Made) -> bool:
    for mine, theirs in zip(best.served, other.served, strict=True):
        if abs(mine - theirs) > 2 * SAME:
            return theirs > mine
    return any(other.served) and other.usd_per_h < best.usd_per_h * (1 - SAME)


def _gap(outcome: PlanOutcome) -> float:
    short = outcome.allocation.shortfall
    if short is not None:
        return (short.fraction_bound - short.fraction) / max(short.fraction_bound, 1e-9)
    return outcome.plan.gap


def summary(rows: list[dict[str, Any]], limit_s: float) -> dict[str, float]:
    gaps = [row["gap"] for row in rows]
    return {
        "specs": len(rows),
        "limit_s": limit_s,
        "worse": sum(bool(row["worse_than"]) for row in rows),
        "unsound": sum(not row["sound"] for row in rows),
        "late": sum(row["cpu_s"] > 1.1 * limit_s for row in rows),
        "slowest_s": max(row["cpu_s"] for row in rows),
        "median_gap": statistics.median(gaps),
        "worst_gap": max(gaps),
    }


if __name__ == "__main__":
    given = options(specs=60, only="", limit=10.0, workers=1, quick=False, json=False)
    seeds = [int(part) for part in given.only.split(",") if part] or list(range(given.specs))
    if given.quick:
        seeds, given.limit = [seed for seed in range(40) if len(problem_of(seed).asks) == 1][:3], 3.0
    names = [name for name in STRATEGIES if name not in LEFT_OUT]
    plans = plans_of([(seed, name, given.limit) for seed in seeds for name in names], given.workers)
    rows = []
    for seed in seeds:
        rows.append(row_of(seed, {name: next(plans) for name in names}))
        say(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    result = summary(rows, given.limit)
    print(json.dumps({"summary": result, "rows": rows}, indent=1) if given.json else result)
