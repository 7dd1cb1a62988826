"""What became of a request that was to be sent."""

from __future__ import annotations

from enum import Enum


class RoutingResult(Enum):
    SENT = "sent"
    WAITS = "waits"
    """For a place on a pair's low-end replica."""
    NOBODY = "nobody"
    """No replica is ready that it could go to."""
    FULL = "full"
    """Some are, and none has room."""


SENT = RoutingResult.SENT
