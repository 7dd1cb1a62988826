"""Hand-written requests, and a Brain that sends every request along one route."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sim_fleets import MODEL

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, Run, StartReplica
from potluck.core.state.events import Event, PlanReceived, RequestArrived, Tick
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import ReplicaSpec
from potluck.sim.load.workload import PrefixBlocks, Workload, workload
from potluck.sim.results.records import SimResult


def requests(*rows: tuple[float, int, int], blocks: PrefixBlocks | None = None) -> Workload:
    """(arrival, prompt, output) each."""
    times, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return workload(MODEL, times.astype(float), prompts, outputs, blocks=blocks)


class WrappedBrain:
    """The Brain and a say around it. It cannot be inherited from where it is compiled."""

    def __init__(self, facts: FleetFacts, policy: Policy) -> None:
        self.brain = Brain(facts, policy)


class FixedRouteBrain:
    """Starts what the plan says and sends every request along one route; keeps what it was told."""

    def __init__(self, route: Callable[[int], object], more: dict[float, list[Action]] | None = None) -> None:
        self.route = route
        self.more = dict(more or {})
        self.told: list[tuple[float, Event]] = []

    def on(self, at_s: float, event: Event) -> list[Action]:
        self.told.append((at_s, event))
        if isinstance(event, PlanReceived):
            return [
                StartReplica(ReplicaSpec(f"{d.template}@{d.region}#{n}/{i}", f"{d.template}@{d.region}#{n}",
                d.template, i, t.kind, t.model, replica.role, d.region)) for d in event.plan.deployments for t in
                [event.plan.template(d.template)] for n in range(d.count) for i, replica in enumerate(t.replicas)
            ]  # fmt: skip
        if isinstance(event, RequestArrived):
            tokens = event.request.prompt_tokens
            return [Run(event.request.id, self.route(tokens), 0, tokens, 0)]  # type: ignore[arg-type]
        due = [key for key in self.more if key <= at_s]
        return [action for key in due for action in self.more.pop(key)] if isinstance(event, Tick) else []


def ttft(result: SimResult) -> float:
    return float(result.records.first_token_s[0] - result.records.arrival_s[0])
