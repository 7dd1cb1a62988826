"""A service that adapts, on mock engines of this machine: `python benchmarks/adapt.py`.

    slow       one replica takes three times as long as planned
    killed     a node dies under load, and none like it is left
    surge      three times the load, then a third of it
    shift      conversation becomes coding: roles flip
    cheaper    a cheaper GPU can be had
    spot       a spot machine goes, with notice
    sleep      nobody asks for a while: no copy is left, and the next request waits for one
    restarts   the controller is killed twenty times
    ahead      a rise that the days before had: copies come before it
    prfaas     other lengths for a remote prefill cluster: its threshold and the local roles follow
    advise     three times the load, and only advice

Each scenario starts its own `potluck up` (gateway, controller, engines: real processes), loads it in an open loop and
tells attainment before, during and after, how long what took, and how many requests were lost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parts.adapt_scenarios import SCENARIOS, slow
from parts.common import run

QUICK = ("slow",)
TARGETS = {
    "slow_noticed_s": ("<=", 10.0),
    "killed_first_answer_s": ("<=", 2.0),
    "shift_first_flip_s": ("<=", 13.0),
    "ahead_lead_s": (">", 0.0),
    "prfaas_threshold_s": ("<=", 60.0),
    "prfaas_flips": (">=", 1.0),
    "advise_changed": ("<=", 0.0),
    "advise_advice": (">=", 1.0),
    "restarts_twice": ("<=", 0.0),
    "restarts_orphans": ("<=", 0.0),
    **{f"{name}_lost": ("<=", 0.0) for name in SCENARIOS},
}


def measure(names: Sequence[str], seed: int, loud: bool) -> dict[str, float]:
    figures: dict[str, float] = {}

    def say(line: str) -> None:
        if loud:
            print(line, file=sys.stderr, flush=True)

    for name in names:
        say(f"{name}:")
        with tempfile.TemporaryDirectory(prefix="adapt-") as folder:
            result = SCENARIOS[name](Path(folder), seed, say)
        say(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in result.items()))
        figures |= {f"{name}_{key}": value for key, value in result.items()}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--only", choices=sorted(SCENARIOS), action="append", help="this one; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loud", action="store_true", help="say on stderr what happens")
    options, rest = parser.parse_known_args()
    names = options.only or list(QUICK if "--quick" in rest else SCENARIOS)
    if "--quick" in rest:
        SCENARIOS["slow"] = partial(slow, happens_s=8.0, lasts_s=26.0)
    return run(
        "adapt",
        lambda quick: measure(names, options.seed, options.loud),
        {key: target for key, target in TARGETS.items() if key.partition("_")[0] in names},
        seeds=(options.seed,),
        arguments=rest,
        quick_without=f"all but {', '.join(QUICK)}",
    )


if __name__ == "__main__":
    sys.exit(main())
