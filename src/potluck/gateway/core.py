"""The one Brain: who tells it what, who does what it asks, and what it decided of late.

What it asks of a request goes back to the worker whose request it is; what it asks of the fleet goes to the registry.
As in the simulator, what happens while its orders are carried out is told afterwards, in order.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from potluck.core.brain.brain import Brain
from potluck.core.state import actions, events
from potluck.core.state.actions import Action
from potluck.core.state.events import Event
from potluck.core.state.policy import Policy
from potluck.core.values.kv import LEAST_CONNECTIONS
from potluck.core.values.plan import Plan, Template, copies_changed, plan_mark, price_text
from potluck.core.values.types import Region
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.operator_state import Cordons, OperatorState
from potluck.gateway.registry.engine_client import Wire
from potluck.gateway.registry.engine_list import EngineEntry, EngineListFile
from potluck.gateway.registry.health import REASON_MAX_CHARS, HealthChecker
from potluck.gateway.registry.registry import ReplicaRegistry
from potluck.runtime.brain_log import FLUSH_S, Decider, LogFiles, LoggedBrain
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan

MOST_KEPT = 1_000
MOST_LOST = 200
SHOWN_REASONS_MAX = 4
"""Engines whose reasons are named where a model has no replica."""
_FREQUENT = frozenset(
    {
        events.RequestArrived,
        events.SegmentDone,
        events.FirstToken,
        events.RequestFinished,
        events.ReplicaReported,
        actions.Run,
        actions.Refuse,
        actions.Abort,
    }
)
"""What comes by the thousand a second, and says nothing of the fleet."""


class Decision(NamedTuple):
    number: int
    at_s: float
    what: str
    why: str
    kind: str = "decision"


class DecisionLog:
    """`decided` hears everything at once; `kept` has the latest. Numbers begin at 1 with each epoch: each process."""

    def __init__(
        self,
        thinks: Callable[[], str],
        plan_why: Callable[[], str] = str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._thinks, self._plan_why, self._clock = thinks, plan_why, clock
        self.decided: Callable[[str, str], None] = lambda what, why: None
        self.epoch = secrets.token_hex(8)
        self.kept: deque[Decision] = deque(maxlen=MOST_KEPT)
        self.lost: dict[str, tuple[float, str]] = {}
        """Replicas that were lost of late: when, by the time of day, and why."""
        self._number = 0
        self._plan: Plan | None = None

    def say(self, kind: str, what: str, why: str) -> None:
        self._number += 1
        self.kept.append(Decision(self._number, self._clock(), what, why, kind))
        self.decided(what, why)

    def _is_lost(self, replica: str, reason: str) -> None:
        while len(self.lost) >= MOST_LOST:
            del self.lost[next(iter(self.lost))]
        self.lost[replica] = (self._clock(), reason)
        self.say("lost", f"{replica} is lost", reason)

    def __call__(self, at_s: float, event: Event, orders: Sequence[Action]) -> None:
        if type(event) in _FREQUENT and (not orders or type(orders[0]) in _FREQUENT):
            return
        match event:
            case events.ReplicaReady(replica=replica):
                self.say("ready", f"{replica} is ready", "its engine answers")
            case events.ReplicaLost(replica, reason):
                self._is_lost(replica, reason)
            case events.ReplicaDrained(replica):
                self.say("drain", f"{replica} is empty", "it was asked to drain")
            case events.OperatorOrdered(replica, what):
                self.say("order", f"{replica}: {what}", "by hand")
            case events.PlanReceived(plan):
                self._adopted(plan)
            case events.MarketReported():
                self.say("market", "prices or offers of GPUs changed", "the market says so")
        for action in orders:
            self._act(action, event)

    def _adopted(self, plan: Plan) -> None:
        previous_plan, self._plan = self._plan, plan
        what = f"the plan for {price_text(plan)} is adopted"
        if previous_plan is not None:
            what += f" instead of {price_text(previous_plan)}: {copies_changed(previous_plan, plan)}"
        self.say("plan", what, self._plan_why())

    def _act(self, action: Action, event: Event) -> None:
        why = ""
        if isinstance(event, events.OperatorOrdered):
            why = "by hand"
        elif isinstance(event, events.PlanReceived):
            why = "the plan asks for it"
        match action:
            case actions.StartReplica(replica_spec):
                self.say(
                    "start",
                    f"{replica_spec.id} is wanted",
                    why or f"{replica_spec.template} in {replica_spec.region}",
                )
            case actions.DrainReplica(replica):
                self.say("drain", f"{replica} drains", why or "the plan or scaling needs it no more")
            case actions.StopReplica(replica):
                self.say("stop", f"{replica} stops", "it is empty or its grace is over")
            case actions.FlipReplica(replica, role):
                thought = self._thinks() if isinstance(event, events.Tick) else "its role is the plan's again"
                self.say("flip", f"{replica} becomes {role}", why or thought)
            case actions.Reassign(replica_spec):
                self.say(
                    "recast",
                    f"{replica_spec.id} becomes {replica_spec.role} of {replica_spec.template}",
                    why,
                )
            case actions.Replan(_, reason):
                self.say("replan", "another plan is asked for", reason)
            case actions.OperatorNote(what, reason):
                self.say("remark", what, reason)
            case actions.ResyncCache(replica):
                self.say("cache", f"{replica} is asked for all it caches", "a report was lost")


CODECS = {"fp16": "raw", "int8": "int8", "int4": "int4"}
"""What a plan calls them, and what engines do: 16 bits are sent as they are."""


class GatewayCore:
    def __init__(
        self,
        resolved: ResolvedPlan,
        policy: Policy,
        connection_pool: ConnectionPool,
        *,
        engine_list: Path | None = None,
        log: Path | None = None,
        operator_state: OperatorState | None = None,
        why: str = "",
        plan_version: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.replica_models = ReplicaModels(resolved)
        self.replica_models.learn(resolved.plan)
        self.plan = resolved.plan
        self.plan_version = plan_version
        self.plan_mark = plan_mark(resolved.plan)
        self.plan_why = why or "it was started with this plan"
        self.kills: set[str] = set()
        """Replicas whose engines somebody wants killed, for whoever started them."""
        self.drains: dict[str, float] = {}
        """Engines of replicas that somebody had drained, and when; for whoever started them: others come instead."""
        self.asked_s = -inf
        """When whoever starts and stops engines last asked what is wanted; by the Brain's time."""
        facts = self.replica_models.facts()
        self.links_gbps = facts.links_gbps
        self.brain = Brain(facts, policy)
        self.logged: LoggedBrain | None = None
        decider: Decider = self.brain
        if log is not None:
            decider = self.logged = LoggedBrain(
                decider, LogFiles(log), facts, policy, zero_utc_s=time.time(), flush_s=FLUSH_S
            )
        self.brain_loop = BrainLoop(decider, self.brain.requests, tick_s=policy.tick_s, clock=clock)
        self.registry = ReplicaRegistry(
            self.brain_loop.tell, connection_pool, self._busy, wire=self.wire, codec_inside=self.codec_inside
        )
        self.brain_loop.manage = self.registry.act
        self.watch = HealthChecker(
            self.registry,
            self.brain_loop.tell,
            caches=policy.affinity > 0,
            planned_gbps=facts.links_gbps,
            views=self.brain.fleet.views,
        )
        self.engine_list = None if engine_list is None else EngineListFile(engine_list)
        self.decision_log = DecisionLog(self.brain.autoscaler.why, lambda: self.plan_why)
        self.brain_loop.watchers.append(self.decision_log)
        self.market: tuple[Region, ...] | None = None
        """What nodes cost and how many can be had, where somebody told since the start."""
        kept = None if operator_state is None else operator_state.cordoned
        self.cordons = Cordons(self.brain.fleet.views, self.registry, self.brain_loop.tell, kept)
        self.brain_loop.at_ticks += [self._look, self.registry.look, self.watch.look, self.cordons.look]
        self._memory = operator_state

    def start(self) -> None:
        entries = None if self.engine_list is None else self.engine_list.entries
        if self._memory is not None:
            plan, version, why = self._memory.plan()
            if self.engine_list is None:  # a file says it better
                entries = self._memory.entries()
            if plan is not None:
                self.replica_models.learn(plan)
                self.plan, self.plan_mark = plan, plan_mark(plan)
                self.plan_version, self.plan_why = version, why
            self.market = self._memory.market()
            self.cordons.inherit(self._memory.cordons())
        if entries is not None:
            self.registry.enlist(entries)
        if self.market is not None:
            self.brain_loop.tell(events.MarketReported(self.market))
        self.brain_loop.tell(events.PlanReceived(self.plan))
        self.watch.meet()
        self.brain_loop.start(asyncio.get_running_loop())

    def adopt(self, plan: Plan, why: str = "", version: int = 0) -> None:
        """Another plan, from an operator or a planner; the same one under another number is only called that."""
        mark = plan_mark(plan)
        same = bool(version) and mark == self.plan_mark
        self.plan_why = why or "an operator or a controller told it"
        self.plan_version = version or self.plan_version + 1
        if self._memory is not None:
            self._memory.planned(plan, self.plan_version, self.plan_why)
        if same:
            return
        self.replica_models.learn(plan)
        self.plan, self.plan_mark = plan, mark
        self.registry.planned()
        self.brain_loop.tell(events.PlanReceived(plan))

    def quote(self, regions: tuple[Region, ...]) -> None:
        self.market = regions
        if self._memory is not None:
            self._memory.quoted(regions)
        self.brain_loop.tell(events.MarketReported(regions))

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self.replica_models.resolved.regions) if self.market is None else self.market

    def price_usd_per_h(self, region: str, node: str) -> float:
        if self.market is None:
            return self.replica_models.resolved.price_usd_per_h(region, node)
        offers = {(item.name, offer.node): offer for item in self.market for offer in item.offers}
        node_offer = offers.get((region, node))
        return 0.0 if node_offer is None else node_offer.price_usd_per_h

    def copy_usd_per_h(self, template: Template, region: str) -> float | None:
        """None where its hardware, and so its price, is unknown."""
        if not template.hardware_known:
            return None
        return sum(nodes.count * self.price_usd_per_h(region, nodes.node) for nodes in template.nodes)

    def enlist(self, entries: tuple[EngineEntry, ...]) -> None:
        if self._memory is not None:
            self._memory.enlisted(entries)
        self.registry.enlist(entries)
        self.watch.meet()

    def _look(self) -> None:
        if self.engine_list is not None and self.engine_list.changed():
            self.enlist(self.engine_list.entries)

    def _busy(self, replica: str) -> int:
        replica_state = self.brain.fleet.views.get(replica)
        return 0 if replica_state is None else replica_state.open_requests

    def wire(self, model: str, source_region: str, target_region: str) -> Wire:
        codec = self.replica_models.codecs.get((model, source_region, target_region), "fp16")
        planned = {(wire.source, wire.target): wire.connections for wire in self.plan.wires}
        return CODECS[codec], planned.get((source_region, target_region), LEAST_CONNECTIONS)

    def codec_inside(self, template: str) -> str:
        result = self.replica_models.templates.get(template)
        return CODECS["fp16" if result is None else result.codec]

    def lacking(self, model: str) -> str:
        if any(endpoint.model == model for endpoint in self.registry.endpoints):
            return ""
        engines = [engine for engine in self.registry.engines if engine.entry.model in ("", model)]
        notes = sorted({engine.note for engine in engines if engine.note})
        more = f"; and {len(notes) - SHOWN_REASONS_MAX} more" if len(notes) > SHOWN_REASONS_MAX else ""
        reasons = "; ".join(note[:REASON_MAX_CHARS] for note in notes[:SHOWN_REASONS_MAX]) + more
        return f"no replica of {model} is ready" + (f" ({reasons})" if notes else "")

    async def close(self) -> None:
        self.brain_loop.stop()
        await self.registry.close()
        if self.logged is not None:
            self.logged.close()


