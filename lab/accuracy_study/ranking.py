"""Whether predictions choose well: runs of one model with the same lengths, in order of cost per token.

All ran on one kind of GPU, so cost is GPU-seconds a request. Runs in which a request waits for its first token longer
than its answer takes are no choice. With a limit to TPOT the first choice is the cheapest that is predicted to keep
it; weighed by bars, the cheapest where a run that breaks the limit has to serve half as many requests. A choice that
breaks it after all is charged in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from potluck.cli.engine.run_tables import Placed
from potluck.perf.error_bars import METRICS, SHARES, RunErrors, step_groups
from potluck.perf.step_timer import Floats

LIMIT_S = 0.03
LEAST_CHOICES = 4
RATE, TPOT = METRICS.index("rate"), METRICS.index("tpot")


ErrorsOf = Callable[[Sequence[Placed], Floats, NDArray[np.bool_]], Sequence[RunErrors]]
"""The errors of some of the runs."""


def ranking(placed: Sequence[Placed], ratios: Floats, errors_of: ErrorsOf) -> dict[str, float]:
    """By kind of model: Kendall's tau, and what the first choice costs more than the best, as means over groups."""
    from scipy.stats import kendalltau

    chances = _chances(placed, ratios, errors_of)
    groups: dict[tuple[str, str, int, int], list[int]] = {}
    for i, item in enumerate(placed):
        run = item.run
        if run.tpot_s and (run.ttft_s or 0.0) < (run.output_tokens - 1) * run.tpot_s:
            key = (item.kind, item.model.name, run.input_tokens, run.output_tokens)
            groups.setdefault(key, []).append(i)
    found: dict[str, list[float]] = {}
    for (kind, *_), rows in sorted(groups.items()):
        if len(rows) < LEAST_CHOICES:
            continue
        cost = np.array([placed[i].run.tp / placed[i].run.requests_per_s for i in rows])
        tpot_s = np.array([placed[i].run.tpot_s for i in rows])
        foretold, foretold_s = cost / np.exp(ratios[RATE, rows]), tpot_s / np.exp(ratios[TPOT, rows])
        found.setdefault(f"{kind}: tau", []).append(float(kendalltau(cost, foretold)[0]))
        found.setdefault(f"{kind}: loss", []).append(float(cost[foretold.argmin()] / cost.min() - 1.0))
        kept, hoped = tpot_s <= LIMIT_S, foretold_s <= LIMIT_S
        if kept.any() and hoped.any():
            charged = cost * np.maximum(tpot_s / LIMIT_S, 1.0) / cost[kept].min() - 1.0
            plain, weighed = np.where(hoped, foretold, np.inf), foretold * (2.0 - chances[rows])
            for words, order in (("loss at 30 ms", plain), ("loss at 30 ms, by bars", weighed)):
                found.setdefault(f"{kind}: {words}", []).append(max(0.0, float(charged[order.argmin()])))
    return {name: round(float(np.mean(values)), 3) for name, values in found.items()}


def _chances(placed: Sequence[Placed], ratios: Floats, errors_of: ErrorsOf) -> Floats:
    """Of each run, the chance that it keeps the limit, by the errors of the half of configurations without it."""
    half = np.array([crc32(" ".join(item.run.configuration).encode()) % 2 for item in placed])
    result = np.zeros(len(placed))
    for side in (0, 1):
        errors = {e.group: e for e in errors_of(placed, ratios, half != side) if e.metric == "tpot"}
        for i in np.flatnonzero((half == side) & np.isfinite(ratios[TPOT])):
            item = placed[int(i)]
            known: RunErrors = next(
                errors[g] for g in step_groups(item.kind, item.bits, item.run.tp) if g in errors
            )
            foretold_s = (item.run.tpot_s or np.nan) / np.exp(ratios[TPOT, i])
            result[i] = np.interp(np.log(LIMIT_S / foretold_s), known.quantiles, SHARES, left=0.0, right=1.0)
    return result
