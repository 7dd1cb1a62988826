"""What happens to the fleet and why, for whoever watches: a watcher of the desk that keeps the latest decisions."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from potluck.core.state.actions import (
    Abort,
    Action,
    CopyPrefix,
    DrainReplica,
    FlipReplica,
    Hedge,
    OperatorNote,
    Reassign,
    Refuse,
    Replan,
    ResyncCache,
    Run,
    StartReplica,
    StopReplica,
)
from potluck.core.state.events import (
    Event,
    FirstToken,
    MarketReported,
    OperatorOrdered,
    PlanReceived,
    ReplicaDrained,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    RequestArrived,
    RequestFinished,
    SegmentDone,
    Tick,
)
from potluck.core.values.difference import copies_changed
from potluck.core.values.plan import Plan
from potluck.core.values.replica_spec import ReplicaSpec

MOST_KEPT = 1_000
MOST_LOST = 200
_FREQUENT = frozenset(
    {RequestArrived, SegmentDone, FirstToken, RequestFinished, ReplicaReported, Run, Hedge, Refuse, Abort}
)
"""What comes by the thousand a second, and says nothing of the fleet."""


class Decision(NamedTuple):
    number: int
    at_s: float
    """The time of day."""
    what: str
    why: str
    kind: str = "decision"
    """In a word: `ready`, `lost`, `plan`, `flip`, ...; what operators filter by."""


class DecisionLog:
    """`decided` hears everything at once; `kept` has the latest, for a controller that asks every second or so.

    Numbers begin at 1 with each epoch, which is this process's.
    """

    def __init__(
        self,
        thinks: Callable[[], str],
        plan_why: Callable[[], str] = str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`thinks` is what scaling last thought: the reason of what it does at a tick; `plan_why` why a plan came."""
        self._thinks, self._plan_why, self._clock = thinks, plan_why, clock
        self.decided: Callable[[str, str], None] = lambda what, why: None
        self.epoch = secrets.token_hex(8)
        self.kept: deque[Decision] = deque(maxlen=MOST_KEPT)
        self.lost: dict[str, tuple[float, str]] = {}
        """Replicas that were lost of late: when, by the time of day, and why."""
        self._number = 0
        self._standby: set[str] = set()
        """Replicas that are on standby."""
        self._plan: Plan | None = None
        """The one that was adopted last."""

    def say(self, kind: str, what: str, why: str) -> None:
        self._number += 1
        self.kept.append(Decision(self._number, self._clock(), what, why, kind))
        self.decided(what, why)

    def _is_lost(self, replica: str, reason: str) -> None:
        self._standby.discard(replica)
        while len(self.lost) >= MOST_LOST:
            del self.lost[next(iter(self.lost))]
        self.lost[replica] = (self._clock(), reason)
        self.say("lost", f"{replica} is lost", reason)

    def __call__(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
        if type(event) in _FREQUENT and (not actions or type(actions[0]) in _FREQUENT):
            return
        match event:
            case ReplicaReady(replica=replica):
                self.say("ready", f"{replica} is ready", "its engine answers")
            case ReplicaLost(replica, reason):
                self._is_lost(replica, reason)
            case ReplicaDrained(replica):
                self.say("drain", f"{replica} is empty", "it was asked to drain")
            case OperatorOrdered(replica, what):
                self.say("order", f"{replica}: {what}", "by hand")
            case PlanReceived(plan):
                self._adopted(plan)
            case MarketReported():
                self.say("market", "prices or offers of GPUs changed", "the market says so")
        for action in actions:
            self._act(action, event)

    def _adopted(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        what = f"the plan for ${plan.cost_usd_per_h:.2f}/h is adopted"
        if before is not None:
            what += f" instead of ${before.cost_usd_per_h:.2f}/h: {copies_changed(before, plan)}"
        self.say("plan", what, self._plan_why())

    def _stands_by(self, member: ReplicaSpec) -> bool:
        """Whether it did before."""
        before = member.id in self._standby
        (self._standby.add if member.standby else self._standby.discard)(member.id)
        return before

    def _act(self, action: Action, event: Event) -> None:
        why = ""
        if isinstance(event, OperatorOrdered):
            why = "by hand"
        elif isinstance(event, PlanReceived):
            why = "the plan asks for it"
        match action:
            case StartReplica(member):
                self._stands_by(member)
                wanted = "is wanted on standby" if member.standby else "is wanted"
                self.say("start", f"{member.id} {wanted}", why or f"{member.template} in {member.region}")
            case DrainReplica(replica):
                self.say("drain", f"{replica} drains", why or "the plan or scaling needs it no more")
            case StopReplica(replica):
                self._standby.discard(replica)
                self.say("stop", f"{replica} stops", "it is empty or its grace is over")
            case FlipReplica(replica, role):
                thought = self._thinks() if isinstance(event, Tick) else "its role is the plan's again"
                self.say("flip", f"{replica} becomes {role}", why or thought)
            case Reassign(member):
                came = self._stands_by(member) and not member.standby
                if member.standby or came:
                    what = "goes on standby" if member.standby else "serves, from standby"
                    self.say("standby", f"{member.id} {what}", why or self._thinks())
                else:
                    self.say("recast", f"{member.id} becomes {member.role} of {member.template}", why)
            case Replan(_, reason):
                self.say("replan", "another plan is asked for", reason)
            case OperatorNote(what, reason):
                self.say("remark", what, reason)
            case CopyPrefix(blocks, source, target):
                self.say(
                    "cache",
                    f"{len(blocks)} blocks are copied from {source} to {target}",
                    "they are in demand",
                )
            case ResyncCache(replica):
                self.say("cache", f"{replica} is asked for all it caches", "a report was lost")
