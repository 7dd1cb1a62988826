"""The gateway over a fleet at true GPU speed, beside the simulator: the same plan, requests and emulated GPUs.

    python benchmarks/gateway_live.py [--quick] [--json] [--only fidelity|overload|flood]...

- fidelity: are TTFT and TPOT those of the simulation, on the whole and request by request?
- overload: at 5 times the capacity, how much is served in time, how soon is the rest refused, how does memory grow?
- flood: what does a tenant that asks for too much take from one that does not?

Engines are mocks. How long processes wait for a core is told, and what the gateway's /health takes beside refusals.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from parts.adapt_rig import shots_of_load
from parts.common import POTLUCK, ROOT, options, resident_bytes, run, say

sys.path.insert(0, str(ROOT / "tools"))
from live_fleet import LiveFleet

from potluck.cli.simulating.simulation import read_inputs, scene_of
from potluck.core.state.policy import Policy
from potluck.gateway.openai.keys import new_key
from potluck.loadgen.load_client import TimedRequest, fire, server_of, shoot
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.run import simulate

SEED = 11
TTFT_S, TPOT_S = 2.0, 0.08
SPEC = """
kv_codecs: [raw, int8, int4]
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
    "overload: gateway's memory, after over warm": ("<=", 1.05),
    "flood: the other's ttft over alone": ("<=", 1.5),
}


PARTS = {"fidelity": ("ttft", "tpot", "log"), "overload": ("overload",), "flood": ("flood",)}
"""To how their targets begin."""
WARM_REQUESTS = 1000
PROBE_S = 0.05


class Waits:
    """How long processes waited for a core, as a share of the time since this was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start_s, self._before_s = time.monotonic(), [_waited_s(pid) for pid in pids]

    def shares(self) -> list[float]:
        passed_s = time.monotonic() - self._start_s
        pairs = zip(self._pids, self._before_s, strict=True)
        return [(_waited_s(pid) - before) / passed_s for pid, before in pairs]


def _waited_s(pid: int) -> float:
    """Of its main thread; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def pids_of(fleet: LiveFleet) -> list[int]:
    processes = [fleet.gateway, *fleet.engines]
    return [process.popen.pid for process in processes if process is not None and process.popen is not None]


