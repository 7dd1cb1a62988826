"""Whole replicas on one node: every node type, tensor-parallel degree and role.

A node with more GPUs than a replica needs carries several. A mixture's experts are sharded like all else, or spread
(`ep`); with data-parallel attention only for decoding, as one prompt would have one GPU of several. Of two layouts in
the same role the one that does no better in any bucket is dropped.

A mixed replica may also decode what others prefilled. At a given batch a step takes as long as its chunks and its
answers do, so requests that bring their KV share a replica's time with those that it serves whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import EngineKind
from potluck.core.values.layout import Ep, single
from potluck.core.values.model import Model, MoeFfn
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template
from potluck.core.values.types import NodeType, Role
from potluck.perf.timers.roofline import check_tp
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.runnable import degree_of, equal_degrees, of_one_degree, phase_degree
from potluck.plan.timing.rate_cache import RateCache
from potluck.plan.timing.replica_rates import useful

ROLES: tuple[Role, ...] = ("mixed", "prefill", "decode")
WORDS: dict[Ep, str] = {"none": "tp{}", "tp": "tp{0} ep{0}", "dp": "dp{0} ep{0}"}


def homogeneous(problem: PlanningProblem, demand: ModelDemand, rate_cache: RateCache) -> list[Template]:
    templates: list[Template] = []
    apart = equal_degrees(demand.model, problem.engine)
    for node in problem.offered:
        for role in ROLES if problem.engine.hands_over else ROLES[:1]:
            made = list(_of_node(problem, demand, node, role, rate_cache))
            for degree in sorted({degree_of(template) for template in made}) if apart else (None,):
                templates += best_of(t for t in made if degree in (None, degree_of(t)))
    return of_one_degree(problem, demand, templates)


def fewest_gpus(problem: PlanningProblem, demand: ModelDemand, rate_cache: RateCache) -> list[Template]:
    """Of each node type the mixed replicas of as few GPUs as hold the model within its objective."""
    made = [
        next(iter(_of_node(problem, demand, node, "mixed", rate_cache)), None) for node in problem.offered
    ]
    return [template for template in made if template is not None]


def also_decoding(
    problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template], rate_cache: RateCache
) -> list[Template]:
    """The mixed ones of single nodes, with what each could decode for others, where others may hand over to it."""
    if not problem.engine.hands_over:
        return []
    degree, made = phase_degree(problem, demand, single), []
    for template in single:
        layout = template.replicas[0].layout
        if template.replicas[0].role == "mixed" and degree in (None, degree_of(template)):
            alone = (
                rate_cache.replica(problem, demand, layout, "decode").times(len(template.replicas)).capacity
            )
            both = zip(template.capacity, alone, strict=True)
            capacity = tuple(
                replace(mine, decode_per_s=other_capacity.decode_per_s) for mine, other_capacity in both
            )
            name = template.name.replace(": mixed ", ": mixed and decode ", 1)
            made.append(replace(template, name=name, capacity=capacity))
    return made


def _of_node(
    problem: PlanningProblem, demand: ModelDemand, node: NodeType, role: Role, rate_cache: RateCache
) -> Iterable[Template]:
    for tp, ep in layouts_on(demand.model, node, role, problem.engine):
        layout = single(node.name, tp, demand.model.layer_count, ep)
        copies = node.gpus // tp
        rated = rate_cache.replica(problem, demand, layout, role).times(copies)
        if useful(rated.capacity):
            yield Template(
                name=f"{demand.name}: {role} {node.name} {WORDS[ep].format(tp)}",
                kind="homogeneous",
                model=demand.name,
                nodes=(NodeCount(node.name, 1),),
                replicas=(PlannedReplica(role, layout),) * copies,
                capacity=rated.capacity,
                confidence=rated.confidence,
            )


def layouts_on(model: Model, node: NodeType, role: Role, engine: EngineKind) -> Iterable[tuple[int, Ep]]:
    """GPUs of a replica, and how its experts lie."""
    mixture = any(isinstance(layer.ffn, MoeFfn) for layer in model.layers)
    choices: tuple[Ep, ...] = ("none",) if not mixture else ("none", "tp", "dp")
    most = min(node.gpus, engine.most_tensor or node.gpus)
    for tp in (degree for degree in range(1, most + 1) if node.gpus % degree == 0):
        for ep in (choice for choice in choices if choice in engine.experts):
            if ep == "dp" and role != "decode":
                continue
            try:
                check_tp(model, node, tp, ep)
            except InputError:
                continue
            yield tp, ep


def best_of(templates: Iterable[Template]) -> list[Template]:
    """Without those that another does as well in every bucket."""
    kept: list[Template] = []
    for template in templates:
        if any(_at_least(other_template, template) for other_template in kept):
            continue
        kept = [other_template for other_template in kept if not _at_least(template, other_template)] + [
            template
        ]
    return kept


def _at_least(first_template: Template, second_template: Template) -> bool:
    return all(
        _rates(x) >= _rates(y) for x, y in zip(first_template.capacity, second_template.capacity, strict=True)
    )


def _rates(capacity: BucketCapacity) -> float:
    return capacity.prefill_per_s + capacity.decode_per_s + capacity.closed_per_s
