"""Having plans made where the Brain asks for them, and handing them over: beside the turns, one at a time.

    asked ─▶ first (what is left, where machines were lost) ─▶ adopted ─▶ full ─▶ adopted

Beside that the plans of a day (`DayPlans`), as `potluck schedule --out` writes them, each due at its time.

A plan is advice only while `--advise` is given, or while the newest plan version was made by hand.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from potluck.control.control_values import PlanReply, PlanRequest
from potluck.control.manual_changes import is_by_hand
from potluck.control.state_store import StateStore
from potluck.core.errors import PotluckError
from potluck.core.state.actions import SeenLengths
from potluck.core.state.facts import ObservedSpeed, spoken
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region

FIRST_S = 1.5  # A turn waits so long for the first answer.
log = logging.getLogger(__name__)
Note = Callable[[str, str, str], None]


class Planner(Protocol):
    """May take long, and is called in a thread."""

    def first(self, plan_request: PlanRequest) -> PlanReply:
        """What to do at once."""

    def full(self, plan_request: PlanRequest) -> PlanReply:
        """A whole plan."""


class PlanRequests:
    """`adopt` makes a plan the one in force; `note` writes down what was done and why."""

    def __init__(
        self,
        store: StateStore,
        planner: Planner | None,
        adopt: Callable[[Plan, str], int],
        note: Note,
        *,
        advise: bool = False,
        paces: Callable[[], tuple[ObservedSpeed, ...]] = tuple,
    ) -> None:
        self._store, self._planner, self._adopt, self._note = store, planner, adopt, note
        self._advise, self._paces = advise, paces
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="potluck-plan")
        self._answered: Any = None
        self._asked: PlanRequest | None = None
        self.under_way: Future[PlanReply] | None = None
        self._first = False

    def turn(self, wanted: dict[str, Any], regions: tuple[Region, ...] | None) -> None:
        if self.under_way is not None:
            if self.under_way.done():
                finished, self.under_way = self.under_way, None
                self._finish(finished, regions)
            return
        asked = wanted.get("replan")
        if asked is None:
            self._answered = None
        elif self._planner is not None and asked != self._answered:
            self._answered = asked
            newest = self._store.plan()
            planned = None if newest is None else newest.plan
            made = _asked(asked, regions, _running(planned, wanted), planned)
            self._asked = replace(made, paces=self._paces())
            self._note("plan", "begins", "; ".join(filter(None, (made.reason, spoken(self._asked.paces)))))
            self._first = True
            self.under_way = self._pool.submit(self._planner.first, self._asked)
            # What is left after a loss should not wait for the next turn.
            done, _ = wait((self.under_way,), FIRST_S)
            if done:
                self.turn(wanted, regions)

    def _finish(self, finished: Future[PlanReply], regions: tuple[Region, ...] | None) -> None:
        plan_request, planner = self._asked, self._planner
        assert plan_request is not None
        assert planner is not None
        try:
            reply = finished.result()
        except PotluckError as error:
            reply = PlanReply(None, str(error))
        except Exception as error:  # a planner that fails must not take the controller with it
            log.error("the planner failed", exc_info=error)
            reply = PlanReply(None, f"the planner failed ({type(error).__name__}); the log says more")
        if (
            reply.plan is not None
            and regions != plan_request.regions
            and (short := _short(reply.plan, regions))
        ):
            self._note("plan", "begins anew", f"{short} since it was begun")
            self._answered = None
            return
        if reply.plan is not None:
            self._hand_over(reply.plan, f"{plan_request.reason}; {reply.why}")
        if self._first:
            self._first = False
            if reply.plan is not None and not self._advise:
                plan_request = self._asked = replace(plan_request, running=reply.plan)
            self.under_way = self._pool.submit(planner.full, plan_request)
        elif reply.plan is None:
            self._note("plan", "stays", reply.why)

    def _hand_over(self, plan: Plan, reason: str) -> None:
        newest = self._store.plan()
        line = f"a plan for ${plan.total_usd_per_h:.2f}/h: {_listed(plan)}"
        if newest is not None and is_by_hand(newest):
            held = f"version {newest.version} was made by hand and holds"
            self._note("advice", line, f"{reason}; {held}; `potluck fleet scale --auto` ends that")
        elif self._advise:
            self._note("advice", line, reason)
        else:
            try:
                self._adopt(plan, reason)
            except PotluckError as error:
                self._note("plan", "was not taken", str(error))
                self._answered = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class DayPlans:
    plans: tuple[tuple[int, Plan], ...]
    """(second of the day from which on, plan), by time."""
    lead_s: float = 0.0
    """How long engines take to start: a plan that costs more begins so much earlier, and is ready on time."""

    def due(self, now_s: float) -> tuple[str, Plan]:
        """The plan for a moment in this machine's own time of day, and its name."""
        at = datetime.fromtimestamp(now_s)
        second = at.hour * 3600 + at.minute * 60 + at.second
        place = bisect_right([begin_s for begin_s, _ in self.plans], second) - 1
        following = (place + 1) % len(self.plans)
        begin_s, plan = self.plans[following]
        soon = (begin_s - second) % DAY_S <= self.lead_s
        if soon and plan.total_usd_per_h > self.plans[place][1].total_usd_per_h:
            place = following
        begin_s, plan = self.plans[place]
        return f"{begin_s // 3600:02d}:{begin_s // 60 % 60:02d}", plan


def _short(plan: Plan, regions: tuple[Region, ...] | None) -> str:
    """Which nodes a plan wants more of than there are; empty where there are enough."""
    needed = plan.nodes
    for region in regions or ():
        for offer in region.offers:
            count = needed.get((region.name, offer.node), 0)
            if count > offer.available:
                return f"it wants {count} x {offer.node} in {region.name}, and there are {offer.available}"
    return ""


def _running(planned: Plan | None, wanted: dict[str, Any]) -> Plan | None:
    """The newest plan with the copies that are to serve now: rules may have changed their number."""
    if planned is None:
        return None
    known = {template.name for template in planned.repertoire}
    units = {
        item["unit"]: (item["template"], item["region"])
        for item in wanted.get("replicas", ())
        if not item.get("draining") and item["template"] in known
    }
    return planned.holding(Counter(units.values()))


def _asked(
    asked: dict[str, Any], regions: tuple[Region, ...] | None, running_plan: Plan | None, planned: Plan | None
) -> PlanRequest:
    lengths = tuple(
        SeenLengths(item["model"], item["output_tokens"], tuple((a, b) for a, b in item["prompts"]))
        for item in asked.get("lengths", ())
    )
    return PlanRequest(
        dict(asked.get("rates_per_s", {})),
        str(asked.get("reason", "")),
        lengths,
        regions,
        running_plan,
        planned,
    )


def _listed(plan: Plan) -> str:
    return ", ".join(f"{one.count} x {one.template} in {one.region}" for one in plan.deployments)
