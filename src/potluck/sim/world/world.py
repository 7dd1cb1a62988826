"""The simulated world: passes events to the Brain at their times and carries out the actions it returns.

Arrivals come from the workload in order, all other events from the event queue. A replica or a pipe is advanced only
when an event concerns it, so the cost grows with requests, not with tokens or replicas. `run` ends when every request
has ended; `sim.run.check` then compares the totals.
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

REQUEST_CHUNK: Final = 4096  # Requests that are converted from the workload's columns at a time.
REQUESTS_PER_COLLECTION: Final = 16 * REQUEST_CHUNK  # Requests between two runs of the garbage collector.
STUCK_AFTER_S: Final = 86400.0
"""Without the end of any open request for so long the run is aborted."""


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
        """The newest plan."""
        self.progress = progress
        self.now_s = 0.0
        self.replans = 0
        self.attempts = SimAttempts(self, self.tell)
        self.fleet = SimFleet(self, self.attempts, self.tell, make)
        self.external = ExternalEvents(self, self.attempts, self.fleet, self.tell)
        self.sampler = StateSampler(self, self.fleet)
        self.arrived = 0
        """Number of requests that have arrived."""
        self._pending_events: deque[tuple[float, Event]] = deque()
        self._acting = False
        self._handlers: dict[int, Callable[[float, Any], None]] = {
            due.PIPE: self.handovers.pipe_due,
            due.HANDED: self.attempts.handover_done,
            TICK: self._tick,
            due.COLLECT: self.reports.collect,
            due.DELIVER: self._deliver,
            due.READY: self.fleet.ready,
            due.FAULT: self.external.happen,
            due.SAMPLE: self.sampler.take,
            PLAN: self._adopt_plan,
            due.CALL: lambda at_s, what: what(at_s),
        }
        self._action_handlers: dict[type, Callable[[float, Any], None]] = {
            actions.Run: self.attempts.run,
            actions.Refuse: self.attempts.refuse,
            actions.Abort: self.attempts.abort,
            actions.QueryAttempt: self.attempts.answer_query,
            actions.StartReplica: self._start,
            actions.DrainReplica: self.fleet.drain,
            actions.StopReplica: self.fleet.stop,
            actions.FlipReplica: self.fleet.flip,
            actions.Reassign: self.fleet.reassign,
            actions.OperatorNote: lambda at_s, action: None,  # notes are for operators only
            actions.Replan: self._replan,
            actions.ResyncCache: self._resync_cache,
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
        arriving_requests = self._requests()
        request = next(arriving_requests, None)
        arrival_s = inf if request is None else request.arrival_s
        while True:
            if not heap:
                turn()  # the queue is never empty: it always has the next tick
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
                brain_actions = on(arrival_s, tuple.__new__(RequestArrived, (request,)))
                if brain_actions:
                    act(arrival_s, brain_actions)
                request = next(arriving_requests, None)
                arrival_s = inf if request is None else request.arrival_s

    def tell(self, at_s: float, event: Event) -> None:
        """Pass an event to the Brain and carry out its actions; events caused by these follow in order."""
        if self._acting:
            self._pending_events.append((at_s, event))
            return
        brain_actions = self._on(at_s, event)
        if brain_actions:
            self._act(at_s, brain_actions)

    def _act(self, at_s: float, brain_actions: list[actions.Action]) -> None:
        self._acting = True
        action_handlers, pending_events = self._action_handlers, self._pending_events
        for action in brain_actions:
            action_handlers[type(action)](at_s, action)
        while pending_events:
            at_s, event = pending_events.popleft()
            for action in self._on(at_s, event):
                action_handlers[type(action)](at_s, action)
        self._acting = False

    def _requests(self) -> Iterator[Request]:
        """All requests in order of arrival, converted from the workload's columns in chunks."""
        workload = self.workload
        names = workload.models
        nothing: Iterable[tuple[int, ...]] = repeat(())
        everyone: tuple[
            Iterable[str], Iterable[str], Iterable[float | None], Iterable[bool], Iterable[bool]
        ] = (repeat(DEFAULT_TENANT), repeat(DEFAULT_CLASS), repeat(None), repeat(False), repeat(False))
        for base in range(0, len(workload), REQUEST_CHUNK):
            rows = slice(base, base + REQUEST_CHUNK)
            if base and base % REQUESTS_PER_COLLECTION == 0:
                gc.collect(1)
            if self.progress is not None:
                self.progress(base, len(workload))
            arrival_s: list[float] = workload.arrival_s[rows].tolist()
            tenants, classes, deadlines, exact, grammar = everyone
            if workload.labels is not None:
                tenants, classes, deadlines, exact, grammar = workload.labels.rows(
                    base, base + REQUEST_CHUNK, arrival_s
                )
            columns = (
                map(str, range(base, base + REQUEST_CHUNK)),
                [names[place] for place in workload.model[rows].tolist()],
                arrival_s,
                workload.prompt_tokens[rows].tolist(),
                workload.output_tokens[rows].tolist(),
                workload.priority[rows].tolist(),
                deadlines,
                nothing if workload.blocks is None else workload.blocks.rows(base, base + REQUEST_CHUNK),
                tenants,
                classes,
                exact,
                grammar,
            )
            yield from Request.many(zip(*columns, strict=False))

    def _tick(self, at_s: float, _: object) -> None:
        self.handovers.release_reservations(at_s)
        for handover in self.handovers.stuck(at_s):
            self.attempts.fail(at_s, handover.attempt, "memory", handover.target.id)
        self.tell(at_s, Tick())
        self.events.push(at_s + self.settings.tick_s, TICK, None)
        attempts = self.attempts
        last_s = max(attempts.ended_s, self.workload.last_s)
        if self.arrived == len(self.workload) and at_s > STUCK_AFTER_S + last_s:
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
        running_plan = running_of(self.plan, self.replicas.values())
        plan_question = PlanQuestion(
            at_s, action.rates_per_s, self.external.regions(), running_plan, action.lengths
        )
        plan = self.planner(plan_question)
        if plan is not None:
            self.events.push(at_s + self.settings.planner_s, PLAN, plan)

    def _adopt_plan(self, at_s: float, plan: Plan) -> None:
        self.plan = plan
        self.replica_models.learn(plan)
        self.tell(at_s, PlanReceived(plan))

    def _resync_cache(self, at_s: float, action: actions.ResyncCache) -> None:
        replica = self.replicas.get(action.replica)
        if replica is not None:
            replica.recount = True
            if not replica.touched:
                self.reports.touched(at_s, replica)
