"""Opportunistic scheduling inside a combo (CAUCHY 3.4.2): do not let a replica idle for its role.

By rule a prompt goes to a prefill replica and then to the least loaded decode replica. Instead it runs in place,
from prompt to last token, on one replica ("0 -> null"):

1. on a decode replica that has nothing to do, while every prefill replica is busy (Figure 5b);
2. on a prefill replica without a waiting prompt, if decoding there is faster than on the least loaded decode
   replica. Prefills that come between its steps slow it down, so its step counts 1 / (1 - busy) times, where
   `busy` is the share of arrivals that lately found a prefill replica at work: as arrivals see time averages, that is
   its utilisation. An idle decode replica gets the request by the rule, and so does whoever would not keep its TPOT
   objective in place (`Room.keeps_pace`; there what arrivals asked for in their time counts too,
   `PrefillUtilization`).

The paper says "underutilized" and gives no measure; that of rule 2 is ours. Where prefill is nearly idle it takes
much of the decoding, as in the paper's Table 3; where prompts keep the prefill replicas busy it takes none.
Everything read here is the Brain's own count, or a report where one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState

Step = Callable[[ReplicaState], float]
"""Seconds of a replica's decode step with one request more than it has."""
MEMORY: Final = 64
"""Arrivals over which `busy` is averaged."""
MOST_BUSY: Final = 0.99


def step_seconds(facts: ReplicaFacts | None, batch: int) -> float:
    """Seconds per token of each of so many requests; their number itself where nothing is known.

    Up to the planned batch it is a step of that many. More requests than that take turns, so it grows with their
    number.
    """
    if facts is None:
        return float(batch)
    planned, full_s = facts.decode_batch, facts.decode_step_s
    if batch >= planned or not 0 < facts.decode_first_s <= full_s:
        return full_s * batch / planned
    return step_s(facts, float(batch))


def step_s(facts: ReplicaFacts, batch: float) -> float:
    """A decode step of so many requests: on the lines through one request, the knees and the planned batch."""
    planned, full_s, first_s = facts.decode_batch, facts.decode_step_s, facts.decode_first_s
    if planned <= 1 or not 0 < first_s <= full_s:
        return full_s
    low, low_s = 1, first_s
    for knee, knee_s in facts.decode_knees:
        if batch <= knee:
            return low_s + (knee_s - low_s) * (batch - low) / (knee - low)
        low, low_s = knee, knee_s
    return low_s + (full_s - low_s) * (batch - low) / (planned - low)


def next_step_seconds(view: ReplicaState) -> float:
    """A decode step with one request more."""
    return step_seconds(view.facts, view.open_requests + 1) * view.pace


def fullness(view: ReplicaState) -> float:
    """How full it would be with one request more; without facts one request fills it."""
    facts = view.facts
    return (view.open_requests + 1) * view.pace / max(1, facts.decode_batch if facts is not None else 1)


def seconds_per_token(view: ReplicaState) -> float:
    """Of a prompt."""
    facts = view.facts
    return (facts.prefill_s_per_token if facts is not None else 1.0) * view.pace


def _prompt_s(view: ReplicaState, tokens: int) -> float:
    fixed_s = view.facts.prefill_fixed_s * view.pace if view.facts is not None else 0.0
    return fixed_s + tokens * seconds_per_token(view)


def busier(busy: float, prefills: Sequence[ReplicaState]) -> float:
    """The running share of busy prefill replicas after one more look."""
    at_work = 0
    for view in prefills:
        at_work += view.open_prefill_tokens > 0
    now = at_work / len(prefills)
    return busy + (now - busy) / MEMORY


class PrefillUtilization:
    """How busy prompts keep a combo's prefill replicas: the larger of two measures.

    The share of arrivals that found one at work is its utilisation where arrivals come by chance. Where they come in
    turn, each may come just after the one before it is done, and all find it free; so what they ask for in the time
    between them counts too.
    """

    __slots__ = ("_count", "_found", "_gap_s", "_last_s", "_work_s")

    def __init__(self) -> None:
        self._count = 0
        self._found = self._gap_s = self._work_s = self._last_s = 0.0

    def seen(self, at_s: float, tokens: int, prefills: Sequence[ReplicaState]) -> float:
        """After one more prompt that came."""
        self._found = busier(self._found, prefills)
        if self._count:
            part = 1.0 / min(self._count, MEMORY)
            work_s = sum([_prompt_s(view, tokens) for view in prefills]) / len(prefills) ** 2
            self._gap_s += (max(0.0, at_s - self._last_s) - self._gap_s) * part
            self._work_s += (work_s - self._work_s) * part
        self._count += 1
        self._last_s = at_s
        if self._count <= MEMORY:  # too few gaps were seen
            return self._found
        return max(self._found, min(MOST_BUSY, self._work_s / max(self._gap_s, 1e-9)))


def in_place(
    prefills: Sequence[ReplicaState], decodes: Sequence[ReplicaState], step: Step, busy: float
) -> ReplicaState | None:
    """The replica that should run the whole request, or None for prefill then decode."""
    free = [view for view in prefills if view.open_prefill_tokens == 0]
    for view in decodes:
        if view.idle:
            return None if free else view
    if not free:
        return None
    best = least_loaded(free, step)
    return best if step(best) < (1.0 - busy) * min(map(step, decodes)) else None


def least_loaded(views: Sequence[ReplicaState], fill: Step) -> ReplicaState:
    """The decode replica for the rule's way: the emptiest by its own measure."""
    return views[0] if len(views) == 1 else min(views, key=fill)


def shortest_queue(
    views: Sequence[ReplicaState], seconds_per_token: Callable[[ReplicaState], float]
) -> ReplicaState:
    """The prefill replica whose waiting prompts are computed first."""
    return min(views, key=lambda view: (view.open_prefill_tokens + 1) * seconds_per_token(view))
