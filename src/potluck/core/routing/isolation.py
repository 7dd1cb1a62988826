"""Replicas set apart for tenants that send little but long prompts, so that others' answers keep their pace.

On k of a model's N replicas the long prompts of such heavy tenants are computed and answered, and of the others'
requests the prompts alone, as many as the rest cannot compute beside its answers without getting slower:

    D + P = N L                              how busy the others keep all N, for decode steps and for prompts
    x = 1 - (1 - L) / (1 + d)                how busy the N - k may be for tokens that take d longer, of `disturbance`
    away = 1 - ((N - k) x - D) / P           share of the others' prompts that the k compute; 1 at most
    spare(k) = k (1 - x) + N (x - L)         what is left for heavy tenants, in replicas

k is the least with as much to spare as heavy tenants ask for, or the most that leaves the others their place."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp
from typing import Final, NamedTuple

from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RequestState

MEMORY_S: Final = 10.0  # Over how long the work of heavy tenants is averaged.
CHECK_S: Final = 1.0  # Between two looks at how many to set apart; one more or less each time.
CALM_S: Final = 10.0  # One is given back when it was too many for so long.
FADE: Final = 1.0 / 512
MANY: Final = 256  # Answers after which their lengths are believed; those that were asked for until then.
FORESEEN: Final = 0.3
"""Of the disturbance; the rest is for bursts, which fewer replicas feel more, and for the moments of change."""
HEAVY: Final = 0.5  # Share of a tenant's prompt tokens in long prompts from which on it is heavy.
BUSY: Final = 0.9  # How busy a replica that is set apart may be.
FULL: Final = 0.8  # Share of the planned batch up to which the others' answers are crowded together.
AWAY: Final = 0.85  # Most of the others' prompts that are computed away from their answers.
MOST_TAKEN: Final = 0.8
MOST_OWED: Final = 4.0  # Prompts by which the others' shares may be behind.


class TenantProfile:
    """What a tenant sends: mean tokens of its prompts, and those of long ones."""

    __slots__ = ("count", "long_tokens", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0.0
        self.long_tokens = 0.0

    def add(self, tokens: int, long: bool) -> None:
        self.count += 1
        part = max(FADE, 1.0 / self.count)
        self.tokens += part * (tokens - self.tokens)
        self.long_tokens += part * ((tokens if long else 0) - self.long_tokens)

    @property
    def heavy(self) -> bool:
        return self.long_tokens > HEAVY * self.tokens


class IsolatedReplicas:
    """One model's replicas that are set apart, and what decides how many."""

    def __init__(self) -> None:
        self.views: list[ReplicaState] = []
        self.members: list[ReplicaState] = []  # All that long prompts may go to.
        self.away = 0.0
        self.taken = 0.0  # Share of their time that the others' prompts take.
        self.owed_tokens = 0.0  # Of the others' prompts, to be computed there.
        self.prompts = 0
        self.answers = 0  # Of the others, counted.
        self.prompt_tokens = 0.0
        self.answer_tokens = 0.0
        self.requests = 0.0  # Of the others lately.
        self.work_s = 0.0  # Seconds of long prompts of heavy tenants lately.
        self.seen_s = 0.0  # How long that is.
        self.since_s = float("inf")  # When these three were right.
        self.checked_s = float("-inf")
        self.needed_s = float("-inf")  # When all that are set apart were last needed.

    def now(self, at_s: float) -> None:
        passed_s = max(0.0, at_s - self.since_s)
        keep = exp(-passed_s / MEMORY_S)
        self.requests *= keep
        self.work_s *= keep
        self.seen_s = self.seen_s * keep + passed_s
        self.since_s = at_s

    def asked(self, prompt_tokens: int, output_tokens: int) -> None:
        """By one of the others. Short answers end first, so that lengths are believed only after many."""
        self.prompts += 1
        self.requests += 1.0
        part = max(FADE, 1.0 / self.prompts)
        self.prompt_tokens += part * (prompt_tokens - self.prompt_tokens)
        if self.answers < MANY:
            self.answer_tokens += part * (output_tokens - self.answer_tokens)

    def answered(self, output_tokens: int) -> None:
        self.answers += 1
        if self.answers > MANY:
            self.answer_tokens += FADE * (output_tokens - self.answer_tokens)


