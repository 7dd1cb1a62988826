"""Prefill across datacenters, live: `python benchmarks/crossdc.py [--quick] [--json] [--only PART]...`.

    study    PrfaaS's case study on mock engines at two sites (network namespaces, TCP over a token bucket): long
             prompts far (4 + 3 + 5 instances) beside none far (9 + 3) and all far (4 + 8), each also simulated
    drop     a third of the link's bandwidth for a while, beside the best threshold that stays as it is
    cut      no link for 30 s
    dense    simulated: from which bandwidth on it pays to prefill far away, for hybrid and dense models
    prefixes simulated: Mooncake's conversations; what crosses of prompts with cached prefixes

One real byte crosses for 100, through 1 Gbps instead of 100. Without root mock engines pretend the link.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from parts import sites
from parts.case_study import HOMOGENEOUS, NAIVE, SELECTIVE, Arrangement, load, prompt_lengths, site
from parts.common import options, prefixed, run, say
from parts.crossdc_simulated import (
    NARROW_GBPS,
    PHASE_S,
    THRESHOLDS,
    WIDE_GBPS,
    best_threshold,
    dense,
    dropped,
    phase_per_s,
    prefixes,
    rate_per_s,
    simulated,
    three_phases,
)
from parts.sites import Run, fired, missing, serving
from potluck.loadgen.load_client import whole
from potluck.sim.load.workload import Workload

from papers.prfaas_model import operating  # isort: skip

SEED = 1
GBPS = 100.0
LOAD = 0.9  # Of what the throughput model says that an arrangement serves.
KINDS = {"selective": SELECTIVE, "homogeneous": HOMOGENEOUS, "naive": NAIVE}
PUBLISHED = {"selective": (3.24, 2.22, 3.51), "homogeneous": (2.11, 4.44, 9.73), "naive": (2.45, 1.74, 3.51)}


def modelled_per_s(what: Arrangement, gbps: float = GBPS) -> float:
    cut = 1e9 if what.threshold_tokens is None else float(what.threshold_tokens)
    return operating(site(what, gbps), prompt_lengths(), cut, what.prefill).rate_per_s


def studied(name: str, folder: Path, quick: bool) -> dict[str, float]:
    """One arrangement under LOAD of what the throughput model says it serves."""
    what, (lasts_s, output) = KINDS[name], (10.0, 64) if quick else (45.0, 256)
    made = load(LOAD * modelled_per_s(what), lasts_s, SEED, output)
    begin_s = lasts_s / 3
    with serving(folder, what, GBPS) as fleet:
        crossed = fleet.crossed_bytes()
        live = fired(fleet, made)
        crossed = next((look.crossed_bytes for look in live.looks if look.at_s >= lasts_s), crossed) - crossed
        slowdown = fleet.ask(0, "/snapshot")["slowdown"] or 1.0
    records = simulated(what, GBPS, made).records
    served = rate_per_s(np.array([shot.first_s for shot in live.shots]), begin_s, lasts_s)
    expected = rate_per_s(records.first_token_s, begin_s, lasts_s)
    figures = {
        "per_s": served,
        "per_s_simulated": expected,
        "per_s_modelled": modelled_per_s(what),
        "per_s_published": PUBLISHED[name][0],
        "simulated_off": abs(expected / served - 1),
        "lost": sum(not whole(shot) for shot in live.shots),
        "link_gbps": crossed * 8e-9 / lasts_s,
        "cpu_share": live.cpu_share,
        "slowdown": slowdown,
    }
    for key, ttft_s in (
        ("", np.array([shot.ttft_s for shot in live.shots])),
        ("_simulated", records.first_token_s - records.arrival_s),
    ):
        figures |= {f"ttft_mean_s{key}": ttft_s.mean(), f"ttft_p90_s{key}": np.percentile(ttft_s, 90)}
    figures |= dict(zip(("ttft_mean_s_published", "ttft_p90_s_published"), PUBLISHED[name][1:], strict=True))
    return {key: float(value) for key, value in figures.items()}


def study(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in ("selective",) if quick else KINDS:
        with tempfile.TemporaryDirectory() as folder:
            figures |= prefixed(name, studied(name, Path(folder), quick))
    for name, published in (("selective", 1.54), ("naive", 1.16)):
        if quick:
            break
        for key in ("per_s", "per_s_simulated"):
            ratio = figures[f"{name}_{key}"] / figures[f"homogeneous_{key}"]
            figures[f"{name}_ratio{key.removeprefix('per_s')}"] = ratio
        figures[f"{name}_ratio_published"] = published
    figures["simulated_off_most"] = max(
        value for key, value in figures.items() if key.endswith("simulated_off")
    )
    figures["lost"] = sum(value for key, value in figures.items() if key.endswith("_lost"))
    return figures


QUEUE_S = 0.5
DROPS = range(
    6
)  # Seeds of loads that are simulated as well: a live phase has 50 first tokens, so one is 2 %.


def goodput_per_s(seen: Run, place: int) -> float:
    return phase_per_s(np.array([shot.first_s for shot in seen.shots if whole(shot)]), place)


def best_static(folder: Path, gbps: float, workload: Workload) -> tuple[int, float]:
    """The threshold with the highest goodput when simulated, and its goodput live."""
    best, _ = best_threshold(gbps, workload, THRESHOLDS)
    what = replace(SELECTIVE, threshold_tokens=best)
    with serving(folder, what, gbps, ("adapt_threshold=false",)) as fleet:
        return best, goodput_per_s(fired(fleet, workload), 0)


def drop_per_s() -> float:
    """LOAD of what the throughput model has for the narrow link at best."""
    tokens = range(THRESHOLDS.start, THRESHOLDS.stop, 1000)
    best = [modelled_per_s(replace(SELECTIVE, threshold_tokens=t), NARROW_GBPS) for t in tokens]
    return LOAD * max(best)


def drop(quick: bool) -> dict[str, float]:
    per_s = drop_per_s()
    made = load(per_s, PHASE_S, SEED + 3)
    with tempfile.TemporaryDirectory() as name:
        with serving(Path(name), SELECTIVE, WIDE_GBPS) as fleet:
            widths = (PHASE_S, NARROW_GBPS), (2 * PHASE_S, WIDE_GBPS)
            happens = [(at_s, partial(fleet.set_link, gbps)) for at_s, gbps in widths]
            seen = fired(fleet, three_phases(made), happens)
        static = [best_static(Path(name), gbps, made) for gbps in (WIDE_GBPS, NARROW_GBPS)]
    narrow = [look for look in seen.looks if PHASE_S <= look.at_s < 2 * PHASE_S]
    late = [look.at_s for look in seen.looks if look.queued_bytes * 8e-9 / WIDE_GBPS > QUEUE_S]
    figures = {"lost": float(sum(not whole(shot) for shot in seen.shots)), "offered_per_s": per_s}
    for place, phase in enumerate(("wide", "narrow", "again")):
        tokens, best = static[place % 2]
        figures[f"{phase}_per_s"] = goodput_per_s(seen, place)
        figures |= {f"{phase}_static_per_s": best, f"{phase}_static_tokens": float(tokens)}
        figures[f"{phase}_of_static"] = figures[f"{phase}_per_s"] / best
    drops = np.array([dropped(load(per_s, PHASE_S, SEED + seed)) for seed in DROPS])
    figures |= {
        "simulated_least": float(drops.min()),
        "simulated_narrow_mean": float(drops[:, 1].mean()),
        "of_static_least": min(value for key, value in figures.items() if key.endswith("_of_static")),
        "queue_most_s": max(look.queued_bytes for look in narrow) * 8e-9 / NARROW_GBPS,
        "queue_mean_s": float(np.mean([look.queued_bytes for look in narrow])) * 8e-9 / NARROW_GBPS,
        "recovers_after_s": max(0.0, max(late, default=0.0) - 2 * PHASE_S),
    }
    return prefixed("drop", figures)


CUT_PER_S, CUT_AT_S, CUT_S, CUT_LAST_S = 1.0, 15.0, 30.0, 65.0


def cut(quick: bool) -> dict[str, float]:
    mended_s = CUT_AT_S + CUT_S
    with tempfile.TemporaryDirectory() as name, serving(Path(name), SELECTIVE, WIDE_GBPS) as fleet:
        happens = [(CUT_AT_S, partial(fleet.set_link, 0.0)), (mended_s, partial(fleet.set_link, WIDE_GBPS))]
        seen = fired(fleet, load(CUT_PER_S, CUT_LAST_S, SEED + 3), happens)
    moved = {look.at_s: look.crossed_bytes for look in seen.looks}
    before = max(size for at_s, size in moved.items() if at_s <= mended_s)
    during = [size for at_s, size in moved.items() if CUT_AT_S + 3.0 <= at_s <= mended_s]
    again_s = min((at_s for at_s, size in moved.items() if size > before + 1e9), default=sites.NEVER_S)
    inside = [shot.ttft_s for shot in seen.shots if CUT_AT_S <= shot.at_s < mended_s]
    return prefixed(
        "cut",
        {
            "requests": float(len(seen.shots)),
            "lost": float(sum(not whole(shot) for shot in seen.shots)),
            "crossed_meanwhile_gb": (max(during) - min(during)) * 1e-9,
            "crosses_again_after_s": again_s - mended_s,
            "ttft_most_s": max(inside),
        },
    )


PARTS: dict[str, Callable[[bool], dict[str, float]]] = {
    "study": study,
    "drop": drop,
    "cut": cut,
    "dense": dense,
    "prefixes": prefixes,
}
TARGETS = {
    "study": {"simulated_off_most": ("<=", 0.07), "lost": ("<=", 0.0)},
    "drop": {
        "drop_lost": ("<=", 0.0),
        "drop_of_static_least": (">=", 0.9),
        "drop_simulated_least": (">=", 0.9),
        "drop_queue_most_s": ("<=", 3.3),  # What the longest prompt's KV takes alone.
    },
    "cut": {"cut_lost": ("<=", 0.0), "cut_crosses_again_after_s": ("<=", 15.0)},
    "prefixes": {f"prefixes_{kind}_wrong_share": ("<=", 0.02) for kind in ("hybrid", "dense")},
}

if __name__ == "__main__":
    chosen = [part for part in options(only=tuple(PARTS)).only if not (missing() and part in ("drop", "cut"))]
    if "--quick" in sys.argv and len(chosen) == len(PARTS):
        chosen = ["study"]
    if missing():
        say(f"crossdc: {missing()}; on loopback engines pretend the link: all runs but drop and cut")
    run(
        "crossdc",
        lambda quick: {key: value for part in chosen for key, value in PARTS[part](quick).items()},
        {key: target for part in chosen for key, target in TARGETS.get(part, {}).items()},
        seeds=(SEED,),
        quick_without="all but the selective arrangement, for a few seconds",
    )
