"""Several hosts in trouble under load, each in a network namespace: `python benchmarks/hosts.py [--only PART]...`.

    troubles  a cable is pulled and put in again (cut), carries next to nothing for a while (slow: the engine is given
              up), or too little (crawls: it is sent less); an engine dies (killed) and an older release is started in
              its place (older), whose KV crosses in another format
    upgrade   every engine through `potluck fleet upgrade`, then both gateways by successors that take their ports
    beside    two gateways in the place of one: how right limits of keys and affinity to caches are then

Engines are mocks; all speak TLS, one engine's clock is a day behind. `wrong` counts answers that differ from those of
an engine that nobody disturbs, were refused or cut. A stall is the longest wait between two pieces of one answer.
Needs root, Linux and iproute2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parts.common import POTLUCK, ROOT, WORDS, options, run, say, skip

sys.path.insert(0, str(ROOT / "tools"))

import host_bed
from hosts_fleet import HostsFleet
from live_plans import COMBO, MODEL, WHOLE, write_plans

from parts.hosts_beside import beside
from parts.hosts_load import Load, Troubles, Upkeep, within, wrong

OLDER: dict[str, object] = {"kv_version": 1, "version": "0.0.9"}
FAILURES = "potluck_failures_total"
FILES = ("--files", f"{MODEL}={WORDS}")
SLOW_BITS_PER_S, CRAWLING_BITS_PER_S = 4e3, 20e3


def troubled(quick: bool) -> dict[str, float]:
    """All of it, one after the other: four engines that answer whole requests, and a prefill with a decode engine."""
    units = WHOLE * 4 + COMBO
    prefill, decode = 4, 5
    with tempfile.TemporaryDirectory() as name, host_bed.Bed(len(units) + 2) as bed:
        plan, spec = write_plans(Path(name), units)
        with HostsFleet(bed, plan, spec, gateway=FILES, odd={1: {"clock_s": -86_400.0}}) as fleet:
            load = Load(fleet, 4.0 if quick else 8.0)
            load.start()
            troubles = Troubles(fleet, 1.0 if quick else 10.0)
            times = {"cut": troubles.cut(0), "slow": troubles.slow(1, SLOW_BITS_PER_S)}
            if not quick:
                times["crawls"] = troubles.slow(2, CRAWLING_BITS_PER_S)
            times["killed"] = troubles.kill(prefill)
            times["older"] = troubles.kill(decode, OLDER)
            troubles.kill(decode)
            shots = load.sent()
            result = wrong(fleet, shots, by=2)
    for line in result:
        say(f"wrong: {line}")
    gaps = sorted(max(shot.longest_gap_s, shot.ttft_s) for shot in shots)
    figures = {"requests": float(len(shots)), "wrong": float(len(result))}
    figures |= {"stall_p50_s": gaps[len(gaps) // 2], "stall_most_s": gaps[-1]}
    for name, item in times.items():
        figures |= {f"{name}_noticed_s": item.noticed_s, f"{name}_back_s": item.back_s}
    return figures


def upgraded(quick: bool) -> dict[str, float]:
    """Everything again and again, for five minutes: engines copy by copy, gateways one after the other."""
    units = WHOLE * 2 + COMBO
    lasts_s = 20.0 if quick else 300.0
    with tempfile.TemporaryDirectory() as name, host_bed.Bed(len(units) + 3) as bed:
        plan, spec = write_plans(Path(name), units)
        gateway = (*FILES, "--gateways", "2")
        engine = ("--mock", "--end-when-drained")
        with HostsFleet(bed, plan, spec, gateways=2, gateway=gateway, engine=engine, takeover=True) as fleet:
            upkeep = Upkeep(fleet, lambda place: fleet.replace(place, {"version": "9.9.9"}))
            load = Load(fleet, 4.0)
            upkeep.start()
            load.start()
            began_s, rounds, successors, troubles = time.monotonic(), 0, [], []
            while not rounds or time.monotonic() - began_s < lasts_s:
                upgrade(fleet)
                troubles += [line for place in range(2) for line in fleet.metrics(place) if FAILURES in line]
                successors += [fleet.succeed(place) for place in range(2)]
                rounds += 1
            took_s = time.monotonic() - began_s
            shots = load.sent()
            within(lambda: all(old.popen is not None and old.popen.poll() == 0 for old in successors))
            upkeep.end()
            result = wrong(fleet, shots, by=0)
    for line in result:
        say(f"failed: {line}")
    if result:
        say("\n".join(["attempts that failed, as gateways counted them:", *troubles]))
    waits = sorted(max(shot.longest_gap_s, shot.ttft_s) for shot in shots)
    return {
        "upgrade_requests": len(shots),
        "upgrade_failed": len(result),
        "upgrade_s": took_s,
        "upgrade_engines_replaced": upkeep.started,
        "upgrade_gateways_replaced": len(successors),
        "upgrade_wait_p50_s": waits[len(waits) // 2],
        "upgrade_wait_most_s": waits[-1],
    }


def upgrade(fleet: HostsFleet) -> None:
    message = ("--at", fleet.gateways[0].admin, "--key-file", str(fleet.folder / "admin.key"))
    command = [*POTLUCK, "fleet", "upgrade", *message, "--ca", str(fleet.authority)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"potluck fleet upgrade: {done.stderr}")


PARTS = {"troubles": troubled, "upgrade": upgraded, "beside": beside}
TARGETS = {"troubles": "wrong", "upgrade": "upgrade_failed"}

if __name__ == "__main__":
    why_not = host_bed.missing()
    if why_not:
        skip("hosts", why_not)
    parts = options(only=tuple(PARTS)).only
    run(
        "hosts",
        lambda quick: {name: value for part in parts for name, value in PARTS[part](quick).items()},
        {TARGETS[part]: ("<=", 0.0) for part in parts if part in TARGETS},
        quick_without="half the load, most of the time between two troubles, and the host that crawls",
    )
