"""Late, doubled, missing and reordered events by the million, at the Brain (tests/core/brain_chaos_driver.py).

    python benchmarks/brain_chaos.py [--quick] [--json] [--events 10000000] [--seed 0]

Every fleet is another one, under other rules. `broken` counts trials that ended in an exception: a request that ended
twice or never, a token that would have been repeated, a count that did not return to nothing. What broke is printed
with its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "core"))

import brain_chaos_driver as driver

from parts.common import as_table, context, holds

TARGETS = {"broken": ("==", 0.0)}
TRIAL_EVENTS = 120_000
EVENTS, QUICK_EVENTS = 1_200_000, 120_000


def measure(events: int, seed: int) -> dict[str, float]:
    """Trials with seeds of their own until there were so many events."""
    figures = dict.fromkeys(("events", "trials", "broken", "asked", *driver.FATES), 0.0)
    begin_s = time.process_time()
    while figures["events"] < events:
        number = seed + int(figures["trials"])
        figures["trials"] += 1
        try:
            chaos = driver.trial(number, int(min(TRIAL_EVENTS, events - figures["events"])))
        except driver.Broken as error:
            print(f"brain_chaos: {error}", file=sys.stderr)
            figures["broken"] += 1
            figures["events"] += TRIAL_EVENTS
            continue
        figures["events"] += chaos.events
        figures["asked"] += chaos.asked
        for fate, count in chaos.fates.items():
            figures[fate] += count
    figures["us_per_event"] = (time.process_time() - begin_s) / figures["events"] * 1e6
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/brain_chaos.py")
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--events", type=int, default=0, help=f"how many; else {EVENTS:,}, quick {QUICK_EVENTS:,}"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    events = options.events or (QUICK_EVENTS if options.quick else EVENTS)
    if events < 1:
        parser.error("--events must be at least 1")
    known = context([options.seed], quick=options.quick)
    figures = measure(events, options.seed)
    report = {
        "name": "brain_chaos",
        "figures": figures,
        "targets": {key: list(target) for key, target in TARGETS.items()},
        "met": all(holds(figures[key], target) for key, target in TARGETS.items()),
        "context": known,
    }
    print(json.dumps(report, indent=1, allow_nan=False) if options.json else as_table(report, TARGETS))
    return 0 if figures["broken"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
