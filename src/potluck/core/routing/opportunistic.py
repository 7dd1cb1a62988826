"""Opportunistic scheduling inside a combo (CAUCHY 3.4.2): use idle replicas whatever their role.

A request prefills on a prefill replica and decodes on the least loaded decode replica, or runs whole on one replica:

1. on an idle decode replica while every prefill replica is busy (Figure 5b);
2. on a prefill replica without a waiting prompt, if decoding there is faster than on the least loaded decode replica.
   Its step time counts 1 / (1 - busy) times, for the prompts between its steps (our measure), and the TPOT objective
   must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState

ReplicaCost = Callable[[ReplicaState], float]
Views = Sequence[ReplicaState]


def step_seconds(facts: ReplicaFacts | None, batch: int) -> float:
    """Seconds per output token in a decode batch of this size; batches beyond the planned one take turns. Without
    facts: the batch size."""
    if facts is None:
        return float(batch)
    planned, full_s = facts.decode_batch, facts.decode_step_s
    if batch >= planned or not 0 < facts.decode_first_s <= full_s:
        return full_s * batch / planned
    return facts.batch_step_s(float(batch))


def next_step_seconds(replica: ReplicaState) -> float:
    return step_seconds(replica.facts, replica.open_requests + 1) * replica.pace


def fullness(replica: ReplicaState) -> float:
    """The replica's batch utilization with one request more; without facts one request fills it."""
    facts = replica.facts
    return (replica.open_requests + 1) * replica.pace / max(1, facts.decode_batch if facts is not None else 1)


def whole_request_replica(
    prefills: Views, decodes: Views, step_s: ReplicaCost, busy: float
) -> ReplicaState | None:
    """The replica that should prefill and decode the request, or None for prefill then decode."""
    free_prefills = [replica for replica in prefills if replica.open_prefill_tokens == 0]
    for replica in decodes:
        if replica.idle:
            return None if free_prefills else replica
    if not free_prefills:
        return None
    fastest = least_loaded(free_prefills, step_s)
    return fastest if step_s(fastest) < (1.0 - busy) * min(map(step_s, decodes)) else None


def least_loaded(views: Views, cost: ReplicaCost) -> ReplicaState:
    """The replica with the least cost."""
    return views[0] if len(views) == 1 else min(views, key=cost)


def shortest_queue(views: Views, seconds_per_token: ReplicaCost) -> ReplicaState:
    return min(views, key=lambda replica: (replica.open_prefill_tokens + 1) * seconds_per_token(replica))
