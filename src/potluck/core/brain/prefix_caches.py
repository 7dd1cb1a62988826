"""What is known of all replicas' prefix caches: the Brain's part of PrfaaS 3.2.

Reports go into the index; after a lost one the replica is asked for all. Prefixes asked for often are copied to
replicas that have less to do than all who hold them, while links have room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Final, NamedTuple

from potluck.core.routing.link_states import LOCAL_GBPS
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.actions import Action, CopyPrefix, ResyncCache
from potluck.core.state.events import CacheReported, LinkReported
from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.values.types import Request

PATIENCE_S: Final = 5.0  # A replica that was asked for all it holds is asked again after so long.
SETTLING_S: Final = 30.0  # A copy is not made again before it can have arrived and been reported.
HOTTEST: Final = 16
LEAST_SAVED: Final = 0.01
"""Seconds of prefill per second that are asked for again and again: below, a prefix is not hot."""
SPARE_LINK: Final = 0.5  # Share of what a link has left that copies may take.
MEMORY: Final = 0.3  # Weight of the last look at how busy a replica is.


class PrefixCaches:
    def __init__(self, facts: FleetFacts, policy: Policy, fleet: FleetState) -> None:
        self._facts, self._policy, self._fleet = facts, policy, fleet
        self.index = PrefixIndex()
        self._asked_s: dict[str, float] = {}
        self._heat: dict[str, PrefixHeat] = {}
        self._busy: dict[str, float] = {}
        self._use: dict[tuple[str, str], float] = {}
        self._copied_s: dict[tuple[int, str], float] = {}

    def reported(self, at_s: float, event: CacheReported) -> list[Action]:
        replica = event.replica
        replica_state = self._fleet.views.get(replica)
        if replica_state is None or self._policy.affinity == 0:
            return []
        if not self.index.apply(event, replica_state.member.region):
            self._asked_s.pop(replica, None)
            return []
        if at_s - self._asked_s.get(replica, -PATIENCE_S) < PATIENCE_S:
            return []
        self._asked_s[replica] = at_s
        return [ResyncCache(replica)]

    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        self._asked_s.pop(replica, None)
        self._busy.pop(replica, None)

    def linked(self, event: LinkReported) -> None:
        self._use[event.source, event.target] = event.utilisation if event.gbps > 0 else 1.0

    def asked_for(self, at_s: float, request: Request) -> None:
        if not self._policy.rebalance or not len(self.index):
            return
        prefix_matches = self.index.longest(request.blocks)
        depth = max((match.blocks for match in prefix_matches.values()), default=0)
        if depth:
            heat = self._heat.get(request.model)
            if heat is None:
                heat = self._heat[request.model] = PrefixHeat()
            heat.add(request.blocks[:depth], at_s)

    def tick(self, at_s: float) -> list[Action]:
        if not self._heat:
            return []
        for key in [key for key, until_s in self._copied_s.items() if until_s <= at_s]:
            del self._copied_s[key]
        actions: list[Action] = []
        views = self._fleet.views
        for model, heat in self._heat.items():
            for copy in self._copies(at_s, model, heat):
                self._copied_s[copy.chain[-1], copy.target] = at_s + SETTLING_S
                if views[copy.source].kv_version == views[copy.target].kv_version:
                    actions.append(CopyPrefix(copy.chain, copy.source, copy.target))
        return actions

    def _copies(self, at_s: float, model: str, heat: PrefixHeat) -> list[PrefixCopy]:
        facts = self._facts.models.get(model)
        views = [
            replica
            for replica in self._fleet.views.values()
            if replica.member.model == model and replica.serves
        ]
        if facts is None or len(views) < 2:
            return []
        every = {replica.member.id: self._load(replica, facts.block_tokens) for replica in views}
        loads = {name: load for name, load in every.items() if load is not None}
        hot = [one for one in heat.hottest(HOTTEST, at_s) if self._worth(one, views, facts.block_tokens)]
        hot = [one for one in hot if not any((one.block, name) in self._copied_s for name in loads)]
        if not hot:
            return []
        block_bytes = round(facts.kv_bytes_per_token * facts.block_tokens)
        costs = CopyCosts(block_bytes, round(facts.fixed_bytes), facts.exact_prefix)
        return rebalance(self.index, hot, loads, self._room_bytes(views), costs)

    def _load(self, replica: ReplicaState, block_tokens: int) -> ReplicaLoad | None:
        """How busy a prefilling replica is (a full batch, or a second of waiting prompts: 1); None if unknown."""
        facts = replica.facts
        if facts is None or replica.status is None or replica.role == "decode":
            return None
        name, waiting_s = replica.member.id, replica.open_prefill_tokens * facts.prefill_s_per_token
        now = waiting_s + replica.open_requests / max(1, facts.decode_batch)
        busy = self._busy.get(name, now)
        self._busy[name] = busy = busy + MEMORY * (now - busy)
        return ReplicaLoad(
            replica.member.region, busy, replica.status.free_blocks * BLOCK_TOKENS // block_tokens
        )

    def _worth(self, hot: HotPrefix, views: list[ReplicaState], block_tokens: int) -> bool:
        facts = views[0].facts
        if facts is None:
            return False
        return hot.uses_per_s * hot.blocks * block_tokens * facts.prefill_s_per_token >= LEAST_SAVED

    def _room_bytes(self, views: list[ReplicaState]) -> dict[tuple[str, str], int]:
        regions = {replica.member.region for replica in views}
        per_gbps = SPARE_LINK * self._policy.tick_s * 1e9 / 8
        room = {(region, region): round(LOCAL_GBPS * per_gbps) for region in regions}
        for ends, gbps in self._facts.links_gbps.items():
            room[ends] = round(gbps * max(0.0, 1.0 - self._use.get(ends, 0.0)) * per_gbps)
        return room


MOST_HOT: Final = 4096
MOST_MOVES: Final = 8
MARGIN: Final = 0.2  # By which a target must be less busy than all holders.


class HotPrefix(NamedTuple):
    chain: tuple[int, ...]
    uses_per_s: float

    @property
    def block(self) -> int:
        return self.chain[-1]

    @property
    def blocks(self) -> int:
        return len(self.chain)


class PrefixHeat:
    """How often prefixes are matched, with older uses counting less: half after `half_life_s`. Bounded."""

    def __init__(self, half_life_s: float = 60.0, most: int = MOST_HOT) -> None:
        self._half_life_s, self._most = half_life_s, most
        self._uses: dict[int, tuple[tuple[int, ...], float, float]] = {}
        """Last block to (the chain up to it, uses, when that was)."""

    def add(self, chain: tuple[int, ...], now_s: float) -> None:
        use = self._uses.get(chain[-1], (chain, 0.0, now_s))
        self._uses[chain[-1]] = use[0], self._now(use, now_s) + 1, now_s
        if len(self._uses) > self._most:
            kept = nlargest(self._most // 2, self._uses.items(), key=lambda item: self._now(item[1], now_s))
            self._uses = dict(kept)

    def hottest(self, count: int, now_s: float) -> list[HotPrefix]:
        """Those whose use stands for most work: uses x blocks."""
        per_s = 0.6931471805599453 / self._half_life_s
        hot_prefixes = [HotPrefix(one[0], self._now(one, now_s) * per_s) for one in self._uses.values()]
        return nlargest(count, hot_prefixes, key=lambda hot: (hot.uses_per_s * hot.blocks, hot.block))

    def _now(self, one: tuple[tuple[int, ...], float, float], now_s: float) -> float:
        _, uses, then_s = one
        return uses * float(2.0 ** (-(now_s - then_s) / self._half_life_s))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    cluster: str
    busy: float  # Its share of time in use, or anything else that is comparable between replicas.
    free_blocks: int


@dataclass(frozen=True, slots=True)
class CopyCosts:
    block_bytes: int
    state_bytes: int = 0
    """Of layers with a window or a state, if there are any: then only prefixes with a checkpoint can move."""
    exact: bool = False


class PrefixCopy(NamedTuple):
    chain: tuple[int, ...]
    source: str
    target: str
    size_bytes: int


Loads = Mapping[str, ReplicaLoad]
LinkBytes = Mapping[tuple[str, str], int]


def rebalance(
    index: PrefixIndex, hot: Sequence[HotPrefix], loads: Loads, room_bytes: LinkBytes, costs: CopyCosts
) -> list[PrefixCopy]:
    """Moves for one round. `room_bytes`: what may be sent now from cluster to cluster, also within one."""
    left, room = dict(loads), dict(room_bytes)
    moves: list[PrefixCopy] = []
    for one in sorted(hot, key=lambda prefix: (-prefix.uses_per_s * prefix.blocks, prefix.block)):
        if len(moves) >= MOST_MOVES:
            break
        move = _move(index, one, left, room, costs)
        if move is None:
            continue
        moves.append(move)
        source, target = left[move.source], left[move.target]
        room[source.cluster, target.cluster] -= move.size_bytes
        # Part of the holder's work goes over: a target is not chosen again as if nothing had happened.
        share = (source.busy - target.busy) / 2
        left[move.target] = replace(
            target, busy=target.busy + share, free_blocks=target.free_blocks - one.blocks
        )
        left[move.source] = replace(source, busy=source.busy - share)
    return moves


def _move(
    index: PrefixIndex, hot: HotPrefix, loads: Loads, room: LinkBytes, costs: CopyCosts
) -> PrefixCopy | None:
    holders = [name for name in index.holders(hot.block, exact=costs.exact) if name in loads]
    if not holders or hot.uses_per_s <= 0:
        return None
    size_bytes = hot.blocks * costs.block_bytes + costs.state_bytes
    least = min(loads[name].busy for name in holders)
    having = set(index.holders(hot.block))
    ranks: list[tuple[bool, float, float, str, str]] = []
    for target, load in loads.items():
        if target in having or load.free_blocks < hot.blocks or load.busy > least - MARGIN:
            continue
        for source in holders:
            here, there = loads[source].cluster, load.cluster
            if room.get((here, there), 0) >= size_bytes:
                ranks.append((here != there, load.busy, loads[source].busy, target, source))
    if not ranks:
        return None
    _, _, _, target, source = min(ranks)
    return PrefixCopy(hot.chain, source, target, size_bytes)
