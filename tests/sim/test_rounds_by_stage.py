"""Rounds of a pipeline against the same pipeline simulated stage by stage, as CORAL's simulator does (its 5.2)."""

from __future__ import annotations

from functools import cache
from heapq import heapify, heappop, heappush

import pytest

from potluck.catalog import models, nodes
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.perf.step_timer import steps
from potluck.perf.timers.pipeline_timer import PipelineTimer, pipeline
from potluck.sim.replicas.round_table import RoundTable

MODEL, CONTEXT, ROUNDS = models.model("Llama-3.1-8B"), 1200, 200
KINDS = {nodes.canonical(each): nodes.node_type(each) for each in ("1xL4", "1xA10", "1xL40S", "1xA100-80")}


def a_pipeline(*stages: tuple[int, str]) -> PipelineTimer:
    """`(layers, "L4+A10")`: nodes of a stage share its requests."""
    made = [
        Stage(layers, tuple(StageNode(nodes.canonical(f"1x{name}"), 1) for name in names.split("+")))
        for layers, names in stages
    ]
    return pipeline(MODEL, Layout(tuple(made)), KINDS)


def by_stage_per_s(timer: PipelineTimer, requests: int) -> float:
    """Answer tokens a second where every lane's step goes to one node of each stage, in turn by what nodes can do."""
    lanes = sum(map(len, timer.stages))
    counts = [requests // lanes + (lane < requests % lanes) for lane in range(lanes)]

    @cache
    def step_s(stage: int, node: int, count: int) -> float:
        batch = steps(decodes=count, decode_context=count * CONTEXT)
        return float(timer.stages[stage][node].step_s(batch)[0]) + float(timer.host.step_s(batch)[0])

    turns: list[WeightedRoundRobin[int]] = [WeightedRoundRobin() for _ in timer.stages]
    for stage, members in enumerate(timer.stages):
        for node in range(len(members)):
            turns[stage].set(node, 1 / step_s(stage, node, counts[0]))
    hop = steps(decodes=counts[0], decode_context=counts[0] * CONTEXT)
    hop_s = float(timer._handovers_s(hop)[0]) / (len(timer.stages) - 1)
    free_s = [[0.0] * len(members) for members in timer.stages]
    due = [(0.0, lane, 0) for lane in range(lanes)]
    heapify(due)
    ends: list[tuple[float, int]] = []
    while len(ends) < lanes * ROUNDS:
        at_s, lane, stage = heappop(due)
        node = turns[stage].pick() or 0
        free_s[stage][node] = max(at_s, free_s[stage][node]) + step_s(stage, node, counts[lane])
        if stage + 1 < len(timer.stages):
            heappush(due, (free_s[stage][node] + hop_s, lane, stage + 1))
        else:
            ends.append((free_s[stage][node], counts[lane]))
            heappush(due, (free_s[stage][node], lane, 0))
    half = len(ends) // 2
    return sum(count for _, count in ends[half:]) / (ends[-1][0] - ends[half - 1][0])


def rounds_per_s(timer: PipelineTimer, requests: int) -> float:
    return requests / RoundTable(timer).row(requests).step_s(requests * CONTEXT)


@pytest.mark.parametrize("requests", [12, 48, 120])
@pytest.mark.parametrize(
    "stages",
    [
        ((14, "L4"), (18, "A10")),
        ((11, "L4"), (11, "L4"), (10, "L4")),
        ((24, "L4+L4"), (8, "L40S")),
        ((12, "L4+A10"), (20, "L40S")),
        ((20, "A10+L40S"), (3, "L4"), (9, "A100-80")),
    ],
    ids=["two", "three", "alike", "unlike, the other binds", "unlike and binding"],
)
def test_rounds_are_what_stages_give(stages: tuple[tuple[int, str], ...], requests: int) -> None:
    timer = a_pipeline(*stages)
    assert rounds_per_s(timer, requests) == pytest.approx(by_stage_per_s(timer, requests), rel=0.04)


@pytest.mark.parametrize("stages", [((24, "L4+A10"), (8, "L40S")), ((26, "L4+A100-80"), (6, "L4"))])
def test_where_a_slow_node_shares_a_stage_rounds_are_too_slow_never_too_fast(
    stages: tuple[tuple[int, str], ...],
) -> None:
    """All lanes of a round wait for the one on the slowest node; really the others go on."""
    timer = a_pipeline(*stages)
    for requests in (12, 120):
        assert 0.65 < rounds_per_s(timer, requests) / by_stage_per_s(timer, requests) < 1.0
