"""The controller of `potluck up` without what comes before it, so that it can be killed often: STATE SPEC PLAN."""

from __future__ import annotations

import sys
from pathlib import Path

from potluck.control.launch.command import EngineMaker
from potluck.control.stand import Stand, StandSettings
from potluck.core.values.plan import plan_from_json
from potluck.engine.shipped import shipped_model


def main(state: Path, spec: Path, plan: Path) -> None:
    made = plan_from_json(plan.read_text("utf-8"))
    names = tuple((model, "Llama-3.1-8B") for model in sorted({each.model for each in made.templates}))
    files = tuple((name, shipped_model()) for name, _ in names)
    stand = Stand(StandSettings(state, spec.resolve(), 0, EngineMaker("pretended", files, names)), made)
    stand.controller._linger_s = 1.0  # so that there is more to do between two kills
    stand.run(lambda: False, lambda turn: None)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
