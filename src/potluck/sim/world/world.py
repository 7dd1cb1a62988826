"""The simulated world: it supplies the time, tells the Brain what happens and does what the Brain asks.

Arrivals come from the workload in order; everything else is due in the event queue. A replica or a pipe is looked at
only when something touches it or when its own next happening is due, so the cost grows with requests, not with
tokens or replicas. `run` goes until every request has ended; `sim.run.check` compares the totals then.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop
from itertools import repeat
from math import inf, nextafter
from typing import Any, Final

from potluck.core.errors import CapacityError
from potluck.core.state import actions
from potluck.core.state.events import Event, PlanReceived, RequestArrived, Tick
from potluck.core.values.plan import Plan
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT, Request
from potluck.runtime.brain_log import Decider
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.load.workload import Workload
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world import event_queue as due
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState
from potluck.sim.world.event_queue import END, PLAN, REPLICA, TICK
from potluck.sim.world.faults import ExternalEvents
from potluck.sim.world.sim_fleet import Make, Planner, PlanQuestion, SimFleet, StateSampler, running_of

FEED: Final = 4096
SWEEP: Final = 16 * FEED  # Requests after which cycles are looked for, if there are any at all.
PATIENCE_S: Final = 86400.0
"""When no request has ended for so long although some are open, something is stuck."""


class SimWorld(CommonState):
    def __init__(
        self,
        replica_models: ReplicaModels,
        mind: Decider,
        workload: Workload,
        settings: SimSettings,
        make: Make,
        planner: Planner | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(replica_models, workload, settings)
        self._on = mind.on
        self.planner = planner
        self.plan = replica_models.resolved.plan
        """The newest."""
        self.progress = progress
        self.now_s = 0.0
        self.replans = 0
        self.attempts = SimAttempts(self, self.tell)
        self.fleet = SimFleet(self, self.attempts, self.tell, make)
        self.external = ExternalEvents(self, self.attempts, self.fleet, self.tell)
        self.sampler = StateSampler(self, self.fleet)
        self.arrived = 0
        """Requests that have come so far."""
        self._news: deque[tuple[float, Event]] = deque()
        self._acting = False
        self._handlers: dict[int, Callable[[float, Any], None]] = {
            due.PIPE: self.handovers.pipe_due,
            due.HANDED: self.attempts.handed,
            TICK: self._tick,
            due.COLLECT: self.reports.collect,
            due.DELIVER: self._deliver,
            due.READY: self.fleet.ready,
            due.FAULT: self.external.happen,
            due.SAMPLE: self.sampler.take,
            PLAN: self._planned,
            due.CALL: lambda at_s, what: what(at_s),
        }
        self._doers: dict[type, Callable[[float, Any], None]] = {
            actions.Run: self.attempts.run,
            actions.Refuse: self.attempts.refuse,
            actions.Abort: self.attempts.abandon,
            actions.QueryAttempt: self.attempts.inquire,
            actions.StartReplica: self._start,
            actions.DrainReplica: self.fleet.drain,
            actions.StopReplica: self.fleet.stop,
            actions.FlipReplica: self.fleet.flip,
            actions.Reassign: self.fleet.reassign,
            actions.OperatorNote: lambda at_s, action: None,  # nobody reads along
            actions.Replan: self._replan,
            actions.ResyncCache: self._recount,
        }

    def run(self) -> None:
        self.fleet.warm = self.settings.warm
        self.tell(0.0, PlanReceived(self.replica_models.resolved.plan))
        self.fleet.warm = False
        self.events.push(self.settings.tick_s, TICK, None)
        self.events.push(nextafter(self.settings.end_s, inf), END, None)
        self.sampler.plan()
        heap, handlers, requests = self.events.heap, self._handlers, self.attempts.open
        replica_due, on, act = self.attempts.replica_due, self._on, self._act
        turn = self.events.turn
        feed = self._feed()
        request = next(feed, None)
        arrival_s = inf if request is None else request.arrival_s
        while True:
            if not heap:
                turn()  # the agenda is never empty: there is always a next tick
            if heap[0][0] <= arrival_s:
                at_s, _, kind, what = heappop(heap)
                if kind == REPLICA:
                    self.now_s = at_s
                    replica_due(at_s, what)
                elif kind == END or (request is None and not requests):
                    break
                else:
                    self.now_s = at_s
                    handlers[kind](at_s, what)
            else:
                assert request is not None
                self.now_s = arrival_s
                requests[self.arrived] = request
                self.arrived += 1
                asked = on(arrival_s, tuple.__new__(RequestArrived, (request,)))
                if asked:
                    act(arrival_s, asked)
                request = next(feed, None)
                arrival_s = inf if request is None else request.arrival_s

    def tell(self, at_s: float, event: Event) -> None:
        """Let the Brain know, and do what it asks. What happens on the way is told afterwards, in order."""
        if self._acting:
            self._news.append((at_s, event))
            return
        asked = self._on(at_s, event)
        if asked:
            self._act(at_s, asked)

    def _act(self, at_s: float, asked: list[actions.Action]) -> None:
        self._acting = True
        doers, news = self._doers, self._news
        for action in asked:
            doers[type(action)](at_s, action)
        while news:
            at_s, event = news.popleft()
            for action in self._on(at_s, event):
                doers[type(action)](at_s, action)
        self._acting = False

    def _feed(self) -> Iterator[Request]:
        """All requests, in order. Their columns are turned into plain numbers many at a time."""
        workload = self.workload
        names = workload.models
        nothing: Iterable[tuple[int, ...]] = repeat(())
        everyone: tuple[
            Iterable[str], Iterable[str], Iterable[float | None], Iterable[bool], Iterable[bool]
        ] = (repeat(DEFAULT_TENANT), repeat(DEFAULT_CLASS), repeat(None), repeat(False), repeat(False))
        for base in range(0, len(workload), FEED):
            rows = slice(base, base + FEED)
            if base and base % SWEEP == 0:
                gc.collect(1)
            if self.progress is not None:
                self.progress(base, len(workload))
            arrival_s: list[float] = workload.arrival_s[rows].tolist()
            tenants, classes, deadlines, exact, grammar = everyone
            if workload.labels is not None:
                tenants, classes, deadlines, exact, grammar = workload.labels.rows(
                    base, base + FEED, arrival_s
                )
            columns = (
                map(str, range(base, base + FEED)),
                [names[place] for place in workload.model[rows].tolist()],
                arrival_s,
                workload.prompt_tokens[rows].tolist(),
                workload.output_tokens[rows].tolist(),
                workload.priority[rows].tolist(),
                deadlines,
                nothing if workload.blocks is None else workload.blocks.rows(base, base + FEED),
                tenants,
                classes,
                exact,
                grammar,
            )
            yield from Request.many(zip(*columns, strict=False))

    def _tick(self, at_s: float, _: object) -> None:
        self.handovers.give_back(at_s)
        for hand in self.handovers.stuck(at_s):
            self.attempts.fail(at_s, hand.running, "memory", hand.target.id)
        self.tell(at_s, Tick())
        self.events.push(at_s + self.settings.tick_s, TICK, None)
        attempts = self.attempts
        last_s = max(attempts.ended_s, self.workload.last_s)
        if self.arrived == len(self.workload) and at_s > PATIENCE_S + last_s:
            stuck = sorted(attempts.open)[:3]
            raise CapacityError(f"{len(attempts.open)} requests never end, such as {stuck}")

    def _deliver(self, at_s: float, events: list[Event]) -> None:
        for event in events:
            self.tell(at_s, event)

    def _start(self, at_s: float, action: actions.StartReplica) -> None:
        self.external.started(at_s, self.fleet.start(at_s, action))

    def _replan(self, at_s: float, action: actions.Replan) -> None:
        self.replans += 1
        if self.planner is None:
            return
        running_plan = running_of(self.plan, self.sites.values())
        plan_question = PlanQuestion(
            at_s, action.rates_per_s, self.external.regions(), running_plan, action.lengths
        )
        plan = self.planner(plan_question)
        if plan is not None:
            self.events.push(at_s + self.settings.planner_s, PLAN, plan)

    def _planned(self, at_s: float, plan: Plan) -> None:
        self.plan = plan
        self.replica_models.learn(plan)
        self.tell(at_s, PlanReceived(plan))

    def _recount(self, at_s: float, action: actions.ResyncCache) -> None:
        replica = self.sites.get(action.replica)
        if replica is not None:
            replica.recount = True
            if not replica.touched:
                self.reports.touched(at_s, replica)
