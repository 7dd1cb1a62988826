"""CRONUS's experiment on real silicon: a high-end and a low-end share of one GPU, six placements, real requests.

    python benchmarks/gpu_cronus.py [--quick] [--json] [--low A10|A30] [--high-share 50] [--low-share 12]
        [--requests 1000] [--rates 0.5,0.7,0.9] [--only cronus]... [--layers 32] [--answers 1.0] [--keep FILE]

The shape of Llama-3.1-8B with random weights, lengths of Azure's conversations, KV memory of an A100 and of an A10
(12 %) or A30 (25 %). All requests at once give the highest throughput; then they come at fixed intervals, at shares
of what data parallel can do: `dp` as the paper has it, by turns of 3 to 1, `learned` as our gateway does it. `busy`:
the share of the time in which an engine made steps. Without a GPU a tiny model shows that all of it works, and no
speed. `--keep`: each request's times, for `gpu_fidelity --kept`.
"""

from __future__ import annotations

import argparse
import json

from parts import common
from parts.gpu_fleet import Bed, ShareFleet, run_benchmark

TARGETS: dict[str, tuple[str, float]] = {
    "cronus_over_dp": (">=", 0.97),
    "cronus_over_disaggregated": (">=", 1.3),
    "ttft_p99_cronus_over_dp": ("<", 1.0),
    "tbt_p99_cronus_over_dp": ("<", 1.0),
}
ORDER = ("dp", "learned", "cronus", "extended", "low_high", "high_low")
COMPARED = ("dp", "learned", "cronus", "extended")
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
            most = figures[f"{name}_per_s"]
            limit = figures.get("dp_per_s", most)
            # Beyond what others can do at most, latencies would tell how long the run is.
            for share in (share for share in rates if name in COMPARED or share * limit < most):
                seen = fleet.run(lengths, share * limit, seed=2)[1]
                figures |= common.prefixed(f"{name}_at_{share:g}", seen)
        # A run that is ended before its last placement has shown the others.
        common.say(json.dumps({key: value for key, value in figures.items() if key.startswith(f"{name}_")}))
    return figures | compared(figures)


def compared(figures: dict[str, float]) -> dict[str, float]:
    """CRONUS, and CRONUS with our rules, beside the others as far as both were run; latencies at the highest rate."""
    per_s = {name: figures[f"{name}_per_s"] for name in ORDER if f"{name}_per_s" in figures}
    apart = [per_s[name] for name in ("low_high", "high_low") if name in per_s]
    rates = [name.partition("_at_")[2].split("_")[0] for name in figures if "_at_" in name]
    result = {}
    for name in (name for name in COMPARED[2:] if name in per_s):
        for other in (other for other in COMPARED[:2] if other in per_s):
            result[f"{name}_over_{other}"] = per_s[name] / per_s[other]
            for what in ("ttft_p99", "tbt_p99") if rates else ():
                mine, its = (figures[f"{each}_at_{max(rates)}_{what}_s"] for each in (name, other))
                result[f"{what}_{name}_over_{other}"] = mine / max(its, 1e-9)
        if apart:
            result[f"{name}_over_disaggregated"] = per_s[name] / max(apart)
    return result


if __name__ == "__main__":
    own = {"requests": 1000, "rates": "0.5,0.7,0.9", "only": ORDER, "answers": 1.0}
    run_benchmark("gpu_cronus", measure, TARGETS, **own)
