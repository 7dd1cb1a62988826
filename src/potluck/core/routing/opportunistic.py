"""Opportunistic scheduling inside a combo (CAUCHY 3.4.2): do not let a replica idle for its role.

By rule a prompt goes to a prefill replica and then to the least loaded decode replica. Instead it runs in
place, from prompt to last token, on one replica ("0 -> null"):

1. on a decode replica that has nothing to do, while every prefill replica is busy (Figure 5b);
2. on a prefill replica without a waiting prompt that is emptier than the least loaded decode replica: its batch would
   be a smaller part of what it was planned for. The paper says "underutilized" and gives no measure; this is ours.
   Nothing idle on the decode side is required: a decode replica that is idle gets the request by the rule.

A replica whose size is not known counts as full once it has one request, so that rule 2 then means "idle".
Everything read here is the Brain's own count, or a report where one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.core.fleet import View

Fill = Callable[[View], float]
"""How full a replica would be with one request more, as a share of its planned batch."""


def in_place(prefills: Sequence[View], decodes: Sequence[View], fill: Fill) -> View | None:
    """The replica that should run the whole request, or None for prefill then decode."""
    free = [view for view in prefills if view.open_prefill_tokens == 0]
    idle = [view for view in decodes if view.idle]
    if idle:
        return None if free else idle[0]
    if not free:
        return None
    best = min(free, key=fill)
    return best if fill(best) < min(map(fill, decodes)) else None


def least_loaded(views: Sequence[View], fill: Fill) -> View:
    """The decode replica for the rule's way: the emptiest by its own measure."""
    return min(views, key=fill)


def shortest_queue(views: Sequence[View], seconds_per_token: Callable[[View], float]) -> View:
    """The prefill replica whose waiting prompts are computed first."""
    return min(views, key=lambda view: (view.open_prefill_tokens + 1) * seconds_per_token(view))
