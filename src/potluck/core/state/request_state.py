"""A request on its way: where it was sent, what of it is done, and what it weighs on replicas meanwhile."""

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
"""Sent; held because nothing is ready; waiting for a turn on a pair's low-end replica; waiting for room anywhere."""

Kind = tuple[int, int]  # Bucket and length class: requests of one kind may go to the same replicas.

NOWHERE: Final[frozenset[str]] = frozenset()


class RequestState:
    """One accepted request. What few change is the class's, so making one is cheap; what all look at comes first."""

    request: Request
    prompt_tokens: int
    """The user's prompt and what was streamed before the last failure."""
    total_tokens: int
    """The longest it can get, which is what it counts for where it decodes; the same on every attempt."""
    state = HELD
    attempt = 0
    earlier: tuple[tuple[ReplicaState, int], ...] = ()
    """Segments before the last: where, and how many tokens count as open there."""
    done = 0
    last: ReplicaState | None = None
    last_tokens = 0
    """Prompt tokens open there; 0 once the first token came."""
    charges: tuple[tuple[Target, float], ...] = ()
    """What balances by load counted for it: where, and how much."""
    first_s = -1.0
    watched_s = -1.0
    """Since when its replica is timed on what it does; below 0 when it is not."""
    watched: tuple[float, int, int] = (0.0, 0, 0)
    """That replica's `done_s`, `done_prompts` and open requests then."""
    sent: tuple[float, float, int] = (-1.0, 0.0, 0)
    """When it was sent to where it is computed whole, and that replica's `done_s` and `done_prompts` then."""
    mixed: tuple[ReplicaState, ...] = ()
    """Replicas that count it among its tenant's."""
    long = False
    """Whether it has a long prompt there that is not computed."""
    heavy = False
    """Whether its tenant sends little but long prompts (`core/routing/isolation.py`)."""
    light_tokens = 0
    """Of its prompt, not computed where it was sent first, if its tenant is not heavy."""
    yielding: tuple[ReplicaState, int] | None = None
    """Where its prompt lets others go before it, and how many tokens that is (`core/routing/deadlines.py`)."""
    link = ""
    """The link between regions that its KV has yet to cross, as `source->target`."""
    cargo: tuple[tuple[str, str, float], ...] = ()
    """From whom to whom KV goes after each of its earlier segments, and how much; only of prompts with prefixes."""
    pair: Target | None = None
    """The pair whose low-end replica it is in, or waits for."""
    route: Route | None = None
    held_s = -1.0
    """Since when it is held or waits; below 0 when it did not since it was last sent."""
    heard_s = 0.0
    """When it was last sent, or last said to be under way."""
    streamed_tokens = 0
    lost_on: frozenset[str] = NOWHERE
    """Replicas that were lost, or seemed so, while it was there."""
    failed_by: frozenset[str] = NOWHERE
    """Replicas and links (`source->target`) that failed it."""
    avoid: frozenset[str] = NOWHERE
    """Where it is not to go: those, and failure domains that may be dying."""
    failures = 0
    """Those that may be its own fault."""
    losses = 0
    patience = 0
    """Which of the notes on when waiting ends is its latest (`recovery.Held`)."""
    recalled = ""
    """The link that its attempt was recalled from; its driver is to say where the user is."""
    place: QueuePosition | None = None
    rho = 0.0
    """Prompt tokens for each output token that it counts for there."""
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
        # One is made for every request, and the constructor of a named tuple is an interpreted function.
        tokens = self.prompt_tokens, self.streamed_tokens
        yields = self.yielding is not None
        return tuple.__new__(Run, (self.request.id, self.route, self.attempt, *tokens, self.weight, yields))

    def leaves_region(self) -> bool:
        """Whether its present segment's KV goes to another region: until it has crossed it counts where it lies."""
        onto = self.earlier[self.done + 1][0] if self.done + 1 < len(self.earlier) else self.last
        return onto is not None and onto.member.region != self.earlier[self.done][0].member.region

    def computed(self) -> tuple[ReplicaState, int]:
        """The present one of its earlier segments is computed: where, and how many tokens are open there no more."""
        place = self.done
        replica, tokens = self.earlier[place]
        if tokens:
            self.earlier = (*self.earlier[:place], (replica, 0), *self.earlier[place + 1 :])
        return replica, tokens

    def views(self) -> list[ReplicaState]:
        """Where it is under way, later segments included; nowhere when it was not sent."""
        if self.state != RUNNING or self.last is None:
            return []
        return [*(replica for replica, _ in self.earlier[self.done :]), self.last]

    def avoids(self, replica: ReplicaState) -> bool:
        """Whether a replica, or a domain it is in, is one not to go to. Asked only of those that failed before."""
        return replica.member.lies_in(self.avoid)

    def workers(self) -> list[str]:
        """Replicas that still work on it, those of later segments included."""
        return list(dict.fromkeys(replica.member.id for replica in self.views()))


class QueuePosition:
    __slots__ = ("kind", "level", "req", "since_s", "stamp", "tenant", "work")

    def __init__(
        self,
        request: RequestState,
        tenant: str,
        level: int,
        kind: Kind,
        work: float,
        since_s: float,
        stamp: int,
    ) -> None:
        self.req = request
        self.tenant = tenant
        self.level = level
        self.kind = kind
        self.work = work  # What it asks for, in prompt tokens.
        self.since_s = since_s
        self.stamp = stamp
