"""The gateway over a fleet at true GPU speed, beside the simulator: the same plan, requests and emulated GPUs.

    python benchmarks/gateway_live.py [--quick] [--json]

Engines only pretend (docs/engine.md), so two cores are a fleet. Three questions:

- fidelity: are TTFT and TPOT those of the simulation?
- overload: at 5 times the capacity, how much of it is still served in time, and how soon is the rest refused?
- flood: what does a tenant that asks for too much take from one that does not?

Capacity is the rate at which the simulated fleet still keeps its objective (`potluck goodput`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common import ROOT, run

sys.path.insert(0, str(ROOT / "tools"))
from live_fleet import LiveFleet

from potluck.cli.trying.simulation import Inputs, read_inputs, scene_of
from potluck.core.brain.policy import Policy
from potluck.gateway.door.keys import new_key
from potluck.load.client import Shot, shoot
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.run import simulate

SEED = 11
TTFT_S, TPOT_S = 2.0, 0.08
SPEC = """
models:
  - model: Llama-3.1-8B
    name: llama
    slo: {ttft_ms: 2000, tpot_ms: 80}
    traffic: {rate_per_s: 6, input: {mean: 800, cv: 0.8}, output: {mean: 120, cv: 0.7}}
fleet:
  regions:
    - name: east
      nodes:
        - {node: 1xA100-80, available: 1}
        - {node: 1xA10, available: 2}
        - {node: 1xL4, available: 4}
"""
TARGETS = {
    "ttft mean, live over simulated, off by": ("<=", 0.07),
    "tpot mean, live over simulated, off by": ("<=", 0.07),
    "ttft p99, live over simulated, off by": ("<=", 0.15),
    "tpot p99, live over simulated, off by": ("<=", 0.15),
    "log replays": ("==", 1.0),
    "overload: goodput over capacity": (">=", 0.9),
    "overload: refusals p99 (s)": ("<=", 0.05),
    "overload: gateway's memory grew by": ("<=", 1.2),
    "flood: the other's ttft over alone": ("<=", 1.5),
}


class Live:
    """A plan and all that is measured on it."""

    def __init__(self, strategy: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-gateway-live-"))
        self.spec, self.plan = self.folder / "spec.yaml", self.folder / "plan.json"
        self.spec.write_text(SPEC)
        potluck("plan", str(self.spec), "--strategy", strategy, "--out", str(self.plan))
        self.inputs: Inputs = read_inputs((self.plan, self.spec), 0.0, lambda line: None, lambda spec: None)[
            0
        ]

    def requests(self, count: int, rate_per_s: float | None = None, seed: int = SEED) -> Workload:
        made = of_traffic([model.traffic for model in self.inputs.spec.models], count, seed)
        return made if rate_per_s is None else at_rate(made, rate_per_s)

    def capacity_per_s(self) -> float:
        said = potluck("goodput", str(self.plan), str(self.spec), "--requests", "2000", "--json")
        return float(json.loads(said)["goodput_per_s"])


def potluck(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "potluck.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"potluck {' '.join(arguments[:2])}: {done.stderr[-500:]}")
    return done.stdout


def shots_of(load: Workload, key: str = "", seed: int = SEED) -> list[Shot]:
    """The same requests for a live gateway; no two prompts begin alike."""
    numbers = np.random.default_rng(seed)
    return [
        Shot(
            at_s,
            load.models[model],
            numbers.integers(20, 400, size=prompt).tolist(),
            output,
            key=key,
        )
        for at_s, model, prompt, output in zip(
            load.arrival_s.tolist(),
            load.model.tolist(),
            load.prompt_tokens.tolist(),
            load.output_tokens.tolist(),
            strict=True,
        )
    ]


def off(live: Sequence[float], simulated: Sequence[float], share: float | None) -> float:
    """How far the mean, or a percentile, is from the simulation's."""
    pick = np.mean if share is None else lambda values: np.percentile(values, share)
    return abs(float(pick(np.asarray(live))) / float(pick(np.asarray(simulated))) - 1.0)


