"""What `potluck plan` takes for each example: for the first time (cold), and once more (warm).

CPU-seconds (user and system) of the whole process, rehearsal and reasons included. And one fleet of every size at
once (`large_spec`), on averages and without reasons: its time, memory and distance from the bound.
Loops that numba compiles once after an installation are compiled before, and modules to bytecode.
"""

from __future__ import annotations

import json
import os
import random
import resource
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

from parts.common import POTLUCK, ROOT, child_cpu_s, run

EXAMPLES = ROOT / "examples"
BUNDLED = "bundled"
QUICK = ("one-node",)
COLD_S, WARM_S = 10.0, 3.0
LARGE_S, LARGE_MB, LARGE_GAP, TYPES, MODELS, REGIONS, GPUS = 60.0, 1000.0, 0.03, 30, 10, 10, 3000
SLO = {"ttft_ms": 3000, "tpot_ms": 80}
SERVED = ("Llama-3.1-8B", "Qwen3-32B", "Llama-3.1-70B", "Phi-4", "GPT-OSS-120B", "Qwen1.5-14B", "GPT-OSS-20B")


def names() -> list[str]:
    return [BUNDLED, *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]


def cpu_s(name: str, folder: str, *options: str) -> float:
    spec = [] if name == BUNDLED else [name if name.endswith(".yaml") else str(EXAMPLES / f"{name}.yaml")]
    # An installation has its bytecode, a checkout in which none may be written does not.
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = os.path.join(tempfile.gettempdir(), "potluck-plan-time")
    environment = installed | {"XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": bytecode}
    return child_cpu_s([*POTLUCK, "plan", *spec, *options], environment)


def large_spec(seed: int) -> dict[str, object]:
    from potluck.catalog import nodes

    rng = random.Random(seed)
    gpus = rng.sample(sorted({nodes.parse(name)[1] for name in nodes.names()}), TYPES)
    sizes = {gpu: rng.choice((1, 2, 4, 8)) for gpu in gpus}
    asks = []
    for m in range(MODELS):
        traffic = {"rate_per_s": rng.choice((2, 5, 10)), "input": rng.choice((512, 1500)), "output": 200}
        asks.append({"model": SERVED[m % len(SERVED)], "name": f"model{m}", "slo": SLO, "traffic": traffic})
    regions = []
    for r in range(REGIONS):
        here = []
        for gpu in rng.sample(gpus, 2 * TYPES // 3) if r else gpus:
            node = nodes.node_type(f"{sizes[gpu]}x{gpu}")
            price = round(sizes[gpu] * node.gpu.memory_gb * rng.uniform(0.018, 0.035), 2)
            count = max(1, round(GPUS / REGIONS / (TYPES if not r else 2 * TYPES // 3) / sizes[gpu]))
            here.append({"node": node.name, "available": count, "price_usd_per_h": price})
        regions.append({"name": f"region{r}", "nodes": here})
    links = [{"between": ["region0", f"region{r}"], "gbps": 10, "rtt_ms": 40} for r in range(1, REGIONS)]
    return {"models": asks, "fleet": {"regions": regions}, "links": links}


def measure_large(folder: str) -> dict[str, float]:
    (spec := Path(folder) / "large.yaml").write_text(json.dumps(large_spec(1)), "utf-8")
    options = (
        "--averages",
        "--no-explain",
        "--time-limit",
        str(LARGE_S),
        "--out",
        str(out := Path(folder) / "plan.json"),
    )
    time_s = cpu_s(str(spec), folder, *options)
    peak_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    value = json.loads(out.read_text("utf-8"))["value"]
    return {"large_cpu_s": time_s, "large_peak_mb": peak_kb / 1024, "large_gap": value["gap"]}


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    with TemporaryDirectory() as first:
        cpu_s(QUICK[0], first, "--no-explain")  # compiles what numba compiles
    for name in QUICK if quick else names():
        key = name.replace("-", "_")
        with TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                figures[f"{key}_{kind}_cpu_s"] = cpu_s(name, folder)
            figures[f"{key}_kept_mb"] = sum(path.stat().st_size for path in Path(folder).rglob("*.npz")) / 1e6
    for kind in ("cold", "warm"):
        figures[f"worst_{kind}_cpu_s"] = max(v for k, v in figures.items() if k.endswith(f"_{kind}_cpu_s"))
    with TemporaryDirectory() as folder:
        return figures if quick else figures | measure_large(folder)


if __name__ == "__main__":
    targets = {"worst_cold_cpu_s": ("<=", COLD_S), "worst_warm_cpu_s": ("<=", WARM_S)}
    targets |= {
        "large_cpu_s": ("<=", LARGE_S),
        "large_peak_mb": ("<=", LARGE_MB),
        "large_gap": ("<=", LARGE_GAP),
    }
    run("plan_time", measure, targets, quick_without="all examples but one, and the large fleet")
