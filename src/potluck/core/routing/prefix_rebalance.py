"""Prefixes that many ask for and few hold: who should get a copy, while links have room to spare (PrfaaS 3.2).

A prefix is worth moving when it is used often and all that hold it are busier than somebody who does not. What is
saved is prefill: uses x blocks. Hot prefixes come first; each gets at most one more holder per round, so that the
next round sees what came of it. Copies go within a cluster where they can, and over links between clusters only as
far as those have room. Everything here is arithmetic on values; carrying a move out is a hand-over like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Final, NamedTuple

from potluck.core.errors import InputError
from potluck.core.routing.prefix_index import PrefixIndex

MOST_HOT: Final = 4096


class HotPrefix(NamedTuple):
    """A prefix, and how often it is used."""

    chain: tuple[int, ...]
    uses_per_s: float

    @property
    def block(self) -> int:
        """Its last block, which stands for all."""
        return self.chain[-1]

    @property
    def blocks(self) -> int:
        return len(self.chain)


class PrefixHeat:
    """How often prefixes are matched, with older uses counting less: half after `half_life_s`. Bounded."""

    def __init__(self, half_life_s: float = 60.0, most: int = MOST_HOT) -> None:
        if half_life_s <= 0 or most < 2:
            raise InputError("heat", "needs a half-life above zero and room for two prefixes")
        self._half_life_s, self._most = half_life_s, most
        self._uses: dict[int, tuple[tuple[int, ...], float, float]] = {}
        """Last block to (the chain up to it, uses, when that was)."""

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, chain: tuple[int, ...], now_s: float) -> None:
        """A request came whose longest known prefix this is."""
        same, uses, then_s = self._uses.get(chain[-1], (chain, 0.0, now_s))
        self._uses[chain[-1]] = same, self._faded(uses, then_s, now_s) + 1, now_s
        if len(self._uses) > self._most:
            kept = nlargest(self._most // 2, self._uses.items(), key=lambda item: self._now(item[1], now_s))
            self._uses = dict(kept)

    def hottest(self, count: int, now_s: float) -> list[HotPrefix]:
        """Those whose use stands for most work: uses x blocks."""
        per_s = 0.6931471805599453 / self._half_life_s
        found = [HotPrefix(one[0], self._now(one, now_s) * per_s) for one in self._uses.values()]
        return nlargest(count, found, key=lambda hot: (hot.uses_per_s * hot.blocks, hot.block))

    def _now(self, one: tuple[tuple[int, ...], float, float], now_s: float) -> float:
        return self._faded(one[1], one[2], now_s)

    def _faded(self, uses: float, then_s: float, now_s: float) -> float:
        return uses * float(2.0 ** (-(now_s - then_s) / self._half_life_s))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica, as far as it matters here."""

    cluster: str
    busy: float
    """Its share of time in use, or anything else that is comparable between replicas."""
    free_blocks: int
    """That it can take without hurting its own."""


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What a copy takes."""

    block_bytes: int
    state_bytes: int = 0
    """Of layers with a window or a state, if there are any: then only prefixes with a checkpoint can move."""
    exact: bool = False


class PrefixCopy(NamedTuple):
    """A prefix to be copied from one replica to another."""

    chain: tuple[int, ...]
    source: str
    target: str
    size_bytes: int

    @property
    def block(self) -> int:
        return self.chain[-1]

    @property
    def blocks(self) -> int:
        return len(self.chain)


def rebalance(
    index: PrefixIndex,
    hot: Sequence[HotPrefix],
    loads: Mapping[str, ReplicaLoad],
    room_bytes: Mapping[tuple[str, str], int],
    costs: CopyCosts,
    *,
    margin: float = 0.2,
    most_moves: int = 8,
) -> list[PrefixCopy]:
    """Moves for one round. `room_bytes`: what may be sent now from cluster to cluster, also within one."""
    left, room = dict(loads), dict(room_bytes)
    moves: list[PrefixCopy] = []
    for one in sorted(hot, key=lambda each: (-each.uses_per_s * each.blocks, each.block)):
        if len(moves) >= most_moves:
            break
        move = _move(index, one, left, room, costs, margin)
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
    index: PrefixIndex,
    hot: HotPrefix,
    loads: Mapping[str, ReplicaLoad],
    room: Mapping[tuple[str, str], int],
    costs: CopyCosts,
    margin: float,
) -> PrefixCopy | None:
    holders = [name for name in index.holders(hot.block, exact=costs.exact) if name in loads]
    if not holders or hot.uses_per_s <= 0:
        return None
    size_bytes = hot.blocks * costs.block_bytes + costs.state_bytes
    least = min(loads[name].busy for name in holders)
    having = set(index.holders(hot.block))
    best: tuple[tuple[bool, float, float, str, str], PrefixCopy] | None = None
    for target, load in loads.items():
        if target in having or load.free_blocks < hot.blocks or load.busy > least - margin:
            continue
        for source in holders:
            ways = (loads[source].cluster, load.cluster)
            if room.get(ways, 0) < size_bytes:
                continue
            rank = (ways[0] != ways[1], load.busy, loads[source].busy, target, source)
            if best is None or rank < best[0]:
                best = rank, PrefixCopy(hot.chain, source, target, size_bytes)
    return None if best is None else best[1]
