"""Plans to bet on: random specs through the commands a user runs, and every promise tried again.

    python benchmarks/random_plans.py [--quick] [--json] [--specs 200] [--only 3,17] [--rivals coral] [--averages]

Each spec (`parts/drawn_specs.py`: fleets of one of each, N+1, several copies, spot, 1 to 10 models, tight and loose
objectives, 0.1 to 1,000 requests/s, answers of 10 to 4,000 tokens) is planned by `potluck plan`, by each rival
strategy, and once more with one restriction drawn at random. Counted are: plans that took longer than their limit;
plans that cost more than a rival's that holds; promises (exit code 0) that three fresh seeds over at least 20 answer
lengths do not keep; specs without a promise where a rival has one; restrictions that made the plan cheaper; with
`--averages` also promises of plans that were not rehearsed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from parts.common import POTLUCK, ROOT, options, run, say
from parts.drawn_specs import DrawnSpec, drawn_spec

ALWAYS, IN_TURN = ("homo", "melange"), ("coral", "prfaas", "cronus", "cauchy", "cauchy-mc")
"""Rivals: the simple ones of every spec, and of the others two."""
LIMIT_S = 30.0
LATE = 1.1  # Times the limit, which is for planning; the rehearsal has as much again.
DEARER, CHEAPER = 1.001, 0.99
ANSWER_LENGTHS = 20
SEEDS = (101, 102, 103)
LEAST_REQUESTS, MOST_REQUESTS = 500, 20_000
TARGETS = {
    "late": ("==", 0.0),
    "dearer_than_a_rival": ("==", 0.0),
    "promises_broken": ("==", 0.0),
    "no_promise_where_a_rival_has_one_share": ("<=", 0.02),
    "cheaper_when_restricted": ("==", 0.0),
}


@dataclass(frozen=True, slots=True)
class Planned:
    code: int
    usd_per_h: float
    cpu_s: float

    @property
    def promises(self) -> bool:
        return self.code == 0


def potluck(*words: str) -> tuple[int, dict[str, Any], float]:
    before_s = _children_s()
    done = subprocess.run([*POTLUCK, *words, "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    cpu_s = _children_s() - before_s
    if done.returncode not in (0, 2, 3):
        raise SystemExit(f"potluck {' '.join(words)}: exit code {done.returncode}: {done.stderr[-500:]}")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, cpu_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(spec: Path, strategy: str = "auto", out: Path | None = None, *more: str) -> Planned:
    words = ("--out", str(out), *more) if out else more
    code, report, cpu_s = potluck(
        "plan", str(spec), "--strategy", strategy, "--no-explain", "--time-limit", f"{LIMIT_S:g}", *words
    )
    return Planned(code, report["plan"]["cost_usd_per_h"] if report else 0.0, cpu_s)


def kept(drawn: DrawnSpec, spec: Path, plan: Path) -> bool:
    """Whether each model has its share of requests in time, over all fresh seeds together."""
    requests = dict.fromkeys(drawn.attainments, 0.0)
    good = dict(requests)
    most = min(MOST_REQUESTS, max(LEAST_REQUESTS, ceil(drawn.rate_per_s * ANSWER_LENGTHS * drawn.answer_s)))
    for seed in SEEDS:
        words = ("--requests", str(most), "--seed", str(seed), "--policy", "scaling=none")
        _, report, _ = potluck("simulate", str(plan), str(spec), *words)
        for model in report["models"]:
            requests[model["model"]] += model["requests"]
            good[model["model"]] += model["requests"] * (model["attainment"] or 0.0)
    return all(
        good[name] >= share * count - 1e-9
        for name, count in requests.items()
        if count and (share := drawn.attainments[name])
    )


def row_of(drawn: DrawnSpec, rivals: list[str], folder: Path) -> dict[str, Any]:
    spec, plan, less = folder / "spec.yaml", folder / "plan.json", folder / "restricted.yaml"
    spec.write_text(drawn.text)
    less.write_text(drawn.restricted)
    plan.unlink(missing_ok=True)
    ours, others = planned(spec, out=plan), {name: planned(spec, name) for name in rivals}
    promising = {name: other for name, other in others.items() if other.promises}
    restricted = planned(less)
    averages = folder / "averages.json"
    rash = OPTIONS.averages and planned(spec, "auto", averages, "--averages").promises
    return {
        "seed": drawn.seed,
        "kind": drawn.kind,
        "code": ours.code,
        "usd_per_h": ours.usd_per_h,
        "cpu_s": round(ours.cpu_s, 1),
        "late": ours.cpu_s > LATE * 2 * LIMIT_S,
        "dearer": [
            f"{name} {other.usd_per_h:.2f}"
            for name, other in promising.items()
            if ours.promises and ours.usd_per_h > DEARER * other.usd_per_h
        ],
        "broken": ours.promises and not kept(drawn, spec, plan),
        "broken_on_averages": rash and not kept(drawn, spec, averages),
        "rivals_hold": sorted(promising),
        "restricted": drawn.restriction,
        "cheaper": ours.promises and restricted.promises and restricted.usd_per_h < CHEAPER * ours.usd_per_h,
    }


def measure(quick: bool) -> dict[str, float]:
    seeds = [int(part) for part in OPTIONS.only.split(",") if part] or list(range(OPTIONS.specs))
    rivals = [name for name in OPTIONS.rivals.split(",") if name]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds[:1] if quick else seeds:
            asked = rivals or [*ALWAYS, *(IN_TURN[(seed + k) % len(IN_TURN)] for k in range(2))]
            rows.append(row_of(drawn_spec(seed), asked[:1] if quick else asked, Path(name)))
            say(json.dumps(rows[-1]))
    lost = [row for row in rows if row["code"] == 3 and row["rivals_hold"]]
    return {
        "specs": len(rows),
        "refused": sum(row["code"] == 2 for row in rows),
        "promises": sum(row["code"] == 0 for row in rows),
        "late": sum(row["late"] for row in rows),
        "dearer_than_a_rival": sum(bool(row["dearer"]) for row in rows),
        "promises_broken": sum(row["broken"] for row in rows),
        "broken_on_averages": sum(row["broken_on_averages"] for row in rows),
        "no_promise_where_a_rival_has_one_share": len(lost) / max(1, len(rows)),
        "cheaper_when_restricted": sum(row["cheaper"] for row in rows),
    }


if __name__ == "__main__":
    OPTIONS = options(specs=200, only="", rivals="", averages=False)
    run("random_plans", measure, TARGETS, seeds=range(OPTIONS.specs), quick_without="all specs but one")