Act = Callable[[Sequence[Action]], None]
Watcher = Callable[[float, Event, Sequence[Action]], None]
_OF_REQUESTS = (actions.Run, actions.Refuse, actions.Abort, actions.QueryAttempt)
_ARRIVALS = (events.RequestArrived, events.RequestAdopted)
_ENDINGS = (events.RequestFinished, events.AttemptFailed, events.RequestCancelled)


class BrainLoop:
    def __init__(
        self,
        decider: Decider,
        open_flights: Mapping[str, object],
        *,
        tick_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decider = decider
        self._flights = open_flights
        self._clock = clock
        self.start_s = clock()
        self._tick_s = tick_s
        self._owners: dict[str, LocalBrainClient] = {}
        self._news: deque[tuple[float, Event, LocalBrainClient | None]] = deque()
        self._acting = False
        self._ticking: asyncio.TimerHandle | None = None
        self.manage: Act = _nobody
        self.watchers: list[Watcher] = []
        self.at_ticks: list[Callable[[], None]] = []

    def now_s(self) -> float:
        return self._clock() - self.start_s

    def line(self, act: Act) -> LocalBrainClient:
        return LocalBrainClient(self, act)

    def tell(self, event: Event, brain_client: LocalBrainClient | None = None) -> None:
        at_s = self._clock() - self.start_s
        if self._acting:
            self._news.append((at_s, event, brain_client))
            return
        self._acting = True
        try:
            while True:
                if brain_client is not None and isinstance(event, _ARRIVALS):
                    self._owners[event.request.id] = brain_client
                orders = self._decider.on(at_s, event)
                for watcher in self.watchers:
                    watcher(at_s, event, orders)
                if orders:
                    self._act(orders)
                if isinstance(event, _ENDINGS) and event.request not in self._flights:
                    self._owners.pop(event.request, None)
                if not self._news:
                    break
                at_s, event, brain_client = self._news.popleft()
        finally:
            self._acting = False

    def _act(self, orders: Sequence[Action]) -> None:
        for action in orders:
            if not isinstance(action, _OF_REQUESTS):
                self.manage((action,))
                continue
            owner = self._owners.get(action.request)
            if owner is not None:
                owner.act((action,))
            if type(action) is actions.Refuse:
                self._owners.pop(action.request, None)

    def lost(self, brain_client: LocalBrainClient) -> None:
        for request in [request for request, owner in self._owners.items() if owner is brain_client]:
            self.tell(events.RequestCancelled(request))
            self._owners.pop(request, None)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)
        self.tell(events.Tick())
        for call in self.at_ticks:
            call()

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    @property
    def open_requests(self) -> int:
        return len(self._flights)


class LocalBrainClient:
    __slots__ = ("act", "now_s", "tell")

    def __init__(self, brain_loop: BrainLoop, act: Act) -> None:
        self.act = act
        self.now_s = brain_loop.now_s
        self.tell = partial(brain_loop.tell, brain_client=self)


def _nobody(orders: Sequence[Action]) -> None:
    """Before the registry is there: what is wanted is asked for again at the next plan."""
