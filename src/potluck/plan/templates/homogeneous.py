"""Whole replicas on one node: every node type, tensor-parallel degree and role.

A node with more GPUs than a replica needs carries several. Of two degrees in the same role the one that does
no better in any bucket is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.errors import InputError
from potluck.core.values.layout import single
from potluck.core.values.plan import BucketCapacity, NodeCount, Replica, Template
from potluck.core.values.types import NodeType, Role
from potluck.perf.roofline import check_tp
from potluck.plan.problem import Ask, Problem
from potluck.plan.rates import fits, layout_timer, replica_capacity, useful

ROLES: tuple[Role, ...] = ("mixed", "prefill", "decode")


def homogeneous(problem: Problem, ask: Ask) -> list[Template]:
    """All useful single-node templates of a model."""
    found: list[Template] = []
    for node in problem.offered:
        for role in ROLES:
            found += _best_degrees(_of_node(problem, ask, node, role))
    return found


def _of_node(problem: Problem, ask: Ask, node: NodeType, role: Role) -> Iterable[Template]:
    for tp in (degree for degree in range(1, node.gpus + 1) if node.gpus % degree == 0):
        try:
            check_tp(ask.model, node, tp)
        except InputError:
            continue
        layout = single(node.name, tp, ask.model.layer_count)
        if not fits(ask, layout, problem.by_name):
            continue
        copies = node.gpus // tp
        timer = layout_timer(ask, layout, problem.by_name)
        capacity = replica_capacity(ask, layout, problem.by_name, role, problem.headroom, copies, timer=timer)
        if useful(capacity):
            yield Template(
                name=f"{ask.name}: {role} {node.name} tp{tp}",
                kind="homogeneous",
                model=ask.name,
                nodes=(NodeCount(node.name, 1),),
                replicas=(Replica(role, layout),) * copies,
                capacity=capacity,
                confidence=timer.confidence,
            )


def _best_degrees(templates: Iterable[Template]) -> list[Template]:
    kept: list[Template] = []
    for template in templates:
        if any(_at_least(other, template) for other in kept):
            continue
        kept = [other for other in kept if not _at_least(template, other)] + [template]
    return kept


def _at_least(a: Template, b: Template) -> bool:
    """Whether `a` does as much as `b` in every bucket."""
    return all(_rates(x) >= _rates(y) for x, y in zip(a.capacity, b.capacity, strict=True))


def _rates(capacity: BucketCapacity) -> float:
    return capacity.prefill_per_s + capacity.decode_per_s + capacity.closed_per_s
