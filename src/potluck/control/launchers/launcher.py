"""What the controller asks of whoever starts engines, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from potluck.control.control_values import EngineSpec, InstanceState

Place = dict[str, object]
"""Where an engine runs, in its launcher's own words; plain JSON, so that it can be kept."""


@dataclass(frozen=True, slots=True)
class EngineSighting:
    name: str
    state: InstanceState
    url: str = ""
    problem: str = ""
    stands_still: bool = False
    """Its process was stopped, and does nothing until somebody lets it go on."""


@dataclass(frozen=True, slots=True)
class NodeNews:
    """Something about the machines themselves: one will vanish, has, or is new."""

    kind: Literal["notice", "gone", "came"]
    node: str
    why: str
    notice_s: float = 0.0
    """Of a notice: how long it will still be there."""
    engines: tuple[str, ...] = ()


class Launcher(Protocol):
    """None of these waits for an engine to be ready or to end: the next look shows what became of it."""

    def start(self, name: str, make: EngineSpec) -> Place:
        """Begin to start an engine. Raises a PotluckError where that is hopeless."""

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        """What became of those, by their names; and of others that bear this launcher's mark, which nobody knows."""

    def stop(self, name: str, place: Place) -> None:
        """Ask it to end; insist at later looks."""

    def kill(self, name: str, place: Place) -> None:
        """End it without asking."""

    def news(self) -> tuple[NodeNews, ...]:
        """What is new about machines since the last call."""

    def log_of(self, name: str) -> Path:
        """Where on this machine an engine's words can be read."""