class Live:
    def __init__(self, strategy: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-gateway-live-"))
        self.spec, self.plan = self.folder / "spec.yaml", self.folder / "plan.json"
        self.spec.write_text(SPEC)
        potluck("plan", str(self.spec), "--strategy", strategy, "--out", str(self.plan))
        self.inputs = read_inputs((self.plan, self.spec), 0.0, lambda line: None, lambda spec: None)[0]

    def requests(self, count: int, rate_per_s: float | None = None, seed: int = SEED) -> Workload:
        workload = of_traffic([model.traffic for model in self.inputs.spec.models], count, seed)
        return workload if rate_per_s is None else at_rate(workload, rate_per_s)

    def capacity_per_s(self) -> float:
        text = potluck("goodput", str(self.plan), str(self.spec), "--requests", "2000", "--json")
        return float(json.loads(text)["goodput_per_s"])


def potluck(*arguments: str) -> str:
    return subprocess.run([*POTLUCK, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def fidelity(live: Live, count: int) -> dict[str, float]:
    workload = live.requests(count)
    log = live.folder / "fidelity.log"
    shots = shots_of_load(workload)
    with LiveFleet(live.plan, live.spec, gateway=("--log", str(log))) as fleet:
        waits = Waits(pids_of(fleet))
        shoot(fleet.url, shots)
        waited = waits.shares()
    wrong = [shot.problem or str(shot.status) for shot in shots if not shot.ended]
    if wrong:
        say(f"fidelity: {len(wrong)} of {count} were not answered, such as {wrong[0]}")
    records = simulate(scene_of(live.inputs), workload, Policy()).records
    answered = np.array([shot.ended for shot in shots])
    both = answered & np.isfinite(records.first_token_s)
    many = both & (records.output_tokens > 1)
    ttft_s = np.array([shot.ttft_s for shot in shots])
    tpot_s = np.array([shot.tpot_s for shot in shots])
    simulated_ttft_s = records.first_token_s - records.arrival_s
    simulated_tpot_s = (records.finish_s - records.first_token_s) / np.maximum(records.output_tokens - 1, 1)
    replayed = subprocess.run([*POTLUCK, "replay", str(log)], capture_output=True, check=False)
    figures = {
        "fidelity: requests": float(count),
        "fidelity: answered": float(answered.mean()),
        "fidelity: answered in the simulation": float(np.isfinite(records.first_token_s).mean()),
        "fidelity: client late p99 (s)": float(np.percentile([s.sent_s - s.at_s for s in shots], 99)),
        "fidelity: gateway waited for a core, of the time": waited[0],
        "fidelity: engines waited for a core, of the time, at most": max(waited[1:]),
        "log replays": float(replayed.returncode == 0),
    }
    for name, live_s, simulated_s, mask in (
        ("ttft", ttft_s, simulated_ttft_s, both),
        ("tpot", tpot_s, simulated_tpot_s, many),
    ):
        live_s, simulated_s = live_s[mask], simulated_s[mask]
        for what, pick in (("mean", np.mean), ("p99", lambda values: np.percentile(values, 99))):
            ours, theirs = float(pick(live_s)), float(pick(simulated_s))
            figures |= {f"{name} {what}, live (s)": ours, f"{name} {what}, simulated (s)": theirs}
            figures[f"{name} {what}, live over simulated, off by"] = abs(ours / theirs - 1.0)
        for share in (10, 50, 90, 99):
            later_s = float(np.percentile(live_s - simulated_s, share))
            figures[f"{name} of each, live less simulated, p{share} (s)"] = later_s
    return figures


def good(request: TimedRequest) -> bool:
    return request.ended and request.ttft_s <= TTFT_S and request.tpot_s <= TPOT_S


async def probed(url: str, shots: Sequence[TimedRequest]) -> list[float]:
    """Send all shots, and meanwhile ask for the gateway's health; how long that took each time."""
    to, took_s = server_of(url), []

    async def ask() -> None:
        while True:
            reader, writer = await asyncio.open_connection(to.hostname, to.port)
            begun_s = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await reader.readline()
            took_s.append(time.monotonic() - begun_s)
            writer.close()
            await asyncio.sleep(PROBE_S)

    asking = asyncio.create_task(ask())
    await fire(url, shots)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return took_s


def overload(live: Live, capacity_per_s: float, lasts_s: float, times: float = 5.0) -> dict[str, float]:
    """A thousand requests at that rate make the gateway warm; then it is measured."""
    rate = capacity_per_s * times
    warming = shots_of_load(live.requests(WARM_REQUESTS, rate, SEED + 1))
    shots = shots_of_load(live.requests(round(rate * lasts_s), rate))
    with LiveFleet(live.plan, live.spec) as fleet:
        pids = pids_of(fleet)
        cold = resident_bytes(pids[0])
        shoot(fleet.url, warming)
        warm, waits = resident_bytes(pids[0]), Waits(pids)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            health_s = runner.run(probed(fleet.url, shots))
        after, waited = resident_bytes(pids[0]), waits.shares()
    served = [shot for shot in shots if good(shot) and shot.last_s <= lasts_s]
    refused = [shot for shot in shots if shot.status == 429]
    other = [shot for shot in shots if not shot.ended and shot.status != 429]
    if other:
        say(f"overload: {len(other)} ended otherwise, such as {other[0].problem[:200]}")
    waits_s = [shot.head_s - shot.sent_s for shot in refused] or [0.0]
    retries = [bool(shot.retry_after) for shot in refused] or [True]
    return {
        "overload: capacity (req/s)": capacity_per_s,
        "overload: sent (req/s)": rate,
        "overload: goodput over capacity": len(served) / lasts_s / capacity_per_s,
        "overload: refused": len(refused) / len(shots),
        "overload: refusals p50 (s)": float(np.percentile(waits_s, 50)),
        "overload: refusals p99 (s)": float(np.percentile(waits_s, 99)),
        "overload: refusals later than 0.3 s": float(np.mean(np.array(waits_s) > 0.3)),
        "overload: /health p50 beside them (s)": float(np.percentile(health_s, 50)),
        "overload: /health p99 beside them (s)": float(np.percentile(health_s, 99)),
        "overload: gateway waited for a core, of the time": waited[0],
        "overload: engines waited for a core, of the time, at most": max(waited[1:]),
        "overload: refusals with Retry-After": float(np.mean(retries)),
        "overload: ended otherwise": float(len(other)),
        "overload: gateway's memory, cold (MB)": cold / 1e6,
        "overload: gateway's memory, warm (MB)": warm / 1e6,
        "overload: gateway's memory, after (MB)": after / 1e6,
        "overload: gateway's memory, after over warm": after / warm,
    }


def flood(live: Live, capacity_per_s: float, lasts_s: float) -> dict[str, float]:
    """One tenant at 0.3 of the capacity, alone and beside one that asks for twice the capacity."""
    keys = live.folder / "keys"
    made = {name: new_key(name) for name in ("calm", "flooder")}
    keys.write_text("".join(f"{line}\n" for _, line in made.values()))
    calm = live.requests(round(0.3 * capacity_per_s * lasts_s), 0.3 * capacity_per_s)
    loud = live.requests(round(2 * capacity_per_s * lasts_s), 2 * capacity_per_s, SEED + 1)
    means, attained = [], []
    for together in (False, True):
        shots = shots_of_load(calm, made["calm"][0])
        others = shots_of_load(loud, made["flooder"][0], SEED + 2) if together else []
        with LiveFleet(live.plan, live.spec, gateway=("--keys", str(keys))) as fleet:
            shoot(fleet.url, sorted([*shots, *others], key=lambda request: request.at_s))
        means.append(float(np.mean([shot.ttft_s for shot in shots if shot.ended])))
        attained.append(float(np.mean([good(shot) for shot in shots])))
    return {
        "flood: the other's ttft alone (s)": means[0],
        "flood: the other's ttft over alone": means[1] / means[0],
        "flood: the other's attainment": attained[1],
        "flood: the flooder's share served": float(np.mean([shot.ended for shot in others])),
    }


def measure(quick: bool, parts: Sequence[str]) -> dict[str, float]:
    live, figures = Live("coral"), {}
    if "fidelity" in parts:
        figures |= _said(fidelity(live, 60 if quick else 1500))
    if not quick and parts != ["fidelity"]:
        capacity_per_s = live.capacity_per_s()
        if "overload" in parts:
            figures |= _said(overload(live, capacity_per_s, 60.0))
        if "flood" in parts:
            figures |= _said(flood(live, capacity_per_s, 60.0))
    return figures


def _said(figures: dict[str, float]) -> dict[str, float]:
    """As they come, since the whole takes minutes."""
    for name, value in figures.items():
        say(f"{name}: {value:.4g}")
    return figures


if __name__ == "__main__":
    parts = options(only=tuple(PARTS)).only
    wanted = tuple(word for part in parts for word in PARTS[part])
    run(
        "gateway_live",
        lambda quick: measure(quick, parts),
        {key: value for key, value in TARGETS.items() if key.startswith(wanted)},
        seeds=[SEED],
        quick_without="overload and flood",
    )
