"""Pipelines that do both phases (CORAL 5.1), beside those that do one.

Placements are those of the pipelines that prefill or decode, each a column more: `perf/serving/mixed_pipeline.py`
says how many answers its batches make and how long the chunks of prompts are that go with them, and the engine's
token budget follows from the same (`runtime/replica_models.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from potluck.core.values.layout import Layout
from potluck.core.values.plan import BucketCapacity, PlannedReplica, Template
from potluck.perf.serving.mixed_pipeline import RequestLengths, together
from potluck.perf.timers.pipeline_timer import PipelineTimer, layout_requests
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.rate_cache import RateCache, RatedLayout, layout_text
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, layout_timer, useful


def aggregated(
    problem: PlanningProblem, ask: ModelDemand, pipelines: Iterable[Template], book: RateCache
) -> Iterator[Template]:
    """Of each placement of several stages the same nodes doing both; one name for one placement."""
    seen: set[Layout] = set()
    names: set[str] = set()
    for template in pipelines:
        layout = template.replicas[0].layout
        if layout in seen or len(layout.stages) < 2:
            continue
        seen.add(layout)
        capacity = book.rated(f"both {layout_text(layout)}", partial(_rated, problem, ask, template)).capacity
        if not useful(capacity):
            continue
        listed = " + ".join(f"{each.count} {each.node}" for each in template.nodes)
        name = f"{ask.name}: mixed pipeline {listed}"
        if name in names:
            name += f", {'+'.join(str(stage.layers) for stage in layout.stages)} layers"
        names.add(name)
        yield replace(template, name=name, replicas=(PlannedReplica("mixed", layout),), capacity=capacity)


def _rated(problem: PlanningProblem, ask: ModelDemand, template: Template) -> RatedLayout:
    layout = template.replicas[0].layout
    return RatedLayout(aggregated_capacity(problem, ask, layout), template.confidence)


def aggregated_capacity(
    problem: PlanningProblem, ask: ModelDemand, layout: Layout
) -> tuple[BucketCapacity, ...]:
    """What a pipeline that does both serves of every bucket; 0 where it cannot be in time."""
    timer = layout_timer(ask, layout, problem.by_name)
    assert isinstance(timer, PipelineTimer)
    return tuple(_bucket(problem, ask, demand, layout, timer) for demand in ask.demands)


def _bucket(
    problem: PlanningProblem, ask: ModelDemand, demand: BucketDemand, layout: Layout, timer: PipelineTimer
) -> BucketCapacity:
    longest = demand.longest_tokens + demand.output_tokens
    room = layout_requests(ask.model, layout, problem.by_name, longest)
    slo = ask.slo if demand.promised else replace(ask.slo, ttft_s=UNPROMISED_TTFT_S)
    lengths = RequestLengths(
        demand.new_tokens, demand.cached_tokens, demand.output_tokens, demand.longest_tokens
    )
    found = together(timer, lengths, room, slo, problem.headroom)
    if found is None:
        return BucketCapacity(demand.bucket, 0.0, 0.0, 0.0, 0.0, 0.0)
    return BucketCapacity(demand.bucket, 0.0, 0.0, found.requests_per_s, found.ttft_s, found.tpot_s)