class TenantIsolation:
    """Who is heavy, and what is set apart for them. Changed by the Brain through `Room`."""

    def __init__(self, disturbance: float) -> None:
        self._disturbance = disturbance
        self._profiles: dict[tuple[str, str], TenantProfile] = {}
        self._isolated: dict[str, IsolatedReplicas] = {}

    def asks(self, at_s: float, request_state: RequestState, long_s: float) -> None:
        """A request came, once there are several tenants; `long_s` its prompt's seconds if it is long."""
        request = request_state.request
        key = request.model, request.tenant
        profile = self._profiles.get(key)
        if profile is None:
            profile = self._profiles[key] = TenantProfile()
        profile.add(request_state.prompt_tokens, long_s > 0)
        request_state.heavy = profile.heavy
        isolated = self._isolated.get(request.model)
        if isolated is None:
            isolated = self._isolated[request.model] = IsolatedReplicas()
        isolated.now(at_s)
        if request_state.heavy:
            isolated.work_s += long_s
        else:
            isolated.asked(request_state.prompt_tokens, request_state.output_tokens)
        if at_s >= isolated.checked_s + CHECK_S:
            isolated.checked_s = at_s
            self._resize(at_s, isolated)

    def views(self, model: str) -> list[ReplicaState]:
        isolated = self._isolated.get(model)
        return isolated.views if isolated is not None else []

    def taken(self, request: RequestState, replica: ReplicaState) -> float:
        """Share of a replica's time that is not there for a heavy tenant, as others' prompts are computed there."""
        isolated = self._isolated.get(request.request.model)
        return isolated.taken if isolated is not None and request.heavy and replica in isolated.views else 0.0

    def may_go(self, model: str, views: Sequence[ReplicaState]) -> None:
        isolated = self._isolated.get(model)
        if isolated is not None:
            isolated.members = list(views)

    def goes_away(self, request: RequestState, long: bool) -> bool:
        """Whether it is the turn of another tenant's prompt to be computed there."""
        isolated = self._isolated.get(request.request.model)
        if isolated is None or not isolated.views:
            return False
        due = isolated.owed_tokens + isolated.away * request.prompt_tokens
        return long or due >= 0.5 * request.prompt_tokens

    def sent(self, request: RequestState, away: bool) -> None:
        isolated = self._isolated.get(request.request.model)
        if isolated is not None and isolated.views and not request.heavy:
            tokens = request.prompt_tokens
            most = MOST_OWED * max(tokens, isolated.prompt_tokens)
            owed = isolated.owed_tokens + isolated.away * tokens - (tokens if away else 0)
            isolated.owed_tokens = min(most, max(-most, owed))

    def answered(self, request: RequestState, output_tokens: int) -> None:
        isolated = self._isolated.get(request.request.model)
        if isolated is not None and not request.heavy:
            isolated.answered(output_tokens)

    def _resize(self, at_s: float, isolated: IsolatedReplicas) -> None:
        """Set one more apart, or one less; how much of the others' prompts goes there."""
        members = [replica for replica in isolated.members if replica.serves and replica.facts is not None]
        isolated.views = [replica for replica in isolated.views if replica in members]
        load = load_of(isolated, members) if isolated.seen_s >= CHECK_S and self._disturbance > 0 else None
        wanted = 0
        if load is not None:
            wanted = fewest(load, isolated.work_s / isolated.seen_s / BUSY, FORESEEN * self._disturbance)
        if wanted >= len(isolated.views):
            isolated.needed_s = at_s
        if wanted > len(isolated.views):
            free = [replica for replica in members if replica not in isolated.views]
            isolated.views = [*isolated.views, min(free, key=lambda replica: replica.open_requests)]
        elif wanted < len(isolated.views) and at_s - isolated.needed_s >= CALM_S:
            isolated.views = isolated.views[:-1]
            isolated.needed_s = at_s
        count = len(isolated.views)
        if count and load is not None:
            isolated.away = min(1.0, max(0.0, away(load, count, FORESEEN * self._disturbance)))
            isolated.taken = min(MOST_TAKEN, isolated.away * load.prompts / count)
        else:
            isolated.away = isolated.taken = isolated.owed_tokens = 0.0


class OthersLoad(NamedTuple):
    """What the others ask of a model's replicas: N, D and P, and how many could be set apart at most."""

    replicas: int
    steps: float
    prompts: float
    most: int


def load_of(isolated: IsolatedReplicas, members: Sequence[ReplicaState]) -> OthersLoad | None:
    """From what was seen lately; None where too little is known."""
    count = len(members)
    first_s = slope_s = token_s = batch = 0.0
    for replica in members:
        facts = replica.facts
        if facts is None or not 0 < facts.decode_first_s <= facts.decode_step_s:
            return None
        first_s += facts.decode_first_s / count
        slope_s += (facts.decode_step_s - facts.decode_first_s) / max(1, facts.decode_batch - 1) / count
        token_s += facts.prefill_s_per_token / count
        batch += facts.decode_batch / count
    if count < 2 or not isolated.answer_tokens > 0:
        return None
    per_s = isolated.requests / isolated.seen_s
    steps, prompts = per_s * isolated.answer_tokens * slope_s, per_s * isolated.prompt_tokens * token_s
    gap_s = first_s / max(0.1, 1.0 - (steps + prompts) / count)
    needed = per_s * isolated.answer_tokens * gap_s / (FULL * batch)
    return OthersLoad(count, steps, prompts, count - max(1, ceil(needed)))


def busiest(load: OthersLoad, slower: float) -> float:
    busy = min(1.0, (load.steps + load.prompts) / load.replicas)
    return 1.0 - (1.0 - busy) / (1.0 + slower)


def away(load: OthersLoad, k: int, slower: float) -> float:
    """Share of the others' prompts to compute on k replicas; > 1: the rest cannot even answer, < 0: it has time."""
    left = (load.replicas - k) * busiest(load, slower) - load.steps
    return 1.0 - left / load.prompts if load.prompts > 0 else float(left < 0)


def spare(load: OthersLoad, k: int, slower: float) -> float:
    """What k replicas have left for heavy tenants, with what fits beside the others on the rest."""
    x = busiest(load, slower)
    return k * (1.0 - x) + load.replicas * x - load.steps - load.prompts


def fewest(load: OthersLoad, asked: float, slower: float) -> int:
    """The least k with so much to spare, or the most that may be set apart."""
    k = 0
    while k < load.most and spare(load, k, slower) < asked and away(load, k + 1, slower) <= AWAY:
        k += 1
    return k
