"""Machine code made ahead of its first use: `python -m potluck.cli.serving.engine.warm`, for installers."""

from __future__ import annotations

from potluck.cli.serving.engine import fork_server
from potluck.cli.serving.up.up_command import demo
from potluck.cli.serving.up.up_plan import PlanChoices, prepared
from potluck.cli.simulating.simulation import read_one_spec


def main() -> None:
    """Plan and rehearse the demo, and load the engine: what is compiled for it is kept on disk."""
    prepared((demo(),), read_one_spec((demo(),)), PlanChoices(30.0), lambda line: None)
    fork_server.load()


if __name__ == "__main__":
    main()
