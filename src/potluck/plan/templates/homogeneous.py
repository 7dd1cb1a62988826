"""Single-node templates: every node type, tensor-parallel degree and role.

A node with more GPUs than a replica needs runs several. Experts are sharded with the other weights, or distributed
(`ep`); data-parallel attention is used for decoding only, as a prompt would get a single GPU. A layout that is no
better in any bucket than another one in the same role is dropped.

A mixed replica may also decode prompts that others prefilled: the time of a step is that of its chunks and decodes,
so both kinds of requests share the replica's time.
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
PARALLELISM_NAMES: dict[Ep, str] = {"none": "tp{}", "tp": "tp{0} ep{0}", "dp": "dp{0} ep{0}"}


def homogeneous(problem: PlanningProblem, demand: ModelDemand, rate_cache: RateCache) -> list[Template]:
    """Single-node templates of a model, without dominated layouts."""
    templates: list[Template] = []
    per_degree = equal_degrees(demand.model, problem.engine)
    for node in problem.offered:
        for role in ROLES if problem.engine.hands_over else ROLES[:1]:
            node_templates = list(_node_templates(problem, demand, node, role, rate_cache))
            for degree in (
                sorted({degree_of(template) for template in node_templates}) if per_degree else (None,)
            ):
                templates += undominated(t for t in node_templates if degree in (None, degree_of(t)))
    return of_one_degree(problem, demand, templates)


def fewest_gpus(problem: PlanningProblem, demand: ModelDemand, rate_cache: RateCache) -> list[Template]:
    """For each node type, mixed replicas with the fewest GPUs that meet the SLO."""
    smallest = [
        next(iter(_node_templates(problem, demand, node, "mixed", rate_cache)), None)
        for node in problem.offered
    ]
    return [template for template in smallest if template is not None]


def also_decoding(
    problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template], rate_cache: RateCache
) -> list[Template]:
    """Mixed single-node templates that also offer decode capacity for prompts prefilled elsewhere."""
    if not problem.engine.hands_over:
        return []
    degree, templates = phase_degree(problem, demand, single), []
    for template in single:
        layout = template.replicas[0].layout
        if template.replicas[0].role == "mixed" and degree in (None, degree_of(template)):
            decode_capacity = (
                rate_cache.replica(problem, demand, layout, "decode").times(len(template.replicas)).capacity
            )
            capacities = zip(template.capacity, decode_capacity, strict=True)
            capacity = tuple(
                replace(own_capacity, decode_per_s=decode_only.decode_per_s)
                for own_capacity, decode_only in capacities
            )
            name = template.name.replace(": mixed ", ": mixed and decode ", 1)
            templates.append(replace(template, name=name, capacity=capacity))
    return templates


def _node_templates(
    problem: PlanningProblem, demand: ModelDemand, node: NodeType, role: Role, rate_cache: RateCache
) -> Iterable[Template]:
    """Templates of one node type and role, in every layout that can serve the model."""
    for tp, ep in layouts_on(demand.model, node, role, problem.engine):
        layout = single(node.name, tp, demand.model.layer_count, ep)
        copies = node.gpus // tp
        rated = rate_cache.replica(problem, demand, layout, role).times(copies)
        if useful(rated.capacity):
            yield Template(
                name=f"{demand.name}: {role} {node.name} {PARALLELISM_NAMES[ep].format(tp)}",
                kind="homogeneous",
                model=demand.name,
                nodes=(NodeCount(node.name, 1),),
                replicas=(PlannedReplica(role, layout),) * copies,
                capacity=rated.capacity,
                confidence=rated.confidence,
            )


def layouts_on(model: Model, node: NodeType, role: Role, engine: EngineKind) -> Iterable[tuple[int, Ep]]:
    """(GPUs of a replica, expert parallelism) for every layout of a model on a node type."""
    has_experts = any(isinstance(layer.ffn, MoeFfn) for layer in model.layers)
    choices: tuple[Ep, ...] = ("none",) if not has_experts else ("none", "tp", "dp")
    max_tp = min(node.gpus, engine.most_tensor or node.gpus)
    for tp in (degree for degree in range(1, max_tp + 1) if node.gpus % degree == 0):
        for ep in (choice for choice in choices if choice in engine.experts):
            if ep == "dp" and role != "decode":
                continue
            try:
                check_tp(model, node, tp, ep)
            except InputError:
                continue
            yield tp, ep


def undominated(templates: Iterable[Template]) -> list[Template]:
    """The templates without those that another one matches or beats in every bucket."""
    kept: list[Template] = []
    for template in templates:
        if any(_matches_or_beats(other_template, template) for other_template in kept):
            continue
        kept = [
            other_template for other_template in kept if not _matches_or_beats(template, other_template)
        ] + [template]
    return kept


def _matches_or_beats(first_template: Template, second_template: Template) -> bool:
    """Whether the first template serves at least as much in every bucket."""
    return all(
        _rates(x) >= _rates(y) for x, y in zip(first_template.capacity, second_template.capacity, strict=True)
    )


def _rates(capacity: BucketCapacity) -> float:
    """Requests/s in the phases that a single-node template runs; the others are 0."""
    return capacity.prefill_per_s + capacity.decode_per_s + capacity.closed_per_s
