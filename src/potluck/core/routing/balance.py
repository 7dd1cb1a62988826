"""Who is next: in turn by weight, or the least loaded.

    goodput       turns in proportion to the goodput of a unit for the bucket    CAUCHY 3.4.1, CORAL 5.1
    round-robin   turns, all alike                                               CAUCHY 4.4's baseline
    fixed         turns by the plan's rates, THUNDERSERVE's X and Y              THUNDERSERVE 3.3
    token         the unit with the most tokens of KV left                       CAUCHY 4.4's token-weighted baseline
    least-work    the unit that would be done first, in seconds
    learned       the same at the speeds observed (speeds.py), and with what the plan gives the bucket there

The last three count what the Brain itself has sent and not seen end, so they need no report and are never late.
Their index is a heap whose keys are put right when they surface: a load that grew is found too low and sinks,
one that fell is pushed anew. A pick costs O(log n).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, Protocol

from potluck.core.routing.targets import Target, avoided
from potluck.core.state.facts import BLOCK_TOKENS, ReplicaFacts
from potluck.core.state.policy import Balance
from potluck.core.state.request_state import RequestState

TRIES: Final = 4
"""Turns that are looked at for one that a failed request need not avoid, before all are."""
BY_LOAD: frozenset[Balance] = frozenset({"learned", "token", "least-work"})


class Balancer(Protocol):
    """Targets with weights, and whose turn it is."""

    total: float

    def __len__(self) -> int: ...
    def __contains__(self, member: Target) -> bool: ...
    def set(self, member: Target, weight: float) -> None: ...
    def pick(self) -> Target | None: ...
    def swap(self, picked: Target, other: Target) -> None: ...
    def members(self) -> tuple[Target, ...]: ...


class _Place:
    """A target's place in an index. Heap items whose stamp is not the place's are old and skipped."""

    __slots__ = ("key", "member", "offset", "stamp", "weight")

    def __init__(self, member: Target, weight: float, offset: float) -> None:
        self.member = member
        self.weight = weight
        self.offset = offset
        self.key = inf
        """That of its heap item: never more than what it would be now."""
        self.stamp = 0


class LeastLoaded:
    """The target with the least (load + offset) x pace; equals take turns."""

    __slots__ = ("_heap", "_offset_of", "_places", "_stamp", "total")

    def __init__(self, offset_of: Callable[[Target, float], float]) -> None:
        self.total = 0.0
        """Sum of the weights."""
        self._offset_of = offset_of
        """From a target and its weight to what is added to its load."""
        self._heap: list[tuple[float, int, _Place]] = []
        self._places: dict[Target, _Place] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, member: Target) -> bool:
        return member in self._places

    def members(self) -> tuple[Target, ...]:
        return tuple(self._places)

    def set(self, member: Target, weight: float) -> None:
        """Add, change, or remove with a weight of 0."""
        old = self._places.pop(member, None)
        if old is not None:
            self.total -= old.weight
            old.stamp = -1
            member.indexes.remove(self)
        if 0 < weight < inf:
            self.total += weight
            self._places[member] = _Place(member, weight, self._offset_of(member, weight))
            member.indexes.append(self)
            self.lighter(member)
        elif not self._places:
            self.total = 0.0
            self._heap = []

    def lighter(self, member: Target) -> None:
        """Its load fell: it may be the least now. While its item says still less, that will be put right there."""
        place = self._places.get(member)
        if place is None:
            return
        key = (member.load + place.offset) * member.pace
        if key >= place.key:
            return
        self._stamp += 1
        place.stamp, place.key = self._stamp, key
        heappush(self._heap, (key, self._stamp, place))
        if len(self._heap) > 2 * len(self._places) + 32:
            self._heap = [(each.key, each.stamp, each) for each in self._places.values()]
            heapify(self._heap)

    def pick(self) -> Target | None:
        heap = self._heap
        while heap:
            key, stamp, place = heap[0]
            if place.stamp != stamp:
                heappop(heap)
                continue
            member = place.member
            now = (member.load + place.offset) * member.pace
            if now > key:
                place.key = now
                heapreplace(heap, (now, stamp, place))
                continue
            size = len(heap)
            if (size > 1 and heap[1][0] <= key) or (size > 2 and heap[2][0] <= key):
                self._stamp += 1  # equals take turns
                place.stamp = self._stamp
                heapreplace(heap, (key, self._stamp, place))
            return member
        return None

    def swap(self, picked: Target, other: Target) -> None:
        """Loads tell by themselves who got it."""


def unfailed(chooser: Balancer, req: RequestState) -> Target | None:
    """A target that did not fail the request; None when all did."""
    for _ in range(TRIES):
        target = chooser.pick()
        if target is not None and not avoided(target, req.avoid):
            return target
    others = [each for each in chooser.members() if not avoided(each, req.avoid)]
    return min(others, key=lambda each: each.load * each.pace, default=None)


def request_seconds(facts: ReplicaFacts, prompt_tokens: int, output_tokens: int) -> float:
    """What a request takes of a replica's time: its prefill, and its part of the decode steps it shares."""
    return prefill_seconds(facts, prompt_tokens) + decode_seconds(facts, output_tokens)


def prefill_seconds(facts: ReplicaFacts, prompt_tokens: int) -> float:
    """What a prompt takes of a replica's time: of the way through a pipeline its slowest stage, since it computes the
    next prompts meanwhile."""
    work_s = prompt_tokens * facts.prefill_s_per_token
    return work_s if facts.alone_s_per_token > 0 else facts.prefill_fixed_s + work_s


def decode_seconds(facts: ReplicaFacts, output_tokens: float) -> float:
    return output_tokens * facts.decode_step_s / max(1, facts.decode_batch)


def kv_tokens(facts: ReplicaFacts) -> int:
    return facts.total_blocks * BLOCK_TOKENS
