"""Pipelines as columns: of all placements in the exact libraries, those worth a price.

Every bucket of lengths has libraries of its own (`pipeline`), exact for its mean lengths by the rule that templates
are timed by: what one drops is no better than its parts, for that bucket. The first gives every stage the same time;
others give each of several stages more, for pipelines of unlike nodes, and whether the whole is in time is seen when
it is timed. The most cost-efficient placements of each are timed again stage by stage for all buckets and become
templates; of several placements of the same nodes those that another outdoes everywhere are dropped. Single nodes are
left to `homogeneous`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout
from potluck.core.values.plan import NodeCount, Replica, Template
from potluck.core.values.types import Role
from potluck.plan.library import pipeline_libraries
from potluck.plan.problem import Ask, Demand, Problem
from potluck.plan.rates import HANDOVER_SHARE, fits, layout_timer, replica_capacity, useful, wait_factor
from potluck.plan.stage_rates import Rule
from potluck.plan.templates.homogeneous import best_of
from potluck.plan.templates.pipeline import PipelineLibrary

COLUMNS = 120
"""Pipelines kept per model and phase; at least LEAST of each library."""
LEAST = 8
MAX_NODES = 6
"""Nodes of a pipeline in a plan, as in the paper; larger ones seldom pay."""
UNEVEN = (1.0, 1.25, 1.5, 2.0)
"""How much longer than the mean a stage of several may take: a library for each."""
Timed = MutableMapping[tuple[str, Role, Layout], Template | None]
"""Model, role and layout to the template; None where it can do nothing. Prices have no part in it."""


def pipelines(
    problem: Problem,
    ask: Ask,
    prices: Mapping[str, float],
    *,
    columns: int = COLUMNS,
    max_nodes: int = MAX_NODES,
    folder: Path | None = None,
    timed: Timed | None = None,
) -> list[Template]:
    """The most cost-efficient pipelines of several nodes, for prefill and for decode.

    Libraries are kept in `folder` (the user's cache when left out), so that planning again loads them; `timed` is
    looked up and added to, so that other prices need not time the same pipelines again.
    """
    timed = {} if timed is None else timed
    asked = [demand for demand in ask.demands if demand.rate_per_s > 0] or list(ask.demands[:1])
    each = max(ceil(columns / len(asked) / len(UNEVEN)), min(LEAST, columns))
    found: dict[tuple[Role, Layout], Template] = {}
    for demand in asked:
        for library in libraries(problem, ask, demand, max_nodes, folder):
            for index in _worthwhile(library, prices, each):
                key = (ask.name, library.rates.phase, library.placement(index))
                if key not in timed:
                    timed[key] = _template(problem, ask, *key[1:])
                template = timed[key]
                if template is not None:
                    found[key[1:]] = template
    return list(_told_apart(found.values()))


def libraries(
    problem: Problem, ask: Ask, demand: Demand, max_nodes: int = MAX_NODES, folder: Path | None = None
) -> tuple[PipelineLibrary, ...]:
    """Prefill and decode pipelines for one bucket; none where there are more layers or types than a library takes."""
    rule = Rule(
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


def _told_apart(templates: Iterable[Template]) -> Iterator[Template]:
    """The best placements of the same nodes; where there are several, all but the first are named by their layers."""
    alike: dict[str, list[Template]] = {}
    for template in templates:
        alike.setdefault(template.name, []).append(template)
    for group in alike.values():
        first, *others = best_of(group)
        yield first
        for other in others:
            layers = "+".join(str(stage.layers) for stage in other.replicas[0].layout.stages)
            yield replace(other, name=f"{other.name}, {layers} layers")


def _worthwhile(library: PipelineLibrary, prices: Mapping[str, float], columns: int) -> list[int]:
    """Indices of several-node templates, most tokens per dollar first."""
    cost = library.counts @ np.array([prices[node.name] for node in library.rates.nodes])
    several = library.counts.sum(axis=1) > 1
    efficiency = np.where(several, library.tokens_per_s / np.maximum(cost, 1e-9), 0.0)
    order = np.argsort(-efficiency, kind="stable")[:columns]
    return [int(i) for i in order if efficiency[i] > 0]


def _template(problem: Problem, ask: Ask, phase: Role, layout: Layout) -> Template | None:
    if not fits(ask, layout, problem.by_name):
        return None
    timer = layout_timer(ask, layout, problem.by_name)
    capacity = replica_capacity(ask, layout, problem.by_name, phase, problem.headroom, timer=timer)
    if not useful(capacity):
        return None
    nodes = tuple(NodeCount(name, count) for name, count in sorted(layout.node_counts.items()))
    listed = " + ".join(f"{each.count} {each.node}" for each in nodes)
    return Template(
        name=f"{ask.name}: {phase} pipeline {listed}",
        kind="pipeline",
        model=ask.name,
        nodes=nodes,
        replicas=(Replica(phase, layout),),
        capacity=capacity,
        confidence=timer.confidence,
    )
