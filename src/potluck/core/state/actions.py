"""What is to be done: everything that the Brain ever asks for. Gateway, controller and simulator carry it out."""

from __future__ import annotations

from typing import Literal, NamedTuple

from potluck.core.values.plan import ReplicaSpec
from potluck.core.values.route import Route
from potluck.core.values.types import Role

RefusalReason = Literal[
    "no_capacity",
    "too_long",
    "deadline",
    "retries",
    "unknown_model",
    "overloaded",
    "unknown_class",
    "lost",
    "grammar",
]


class Run(NamedTuple):
    """Send a request along a route; on a retry over the prompt and the `streamed_tokens` of the attempt before."""

    request: str
    route: Route
    attempt: int
    prompt_tokens: int
    streamed_tokens: int
    weight: float = 1.0
    """Its tenant's: replicas share among tenants what they compute."""
    yields: bool = False
    """Its prompt is late wherever it is computed: others go before it, chunk by chunk (`LATE`)."""


class Refuse(NamedTuple):
    request: str
    reason: RefusalReason
    detail: str
    retry_after_s: float | None = None
    """When to try again, where waiting may help."""


class Abort(NamedTuple):
    """Stop working on a request at these replicas: it was cancelled, refused or re-routed."""

    request: str
    replicas: tuple[str, ...]


class QueryAttempt(NamedTuple):
    """Say what became of an attempt: `Finished`, `Failed` or `Underway` answers."""

    request: str
    attempt: int


class StartReplica(NamedTuple):
    """Bring a replica up; `ReplicaReady` answers."""

    member: ReplicaSpec


class DrainReplica(NamedTuple):
    """Give it no new requests; `Drained` answers when the last one is done."""

    replica: str


class StopReplica(NamedTuple):
    replica: str


class FlipReplica(NamedTuple):
    """Change a replica's role in place, weights and running requests kept."""

    replica: str
    role: Role


class Reassign(NamedTuple):
    """A replica (`member` has its old id) becomes another template's, in its role."""

    member: ReplicaSpec


class SeenLengths(NamedTuple):
    model: str
    output_tokens: float
    """Of a mean answer."""
    prompts: tuple[tuple[float, float], ...]
    """(tokens, how many), without what caches saved; shortest first."""


class Replan(NamedTuple):
    """Ask the planner, which the core cannot: for which rates and lengths, and why. `Planned` answers."""

    rates_per_s: tuple[tuple[str, float], ...]
    reason: str
    lengths: tuple[SeenLengths, ...] = ()
    """Of models of which enough was seen."""


class ResyncCache(NamedTuple):
    """Ask a replica for all that its prefix cache holds: a report was lost. `Cached` with `whole` answers."""

    replica: str


class OperatorNote(NamedTuple):
    """Something that operators should know, and that nobody does anything about."""

    what: str
    why: str


RequestAction = Run | Refuse | Abort | QueryAttempt
FleetAction = StartReplica | DrainReplica | StopReplica | FlipReplica | Reassign
Action = RequestAction | FleetAction | Replan | ResyncCache | OperatorNote
