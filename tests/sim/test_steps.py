"""Step-time tables agree with their timer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from heapq import heapify, heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import Confidence
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.mock.mock_engine import lasting
from potluck.perf.step_timer import Floats, StepBatch, StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer, pipeline
from potluck.perf.timers.roofline import roofline
from potluck.sim.step_table import CONTEXTS, DecodeRow, RoundTable, StepTable, step_table

CASES = [
    ("Llama-3.1-8B", "H100-SXM", 1),
    ("Llama-3.1-8B", "A10", 1),
    ("Llama-3-70B", "4xH100-SXM", 4),
    ("GPT-OSS-120B", "H200", 1),
    ("DeepSeek-V3", "8xH200", 8),
    ("Kimi-Linear-48B", "2xA100-80", 2),
]


Made = tuple[list[tuple[int, int, int]], int, int]  # Chunks, decodes, their contexts' sum.


@cache
def timer(model: str, node: str, tp: int) -> StepTimer:
    return roofline(models.model(model), nodes.node_type(node), tp)


@cache
def unlike_pipeline() -> PipelineTimer:
    names = ("1xH100-SXM", "1xL4", "1xA10")
    stages = (
        Stage(16, (StageNode("1xH100-SXM", 1),)),
        Stage(16, (StageNode("1xL4", 1), StageNode("1xA10", 1))),
    )
    return pipeline(models.model("Llama-3.1-8B"), Layout(stages), {n: nodes.node_type(n) for n in names})


def random_steps(count: int, seed: int) -> Iterator[Made]:
    """Steps of up to 2,048 tokens: none to five chunks, contexts to 32k, none to 300 decodes."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        decodes = int(rng.choice([0, rng.integers(1, 8), rng.integers(1, 64), rng.integers(1, 300)]))
        left, chunks = 2048 - decodes, []
        for key in range(int(rng.choice([0, 1, 1, 1, 2, 3, 5])) if decodes else 1):
            new = min(left, int(rng.choice([rng.integers(1, 64), rng.integers(1, 2048)])))
            if new > 0:
                chunks.append((key, new, int(rng.choice([0, 0, 2 ** rng.uniform(0, 15)]))))
                left -= new
        yield chunks, decodes, int(decodes * 2 ** rng.uniform(3, 14))


def as_steps(made: list[Made]) -> StepBatch:
    new, cached = np.zeros((len(made), 5)), np.zeros((len(made), 5))
    for row, (chunks, _, _) in enumerate(made):
        for column, (_, tokens, behind) in enumerate(chunks):
            new[row, column], cached[row, column] = tokens, behind
    return steps(new, cached, [decodes for _, decodes, _ in made], [context for _, _, context in made])


@pytest.mark.parametrize("case", [*CASES, None], ids=str)
def test_step_table_is_near_its_timer(case: tuple[str, str, int] | None) -> None:
    source = unlike_pipeline() if case is None else timer(*case)
    table, made = StepTable(source.unlaunched, source.least_s), list(random_steps(600, 1))
    error = np.abs(np.array([table.step_s(*item) for item in made]) / source.step_s(as_steps(made)) - 1.0)
    chunks = np.array([len(item[0]) for item in made])
    decodes = np.array([item[1] for item in made])
    assert error[chunks == 0].max() < 0.003
    # Latent attention bends between the contexts that are asked for, and beside few decodes.
    latent = case is not None and case[0] == "DeepSeek-V3"
    assert error[(chunks == 1) & (decodes == 0)].max() < (0.004 if latent else 0.003)
    assert error[chunks == 1].mean() < 0.0025
    assert error[chunks == 1].max() < (0.018 if latent else 0.016)
    # Several chunks share the GPU in ways that pairs of figures cannot tell.
    assert error[chunks > 1].mean() < 0.01
    assert error[chunks > 1].max() < 0.15
    assert error.mean() < 0.005


def test_step_table_of_a_linear_timer_is_exact() -> None:
    class Linear:
        confidence: Confidence = "assumed"

        def step_s(self, batch: StepBatch) -> Floats:
            pairs = (batch.chunk_new * (batch.chunk_cached + batch.chunk_new / 2)).sum(axis=1)
            return 1e-3 + 1e-5 * batch.tokens + 1e-9 * pairs + 1e-7 * batch.decode_context

    table, made = StepTable(Linear()), list(random_steps(200, 2))
    ours = [table.step_s(*item) for item in made]
    assert ours == pytest.approx(Linear().step_s(as_steps(made)).tolist(), rel=1e-9)


def bent_row(count: int, fixed: float, slope: float, early: float, late: float) -> DecodeRow:
    """Steps that grow faster at first, or later on, or both."""
    contexts = np.array(CONTEXTS, np.float64)
    bends = np.minimum(early * contexts, 1.0) + np.maximum(late * (contexts - 300.0), 0.0)
    return DecodeRow(count, 1e-3 * (fixed + slope * contexts + bends))


