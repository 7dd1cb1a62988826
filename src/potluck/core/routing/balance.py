"""How requests are spread over targets: a class per rule, named in BALANCES. A new rule is a class and a line here.

    learned       the target done first at the speeds observed, with what the plan gives the bucket (default)
    goodput       turns in proportion to a target's goodput for the bucket       CAUCHY 3.4.1, CORAL 5.1
    fixed         turns by the plan's rates, THUNDERSERVE's X and Y              THUNDERSERVE 3.3
    round-robin   turns, all alike                                               CAUCHY 4.4's baseline
    token         the target with the most tokens of KV left                     CAUCHY 4.4's token-weighted baseline

`learned` and `token` count what the Brain has sent and not seen end, so they need no report and are never late."""

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
from potluck.core.state.targets import PLAIN, Target, avoided

TRIES: Final = 4  # Turns that are looked at for one that a failed request need not avoid, before all are.


class Balancer(Protocol):
    total: float

    def __len__(self) -> int: ...
    def __contains__(self, target: Target) -> bool: ...
    def set(self, target: Target, weight: float) -> None: ...
    def pick(self) -> Target | None: ...
    def swap(self, picked_target: Target, other_target: Target) -> None: ...
    def members(self) -> tuple[Target, ...]: ...


class PlacedWork(NamedTuple):
    """A request, and where it goes: of its prompt so many tokens are computed; `apart` from its answer or not."""

    req: RequestState
    tokens: int
    prefills: list[ReplicaState]
    decodes: list[ReplicaState]
    answer_tokens: float
    apart: bool


class BalanceRule:
    """Turns, all alike; other rules say what they have otherwise."""

    weights: Literal["even", "rates", "goodput"] = "even"
    """What a copy weighs for a bucket: all alike, the plan's rate, or its goodput (`template_weights.py`)."""
    by_length = True  # Whether length thresholds between regions may decide.
    learns = False  # Whether speeds are observed, and late links avoided.
    by_load = False
    in_seconds = False
    """Whether loads are seconds; where a target's facts are missing, its planned rate stands in."""

    def chooser(self) -> Balancer:
        return WeightedRoundRobin()

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        """What a request counts for: its prompt, and its answer."""
        return 0.0, 0.0


class RoundRobin(BalanceRule):
    """CAUCHY 4.4's baseline."""


class GoodputBalance(BalanceRule):
    weights = "goodput"


class FixedBalance(BalanceRule):
    weights = "rates"
    by_length = False


class TokenBalance(BalanceRule):
    """All tokens count where they are decoded, and along a flow the prompt where it is computed."""

    by_load = True

    def chooser(self) -> Balancer:
        return LeastLoaded(self.offset)

    def offset(self, target: Target, weight: float) -> float:
        views = target.decodes if target.kind != PLAIN else target.views()
        return -float(sum(v.facts.total_blocks * BLOCK_TOKENS for v in views if v.facts is not None))

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        return float(work.tokens) if work.apart else 0.0, float(work.req.total_tokens)


class LearnedBalance(BalanceRule):
    """Seconds of the prompt until it is computed, and of its part of the decode steps, answers as long as lately."""

    weights = "goodput"
    learns = True
    by_load = True
    in_seconds = True

    def chooser(self) -> Balancer:
        return LeastLoaded(self.offset)

    def offset(self, target: Target, weight: float) -> float:
        return 1.0 / weight

    def loads(self, work: PlacedWork) -> tuple[float, float]:
        first, last, answer_tokens = work.prefills[0].facts, work.decodes[0].facts, work.answer_tokens
        first_s = prefill_seconds(first, work.tokens) if first is not None else float(work.tokens)
        rest_s = decode_seconds(last, answer_tokens) if last is not None else float(answer_tokens)
        return first_s / len(work.prefills), rest_s / len(work.decodes)


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


class _Place:
    """A target's place in an index. Heap items whose stamp is not the place's are old and skipped."""

    __slots__ = ("key", "member", "offset", "stamp", "weight")

    def __init__(self, target: Target, weight: float, offset: float) -> None:
        self.member = target
        self.weight = weight
        self.offset = offset
        self.key = inf
        self.stamp = 0


class LeastLoaded:
    """The target with the least (load + offset) x pace; equals take turns. A heap whose keys are corrected on top."""

    __slots__ = ("_heap", "_offset_of", "_places", "_stamp", "total")

    def __init__(self, offset_of: Callable[[Target, float], float]) -> None:
        self.total = 0.0
        self._offset_of = offset_of  # From a target and its weight to what is added to its load.
        self._heap: list[tuple[float, int, _Place]] = []
        self._places: dict[Target, _Place] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, target: Target) -> bool:
        return target in self._places

    def members(self) -> tuple[Target, ...]:
        return tuple(self._places)

    def set(self, target: Target, weight: float) -> None:
        old = self._places.pop(target, None)
        if old is not None:
            self.total -= old.weight
            old.stamp = -1
            target.indexes.remove(self)
        if 0 < weight < inf:
            self.total += weight
            self._places[target] = _Place(target, weight, self._offset_of(target, weight))
            target.indexes.append(self)
            self.lighter(target)
        elif not self._places:
            self.total = 0.0
            self._heap = []

    def lighter(self, target: Target) -> None:
        place = self._places.get(target)
        if place is None:
            return
        key = (target.load + place.offset) * target.pace
        if key >= place.key:
            return
        self._stamp += 1
        place.stamp, place.key = self._stamp, key
        heappush(self._heap, (key, self._stamp, place))
        if len(self._heap) > 2 * len(self._places) + 32:
            self._heap = [(item.key, item.stamp, item) for item in self._places.values()]
            heapify(self._heap)

    def pick(self) -> Target | None:
        heap = self._heap
        while heap:
            key, stamp, place = heap[0]
            if place.stamp != stamp:
                heappop(heap)
                continue
            target = place.member
            now = (target.load + place.offset) * target.pace
            if now > key:
                place.key = now
                heapreplace(heap, (now, stamp, place))
                continue
            size = len(heap)
            if (size > 1 and heap[1][0] <= key) or (size > 2 and heap[2][0] <= key):
                self._stamp += 1  # equals take turns
                place.stamp = self._stamp
                heapreplace(heap, (key, self._stamp, place))
            return target
        return None

    def swap(self, picked_target: Target, other_target: Target) -> None:
        """Loads tell by themselves who got it."""


def unfailed(balancer: Balancer, request: RequestState) -> Target | None:
    for _ in range(TRIES):
        target = balancer.pick()
        if target is not None and not avoided(target, request.avoid):
            return target
    others = [fleet_target for fleet_target in balancer.members() if not avoided(fleet_target, request.avoid)]
    return min(others, key=lambda each: each.load * each.pace, default=None)


def prefill_seconds(facts: ReplicaFacts, prompt_tokens: int) -> float:
    """What a prompt takes of a replica's time: its slowest stage's, as the others compute the next ones meanwhile."""
    work_s = prompt_tokens * facts.prefill_s_per_token
    return work_s if facts.alone_s_per_token > 0 else facts.prefill_fixed_s + work_s


def decode_seconds(facts: ReplicaFacts, output_tokens: float) -> float:
    return output_tokens * facts.decode_step_s / max(1, facts.decode_batch)
