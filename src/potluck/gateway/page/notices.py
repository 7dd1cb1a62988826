"""What whoever looks at the page should know before trusting what it shows: one line each, below its head.

A further notice is one further `yield`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.core.values.lossy_hops import lossy_notices
from potluck.gateway.brain_loop.gateway_core import GatewayCore
from potluck.gateway.fleet.emulation_lag import slow_lines
from potluck.gateway.settings import GatewaySettings


def notices(core: GatewayCore, settings: GatewaySettings) -> Iterator[str]:
    if settings.pretended:
        yield "Mock engines: they take the time of the planned GPUs, and make their tokens up."
    yield from slow_lines(core.watch.lateness.slowdown)
    yield from lossy_notices(core.plan)
