"""A request on its way: where it was sent, what of it is done, and what it weighs on replicas meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.core.fleet import View
from potluck.core.route import Route
from potluck.core.types import Request

if TYPE_CHECKING:
    from potluck.core.routing.targets import Target

RUNNING, HELD, WAITING = 0, 1, 2
"""Sent; held because nothing is ready; waiting for a turn on a pair's low-end replica."""


class Flight:
    """One accepted request, from its arrival to its end. The Brain alone changes it."""

    __slots__ = (
        "attempt",
        "avoid",
        "charges",
        "context_tokens",
        "done",
        "earlier",
        "first_s",
        "held_s",
        "last",
        "last_tokens",
        "pair",
        "prompt_tokens",
        "request",
        "route",
        "state",
        "streamed_tokens",
        "total_tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_tokens = request.prompt_tokens
        """The user's prompt and what was streamed before the last failure."""
        self.total_tokens = request.prompt_tokens + request.max_output_tokens
        """The longest it can get; the same on every attempt."""
        self.streamed_tokens = 0
        self.attempt = 0
        self.state = HELD
        self.route: Route | None = None
        self.earlier: tuple[tuple[View, int], ...] = ()
        """Segments before the last: where, and how many tokens count as open there."""
        self.done = 0
        """How many of these are done."""
        self.last: View | None = None
        """Where it decodes."""
        self.last_tokens = 0
        """Prompt tokens open there; 0 once the first token came."""
        self.context_tokens = 0
        self.charges: tuple[tuple[Target, float], ...] = ()
        """What balances by load counted for it: where, and how much."""
        self.pair: Target | None = None
        """The pair whose low-end replica it is in, or waits for."""
        self.avoid: frozenset[str] = frozenset()
        """Replicas and links (`source->target`) that failed it."""
        self.held_s = -1.0
        """Since when it is held; below 0 when it was not since it was last sent."""
        self.first_s = -1.0

    @property
    def output_tokens(self) -> int:
        """Tokens still to come, at most."""
        return self.request.max_output_tokens - self.streamed_tokens
