"""Late, doubled, missing and reordered events by the million, at the Brain (tests/core/brain_chaos_driver.py).

    python benchmarks/brain_chaos.py [--quick] [--json] [--events 10000000] [--seed 0]

Every fleet is another one, under other rules. `broken` counts trials that ended in an exception: a request that ended
twice or never, a token that would have been repeated, a count that did not return to nothing.
"""

from __future__ import annotations

import sys
import time

from parts.common import ROOT, options, run, say

sys.path.append(str(ROOT / "tests" / "core"))
import brain_chaos_driver as driver

TARGETS = {"broken": ("==", 0.0)}
TRIAL_EVENTS = 120_000
EVENTS, QUICK_EVENTS = 1_200_000, 120_000


def measure(events: int, seed: int) -> dict[str, float]:
    figures = dict.fromkeys(("events", "trials", "broken", "asked", *driver.FATES), 0.0)
    begin_s = time.process_time()
    while figures["events"] < events:
        number = seed + int(figures["trials"])
        figures["trials"] += 1
        try:
            chaos = driver.run_chaos(number, int(min(TRIAL_EVENTS, events - figures["events"])))
        except driver.InvariantBroken as error:
            say(f"brain_chaos: {error}")
            figures["broken"] += 1
            figures["events"] += TRIAL_EVENTS
            continue
        figures["events"] += chaos.events
        figures["asked"] += chaos.asked
        for fate, count in chaos.fates.items():
            figures[fate] += count
    figures["us_per_event"] = (time.process_time() - begin_s) / figures["events"] * 1e6
    return figures


if __name__ == "__main__":
    given, broken = options(events=0, seed=0), []

    def trials(quick: bool) -> dict[str, float]:
        figures = measure(given.events or (QUICK_EVENTS if quick else EVENTS), given.seed)
        broken.append(figures["broken"] > 0)
        return figures

    run("brain_chaos", trials, TARGETS, seeds=[given.seed])
    sys.exit(any(broken))
