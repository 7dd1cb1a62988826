"""A request in progress: its route, the segments that are done, and the load that it adds to replicas."""

from __future__ import annotations

from typing import Final

from potluck.core.state.actions import Run
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.targets import Target
from potluck.core.values.route import Route
from potluck.core.values.types import Request

RUNNING: Final = 0
HELD: Final = 1
WAITING: Final = 2
QUEUED: Final = 3
"""Sent to a replica; held because none is ready; waiting for a place on a pair's low-end replica; queued for room
anywhere."""

RequestKind = tuple[int, int]  # (bucket, length class): requests of one kind can go to the same replicas.

NOWHERE: Final[frozenset[str]] = frozenset()


class RequestState:
    """One accepted request. Fields that rarely change are class attributes, so that making one is cheap."""

    request: Request
    prompt_tokens: int
    """Tokens of the user's prompt, and those streamed before the last failure."""
    total_tokens: int
    """The longest context that the request can reach, which its decode replica counts; the same on every attempt."""
    state = HELD
    attempt = 0
    earlier: tuple[tuple[ReplicaState, int], ...] = ()
    """(replica, open prompt tokens) of the segments before the last."""
    done = 0
    last: ReplicaState | None = None
    last_tokens = 0
    """Open prompt tokens on the last replica; 0 after the first token."""
    added_loads: tuple[tuple[Target, float], ...] = ()
    """(target, load) that balances by load added for this request."""
    first_s = -1.0
    timed_since_s = -1.0
    """Start of the present timing of its replica; below 0 when it is not timed."""
    timing_start: tuple[float, int, int] = (0.0, 0, 0)
    """The replica's `done_s`, `done_prompts` and open requests at that time."""
    sent: tuple[float, float, int] = (-1.0, 0.0, 0)
    """(dispatch time, the replica's `done_s` and `done_prompts` then) of a request that one replica computes
    whole."""
    mixed: tuple[ReplicaState, ...] = ()
    """Replicas that count the request for its tenant."""
    long = False
    """Whether it has a long prompt that is not computed yet."""
    heavy = False
    """Whether its tenant sends little but long prompts (`core/routing/isolation.py`)."""
    light_tokens = 0
    """Of its prompt, not computed where it was sent first, if its tenant is not heavy."""
    yielding: tuple[ReplicaState, int] | None = None
    """(replica, tokens) of a prompt that yields to others (`core/routing/deadlines.py`)."""
    link = ""
    """The link between regions that its KV has yet to cross, as `source->target`."""
    transfers: tuple[tuple[str, str, float], ...] = ()
    """(source, target, bytes) of the KV transfer after each earlier segment; only of prompts with prefixes."""
    pair: Target | None = None
    """The pair whose low-end replica it uses or waits for."""
    route: Route | None = None
    held_s = -1.0
    """Start of its present wait; below 0 when it has not waited since it was last sent."""
    last_seen_s = 0.0
    """Time of its last dispatch, or of the last report that it is running."""
    streamed_tokens = 0
    lost_on: frozenset[str] = NOWHERE
    """Replicas that were lost, or suspected lost, while it ran there."""
    failed_by: frozenset[str] = NOWHERE
    """Replicas and links (`source->target`) that failed it."""
    avoid: frozenset[str] = NOWHERE
    """Replicas, links and failure domains that it must not use: those that failed it, and domains that may be
    failing."""
    failures = 0
    """Failures that the request itself may have caused."""
    losses = 0
    wait_number = 0
    """Number of its latest expiry entry in `WaitingRequests`."""
    recalled_from = ""
    """The link that its attempt was recalled from, until the driver reports how far the answer got."""
    position: QueuePosition | None = None
    rho = 0.0
    """Prompt tokens per output token that its tenant counts for on its replicas."""
    weight = 1.0

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_tokens = request.prompt_tokens
        self.total_tokens = request.prompt_tokens + request.max_output_tokens

    @property
    def output_tokens(self) -> int:
        return self.request.max_output_tokens - self.streamed_tokens

    def run(self) -> Run:
        assert self.route is not None
        # Made for every request; a named tuple's constructor is an interpreted function.
        tokens = self.prompt_tokens, self.streamed_tokens
        yields = self.yielding is not None
        return tuple.__new__(Run, (self.request.id, self.route, self.attempt, *tokens, self.weight, yields))

    def leaves_region(self) -> bool:
        """Whether its present segment's KV goes to another region; until it has crossed, the segment counts on its
        replica."""
        onto = self.earlier[self.done + 1][0] if self.done + 1 < len(self.earlier) else self.last
        return onto is not None and onto.member.region != self.earlier[self.done][0].member.region

    def computed(self) -> tuple[ReplicaState, int]:
        """Mark the present earlier segment computed; returns (replica, tokens that are open there no more)."""
        segment = self.done
        replica, tokens = self.earlier[segment]
        if tokens:
            self.earlier = (*self.earlier[:segment], (replica, 0), *self.earlier[segment + 1 :])
        return replica, tokens

    def views(self) -> list[ReplicaState]:
        """The replicas of its present and later segments; empty when it is not sent."""
        if self.state != RUNNING or self.last is None:
            return []
        return [*(replica for replica, _ in self.earlier[self.done :]), self.last]

    def avoids(self, replica: ReplicaState) -> bool:
        """Whether a replica, or a failure domain of it, is to be avoided; only asked after a failure."""
        return replica.member.lies_in(self.avoid)

    def workers(self) -> list[str]:
        """The replicas that still work on the request, later segments included."""
        return list(dict.fromkeys(replica.member.id for replica in self.views()))


class QueuePosition:
    """A request's place in the admission queue."""

    """A request's place in the admission queue."""

    __slots__ = ("kind", "level", "request", "since_s", "stamp", "tenant", "work")

    def __init__(
        self,
        request: RequestState,
        tenant: str,
        level: int,
        kind: RequestKind,
        work: float,
        since_s: float,
        stamp: int,
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.level = level
        self.kind = kind
        self.work = work  # Its work in prompt tokens.
        self.since_s = since_s
        self.stamp = stamp
