"""How requests are spread over targets: one class per rule, listed in BALANCES.

    learned       the target with the least expected work, from learned speeds and the plan's rates (default)
    goodput       weighted round robin by a target's goodput for the bucket       CAUCHY 3.4.1, CORAL 5.1
    fixed         weighted round robin by the plan's rates, X and Y               THUNDERSERVE 3.3
    round-robin   round robin with equal weights                                  CAUCHY 4.4's baseline
    token         the target with the most free KV tokens                         CAUCHY 4.4's token-weighted baseline

`learned` and `token` count the Brain's own open requests, so their loads are exact and need no reports. A new rule is
a class and an entry in BALANCES."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, Literal, NamedTuple, Protocol

from potluck.core.errors import UnknownNameError
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.state.facts import BLOCK_TOKENS, ReplicaFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import PLAIN, Target, is_avoided

# Picks tried for a target outside `request.avoid`; then all targets are compared.
MAX_PICKS_TO_AVOID_FAILURE: Final = 4


class Balancer(Protocol):
    total: float

    def __len__(self) -> int: ...
    def __contains__(self, target: Target) -> bool: ...
    def set(self, target: Target, weight: float) -> None: ...
    def pick(self) -> Target | None: ...
    def swap(self, picked_target: Target, other_target: Target) -> None: ...
    def members(self) -> tuple[Target, ...]: ...


class PlacedWork(NamedTuple):
    """A request with the replicas chosen for it. `tokens` of its prompt are computed; `apart`: prefill and decode
    run on different replicas."""

    request: RequestState
    tokens: int
    prefills: list[ReplicaState]
    decodes: list[ReplicaState]
    answer_tokens: float
    apart: bool


class BalanceRule:
    """The base rule: turns with equal weights and no load counts. Subclasses override what differs."""

    weights: Literal["even", "rates", "goodput"] = "even"
    """The weight of a template copy in a bucket: 1, the plan's rate, or its goodput (`template_weights.py`)."""
    by_length = True  # Whether length thresholds decide between regions.
    learns = False  # Whether replica speeds are learned and delayed links avoided.
    by_load = False
    in_seconds = False
    """Whether loads are in seconds. A target without facts then counts by its planned rate."""

    def new_balancer(self) -> Balancer:
        return WeightedRoundRobin()

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        """(load of the prompt, load of the answer) that a request adds to its targets."""
        return 0.0, 0.0


class RoundRobin(BalanceRule):
    """CAUCHY 4.4's baseline."""


class GoodputBalance(BalanceRule):
    weights = "goodput"


class FixedBalance(BalanceRule):
    weights = "rates"
    by_length = False


class TokenBalance(BalanceRule):
    """Counts all tokens of a request on its decode target, and the prompt on the prefill target of a flow."""

    by_load = True

    def new_balancer(self) -> Balancer:
        return LeastLoaded(self.offset)

    def offset(self, target: Target, weight: float) -> float:
        views = target.decodes if target.kind != PLAIN else target.views()
        return -float(
            sum(replica.facts.total_blocks * BLOCK_TOKENS for replica in views if replica.facts is not None)
        )

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        return float(work.tokens) if work.apart else 0.0, float(work.request.total_tokens)


class LearnedBalance(BalanceRule):
    """Counts the expected prefill seconds of a prompt and decode seconds of an answer of the recent mean length."""

    weights = "goodput"
    learns = True
    by_load = True
    in_seconds = True

    def new_balancer(self) -> Balancer:
        return LeastLoaded(self.offset)

    def offset(self, target: Target, weight: float) -> float:
        return 1.0 / weight

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        prefill_facts, decode_facts, answer_tokens = (
            work.prefills[0].facts,
            work.decodes[0].facts,
            work.answer_tokens,
        )
        prompt_s = (
            prefill_seconds(prefill_facts, work.tokens) if prefill_facts is not None else float(work.tokens)
        )
        answer_s = (
            decode_seconds(decode_facts, answer_tokens) if decode_facts is not None else float(answer_tokens)
        )
        return prompt_s / len(work.prefills), answer_s / len(work.decodes)


