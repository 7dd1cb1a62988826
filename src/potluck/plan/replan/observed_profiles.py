"""Planning with what replicas really take: the pace of a kind of node, as a profile that the planner reads.

    observed step = step of the facts x pace          facts: a measured profile, or the roofline

A pace says how much, not where: so all steps take as much longer. It is believed within bounds, and only where it is
worth it: facts that are nearly right are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from potluck.core.errors import UnknownNameError
from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.layout import single
from potluck.perf.step_timer import StepTimer, steps
from potluck.perf.timers.profile import Profile, ProfilePoint
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.replica_rates import layout_timer

ENGINE = "observed"
CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
CACHED = (0, 1024, 8192)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (64, 512, 4096)
MIXED = ((256, 16), (1024, 64), (2048, 4), (512, 256))


def observed(problem: PlanningProblem, paces: Sequence[ObservedSpeed], day: str) -> PlanningProblem:
    """The problem with the paces that matter; of models and nodes that it does not have, none does."""
    known = {(each.model, each.node) for each in paces if each.matters}
    asks = tuple(
        replace(
            ask,
            profiles=(
                *ask.profiles,
                *(
                    profile_of(problem, ask, pace, day)
                    for pace in paces
                    if pace.matters and pace.model == ask.name and pace.node in problem.by_name
                ),
            ),
        )
        if any(model == ask.name for model, _ in known)
        else ask
        for ask in problem.asks
    )
    return replace(problem, asks=asks)


def profile_of(problem: PlanningProblem, ask: ModelDemand, pace: ObservedSpeed, day: str) -> Profile:
    """Step times of a model on a kind of node, as long as they really are."""
    if pace.node not in problem.by_name:
        raise UnknownNameError("node", pace.node, problem.by_name)
    layout = single(pace.node, pace.tp, len(ask.model.layers))
    timer = layout_timer(ask, layout, problem.by_name)
    node = problem.node(pace.node)
    points = tuple(_points(timer, pace.believed, ask.model.max_context_tokens))
    return Profile(node.gpu.name, ask.model.name, pace.tp, ENGINE, {}, day, points)


def _points(timer: StepTimer, pace: float, most_tokens: int) -> list[ProfilePoint]:
    shapes = [(new, cached, 0, 0) for new, cached in product(CHUNKS, CACHED) if new + cached <= most_tokens]
    for batch, context in product(BATCHES, CONTEXTS):
        shapes.append((0, 0, batch, batch * min(context, most_tokens)))
    for (new, batch), context in product(MIXED, CONTEXTS):
        shapes.append((min(new, most_tokens), 0, batch, batch * min(context, most_tokens)))
    unique = list(dict.fromkeys(shapes))
    taken_s = timer.step_s(steps(*zip(*unique, strict=True)))
    return [ProfilePoint(*shape, float(each) * pace) for shape, each in zip(unique, taken_s, strict=True)]
