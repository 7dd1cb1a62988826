"""Small plans, fleets and a world that starts and drains at random, for the tests of scaling and reconciling."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from potluck.core.scaling.copy_capacity import (
    CopyKey,
    CopyRates,
    TemplateCapacity,
    sum_rates,
    template_capacities,
)
from potluck.core.scaling.reconcile import ReconcileInputs, ReconcileState, ReconcileStep, reconcile
from potluck.core.scaling.traffic_window import LengthCount, ModelTraffic, ObservedTraffic
from potluck.core.state.actions import Action, DrainReplica, Reassign, StartReplica, StopReplica
from potluck.core.state.events import LinkReported
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Role


def template(
    name: str,
    closed: float = 0.0,
    prefill: float = 0.0,
    decode: float = 0.0,
    *,
    model: str = "m",
    roles: Sequence[Role] = ("mixed",),
    nodes: Mapping[str, int] | None = None,
) -> plans.Template:
    """One bucket of capacity; an empty one when all rates are 0."""
    capacity = (
        (plans.BucketCapacity(0, prefill, decode, closed, 0.1, 0.01),) if closed + prefill + decode else ()
    )
    counts = tuple(plans.NodeCount(node, count) for node, count in (nodes or {"n": 1}).items())
    kind = "homogeneous" if len(set(roles)) == 1 else "combo"
    replicas = tuple(plans.PlannedReplica(role, single("n", 1, 1)) for role in roles)
    return plans.Template(name, kind, model, counts, replicas, capacity, "measured")


def plan_of(
    templates: Sequence[plans.Template],
    counts: Mapping[CopyKey, int],
    buckets: Sequence[plans.LengthBucket] | None = None,
) -> plans.Plan:
    models = sorted({item.model for item in templates})
    length_buckets = buckets or [plans.LengthBucket(model, 0, 10**6, 1.0) for model in models]
    deployments = tuple(plans.Deployment(name, region, count) for (name, region), count in counts.items())
    return plans.Plan("test", tuple(templates), deployments, tuple(length_buckets), (), (), (), 0.0, 0.0)


def fleet_of(plan: plans.Plan) -> FleetState:
    """The plan's copies, all ready."""
    world = World(template_capacities(plan), {}, random.Random(0))
    for deployment in plan.deployments:
        world.wanted[deployment.template, deployment.region] = deployment.count
    world.call()
    for replica in list(world.fleet.views):
        world.fleet.ready(replica)
    return world.fleet


class World:
    """Carries actions out at once and answers when it likes; checks that every action is a sensible one."""

    def __init__(
        self,
        known: Mapping[str, TemplateCapacity],
        wanted: Mapping[CopyKey, int],
        chance: random.Random,
        available: Mapping[tuple[str, str], int] | None = None,
        dip: float = 0.0,
        grace_s: float = 30.0,
    ) -> None:
        self.known, self.wanted, self.chance = dict(known), dict(wanted), chance
        self.available, self.dip, self.grace_s = available, dip, grace_s
        self.fleet, self.progress, self.at_s = FleetState(), ReconcileState(), 0.0
        self.units_seen: set[str] = set()
        self.ids_seen: set[str] = set()

    def call(self) -> ReconcileStep:
        inputs = ReconcileInputs(self.known, self.available, self.grace_s, self.dip)
        step = reconcile(self.fleet, self.wanted, self.progress, self.at_s, inputs)
        self.progress = step.progress
        new = {action.member.unit for action in step.actions if isinstance(action, StartReplica)}
        new -= set(self.fleet.units)
        assert not new & self.units_seen, "a number was used twice"
        self.units_seen |= new
        for action in step.actions:
            self.carry_out(action)
        return step

    def carry_out(self, action: Action) -> None:
        if isinstance(action, StartReplica):
            assert action.member.id not in self.ids_seen
            self.ids_seen.add(action.member.id)
            self.fleet.add(action.member)
        elif isinstance(action, DrainReplica):
            assert self.fleet.views[action.replica].state == "ready"
            self.fleet.drain(action.replica)
        elif isinstance(action, Reassign):
            self.fleet.reassign(action.member)
        else:
            assert isinstance(action, StopReplica)
            assert self.fleet.remove(action.replica) is not None

    def pass_time(self, lose: float = 0.0) -> None:
        """Some replicas become ready or drained, some are lost."""
        self.at_s += self.chance.uniform(0, 10)
        for replica in list(self.fleet.views.values()):
            if self.chance.random() < lose:
                self.fleet.remove(replica.member.id)
            elif replica.state == "starting" and self.chance.random() < 0.4:
                self.fleet.ready(replica.member.id)
            elif replica.state == "draining" and self.chance.random() < 0.4:
                self.progress = self.progress.drained(replica.member.id)

    def serving_per_s(self, model: str) -> float:
        units = self.fleet.units.values()
        whole = [template_copy.template for template_copy in units if self.whole(template_copy)]
        return served(self.known, whole, model)

    def whole(self, template_copy: TemplateCopy) -> bool:
        return template_copy.whole and len(template_copy.views) == len(
            self.known[template_copy.template].template.replicas
        )

    def counts(self) -> dict[CopyKey, int]:
        """Whole copies of each key."""
        result = dict.fromkeys(self.wanted, 0)
        for template_copy in self.fleet.units.values():
            if self.whole(template_copy):
                key = (template_copy.template, template_copy.region)
                result[key] = result.get(key, 0) + 1
        return result

    def held_nodes(self) -> dict[tuple[str, str], int]:
        held: dict[tuple[str, str], int] = {}
        for template_copy in self.fleet.units.values():
            for item in self.known[template_copy.template].template.nodes:
                key = (template_copy.region, item.node)
                held[key] = held.get(key, 0) + item.count
        return held


def served(known: Mapping[str, TemplateCapacity], names: Sequence[str], model: str) -> float:
    """What copies of these templates serve together, worked out anew."""
    rates = sum_rates(known[name].rates for name in names if known[name].template.model == model)
    return CopyRates(*rates).served_per_s


def target_per_s(known: Mapping[str, TemplateCapacity], wanted: Mapping[CopyKey, int], model: str) -> float:
    return served(known, [name for (name, _), count in wanted.items() for _ in range(count)], model)


def traffic(
    rate_per_s: float,
    *,
    model: str = "m",
    prompt: int = 1000,
    output: int = 100,
    span_s: float = 120.0,
    error: float | None = None,
    **more: Any,
) -> ModelTraffic:
    """A window of equal requests."""
    arrivals = round(rate_per_s * span_s)
    spread = sqrt(max(arrivals, 1)) / span_s if error is None else error
    lengths = (LengthCount(prompt, prompt + 1, arrivals, arrivals * prompt),) if arrivals else ()
    plain = ModelTraffic(
        model=model,
        span_s=span_s,
        arrivals=arrivals,
        rate_per_s=rate_per_s,
        error_per_s=spread,
        mean_prompt_tokens=float(prompt),
        mean_output_tokens=float(output),
        prompt_error_tokens=0.0,
        output_error_tokens=0.0,
        finished=arrivals,
        attained=arrivals,
        refused=0,
        held=0,
        long_span_s=1800.0,
        long_rate_per_s=rate_per_s,
        lengths=lengths,
    )
    return replace(plain, **more)


def observed(at_s: float, *models: ModelTraffic, links: tuple[LinkReported, ...] = ()) -> ObservedTraffic:
    return ObservedTraffic(at_s, models, links)