BALANCES: Final[dict[str, type[BalanceRule]]] = {
    "learned": LearnedBalance,
    "goodput": GoodputBalance,
    "round-robin": RoundRobin,
    "token": TokenBalance,
    "fixed": FixedBalance,
}


def balance_rule(name: str) -> BalanceRule:
    if name not in BALANCES:
        raise UnknownNameError("policy: balance", name, BALANCES)
    return BALANCES[name]()


class _HeapEntry:
    """A target in a `LeastLoaded` index. Heap items with a stamp other than the entry's are outdated and skipped."""

    __slots__ = ("key", "offset", "stamp", "target", "weight")

    def __init__(self, target: Target, weight: float, offset: float) -> None:
        self.target = target
        self.weight = weight
        self.offset = offset
        self.key = inf
        self.stamp = 0


class LeastLoaded:
    """Picks the target with the least (load + offset) x pace; targets with equal keys take turns. A heap whose
    stale keys are corrected when they reach the top."""

    __slots__ = ("_entries", "_heap", "_offset_of", "_stamp", "total")

    def __init__(self, offset_of: Callable[[Target, float], float]) -> None:
        self.total = 0.0
        self._offset_of = offset_of  # (target, weight) -> offset added to its load.
        self._heap: list[tuple[float, int, _HeapEntry]] = []
        self._entries: dict[Target, _HeapEntry] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, target: Target) -> bool:
        return target in self._entries

    def members(self) -> tuple[Target, ...]:
        return tuple(self._entries)

    def set(self, target: Target, weight: float) -> None:
        old_entry = self._entries.pop(target, None)
        if old_entry is not None:
            self.total -= old_entry.weight
            old_entry.stamp = -1
            target.indexes.remove(self)
        if 0 < weight < inf:
            self.total += weight
            self._entries[target] = _HeapEntry(target, weight, self._offset_of(target, weight))
            target.indexes.append(self)
            self.lower_key(target)
        elif not self._entries:
            self.total = 0.0
            self._heap = []

    def lower_key(self, target: Target) -> None:
        entry = self._entries.get(target)
        if entry is None:
            return
        key = (target.load + entry.offset) * target.pace
        if key >= entry.key:
            return
        self._stamp += 1
        entry.stamp, entry.key = self._stamp, key
        heappush(self._heap, (key, self._stamp, entry))
        if len(self._heap) > 2 * len(self._entries) + 32:
            self._heap = [(item.key, item.stamp, item) for item in self._entries.values()]
            heapify(self._heap)

    def pick(self) -> Target | None:
        heap = self._heap
        while heap:
            key, stamp, entry = heap[0]
            if entry.stamp != stamp:
                heappop(heap)
                continue
            target = entry.target
            current_key = (target.load + entry.offset) * target.pace
            if current_key > key:
                entry.key = current_key
                heapreplace(heap, (current_key, stamp, entry))
                continue
            size = len(heap)
            if (size > 1 and heap[1][0] <= key) or (size > 2 and heap[2][0] <= key):
                self._stamp += 1  # Targets with equal keys take turns.
                entry.stamp = self._stamp
                heapreplace(heap, (key, self._stamp, entry))
            return target
        return None

    def swap(self, picked_target: Target, other_target: Target) -> None:
        """Nothing to do: loads already show which target received the request."""


def pick_unfailed(balancer: Balancer, request: RequestState) -> Target | None:
    for _ in range(MAX_PICKS_TO_AVOID_FAILURE):
        target = balancer.pick()
        if target is not None and not is_avoided(target, request.avoid):
            return target
    allowed_targets = [target for target in balancer.members() if not is_avoided(target, request.avoid)]
    return min(
        allowed_targets, key=lambda allowed_target: allowed_target.load * allowed_target.pace, default=None
    )


def prefill_seconds(facts: ReplicaFacts, prompt_tokens: int) -> float:
    """Seconds of a replica's time for a prompt. A pipeline counts its slowest stage, as the others compute the next
    prompts."""
    work_s = prompt_tokens * facts.prefill_s_per_token
    return work_s if facts.alone_s_per_token > 0 else facts.prefill_fixed_s + work_s


def decode_seconds(facts: ReplicaFacts, output_tokens: float) -> float:
    return output_tokens * facts.decode_step_s / max(1, facts.decode_batch)
