"""What operators should know, said once: who is slower than its facts, and from which length on prompts go elsewhere.

Routing weighs a replica by its pace, and follows thresholds, in any case; this only says so.
"""

from __future__ import annotations

from typing import Final

from potluck.core.routing.threshold import LEAST_TOKENS, LengthThreshold
from potluck.core.state.actions import Action, OperatorNote
from potluck.core.state.fleet import FleetState

SLOW, FINE = 1.5, 1.2
"""Paces from which a replica counts as slow, and below which it no longer does."""
MOVED: Final = 1.2
"""By how much a threshold must have moved to be spoken of again."""


class OperatorNotes:
    """State: who was said to be slow, and what was last said of each threshold."""

    __slots__ = ("_slow", "_thresholds")

    def __init__(self) -> None:
        self._slow: set[str] = set()
        self._thresholds: dict[tuple[str, str], LengthThreshold] = {}

    def paces(self, fleet: FleetState) -> list[Action]:
        found: list[Action] = []
        for name, view in fleet.views.items():
            if name not in self._slow and view.pace >= SLOW:
                self._slow.add(name)
                said = f"takes {view.pace:.1f} times as long as planned"
                found.append(OperatorNote(f"{name} {said}", "it is sent less: requests there took so long"))
            elif name in self._slow and view.pace < FINE:
                self._slow.discard(name)
                found.append(
                    OperatorNote(f"{name} is about as fast as planned again", f"pace {view.pace:.2f}")
                )
        if self._slow:
            self._slow &= fleet.views.keys()
        return found

    def planned(self, links: dict[str, dict[str, LengthThreshold]]) -> None:
        """A plan brought these with it."""
        self._thresholds = {
            (model, link): each for model, mine in links.items() for link, each in mine.items()
        }

    def thresholds(self, links: dict[str, dict[str, LengthThreshold]], thinks: str) -> list[Action]:
        """Those that moved since they were last spoken of; `thinks` is what scaling thought at last."""
        found: list[Action] = []
        for model, mine in links.items():
            for link, now in mine.items():
                before = self._thresholds.get((model, link))
                if before is not None and not _moved(before, now):
                    continue
                self._thresholds[model, link] = now
                what = f"only prompts of {model} beyond {now.tokens:.0f} tokens go over {link} now"
                found.append(OperatorNote(what, _why(before, now, thinks)))
        return found


def _moved(before: LengthThreshold, now: LengthThreshold) -> bool:
    low, high = sorted((max(before.tokens, LEAST_TOKENS), max(now.tokens, LEAST_TOKENS)))
    return high >= MOVED * low or before.base_tokens != now.base_tokens


def _why(before: LengthThreshold | None, now: LengthThreshold, thinks: str) -> str:
    if before is None or before.base_tokens != now.base_tokens:
        return thinks
    away = f"before it was {before.tokens:.0f}, planned are {now.base_tokens:.0f}"
    if now.tokens > before.tokens:
        return f"the link, or prefill at its far end, has too much to do; {away}"
    return f"the link and its far end are clear again; {away}"
