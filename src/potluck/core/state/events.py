"""What happens: everything that the Brain is ever told, in the live system and in the simulator alike.

Named tuples: cheap to make by the million, equal by value, logged as they are. Their time is given beside them. News
of a request carry the number of the attempt, which its `Run` had: those of an attempt that is over change nothing."""

from __future__ import annotations

from typing import Literal, NamedTuple

from potluck.core.values.plan import Plan
from potluck.core.values.route import Route
from potluck.core.values.types import Region, Request

FailureKind = Literal["replica", "link", "transfer", "timeout", "memory"]


class ReplicaStatus(NamedTuple):
    """What a replica reports about itself; old by the time it arrives."""

    queued: int
    """Requests that have not begun."""
    running: int
    queued_tokens: int
    """Prompt tokens not yet computed, of queued and running requests."""
    context_tokens: int
    """KV tokens held by running requests."""
    free_blocks: int
    total_blocks: int
    step_s: float
    """Seconds of the last step; 0 when idle."""


class RequestArrived(NamedTuple):
    request: Request


class RequestAdopted(NamedTuple):
    """A request that an earlier Brain accepted, in whose place this one is: it goes on from where it is."""

    request: Request
    attempt: int
    streamed_tokens: int
    """Output tokens that reached the user before that attempt began; up to now where none is under way."""
    route: Route | None
    """Where it is under way; None: nowhere, it is to be sent again."""
    done: int = 0
    """How many of the route's segments are computed and handed on."""
    first: bool = False


class SegmentDone(NamedTuple):
    """All tokens of a segment but the last are computed and handed on."""

    request: str
    attempt: int
    segment: int
    """Its place in the route; those before it are done as well."""


class SegmentComputed(NamedTuple):
    """A segment's tokens are computed; its KV may still be on the way, but its replica is free for another."""

    request: str
    attempt: int
    segment: int


class FirstToken(NamedTuple):
    request: str
    attempt: int


class RequestFinished(NamedTuple):
    request: str
    attempt: int
    output_tokens: int


class AttemptFailed(NamedTuple):
    """An attempt lost its replica, link or transfer; no more tokens of it are passed on after `streamed_tokens`."""

    request: str
    attempt: int
    kind: FailureKind
    where: str
    """The replica, or the link as `source->target`."""
    streamed_tokens: int
    """Output tokens that reached the user so far, those of earlier attempts included."""
    rejected: bool = False
    """Whether that replica never began a request with a grammar: it could not be reached, or took nothing. Others do
    not say."""


class AttemptRunning(NamedTuple):
    """An attempt goes on: the answer to an Inquire when it neither finished nor failed."""

    request: str
    attempt: int


class RequestCancelled(NamedTuple):
    request: str


class ReplicaReported(NamedTuple):
    replica: str
    status: ReplicaStatus


class ReplicaSilent(NamedTuple):
    """A replica has not answered for longer than it ever takes: told again and again until it does, or is lost. Or
    its line carries too little: then it is not to be used for `lasts_s`."""

    replica: str
    lasts_s: float = 0.0


class LinkReported(NamedTuple):
    """A link between regions: how full it was lately, and what waits for it."""

    source: str
    target: str
    utilisation: float
    queued_bytes: float
    gbps: float
    """What it carries at present, which may be less than it was built for."""
    lost_share: float = 0.0
    """Of what was sent lately, how much was lost and sent again."""


class CacheReported(NamedTuple):
    """What changed in a prefix cache, or with `whole` all it holds. Marked: with state of linear or window layers."""

    replica: str
    sequence: int
    """1 for an epoch's first report; all there is has that of the last report before it."""
    added: tuple[int, ...]
    removed: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    unmarked: tuple[int, ...] = ()
    epoch: int = 0
    """Higher each time the replica starts."""
    whole: bool = False


class ReplicaReady(NamedTuple):
    replica: str
    kv_version: int = 0
    """In which its caches cross; those of another version are no use to it."""
    max_running: int = 0
    """Requests that its engine runs at once; 0: as many as planned."""


class ReplicaLost(NamedTuple):
    """It stopped without being asked, or will: it takes nobody any more, and its requests come as `AttemptFailed`."""

    replica: str
    reason: str
    notice_s: float = 0.0
    """How long it still works on what it has."""


class ReplicaDrained(NamedTuple):
    """It finished its last request after a Drain."""

    replica: str


class PlanReceived(NamedTuple):
    """A plan to adopt: the first one, an operator's, or the answer to a Replan."""

    plan: Plan


class OperatorOrdered(NamedTuple):
    """What a person wants of a replica: that it is emptied and replaced, has another role, or gets nothing new."""

    replica: str
    what: Literal["drain", "prefill", "decode", "cordon", "uncordon"]


class MarketReported(NamedTuple):
    """What nodes cost and how many can be had from now on: regions as in the facts, in their place."""

    regions: tuple[Region, ...]


class Tick(NamedTuple):
    """Some time has passed: look at the windows."""


ProgressEvent = RequestArrived | RequestAdopted | SegmentDone | SegmentComputed | FirstToken | RequestFinished
AttemptEvent = AttemptFailed | AttemptRunning | RequestCancelled
ReportEvent = ReplicaReported | ReplicaSilent | LinkReported | CacheReported
FleetEvent = ReplicaReady | ReplicaLost | ReplicaDrained | PlanReceived | OperatorOrdered | MarketReported
Event = ProgressEvent | AttemptEvent | ReportEvent | FleetEvent | Tick
