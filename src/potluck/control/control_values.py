"""What the controller compares: what is wanted, and what was started; what it asks a planner and a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from potluck.core.state.actions import SeenLengths
from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.layout import Layout, StageNode
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region, Role

InstanceState = Literal["starting", "up", "dead"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is, whichever replica it is at present: a role can be changed, this cannot."""

    model: str
    layout: Layout
    region: str
    step_tokens: int = field(default=0, compare=False)
    """New tokens that the plan reckons with in one of its steps, 0: nothing is said. One that was started with others
    serves as well, so it is no other engine for that."""

    @property
    def nodes(self) -> list[StageNode]:
        """One for each machine, in the order of its stages."""
        return [node for stage in self.layout.stages for node in stage.nodes]


@dataclass(frozen=True, slots=True)
class WantedReplica:
    replica: str
    make: EngineSpec
    role: Role
    draining: bool = False  # It is draining and is not replaced.


@dataclass(frozen=True, slots=True)
class EngineInstance:
    name: str  # Its own, never used twice.
    make: EngineSpec
    state: InstanceState
    since_s: float  # When it came into that state.
    url: str = ""
    replica: str = ""  # Which replica it is, or is being started for; empty: none.
    problem: str = ""
    pinned: bool = False  # Started by hand: it is used, and never stopped by us.


@dataclass(frozen=True, slots=True)
class LaunchEngine:
    want: WantedReplica
    why: str


@dataclass(frozen=True, slots=True)
class AssignEngine:
    """An engine that is there becomes a replica; with an empty one, none."""

    instance: str
    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    instance: str
    why: str
    insist: bool = False  # Without asking it: it would not hear.


@dataclass(frozen=True, slots=True)
class ForgetEngine:
    instance: str
    why: str


Order = LaunchEngine | AssignEngine | StopEngine | ForgetEngine


@dataclass(frozen=True, slots=True)
class PlanRequest:
    rates_per_s: Mapping[str, float]
    reason: str
    lengths: tuple[SeenLengths, ...] = ()
    regions: tuple[Region, ...] | None = None  # Prices and nodes, where they differ from the spec's.
    running: Plan | None = None  # The newest plan, with the copies that are there.
    planned: Plan | None = None  # The newest plan as it was made; some of its copies may be gone already.
    paces: tuple[ObservedSpeed, ...] = ()  # What replicas really take, as far as is known.


@dataclass(frozen=True, slots=True)
class PlanReply:
    """A plan, or None where what runs is as good, and why."""

    plan: Plan | None
    why: str


Place = dict[str, object]
"""Where an engine runs, in its launcher's own words; plain JSON, so that it can be kept."""


@dataclass(frozen=True, slots=True)
class EngineSighting:
    name: str
    state: InstanceState
    url: str = ""
    problem: str = ""
    is_hung: bool = False  # Its process is stopped (SIGSTOP).


@dataclass(frozen=True, slots=True)
class NodeNews:
    """Something about the machines themselves: one will vanish, has, or is new."""

    kind: Literal["notice", "gone", "came"]
    node: str
    why: str
    notice_s: float = 0.0  # Of a notice: how long it will still be there.
    engines: tuple[str, ...] = ()


class Launcher(Protocol):
    """None of these waits for an engine to be ready or to end: the next look shows what became of it."""

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
        """Begin to start an engine. Raises a PotluckError where that is hopeless."""

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        """The state of these engines by name, and of unknown ones that carry this launcher's mark."""

    def stop(self, name: str, place: Place) -> None:
        """Ask it to end; insist at later looks."""

    def kill(self, name: str, place: Place) -> None:
        """End it without asking."""

    def news(self) -> tuple[NodeNews, ...]:
        """What is new about machines since the last call."""

    def log_of(self, name: str) -> Path:
        """Where on this machine an engine's words can be read."""
