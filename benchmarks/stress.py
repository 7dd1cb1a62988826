"""A fleet under stress, in simulation: overload, bursts, slow replicas, wrong weights, bad links, floods, losses.

    python benchmarks/stress.py [--quick] [--json] [--only SCENARIO]... [--balance NAME] [--policy NAME=VALUE]...

Every scenario serves made-up or recorded requests with the Brain that runs live, and says what the users got: which
share of them kept the objective, how many good answers a second there were, who was refused and how soon.
`--policy` and `--balance` compare rules.

Where a compiled copy of the present source lies in build/compiled (`make compiled`), that is what runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

from parts.common import COMPILED, compiled_copy, run
from parts.stress_fleets import SEED, Rules
from parts.stress_scenarios import COMPILED as RUNS_COMPILED
from parts.stress_scenarios import SCENARIOS, Scenario
from potluck.cli.simulating.simulation import policy_of
from potluck.core.errors import PotluckError
from potluck.core.state.policy import Policy


def measure(chosen: Sequence[Scenario], policy: Policy, quick: bool) -> dict[str, float]:
    """All figures of the chosen scenarios."""
    rules, figures = Rules(policy, quick), {"compiled": float(RUNS_COMPILED)}
    for item in chosen:
        begin_s = time.process_time()
        print(f"  {item.name} (seed {SEED}) ...", end="", file=sys.stderr, flush=True)
        figures |= item.run(rules)
        spent_s = time.process_time() - begin_s
        figures[f"{item.name}_cpu_s"] = spent_s
        print(f" {spent_s:.1f} CPU-s", file=sys.stderr, flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/stress.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only", action="append", choices=[scenario.name for scenario in SCENARIOS], help="may be repeated"
    )
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--balance", metavar="NAME", help="the same as --policy balance=NAME")
    options = parser.parse_args()
    if not RUNS_COMPILED and compiled_copy():
        environment = os.environ | {"PYTHONPATH": str(COMPILED)}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    try:
        policy = policy_of((*options.policy, *([f"balance={options.balance}"] if options.balance else ())))
    except (ValueError, PotluckError) as error:
        print(f"stress: {error}", file=sys.stderr)
        return 2
    asked = options.only or [scenario.name for scenario in SCENARIOS]
    chosen = [scenario for scenario in SCENARIOS if scenario.name in asked]
    flags = [f"--{name}" for name in ("quick", "json") if getattr(options, name)]
    targets = {key: value for item in chosen for key, value in item.targets.items()}
    return run("stress", partial(measure, chosen, policy), targets, seeds=[SEED], arguments=flags)


if __name__ == "__main__":
    sys.exit(main())
