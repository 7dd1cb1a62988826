"""What operators should know of replicas, said once: who is slower than its facts, and who is as planned again.

Routing weighs a replica by its pace in any case; this only says so.
"""

from __future__ import annotations

from potluck.core.brain.actions import Action, Remark
from potluck.core.brain.fleet import Fleet

SLOW, FINE = 1.5, 1.2
"""Paces from which a replica counts as slow, and below which it no longer does."""


class Remarks:
    """State: who was said to be slow."""

    __slots__ = ("_slow",)

    def __init__(self) -> None:
        self._slow: set[str] = set()

    def paces(self, fleet: Fleet) -> list[Action]:
        found: list[Action] = []
        for name, view in fleet.views.items():
            if name not in self._slow and view.pace >= SLOW:
                self._slow.add(name)
                said = f"takes {view.pace:.1f} times as long as planned"
                found.append(Remark(f"{name} {said}", "it is sent less: requests there took so long"))
            elif name in self._slow and view.pace < FINE:
                self._slow.discard(name)
                found.append(Remark(f"{name} is about as fast as planned again", f"pace {view.pace:.2f}"))
        if self._slow:
            self._slow &= fleet.views.keys()
        return found
