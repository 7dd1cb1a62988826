"""Pipelines that do both phases: turns within the objective, and what the simulator makes of them."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.types import Slo
from potluck.perf.serving.mixed_pipeline import PACED, RequestLengths, together
from potluck.perf.step_timer import steps
from potluck.perf.timers.pipeline_timer import PipelineTimer, pipeline

MODEL = models.model("LLaMA-30B")
NODES = {nodes.canonical(name): nodes.node_type(name) for name in ("2xRTX4090", "4xA10")}


def timer_of(*layers: int) -> PipelineTimer:
    kinds = sorted(NODES)
    stages = [
        Stage(each, (StageNode(kinds[i % 2], NODES[kinds[i % 2]].gpus),)) for i, each in enumerate(layers)
    ]
    return pipeline(MODEL, Layout(tuple(stages)), NODES)


TIMERS = (timer_of(30, 30), timer_of(25, 20, 15))


@settings(max_examples=12)
@given(
    timer=st.sampled_from(TIMERS),
    new=st.integers(64, 1500),
    output=st.integers(16, 300),
    room=st.integers(2, 200),
    ttft_s=st.floats(0.5, 6.0),
    tpot_s=st.floats(0.05, 0.3),
)
def test_turns_keep_the_objective_by_the_formula(
    timer: PipelineTimer, new: int, output: int, room: int, ttft_s: float, tpot_s: float
) -> None:
    found = together(timer, RequestLengths(new, 0, output, new), room, Slo(ttft_s, tpot_s))
    if found is None:
        return
    lanes, batch, chunk = len(timer.stages), found.batch, found.chunk_tokens
    assert lanes * batch <= room

    def turn_s(tokens: int) -> float:
        context = batch * (new + output / 2)
        work = steps(tokens, max(new - tokens, 0) / 2, batch, context)
        if not tokens:
            work = steps(decodes=batch, decode_context=context)
        return float(max(lanes * timer.interval_s(work)[0], timer.step_s(work)[0]))

    used = batch * new / output / chunk
    assert used < 1
    assert found.tpot_s == pytest.approx(used * turn_s(chunk) + (1 - used) * turn_s(0))
    assert found.tpot_s <= PACED * tpot_s
    assert ceil(new / chunk) * turn_s(chunk) <= found.ttft_s <= ttft_s
    assert found.requests_per_s == pytest.approx(lanes * batch / output / found.tpot_s)


def test_what_cannot_be_in_time_is_not_offered() -> None:
    timer = TIMERS[0]
    assert together(timer, RequestLengths(1000, 0, 100, 1000), 40, Slo(0.05, 0.1)) is None
    assert together(timer, RequestLengths(1000, 0, 100, 1000), 1, Slo(3.0, 0.2)) is None
    short, long = (together(timer, RequestLengths(1000, 0, 100, n), 40, Slo(1.5, 0.2)) for n in (1000, 1900))
    assert short is not None
    assert long is None or long.requests_per_s <= short.requests_per_s
