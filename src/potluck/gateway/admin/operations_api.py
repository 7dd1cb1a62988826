"""What operators see and say of the fleet: made by desk/ and fleet/, shown by this room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

Json = dict[str, object]


class ReplicaView(NamedTuple):
    """A replica as it is known now."""

    replica: str
    model: str
    state: str
    """`ready`, `starting`, `draining`, `lost`, ..."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    age_s: float = 0.0
    """Of what is known of it."""


class QueueView(NamedTuple):
    """Requests of one tenant for one model: those that wait before the replicas, and those that were sent."""

    model: str
    tenant: str
    waiting: int
    running: int


class OperationsApi(Protocol):
    """The fleet and its Brain. What is wrong with what an operator sends is raised as an InputError."""

    def replicas(self) -> Iterable[ReplicaView]: ...

    def queues(self) -> Iterable[QueueView]: ...

    def usd_per_h(self) -> Mapping[str, float]:
        """What each model's replicas cost."""

    def snapshot(self) -> Json:
        """Everything at one moment: fleet, models, queues, wanted and seen, plan, counters."""

    def fleet(self) -> Json:
        """Which engines there are."""

    def set_fleet(self, body: Json) -> Json:
        """Other engines from now on; says what changed."""

    def set_plan(self, body: Json, why: str = "", version: int = 0) -> Json:
        """Another plan from now on, why, and its number (0: the next one); says what changes."""

    def set_market(self, body: Json) -> Json:
        """Other prices, other nodes."""

    def decisions(self, after: int) -> Json:
        """What was decided since a number, what scaling thinks now, and what replicas really take."""

    def drain(self, body: Json) -> Json:
        """Empty a replica, by hand; says which others go with it."""

    def cordon(self, body: Json) -> Json:
        """Send nothing new to a replica, or to those of a machine."""

    def uncordon(self, body: Json) -> Json:
        """Send to it again."""

    def flip(self, body: Json) -> Json:
        """Give a replica another role, by hand."""

    def kill(self, body: Json) -> Json:
        """Have a replica's engine killed, by hand."""

    def note(self, body: Json) -> Json:
        """Write a line into the log of decisions."""

    def wanted(self) -> Json:
        """What the Brain wants of the fleet, for whoever starts and stops engines."""


class NoOperations:
    """An overseer of nothing."""

    def replicas(self) -> Iterable[ReplicaView]:
        return ()

    def queues(self) -> Iterable[QueueView]:
        return ()

    def usd_per_h(self) -> Mapping[str, float]:
        return {}

    def snapshot(self) -> Json:
        return {}

    def fleet(self) -> Json:
        return {"engines": []}

    def set_fleet(self, body: Json) -> Json:
        return {}

    def set_plan(self, body: Json, why: str = "", version: int = 0) -> Json:
        return {}

    def set_market(self, body: Json) -> Json:
        return {}

    def decisions(self, after: int) -> Json:
        return {}

    def drain(self, body: Json) -> Json:
        return {}

    def cordon(self, body: Json) -> Json:
        return {}

    def uncordon(self, body: Json) -> Json:
        return {}

    def flip(self, body: Json) -> Json:
        return {}

    def kill(self, body: Json) -> Json:
        return {}

    def note(self, body: Json) -> Json:
        return {}

    def wanted(self) -> Json:
        return {}
