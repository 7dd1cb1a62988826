"""Several hosts in trouble under load, each in a network namespace of its own: `python benchmarks/hosts.py`.

    cut       a host's cable is pulled, and put in again
    slow      a host's cable carries next to nothing for a while: its engine is given up, and taken back
    crawls    it carries too little for its answers: found out by how long they take, and sent less
    killed    an engine dies, and the same release is started in its place
    older     an engine dies, and an older release is started, whose KV crosses in another format

Engines pretend; gateway, engines and their KV speak TLS, and one engine's clock is a day behind. Every answer is
compared with an engine's that nobody disturbs: `wrong` counts those that differ, were refused or cut. A stall is the
longest wait between two pieces of one answer. Needs root, Linux and iproute2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from parts.common import ROOT, run, skip

sys.path.insert(0, str(ROOT / "tools"))

from hosts_fleet import HostsFleet
from live_plans import COMBO, MODEL, WHOLE, write_plans

import hosts
from parts.hosts_load import Load, wrong
from parts.hosts_troubles import Times, Troubles

WORDS = ROOT / "src" / "potluck" / "engine" / "data" / "words"
OLDER: dict[str, object] = {"kv_version": 1, "version": "0.0.9"}
SLOW_BITS_PER_S, CRAWLING_BITS_PER_S = 4e3, 20e3


def source_of(revision: str, folder: Path) -> Path:
    """The code as it was at a revision of this repository's history."""
    made = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, "src"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=made.stdout, check=True)
    return folder / "src"


def troubled(quick: bool, older: str | None) -> dict[str, float]:
    """All of it, one after the other: four engines that answer whole requests, and a prefill with a decode engine."""
    units = WHOLE * 4 + COMBO
    prefill, decode = 4, 5
    with tempfile.TemporaryDirectory() as name, hosts.Bed(len(units) + 2) as bed:
        folder = Path(name)
        source = None if older is None else source_of(older, folder)
        plan, spec = write_plans(folder, units)
        with HostsFleet(
            bed, plan, spec, gateway=("--files", f"{MODEL}={WORDS}"), odd={1: {"clock_s": -86_400.0}}
        ) as fleet:
            load = Load(fleet, 4.0 if quick else 8.0)
            load.start()
            troubles = Troubles(fleet, 1.0 if quick else 10.0)
            times = {"cut": troubles.cut(0), "slow": troubles.slow(1, SLOW_BITS_PER_S)}
            if not quick:
                times["crawls"] = troubles.slow(2, CRAWLING_BITS_PER_S)
            times["killed"] = troubles.kill(prefill)
            times["older"] = troubles.kill(decode, None if source else OLDER, source)
            troubles.kill(decode)
            shots = load.end()
            found = wrong(fleet, shots, by=2)
    for line in found:
        print(f"wrong: {line}", file=sys.stderr)
    gaps = sorted(max(shot.longest_gap_s, shot.ttft_s) for shot in shots)
    figures = {"requests": float(len(shots)), "wrong": float(len(found))}
    figures |= {"stall_p50_s": gaps[len(gaps) // 2], "stall_most_s": gaps[-1]}
    return figures | spread(times)


def spread(times: dict[str, Times]) -> dict[str, float]:
    found = {}
    for name, each in times.items():
        found |= {f"{name}_noticed_s": each.noticed_s, f"{name}_back_s": each.back_s}
    return found


def main() -> int:
    why_not = hosts.missing()
    if why_not:
        return skip("hosts", why_not)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--older", metavar="REVISION", help="a release of history, in place of one that acts so"
    )
    options, rest = parser.parse_known_args()
    return run(
        "hosts",
        lambda quick: troubled(quick, options.older),
        {"wrong": ("<=", 0.0)},
        arguments=rest,
        quick_without="half the load, most of the time between two troubles, and the host that crawls",
    )


if __name__ == "__main__":
    sys.exit(main())
