"""Pipelines as columns: the libraries of a model by the plan's own rule, and placements of them as templates.

Every bucket of lengths has libraries of its own (`pipeline`), exact for its mean lengths by the rule that templates
are timed by: what one drops is no better than its parts, for that bucket. The first gives every stage the same time;
others give each of several stages more, for pipelines of unlike nodes, and whether the whole is in time is seen when
it is timed. `plan.templates.shelf` says which of all these are. Single nodes are left to `homogeneous`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout
from potluck.core.values.plan import NodeCount, PlannedReplica, Template
from potluck.core.values.types import Role
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.templates.library import pipeline_libraries
from potluck.plan.templates.pipeline import PipelineLibrary
from potluck.plan.timing.rate_cache import RateCache
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, useful, wait_factor
from potluck.plan.timing.stage_rates import BucketRule

MAX_NODES = 6
"""Nodes of a pipeline in a plan, as in the paper; larger ones seldom pay."""
UNEVEN = (1.0, 1.25, 1.5, 2.0)
"""How much longer than the mean a stage of several may take: a library for each."""
Timed = MutableMapping[tuple[str, Role, Layout], Template | None]
"""Model, role and layout to the template; None where it can do nothing. Prices have no part in it."""


def libraries(
    problem: PlanningProblem,
    ask: ModelDemand,
    demand: BucketDemand,
    max_nodes: int = MAX_NODES,
    folder: Path | None = None,
) -> tuple[PipelineLibrary, ...]:
    """Prefill and decode pipelines for one bucket; none where there are more layers or types than a library takes."""
    rule = BucketRule(
        wait_factor(problem.headroom),
        1.0 - HANDOVER_SHARE,
        demand.longest_tokens,
        demand.cached_tokens,
        demand.promised,
        problem.headroom,
        ask.slo.attainment,
    )
    given = (ask.model, problem.offered, ask.slo, demand.new_tokens, demand.output_tokens)
    try:
        return tuple(
            library
            for uneven in UNEVEN
            for library in pipeline_libraries(
                *given, max_nodes=max_nodes, rule=replace(rule, uneven=uneven), folder=folder, sure=ask.sure
            )
        )
    except InputError:
        return ()


def timed_template(
    problem: PlanningProblem, ask: ModelDemand, phase: Role, layout: Layout, book: RateCache
) -> Template | None:
    """A placement timed stage by stage for every bucket; None where it can do nothing."""
    rated = book.replica(problem, ask, layout, phase)
    if not useful(rated.capacity):
        return None
    nodes = tuple(NodeCount(name, count) for name, count in sorted(layout.node_counts.items()))
    listed = " + ".join(f"{each.count} {each.node}" for each in nodes)
    return Template(
        name=f"{ask.name}: {phase} pipeline {listed}",
        kind="pipeline",
        model=ask.name,
        nodes=nodes,
        replicas=(PlannedReplica(phase, layout),),
        capacity=rated.capacity,
        confidence=rated.confidence,
    )
