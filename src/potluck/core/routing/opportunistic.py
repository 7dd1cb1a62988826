"""Opportunistic scheduling inside a combo (CAUCHY 3.4.2): do not let a replica idle for its role.

A prompt goes to a prefill replica and then to the least loaded decode replica, or runs in place:

1. on a decode replica that has nothing to do, while every prefill replica is busy (Figure 5b);
2. on a prefill replica without a waiting prompt, if decoding there is faster than on the least loaded decode replica,
   its step counting 1 / (1 - busy) times for the prompts between (our measure), and the TPOT objective kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState

Step = Callable[[ReplicaState], float]
Views = Sequence[ReplicaState]


def step_seconds(facts: ReplicaFacts | None, batch: int) -> float:
    """Seconds per token of each of so many requests, beyond the planned batch in turns; no facts: their number."""
    if facts is None:
        return float(batch)
    planned, full_s = facts.decode_batch, facts.decode_step_s
    if batch >= planned or not 0 < facts.decode_first_s <= full_s:
        return full_s * batch / planned
    return facts.batch_step_s(float(batch))


def next_step_seconds(replica: ReplicaState) -> float:
    return step_seconds(replica.facts, replica.open_requests + 1) * replica.pace


def fullness(replica: ReplicaState) -> float:
    """How full it would be with one request more; without facts one request fills it."""
    facts = replica.facts
    return (replica.open_requests + 1) * replica.pace / max(1, facts.decode_batch if facts is not None else 1)


def in_place(prefills: Views, decodes: Views, step: Step, busy: float) -> ReplicaState | None:
    """The replica that should run the whole request, or None for prefill then decode."""
    free = [replica for replica in prefills if replica.open_prefill_tokens == 0]
    for replica in decodes:
        if replica.idle:
            return None if free else replica
    if not free:
        return None
    best = least_loaded(free, step)
    return best if step(best) < (1.0 - busy) * min(map(step, decodes)) else None


def least_loaded(views: Views, fill: Step) -> ReplicaState:
    """The decode replica for the rule's way: the emptiest by its own measure."""
    return views[0] if len(views) == 1 else min(views, key=fill)


def shortest_queue(views: Views, seconds_per_token: Step) -> ReplicaState:
    return min(views, key=lambda replica: (replica.open_prefill_tokens + 1) * seconds_per_token(replica))
