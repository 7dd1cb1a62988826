"""Who may send how much over which link, from what all engines say of their transfers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from potluck.core.routing.bandwidth_grants import grants
from potluck.gateway.interfaces import Endpoint

LASTS_S = 15.0
"""How long a grant holds that is not given again."""
Ends = tuple[str, str]


def hosts_of(endpoints: Iterable[Endpoint]) -> dict[str, frozenset[str]]:
    """The machines of each region that senders know by their address; one of two regions is in neither."""
    found: dict[str, set[str]] = {}
    for each in endpoints:
        if each.kv:
            found.setdefault(each.region, set()).add(each.kv.rpartition(":")[0].strip("[]"))
    return {
        region: frozenset(mine - set().union(*(hosts for other, hosts in found.items() if other != region)))
        for region, mine in found.items()
    }


def granted(
    endpoints: Iterable[Endpoint],
    gbps: Mapping[Ends, float],
    wants_bytes_per_s: Mapping[Ends, Mapping[str, float]],
) -> dict[str, list[dict[str, object]]]:
    """By replica, the body's `grants` of PUT /grants. All that could send over a link have a share of it."""
    known = tuple(endpoints)
    hosts = hosts_of(known)
    found: dict[str, list[dict[str, object]]] = {}
    for (source, target), bandwidth in sorted(gbps.items()):
        peers = sorted(hosts.get(target, ()))
        wants = wants_bytes_per_s.get((source, target), {})
        senders = {
            each.replica: wants.get(each.replica, 0.0) for each in known if each.region == source and each.kv
        }
        if not peers or not senders or bandwidth <= 0:
            continue
        for replica, rate in grants(bandwidth * 1e9 / 8, senders).items():
            said = {"link": f"{source}->{target}", "peers": peers, "bytes_per_s": max(1, round(rate))}
            found.setdefault(replica, []).append(said)
    return found
