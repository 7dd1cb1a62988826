"""What happens: everything that the Brain is ever told, in the live system and in the simulator alike.

Events are plain named tuples: cheap to make by the million, equal by value, and written to the log as they are.
The time of an event is given beside it, never read from a clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from potluck.core.values.plan import Plan
from potluck.core.values.types import Request

FailureKind = Literal["replica", "link", "transfer", "timeout", "memory"]


class Status(NamedTuple):
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


class Arrived(NamedTuple):
    """A request wants an answer."""

    request: Request


class SegmentDone(NamedTuple):
    """All tokens of a segment but the last are computed and handed on."""

    request: str
    segment: int
    """Its place in the route."""


class FirstToken(NamedTuple):
    request: str


class Finished(NamedTuple):
    """The last token was streamed."""

    request: str
    output_tokens: int


class Failed(NamedTuple):
    """A request lost its replica, link or transfer; so many output tokens had reached the user."""

    request: str
    kind: FailureKind
    where: str
    """The replica, or the link as `source->target`."""
    streamed_tokens: int


class Cancelled(NamedTuple):
    """The user went away."""

    request: str


class Reported(NamedTuple):
    replica: str
    status: Status


class LinkReported(NamedTuple):
    """A link between regions: how full it was lately, and what waits for it."""

    source: str
    target: str
    utilisation: float
    queued_bytes: float
    gbps: float
    """What it carries at present, which may be less than it was built for."""


class Cached(NamedTuple):
    """What changed in a replica's prefix cache, or with `whole` all that it holds, as of `sequence`.

    Blocks have the chained names of `core.replica.block_values`. Marked are blocks at whose end the state of linear
    and window layers is held too; models that have such can only be resumed there.
    """

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


class ReplicaLost(NamedTuple):
    """It stopped without being asked. Its requests are reported as `Failed` one by one."""

    replica: str
    reason: str


class Drained(NamedTuple):
    """It finished its last request after a Drain."""

    replica: str


class Planned(NamedTuple):
    """A plan to adopt: the first one, an operator's, or the answer to a Replan."""

    plan: Plan


class Tick(NamedTuple):
    """Some time has passed: look at the windows."""


Event = (
    Arrived
    | SegmentDone
    | FirstToken
    | Finished
    | Failed
    | Cancelled
    | Reported
    | LinkReported
    | Cached
    | ReplicaReady
    | ReplicaLost
    | Drained
    | Planned
    | Tick
)
