"""What a gateway has once, however many workers: the Brain at its desk, the fleet, the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from potluck.core.brain.brain import Brain
from potluck.core.state.events import MarketReported, PlanReceived
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, plan_mark
from potluck.core.values.types import Region
from potluck.gateway.brain_loop.cordons import Cordons
from potluck.gateway.brain_loop.decision_log import DecisionLog
from potluck.gateway.brain_loop.loop import BrainLoop
from potluck.gateway.brain_loop.operator_state import OperatorState
from potluck.gateway.interfaces import EngineConnections
from potluck.gateway.registry.engine_list import EngineEntry, EngineListFile
from potluck.gateway.registry.health import HealthChecker
from potluck.gateway.registry.registry import ReplicaRegistry
from potluck.runtime.brain_log import FLUSH_S, LoggedBrain
from potluck.runtime.decider import Decider
from potluck.runtime.log_files import LogFiles
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan

CODECS = {"fp16": "raw", "int8": "int8", "int4": "int4"}
"""What a plan calls them, and what engines do: 16 bits are sent as they are."""


class GatewayCore:
    """Made once. `start` needs a running event loop."""

    def __init__(
        self,
        resolved: ResolvedPlan,
        policy: Policy,
        outgoing: EngineConnections,
        *,
        engine_list: Path | None = None,
        log: Path | None = None,
        memory: OperatorState | None = None,
        why: str = "",
        plan_version: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`why` and `plan_version`: the reason for the scene's plan and its number, as they are shown."""
        self.policy = policy
        self.replica_models = ReplicaModels(resolved)
        self.replica_models.learn(resolved.plan)
        self.plan = resolved.plan
        self.plan_version = plan_version
        """As whoever tells a plan numbers it; else it grows with every one that is adopted."""
        self.plan_mark = plan_mark(resolved.plan)
        """By which a controller knows it again."""
        self.plan_why = why or "it was started with this plan"
        """Why this one; whoever told it may say so."""
        self.kills: set[str] = set()
        """Replicas whose engines somebody wants killed, for whoever started them."""
        self.drains: dict[str, float] = {}
        """Engines of replicas that somebody had drained, and when; for whoever started them: others come instead."""
        self.asked_s = -inf
        """When whoever starts and stops engines last asked what is wanted; by the desk's time."""
        facts = self.replica_models.facts()
        self.links_gbps = facts.links_gbps
        self.brain = Brain(facts, policy)
        self.logged: LoggedBrain | None = None
        mind: Decider = self.brain
        if log is not None:
            mind = self.logged = LoggedBrain(
                mind, LogFiles(log), facts, policy, zero_utc_s=time.time(), flush_s=FLUSH_S
            )
        self.brain_loop = BrainLoop(mind, self.brain.requests, tick_s=policy.tick_s, clock=clock)
        self.registry = ReplicaRegistry(
            self.brain_loop.tell, outgoing, self._busy, codec=self.codec, codec_inside=self.codec_inside
        )
        self.brain_loop.manage = self.registry.act
        self.watch = HealthChecker(
            self.registry,
            self.brain_loop.tell,
            caches=policy.affinity > 0,
            planned_gbps=facts.links_gbps,
            grants=policy.grants,
        )
        self.engine_list = None if engine_list is None else EngineListFile(engine_list)
        self.decision_log = DecisionLog(self.brain.autoscaler.why, lambda: self.plan_why)
        self.brain_loop.watchers.append(self.decision_log)
        self.market: tuple[Region, ...] | None = None
        """What nodes cost and how many can be had, where somebody told since the start."""
        kept = None if memory is None else memory.cordoned
        self.cordons = Cordons(self.brain.fleet.views, self.registry, self.brain_loop.tell, kept)
        self.brain_loop.at_ticks += [self._look, self.registry.look, self.watch.look, self.cordons.look]
        self._memory = memory

    def start(self) -> None:
        """From the first plan on, or from what an earlier process was told since."""
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
            self.brain_loop.tell(MarketReported(self.market))
        self.brain_loop.tell(PlanReceived(self.plan))
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
        self.brain_loop.tell(PlanReceived(plan))

    def quote(self, regions: tuple[Region, ...]) -> None:
        """Other prices, other nodes."""
        self.market = regions
        if self._memory is not None:
            self._memory.quoted(regions)
        self.brain_loop.tell(MarketReported(regions))

    @property
    def regions(self) -> tuple[Region, ...]:
        """What nodes cost and how many can be had: as somebody told, else as the spec has it."""
        return tuple(self.replica_models.resolved.regions) if self.market is None else self.market

    def price_usd_per_h(self, region: str, node: str) -> float:
        """What a node costs there now."""
        if self.market is None:
            return self.replica_models.resolved.price_usd_per_h(region, node)
        offers = {(each.name, offer.node): offer for each in self.market for offer in each.offers}
        found = offers.get((region, node))
        return 0.0 if found is None else found.price_usd_per_h

    def enlist(self, entries: tuple[EngineEntry, ...]) -> None:
        """Another roster."""
        if self._memory is not None:
            self._memory.enlisted(entries)
        self.registry.enlist(entries)
        self.watch.meet()

    def _look(self) -> None:
        if self.engine_list is not None and self.engine_list.changed():
            self.enlist(self.engine_list.entries)

    def _busy(self, replica: str) -> int:
        view = self.brain.fleet.views.get(replica)
        return 0 if view is None else view.open_requests

    def codec(self, model: str, source_region: str, target_region: str) -> str:
        return CODECS[self.replica_models.codecs.get((model, source_region, target_region), "fp16")]

    def codec_inside(self, template: str) -> str:
        found = self.replica_models.templates.get(template)
        return CODECS["fp16" if found is None else found.codec]

    def lacking(self, model: str) -> str:
        """Why a model cannot be served now; empty when it can."""
        if any(each.model == model for each in self.registry.endpoints):
            return ""
        notes = {each.note for each in self.registry.engines if each.note}
        return f"no replica of {model} is ready" + (f" ({'; '.join(sorted(notes))[:300]})" if notes else "")

    async def close(self) -> None:
        self.brain_loop.stop()
        await self.registry.close()
        if self.logged is not None:
            self.logged.close()
