"""What decides, as the worlds see it."""

from __future__ import annotations

from typing import Protocol

from potluck.core.state.actions import Action
from potluck.core.state.events import Event


class Decider(Protocol):
    """The Brain, or a stand-in for it."""

    def on(self, at_s: float, event: Event) -> list[Action]: ...
