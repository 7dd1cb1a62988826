"""What whoever looks at the page should know before trusting what it shows: one line each, below its head.

A further notice is one further `yield`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.core.values.crossings import lossy_notices
from potluck.gateway.desk.center import Center
from potluck.gateway.fleet.lateness import slow_lines
from potluck.gateway.settings import Settings


def notices(center: Center, settings: Settings) -> Iterator[str]:
    if settings.pretended:
        yield "Mock engines: they take the time of the planned GPUs, and make their tokens up."
    yield from slow_lines(center.watch.lateness.slowdown)
    yield from lossy_notices(center.plan)
