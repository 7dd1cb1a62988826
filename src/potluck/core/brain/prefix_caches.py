"""The Brain's view of all replicas' prefix caches: cache reports update an index.

After a lost report the Brain asks the replica to report its whole cache."""

from __future__ import annotations

from typing import Final

from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.actions import Action, ResyncCache
from potluck.core.state.events import CacheReported
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy

RESYNC_RETRY_S: Final = 5.0  # A replica that has not answered a request for its whole cache is asked again.


class PrefixCaches:
    """The index of cached prefixes, updated from replicas' cache reports."""

    def __init__(self, policy: Policy, fleet: FleetState) -> None:
        self._policy, self._fleet = policy, fleet
        self.index = PrefixIndex()
        self._resync_s: dict[str, float] = {}

    def reported(self, at_s: float, event: CacheReported) -> list[Action]:
        replica = event.replica
        replica_state = self._fleet.views.get(replica)
        if replica_state is None or self._policy.affinity == 0:
            return []
        if not self.index.apply(event, replica_state.member.region):
            self._resync_s.pop(replica, None)
            return []
        if at_s - self._resync_s.get(replica, -RESYNC_RETRY_S) < RESYNC_RETRY_S:
            return []
        self._resync_s[replica] = at_s
        return [ResyncCache(replica)]

    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        self._resync_s.pop(replica, None)
