"""An upgrade of a fleet's engines, copy by copy: each is emptied, replaced by whoever looks after it, and waited for.

Read from the gateway's snapshots alone, so it goes for engines that a controller started as for those of other hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Snapshot = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpgradeTurn:
    """One copy: replicas that are emptied together, and where their engines listen."""

    replicas: tuple[str, ...]
    urls: tuple[str, ...]


def turns(snapshot: Snapshot) -> tuple[UpgradeTurn, ...]:
    """All copies that serve, those of which there are most first: what goes wrong is seen where it costs least."""
    units: dict[str, list[Mapping[str, Any]]] = {}
    for each in _serving(snapshot):
        units.setdefault(str(each["unit"]), []).append(each)
    alike = Counter(_kind(found[0]) for found in units.values())
    ordered = sorted(units.values(), key=lambda found: -alike[_kind(found[0])])
    return tuple(
        UpgradeTurn(tuple(str(each["replica"]) for each in found), tuple(str(each["url"]) for each in found))
        for found in ordered
    )


def due(snapshot: Snapshot, passed_s: float) -> tuple[UpgradeTurn, ...]:
    """Copies with an engine that was there before the upgrade began, so long ago. One that was lost meanwhile and
    came back is a new one already."""
    since = {str(each["url"]): float(each["uptime_s"]) for each in snapshot["engines"]}
    return tuple(
        turn for turn in turns(snapshot) if any(since.get(url, 0.0) >= passed_s for url in turn.urls)
    )


def lacks(snapshot: Snapshot, before: Snapshot, turn: UpgradeTurn, passed_s: float) -> str:
    """What is still waited for, so long after a copy was asked to drain; empty when another is in its place."""
    left = {str(each["replica"]) for each in snapshot["replicas"]} & set(turn.replicas)
    if left:
        return f"{min(left)} still has requests"
    engines = {str(each["url"]): each for each in snapshot["engines"]}
    for url in turn.urls:
        found = engines.get(url)
        if found is not None and not (found["up"] and float(found["uptime_s"]) < passed_s):
            return f"no other engine has come up at {url}"
    missing = Counter(map(_kind, _serving(before))) - Counter(map(_kind, _serving(snapshot)))
    for (template, _, region), count in missing.items():
        return f"{count} of {template} in {region} are not ready"
    return ""


def _serving(snapshot: Snapshot) -> Sequence[Mapping[str, Any]]:
    return [each for each in snapshot["replicas"] if each["state"] == "ready" and each["url"] is not None]


def _kind(replica: Mapping[str, Any]) -> tuple[str, int, str]:
    return str(replica["template"]), int(replica["index"]), str(replica["region"])