rows = st.builds(
    bent_row,
    st.integers(1, 300),
    st.floats(0.5, 20.0),
    st.floats(0.0, 0.01),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
)


@given(rows, st.integers(0, 5000), st.integers(1, 400))
def test_step_run_time_is_the_sum_of_its_steps(row: DecodeRow, mean: int, count: int) -> None:
    context = mean * row.count + mean % row.count
    apart = sum(row.step_s(context + i * row.count) for i in range(count))
    assert row.run_s(context, count) == pytest.approx(apart, rel=1e-11)


@given(rows, st.integers(0, 5000), st.integers(1, 400), st.floats(-0.2, 1.2))
def test_step_run_is_cut_at_the_first_step_that_reaches_the_time(
    row: DecodeRow, mean: int, most: int, share: float
) -> None:
    context = mean * row.count
    seconds = share * row.run_s(context, most)
    count, lasted_s = row.cut(context, seconds, most)
    assert 1 <= count <= most
    assert lasted_s == row.run_s(context, count)
    if count < most:
        assert lasted_s >= seconds
    if count > 1:
        assert row.run_s(context, count - 1) < seconds


def test_only_a_pipeline_uses_a_round_table() -> None:
    single = Layout((Stage(32, (StageNode("1xA10", 1),)),))
    plain = pipeline(models.model("Llama-3.1-8B"), single, {"1xA10": nodes.node_type("1xA10")})
    assert isinstance(step_table(plain), StepTable)
    assert isinstance(step_table(unlike_pipeline()), RoundTable)
    assert step_table(unlike_pipeline()).lanes == 3


def test_lone_prompt_takes_pipeline_latency_and_full_lanes_take_its_interval() -> None:
    source = unlike_pipeline()
    table = step_table(source)
    one = steps(1000.0)
    latency_s, pace_s = float(source.step_s(one)[0]), float(source.interval_s(one)[0])
    assert table.step_s([(0, 1000, 0)], 0, 0) == pytest.approx(latency_s, rel=1e-6)
    full_s = table.step_s([(key, 1000, 0) for key in range(3)], 0, 0)
    assert full_s == pytest.approx(max(latency_s, 3 * pace_s), rel=1e-6)
    assert full_s < 3 * latency_s


@pytest.mark.parametrize(
    ("chunks", "contexts"),
    [
        ([(900, 0)], []),
        ([(900, 0), (1, 0), (300, 512)], [40, 700]),
        ([], [900] * 7),
        ([(64, 64)] * 5, [1200]),
    ],
)
def test_emulated_engine_rounds_equal_the_simulated_step_time(
    chunks: list[tuple[int, int]], contexts: list[int]
) -> None:
    source = unlike_pipeline()
    works = [SequenceWork(row, cached, (5,) * new) for row, (new, cached) in enumerate(chunks)]
    works += [SequenceWork(len(chunks) + row, context, (5,)) for row, context in enumerate(contexts)]
    simulated = step_table(source).step_s(
        [(row, new, cached) for row, (new, cached) in enumerate(chunks)], len(contexts), sum(contexts)
    )
    assert lasting(source)(works) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("decodes", [1, 2, 3, 7, 60])
def test_decodes_are_spread_evenly_over_pipeline_lanes(decodes: int) -> None:
    source = unlike_pipeline()
    table = step_table(source)
    parts = [decodes // 3 + (lane < decodes % 3) for lane in range(3)]
    batch = steps(decodes=parts, decode_context=[500.0 * part for part in parts])
    expected = max(float(source.step_s(batch).max()), float(source.interval_s(batch).sum()))
    assert table.row(decodes).step_s(500 * decodes) == pytest.approx(expected, rel=3e-3)
    assert table.step_s((), decodes, 500 * decodes) == table.row(decodes).step_s(500 * decodes)


MODEL, CONTEXT, ROUNDS = models.model("Llama-3.1-8B"), 1200, 200


KINDS = {nodes.canonical(item): nodes.node_type(item) for item in ("1xL4", "1xA10", "1xL40S", "1xA100-80")}


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
def test_pipeline_rounds_equal_the_rate_of_simulated_stages(
    stages: tuple[tuple[int, str], ...], requests: int
) -> None:
    timer = a_pipeline(*stages)
    assert rounds_per_s(timer, requests) == pytest.approx(by_stage_per_s(timer, requests), rel=0.04)


@pytest.mark.parametrize("stages", [((24, "L4+A10"), (8, "L40S")), ((26, "L4+A100-80"), (6, "L4"))])
def test_round_rate_of_stages_with_slow_nodes_is_a_lower_bound(
    stages: tuple[tuple[int, str], ...],
) -> None:
    """All lanes of a round wait for the one on the slowest node; really the others go on."""
    timer = a_pipeline(*stages)
    for requests in (12, 120):
        assert 0.65 < rounds_per_s(timer, requests) / by_stage_per_s(timer, requests) < 1.0
