"""CRONUS's experiment on real silicon: a high-end and a low-end share of one GPU, six placements, real requests.

    python benchmarks/gpu_cronus.py [--quick] [--json] [--low A10|A30] [--high-share 50] [--low-share 12]
        [--requests 1000] [--rates 0.5,0.7,0.9] [--only cronus]... [--layers 32] [--answers 1.0]

The shape of Llama-3.1-8B with random weights, lengths of Azure's conversations, KV memory of an A100 and of an A10
(12 %) or A30 (25 %). All requests at once give the highest throughput; then they come at fixed intervals, at shares
of what data parallel can do. `busy`: the share of the time in which an engine made steps (of a pipeline: the sum over
those that overlap). Without a GPU a tiny model shows that all of it works, and no speed.
"""

from __future__ import annotations

import argparse

from parts import common
from parts.gpu_fleet import Bed, ShareFleet, run_benchmark

TARGETS: dict[str, tuple[str, float]] = {
    "cronus_over_dp": (">=", 0.97),
    "cronus_over_disaggregated": (">=", 1.3),
    "ttft_p99_cronus_over_dp": ("<", 1.0),
    "tbt_p99_cronus_over_dp": ("<", 1.0),
}
ORDER = ("dp", "cronus", "extended", "low_high", "high_low", "pp")
WARM_UP = 24  # Requests before those that count: kernels are compiled, steps recorded.


def measure(asked: argparse.Namespace, made: Bed, fleet: ShareFleet) -> dict[str, float]:
    names, rates = asked.only, [float(part) for part in asked.rates.split(",") if part]
    if asked.quick:
        names, rates = ("dp", "cronus") if names == ORDER else names, rates[-1:]
    lengths = made.lengths(made.fewer(asked), asked.answers)
    figures: dict[str, float] = {}
    for name in names:
        with fleet.placed(name):
            fleet.run(lengths[:WARM_UP], seed=1)
            figures |= common.prefixed(name, fleet.run(lengths)[1])
            limit = figures.get("dp_per_s", figures[f"{name}_per_s"])
            for share in rates:
                seen = fleet.run(lengths, share * limit, seed=2)[1]
                figures |= common.prefixed(f"{name}_at_{share:g}", seen)
    return figures | compared(figures)


def compared(figures: dict[str, float]) -> dict[str, float]:
    """CRONUS beside the others, as far as both were run; latencies at the highest rate."""
    per_s = {name: figures[f"{name}_per_s"] for name in ORDER if f"{name}_per_s" in figures}
    if "cronus" not in per_s:
        return {}
    result = {}
    if "dp" in per_s:
        result["cronus_over_dp"] = per_s["cronus"] / per_s["dp"]
        last = max(name.split("_")[2] for name in figures if name.startswith("dp_at_"))
        for what in ("ttft_p99", "tbt_p99"):
            mine, other = (figures[f"{name}_at_{last}_{what}_s"] for name in ("cronus", "dp"))
            result[f"{what}_cronus_over_dp"] = mine / max(other, 1e-9)
    if apart := [per_s[name] for name in ("low_high", "high_low") if name in per_s]:
        result["cronus_over_disaggregated"] = per_s["cronus"] / max(apart)
    return result | {
        f"{name}_over_cronus": per_s[name] / per_s["cronus"] for name in per_s if name != "cronus"
    }


if __name__ == "__main__":
    own = {"requests": 1000, "rates": "0.5,0.7,0.9", "only": ORDER, "answers": 1.0}
    run_benchmark("gpu_cronus", measure, TARGETS, **own)
