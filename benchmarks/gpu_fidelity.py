"""Does the simulator tell what a GPU does? The same requests on shares of a GPU and in simulation, one by one.

    python benchmarks/gpu_fidelity.py [--quick] [--json] [--low A10|A30] [--high-share 50] [--low-share 12]
        [--requests 600] [--rate 0.6] [--only learned]... [--layers 32] [--profiles FOLDER]
    python benchmarks/gpu_fidelity.py --kept FILE --profiles FOLDER [--json] [--low A10|A30]    requests of gpu_cronus

Step times come from `potluck profile` of each share, requests and their times from a run at a share of the highest
throughput. The first third fits two constants: what the host takes of a step, and a request on its way and back.
Errors are of the others: of the time to the first token (prefill), and from there to the last one (decode). CRONUS's
predictors: partial prefill on the low-end share's points, iterations of one token budget on the high-end one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from parts import common
from parts.gpu_fleet import HIGH, KEPT, LOW, Bed, ShareFleet, fleets, policy_of, run_benchmark, write_config
from potluck.loadgen.load_client import TimedRequest
from potluck.perf.linear_fit import ChunkedIterationPredictor, PartialPrefillPredictor, absolute_errors
from potluck.perf.step_timer import Floats
from potluck.perf.timers.profile import Profile, profile_from_json
from potluck.sim.load.workload import workload
from potluck.sim.run import simulate

PLACEMENTS = ("learned", "cronus")
TARGETS = {
    f"{name}_{phase}_{error}": ("<=", limit)
    for name in PLACEMENTS
    for phase in ("prefill", "decode")
    for error, limit in (("error", 0.05), ("error_p99", 0.12))
} | {
    "partial_prefill_r2": (">=", 0.99),
    "chunked_iteration_r2": (">=", 0.99),
    "chunked_iteration_error": ("<=", 0.02),
}
FITTED = 1 / 3


def simulated(
    made: Bed, placement: str, live: Sequence[TimedRequest], host_s: float
) -> tuple[Floats, Floats]:
    """Time to the first token and from there to the last one, request by request."""
    resolved = made.resolved(placement)
    profiles = tuple(slower(profile, host_s) for profile in resolved.profiles[fleets.MODEL])
    lengths = np.array([(len(request.prompt), request.max_tokens) for request in live])
    load = workload(
        fleets.MODEL, np.array([request.sent_s for request in live]), lengths[:, 0], lengths[:, 1]
    )
    resolved = replace(resolved, profiles={fleets.MODEL: profiles})
    records = simulate(resolved, load, policy_of(placement)).records
    return records.first_token_s - records.arrival_s, records.finish_s - records.first_token_s


def slower(profile: Profile, host_s: float) -> Profile:
    """With so many seconds more in every step; never less than half of what was measured."""
    points = (replace(p, seconds=max(p.seconds + host_s, p.seconds / 2)) for p in profile.points)
    return replace(profile, points=tuple(points))


def compared(made: Bed, placement: str, shots: Sequence[TimedRequest]) -> dict[str, float]:
    live = [request for request in shots if request.ended and request.output_tokens > 1]
    first = np.array([request.first_s - request.sent_s for request in live])
    rest = np.array([request.last_s - request.first_s for request in live])
    tokens, fitted = np.array([request.output_tokens - 1 for request in live]), int(len(live) * FITTED)
    host_s = 0.0
    for _ in range(3):
        _, decode_s = simulated(made, placement, live, host_s)
        host_s += float(np.median(((rest - decode_s) / tokens)[:fitted]))
    prefill_s, decode_s = simulated(made, placement, live, host_s)
    request_s = float(np.median((first - prefill_s)[:fitted]))
    prefill = absolute_errors(first[fitted:], prefill_s[fitted:] + request_s)
    decode = absolute_errors(rest[fitted:], decode_s[fitted:])
    figures = {"requests": float(len(live) - fitted), "host_ms": 1e3 * host_s, "request_ms": 1e3 * request_s}
    for phase, errors in (("prefill", prefill), ("decode", decode)):
        figures[f"{phase}_error"] = float(errors.mean())
        figures |= {f"{phase}_error_p{q}": float(np.percentile(errors, q)) for q in (50, 99)}
    return figures


def predictors(made: Bed) -> dict[str, float]:
    """CRONUS's (2) and (3), by plain least squares as in the paper, on what was measured."""
    low, high = (
        profile_from_json((made.profiles / f"{side}.json").read_text("utf-8")) for side in (LOW, HIGH)
    )
    prompts = [(p.chunk_new, p.seconds) for p in low.points if not p.decodes and not p.chunk_cached]
    partial = PartialPrefillPredictor.fit(prompts)
    budget = max(p.chunk_new + p.decodes for p in high.points if p.decodes and p.chunk_new)
    filled = [p for p in high.points if p.chunk_new + p.decodes == budget and p.decodes and p.chunk_new]
    chunked = ChunkedIterationPredictor.fit([(p.chunk_cached, p.decode_context, p.seconds) for p in filled])
    return {
        "partial_prefill_r2": partial.r2,
        "partial_prefill_error": partial.mape,
        "chunked_iteration_r2": chunked.r2,
        "chunked_iteration_error": chunked.mape,
    }


def measure(asked: argparse.Namespace, made: Bed, fleet: ShareFleet) -> dict[str, float]:
    lengths, figures = made.lengths(made.fewer(asked), 1.0), predictors(made)
    for name in asked.only[:1] if asked.quick else asked.only:
        with fleet.placed(name):
            limit = fleet.run(lengths[: len(lengths) // 2], seed=1)[1]["per_s"]
            shots = fleet.run(lengths, asked.rate * limit, seed=2)[0]
        figures |= common.prefixed(name, compared(made, name, shots))
    return figures


def from_kept(path: str, profiles: str, low: str, layers: int) -> dict[str, float]:
    """The same for requests whose times were kept: those at a rate, of placements that our gateway makes."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder, "model"), layers, tiny=False)
        made, figures = Bed(Path(folder), low, Path(profiles), {}, tiny=False), dict[str, float]()
        for run in map(json.loads, Path(path).read_text("utf-8").splitlines()):
            if run["placement"] not in PLACEMENTS or run["rate_per_s"] == inf:
                continue
            shots = []
            for *times, prompt in run["requests"]:
                fields = dict(zip(KEPT, times, strict=True))
                tokens = fields.pop("output_tokens")
                fields |= {"model": "", "prompt": [0] * prompt, "told_tokens": tokens, "ended": True}
                shots.append(TimedRequest(**fields))
            name = f"{run['placement']}_at_{run['rate_per_s']:.3g}"
            figures |= common.prefixed(name, compared(made, run["placement"], shots))
        return figures | predictors(made)


if __name__ == "__main__":
    if "--kept" in sys.argv:
        asked = common.options(json=False, kept="", profiles="", low="A10", layers=32)
        seen = from_kept(asked.kept, asked.profiles, asked.low, asked.layers)
        judged = {name: target for name, target in TARGETS.items() if name in seen}
        common.show("gpu_fidelity", seen, judged, common.context((), quick=False), asked.json)
        sys.exit()
    run_benchmark("gpu_fidelity", measure, TARGETS, requests=600, rate=0.6, only=PLACEMENTS)