def fidelity(live: Live, count: int) -> dict[str, float]:
    load = live.requests(count)
    log = live.folder / "fidelity.log"
    shots = shots_of(load)
    with LiveFleet(live.plan, live.spec, gateway=("--log", str(log))) as fleet:
        shoot(fleet.url, shots)
    wrong = [shot.problem or str(shot.status) for shot in shots if not shot.ended]
    if wrong:
        print(f"fidelity: {len(wrong)} of {count} were not answered, such as {wrong[0]}", file=sys.stderr)
    records = simulate(scene_of(live.inputs), load, Policy()).records
    answered = [place for place, shot in enumerate(shots) if shot.ended]
    ttft_s = [shots[place].ttft_s for place in answered]
    tpot_s = [shots[place].tpot_s for place in answered if shots[place].max_tokens > 1]
    simulated_ttft = (records.first_token_s - records.arrival_s).tolist()
    many = records.output_tokens > 1
    simulated_tpot = (
        (records.finish_s - records.first_token_s)[many] / (records.output_tokens[many] - 1)
    ).tolist()
    replayed = subprocess.run(
        [sys.executable, "-m", "potluck.cli.main", "replay", str(log)], capture_output=True, check=False
    )
    return {
        "fidelity: requests": float(count),
        "fidelity: answered": len(answered) / count,
        "fidelity: client late p99 (s)": float(np.percentile([s.sent_s - s.at_s for s in shots], 99)),
        "ttft mean, live (s)": float(np.mean(ttft_s)),
        "ttft mean, simulated (s)": float(np.mean(simulated_ttft)),
        "tpot mean, live (s)": float(np.mean(tpot_s)),
        "tpot mean, simulated (s)": float(np.mean(simulated_tpot)),
        "ttft p99, live (s)": float(np.percentile(ttft_s, 99)),
        "ttft p99, simulated (s)": float(np.percentile(simulated_ttft, 99)),
        "ttft mean, live over simulated, off by": off(ttft_s, simulated_ttft, None),
        "tpot mean, live over simulated, off by": off(tpot_s, simulated_tpot, None),
        "ttft p99, live over simulated, off by": off(ttft_s, simulated_ttft, 99),
        "tpot p99, live over simulated, off by": off(tpot_s, simulated_tpot, 99),
        "log replays": float(replayed.returncode == 0),
    }


def good(shot: Shot) -> bool:
    return shot.ended and shot.ttft_s <= TTFT_S and shot.tpot_s <= TPOT_S


def overload(live: Live, capacity_per_s: float, lasts_s: float, times: float = 5.0) -> dict[str, float]:
    rate = capacity_per_s * times
    shots = shots_of(live.requests(round(rate * lasts_s), rate))
    with LiveFleet(live.plan, live.spec) as fleet:
        assert fleet.gateway is not None
        assert fleet.gateway.popen is not None
        before = rss_bytes(fleet.gateway.popen.pid)
        shoot(fleet.url, shots)
        after = rss_bytes(fleet.gateway.popen.pid)
    served = [shot for shot in shots if good(shot) and shot.last_s <= lasts_s]
    refused = [shot for shot in shots if shot.status == 429]
    other = [shot for shot in shots if not shot.ended and shot.status != 429]
    if other:
        print(f"overload: {len(other)} ended otherwise, such as {other[0].problem[:200]}", file=sys.stderr)
    return {
        "overload: capacity (req/s)": capacity_per_s,
        "overload: sent (req/s)": rate,
        "overload: goodput over capacity": len(served) / lasts_s / capacity_per_s,
        "overload: refused": len(refused) / len(shots),
        "overload: refusals p99 (s)": float(
            np.percentile([shot.done_s - shot.sent_s for shot in refused], 99) if refused else 0.0
        ),
        "overload: refusals with Retry-After": float(
            np.mean([bool(shot.retry_after) for shot in refused]) if refused else 1.0
        ),
        "overload: ended otherwise": float(len(other)),
        "overload: gateway's memory grew by": after / before,
    }


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def flood(live: Live, capacity_per_s: float, lasts_s: float) -> dict[str, float]:
    """One tenant at 0.3 of the capacity, alone and beside one that asks for twice the capacity."""
    keys = live.folder / "keys"
    made = {}
    lines = []
    for name in ("calm", "flooder"):
        made[name], line = new_key(name)
        lines.append(line)
    keys.write_text("\n".join(lines) + "\n")
    calm = live.requests(round(0.3 * capacity_per_s * lasts_s), 0.3 * capacity_per_s)
    loud = live.requests(round(2 * capacity_per_s * lasts_s), 2 * capacity_per_s, SEED + 1)
    means = []
    attained = []
    for together in (False, True):
        shots = shots_of(calm, made["calm"])
        others = shots_of(loud, made["flooder"], SEED + 2) if together else []
        with LiveFleet(live.plan, live.spec, gateway=("--keys", str(keys))) as fleet:
            shoot(fleet.url, sorted([*shots, *others], key=lambda shot: shot.at_s))
        means.append(float(np.mean([shot.ttft_s for shot in shots if shot.ended])))
        attained.append(float(np.mean([good(shot) for shot in shots])))
    served = float(np.mean([shot.ended for shot in others]))
    return {
        "flood: the other's ttft alone (s)": means[0],
        "flood: the other's ttft over alone": means[1] / means[0],
        "flood: the other's attainment": attained[1],
        "flood: the flooder's share served": served,
    }


def measure(quick: bool) -> dict[str, float]:
    live = Live("coral")
    figures = _said(fidelity(live, 60 if quick else 600))
    if not quick:
        capacity_per_s = live.capacity_per_s()
        figures |= _said(overload(live, capacity_per_s, 60.0))
        figures |= _said(flood(live, capacity_per_s, 60.0))
    return figures


def _said(figures: dict[str, float]) -> dict[str, float]:
    """As they come, since the whole takes minutes."""
    for name, value in figures.items():
        print(f"{name}: {value:.4g}", file=sys.stderr)
    return figures


if __name__ == "__main__":
    sys.exit(run("gateway_live", measure, TARGETS, seeds=[SEED], quick_without="overload and flood"))
