"""A service that adapts, on mock engines: `python benchmarks/adapt.py [--only SCENARIO]... [--seed N]`.

Each scenario (a function of `parts/adapt_scenarios.py`) starts its own `potluck up` (gateway, controller, engines:
real processes), loads it in an open loop and tells attainment before, during and after, how long what took, and how
many requests were lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parts.adapt_scenarios import SCENARIOS, slow
from parts.common import options, prefixed, run, say

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


def measure(names: Sequence[str], seed: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in names:
        say(f"{name}:")
        with tempfile.TemporaryDirectory(prefix="adapt-") as folder:
            figures |= prefixed(name, SCENARIOS[name](Path(folder), seed))
    return figures


if __name__ == "__main__":
    given = options(only=tuple(SCENARIOS), seed=1)
    if "--quick" in sys.argv:
        SCENARIOS["slow"] = partial(slow, happens_s=8.0, lasts_s=26.0)
        given.only = ["slow"] if given.only == tuple(SCENARIOS) else given.only
    run(
        "adapt",
        lambda quick: measure(given.only, given.seed),
        {key: target for key, target in TARGETS.items() if key.partition("_")[0] in given.only},
        seeds=(given.seed,),
        quick_without="all but slow",
    )
