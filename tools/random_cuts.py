"""`potluck serve` as it is, but that prompts which two engines share are cut at random: tests want any cut.

    python tools/random_cuts.py serve plan.json potluck.yaml ...

The rule's own cut (core/routing/split.py) hardly moves with a small model's short prompts.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

from potluck.cli.main import main
from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, Run
from potluck.core.state.events import Event
from potluck.core.values.route import Route, Segment
from potluck.gateway import core

SEED = 7


class RandomCuts:
    """A Brain whose routes over two replicas have another cut."""

    def __init__(self, *given: Any) -> None:
        self._brain, self._chance = Brain(*given), Random(SEED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._brain, name)

    def on(self, at_s: float, event: Event) -> list[Action]:
        return [self._cut(item) if isinstance(item, Run) else item for item in self._brain.on(at_s, event)]

    def _cut(self, run: Run) -> Run:
        segments = run.route.segments
        if len(segments) != 2 or run.prompt_tokens < 2:
            return run
        cut = self._chance.randrange(1, run.prompt_tokens)
        first, last = segments
        route = Route((Segment(first.replica, 0, cut), Segment(last.replica, cut, None)))
        return run._replace(route=route)


if __name__ == "__main__":
    core.Brain = RandomCuts  # type: ignore[misc, assignment]
    sys.exit(main())
