"""Models that nobody asks for sleep: their copies go, and come back with the next request, which is held meanwhile.

Only where a model's facts allow it (`idle_s`). The plan stays what it is; while a model sleeps, none of its copies is
wanted. A request that comes wakes it at the next tick, and waits as any does that finds no replica: for `max_wait_s`.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.state.actions import Action, OperatorNote
from potluck.core.state.facts import ModelFacts
from potluck.core.state.fleet import FleetState


class ScaleToZero:
    """State: when each model was last asked for or had something to do, and which sleep."""

    __slots__ = ("_active_s", "_models", "asleep")

    def __init__(self, models: Mapping[str, ModelFacts]) -> None:
        self._models = models
        self._active_s: dict[str, float] = {}
        self.asleep: set[str] = set()

    @property
    def any(self) -> bool:
        return any(each.idle_s is not None for each in self._models.values())

    def asked(self, at_s: float, model: str) -> None:
        self._active_s[model] = at_s

    def tick(self, at_s: float, fleet: FleetState, held: Mapping[str, int]) -> tuple[list[Action], bool]:
        """What to say of it, and whether another number of copies is wanted."""
        found: list[Action] = []
        if not self.any:
            return found, False
        busy = {view.member.model for view in fleet.views.values() if view.open_requests}
        for model, facts in self._models.items():
            if facts.idle_s is None:
                continue
            if model in busy or held.get(model) or model not in self._active_s:
                self._active_s[model] = at_s
            idle_s = at_s - self._active_s[model]
            if model not in self.asleep and idle_s >= facts.idle_s:
                self.asleep.add(model)
                found.append(OperatorNote(f"{model} sleeps", f"no request came for {idle_s:.0f} s"))
            elif model in self.asleep and idle_s < facts.idle_s:
                self.asleep.discard(model)
                found.append(OperatorNote(f"{model} wakes", "a request came"))
        return found, bool(found)
