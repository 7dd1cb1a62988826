"""Machine code made ahead of its first use: `python -m potluck.cli.serving.engine.warm`, for installers."""

from __future__ import annotations

from potluck.cli.serving.engine import nursery
from potluck.cli.serving.up.command import demo
from potluck.cli.serving.up.plan import Wishes, prepared
from potluck.cli.trying.simulation import read_one_spec


def main() -> None:
    """Plan and rehearse the demo, and load the engine: what is compiled for it is kept on disk."""
    prepared((demo(),), read_one_spec((demo(),)), Wishes(30.0), lambda line: None)
    nursery.load()


if __name__ == "__main__":
    main()
