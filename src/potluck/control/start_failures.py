"""Starts that fail: how often in the same way, when to try again, and when that is in vain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from potluck.control.control_values import EngineInstance, EngineSpec, WantedReplica

RETRY_S = 1.0
RETRY_MOST_S = 60.0
IN_VAIN = 3
"""Starts that failed in the same way, after which another one will too."""
IN_VAIN_MOST_S = 300.0
_CHANGING = re.compile(r"\b[0-9a-f]{8}\b|[0-9.]+")
"""What differs between two starts that fail alike: names of engines, ports, sizes."""


@dataclass(frozen=True, slots=True)
class StartFailures:
    """Starts of one make that came to nothing, one after another."""

    count: int = 0
    last_s: float = 0.0
    why: str = ""
    """Of the last one."""
    alike: int = 0
    """So many of the last ones failed in the same way."""
    engine: str = ""
    """Which was the last, by name."""

    @property
    def in_vain(self) -> bool:
        return self.alike >= IN_VAIN

    @property
    def again_s(self) -> float:
        """When to try again: after 1 s, 2 s, 4 s, ... 60 s; in vain, after 1 min, 2 min, 4 min, 5 min."""
        if not self.count:
            return 0.0
        if self.in_vain:
            return self.last_s + min(IN_VAIN_MOST_S, RETRY_MOST_S * 2.0 ** (self.alike - IN_VAIN))
        return self.last_s + min(RETRY_MOST_S, RETRY_S * 2.0 ** (self.count - 1))

    def more(self, at_s: float, why: str, engine: str = "") -> StartFailures:
        """With one more."""
        alike = self.alike + 1 if self.count and _gist(self.why) == _gist(why) else 1
        return StartFailures(self.count + 1, at_s, why, alike, engine)


@dataclass(frozen=True, slots=True)
class StuckReplica:
    """A replica that is wanted, has no engine, and whose starts failed."""

    replica: str
    failures: StartFailures


def stuck(
    wants: Sequence[WantedReplica],
    instances: Iterable[EngineInstance],
    failures: Mapping[EngineSpec, StartFailures],
) -> tuple[StuckReplica, ...]:
    """Those that wait for another try."""
    there = {each.replica for each in instances if each.state != "dead"}
    return tuple(
        StuckReplica(want.replica, failures[want.make])
        for want in wants
        if want.make in failures and want.replica not in there and not want.draining
    )


def _gist(why: str) -> str:
    return _CHANGING.sub("#", why)
