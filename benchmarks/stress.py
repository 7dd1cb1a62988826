"""A fleet under stress, in simulation: overload, bursts, slow replicas, wrong weights, bad links, floods, losses.

    python benchmarks/stress.py [--quick] [--json] [--only SCENARIO]... [--policy NAME=VALUE,...]

Every scenario serves made-up or recorded requests with the Brain that runs live, and says what the users got.
`--policy` compares rules. Where a compiled copy of the present source lies in build/compiled (`make compiled`), that
is what runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

from parts.common import COMPILED, compiled_copy, options, run, say
from parts.stress_fleets import SEED, Rules
from parts.stress_scenarios import COMPILED as RUNS_COMPILED
from parts.stress_scenarios import SCENARIOS, TARGETS
from potluck.cli.simulating.simulation import policy_of
from potluck.core.state.policy import Policy


def measure(names: Sequence[str], policy: Policy, quick: bool) -> dict[str, float]:
    rules, figures = Rules(policy, quick), {"compiled": float(RUNS_COMPILED)}
    for name in names:
        begin_s = time.process_time()
        figures |= SCENARIOS[name](rules)
        spent_s = figures[f"{name}_cpu_s"] = time.process_time() - begin_s
        say(f"  {name} (seed {SEED}): {spent_s:.1f} CPU-s")
    return figures


if __name__ == "__main__":
    if not RUNS_COMPILED and compiled_copy():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONPATH": str(COMPILED)})
    given = options(only=tuple(SCENARIOS), policy="")
    policy = policy_of(tuple(filter(None, given.policy.split(","))))
    names = [name for name in SCENARIOS if name in given.only]
    targets = {key: value for name in names for key, value in TARGETS[name].items()}
    run("stress", partial(measure, names, policy), targets, seeds=[SEED])
