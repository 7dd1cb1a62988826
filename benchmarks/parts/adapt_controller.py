"""The controller of `potluck up` without what comes before it, so that it can be killed often: STATE SPEC PLAN."""

from __future__ import annotations

import sys
from pathlib import Path

from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.local_stack import LocalStack, LocalStackSettings
from potluck.core.values.plan import plan_from_json
from potluck.engine import shipped_model


def main(state: Path, spec: Path, plan: Path) -> None:
    made = plan_from_json(plan.read_text("utf-8"))
    names = tuple((model, "Llama-3.1-8B") for model in sorted({item.model for item in made.templates}))
    files = tuple((name, shipped_model()) for name, _ in names)
    stand = LocalStack(
        LocalStackSettings(state, spec.resolve(), 0, EngineCommands("mock", files, names)), made
    )
    stand.controller._linger_s = 1.0  # so that there is more to do between two kills
    stand.run(lambda: False, lambda turn: None)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
