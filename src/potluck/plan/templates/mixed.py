"""Pipelines as columns: of all placements in the exact library, those worth a price.

The library (`pipeline`) is exact for a model's mean lengths. Its most cost-efficient placements, per phase,
are timed again stage by stage for every bucket of lengths, and become templates; single nodes are left to
`homogeneous`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from math import ceil
from pathlib import Path

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout
from potluck.core.values.plan import NodeCount, Replica, Template
from potluck.core.values.types import Role
from potluck.plan.library import pipeline_libraries
from potluck.plan.problem import Ask, Problem
from potluck.plan.rates import fits, layout_timer, replica_capacity, useful
from potluck.plan.templates.pipeline import PipelineLibrary

COLUMNS = 120
"""Pipelines kept per model and phase."""
MAX_NODES = 6
"""Nodes of a pipeline in a plan, as in the paper; larger ones seldom pay."""
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

    The library is kept in `folder` (the user's cache when left out), so that planning again loads it; `timed` is
    looked up and added to, so that other prices need not time the same pipelines again.
    """
    timed = {} if timed is None else timed
    rate = ask.rate_per_s or 1.0
    mean_in = ceil(sum(d.rate_per_s * d.new_tokens for d in ask.demands) / rate) or ask.demands[0].new_tokens
    mean_out = ceil(sum(d.rate_per_s * d.output_tokens for d in ask.demands) / rate) or 1
    try:
        both = pipeline_libraries(
            ask.model, problem.offered, ask.slo, mean_in, mean_out, max_nodes=max_nodes, folder=folder
        )
    except InputError:
        return []  # more layers or types than the library takes: whole replicas remain
    found = []
    for library in both:
        for index in _worthwhile(library, prices, columns):
            key = (ask.name, library.rates.phase, library.placement(index))
            if key not in timed:
                timed[key] = _template(problem, ask, *key[1:])
            template = timed[key]
            if template is not None:
                found.append(template)
    return found


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
