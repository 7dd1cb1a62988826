"""CAUCHY's and CRONUS's scheduling experiments in the simulator: `lab/reproductions.md` tells what they are.

`--quick` runs CAUCHY's experiments for a shorter time: runs of half a minute near the limit, from an empty fleet, in
which what builds up slowly does not show. The trace is looked for in POTLUCK_DATA, else beside the checkout; without
it, lengths are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parts.common import DATA, ROOT, cpu_s, run, say

sys.path.insert(0, str(ROOT / "lab"))
from papers.cronus_beyond import OVERLOADS

from papers import cauchy, cauchy_rows, cronus, cronus_beyond, cronus_rows

SEED = 0
OFF = 0.25
APPROACHES = (cronus.DP, cronus.PP, cronus.HIGH_LOW, cronus.LOW_HIGH, cronus.CRONUS)
KEYS = dict(zip(APPROACHES, ("dp", "pp", "high_low", "low_high", "cronus"), strict=True))


def requests() -> tuple[cronus.RequestLengthList, bool]:
    trace = DATA / cronus.TRACE
    if trace.is_file():
        return cronus.trace_requests(trace), True
    return cronus.synthetic_requests(SEED), False


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    figures["cronus_cpu_s"] = cpu_s(lambda: figures.update(of_cronus(quick)))
    figures |= beyond_cronus(cronus.SETTINGS[:3:2])
    if quick:
        say("left out: CAUCHY, a new fit of the host's time")
    else:
        figures["cauchy_cpu_s"] = cpu_s(lambda: figures.update(of_cauchy()))
    return figures


def of_cronus(quick: bool) -> dict[str, float]:
    asked, real = requests()
    result = cronus_rows.measure(asked, fitted_only=True)
    figures = {"real_trace": float(real), "host_s": cronus.FITTED_HOST_S}
    if not quick:
        figures["host_fitted_again_s"] = cronus.fit_host_s(asked)
    within = 0
    for approach, key in KEYS.items():
        off = []
        for setting in cronus.SETTINGS:
            ours, published = result.fitted[setting.name][approach], setting.published_per_s[approach]
            place = setting.name.removeprefix("A100+").replace(" ", "_").lower()
            figures[f"{key}_{place}_per_s"] = ours
            off.append(abs(ours / published - 1.0))
        within += sum(item <= OFF for item in off)
        figures[f"{key}_off_most"] = max(off)
    figures["cells_within_a_quarter"] = within
    figures["order_inversions"] = cronus_rows.order_inversions(result)
    figures["order_inversions_without_pp"] = cronus_rows.order_inversions(result, cronus.PP)
    for metric, other, low, _ in cronus_rows.CLAIMS:
        where = f"_{low.lower()}" if low else ""
        label = f"{metric}_p99_below_{KEYS[other]}{where}"
        figures[label] = cronus_rows.largest_reduction(result, metric, other, low) or 0.0
    figures["wrong_directions"] = len(cronus_rows.wrong_directions(result))
    return figures


def beyond_cronus(settings: Sequence[cronus.Setting]) -> dict[str, float]:
    """What our two rules change in an overload, against the paper's."""
    figures: dict[str, float] = {}
    for setting in settings:
        for overload in OVERLOADS:
            policies = cronus_beyond.policies().items()
            result = {name: cronus_beyond.run(setting, overload, policy, SEED) for name, policy in policies}
            for name, outcome in result.items():
                label = f"beyond_{setting.low.lower()}_{overload}_{name}"
                figures[f"{label}_per_s"] = outcome.per_s
                figures[f"{label}_ttft_p90_s"] = outcome.ttft_p90_s
                figures[f"{label}_alone"] = outcome.kept
            gain = result["both"].per_s / result["paper"].per_s
            figures[f"beyond_{setting.low.lower()}_{overload}_gain"] = gain
    return figures


def of_cauchy() -> dict[str, float]:
    result = cauchy_rows.measure(cauchy.Effort())
    figures: dict[str, float] = {}
    for decodes in cauchy.DECODES:
        figures[f"opportunistic_goodput_1p{decodes}d"] = result.goodput_change(decodes)
        for metric in ("e2e_s", "ttft_s", "tbt_s"):
            name = metric.removesuffix("_s")
            figures[f"opportunistic_{name}_1p{decodes}d"] = result.latency_change(decodes, metric)
    for load in cauchy.LOADS:
        figures[f"goodput_weighted_e2e_{load.name}"] = result.figure9_change(load.name, "round-robin")
        figures[f"goodput_against_token_e2e_{load.name}"] = result.figure9_change(load.name, "token")
    return figures


if __name__ == "__main__":
    targets = {
        **{f"{key}_off_most": ("<=", OFF) for key in KEYS.values()},
        "order_inversions": ("==", 0),
        **{
            f"{metric}_p99_below_{KEYS[other]}{'_' + low.lower() if low else ''}": (">", 0)
            for metric, other, low, _ in cronus_rows.CLAIMS
        },
        **{f"beyond_{low}_{load}_gain": (">", 1) for low in ("a10", "a30") for load in OVERLOADS},
        **{f"opportunistic_goodput_1p{decodes}d": (">", 0) for decodes in cauchy.DECODES},
        **{f"goodput_weighted_e2e_{load.name}": ("<", 0) for load in cauchy.LOADS},
    }
    run("scheduling", measure, targets, seeds=[SEED, *cauchy.Effort().seeds])
