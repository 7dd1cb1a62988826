"""Emulated GPUs: steps last as long as predicted, errors do not add up, and what is too slow is counted."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from executor_loop import HYBRID, PLAIN, PROMPTS, SEED, SIZE, generate, local
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.cli.engine.emulate import executor_maker, mock_model
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.layout import EmulatedReplica, Layout, Stage, StageNode
from potluck.core.values.plan import Confidence
from potluck.engine.compute.emulated import EmulatedNic, StepPacer, emulated_blocks, steps_of
from potluck.engine.compute.executor import CacheExport, Executor, SequenceWork, StepInputs
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.mock.mock_engine import lasting
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.serve import EngineSettings, service_of
from potluck.kv.chunks import KvChunk
from potluck.kv.kv_codec import packed
from potluck.perf.memory import kv_bytes
from potluck.perf.step_timer import Floats, StepBatch, steps
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import AlphaBeta, alpha_beta

LLAMA = models.model("Llama-3.1-8B")
A10 = nodes.node_type("A10")


class FakeTime:
    """A clock that only sleeping and working move; each sleep lasts `over_s` too long."""

    def __init__(self, over_s: float = 0.0) -> None:
        self.now_s, self.over_s, self.sleeps = 100.0, over_s, 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.now_s += seconds + self.over_s


class SecondPerToken:
    """A timer: a second for each new token."""

    confidence: Confidence = "assumed"

    def step_s(self, batch: StepBatch) -> Floats:
        return np.asarray(batch.tokens, np.float64)


def run(pacer: StepPacer, fake: FakeTime, tokens: Sequence[int], work_s: float, gap_s: float) -> list[float]:
    ends = []
    for count in tokens:
        pacer.begin([SequenceWork(0, 0, [0] * count)])
        fake.now_s += work_s
        pacer.end()
        ends.append(fake.now_s)
        fake.now_s += gap_s
    return ends


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
    st.floats(0.0, 0.4),
    st.floats(0.0, 0.05),
    st.floats(0.25, 8.0),
)
def test_emulated_steps_last_as_predicted_without_accumulating_error(
    tokens: list[int], work_share: float, over_s: float, speed_up: float
) -> None:
    fake = FakeTime(over_s)
    pacer = StepPacer(SecondPerToken(), speed_up, fake.clock, fake.sleep, host_s=0.1)
    ends = run(pacer, fake, tokens, work_share / speed_up, gap_s=0.1 / speed_up * 0.9)
    due = 100.0 + np.cumsum(tokens) / speed_up
    assert pacer.late_steps == 0
    assert np.all(np.array(ends) >= due - 1e-9)
    # Only the last sleep's error is left, however many there were.
    assert np.all(np.array(ends) <= due + over_s + 1e-9)


def test_idle_time_between_emulated_steps_is_not_recovered() -> None:
    fake = FakeTime()
    pacer = StepPacer(SecondPerToken(), 1.0, fake.clock, fake.sleep, host_s=0.1)
    assert run(pacer, fake, [1, 1], 0.2, gap_s=5.0) == [101.0, pytest.approx(107.0)]


def test_late_emulated_steps_are_counted_without_sleeping() -> None:
    fake = FakeTime()
    pacer = StepPacer(SecondPerToken(), 4.0, fake.clock, fake.sleep)
    run(pacer, fake, [1, 8, 1], work_s=0.5, gap_s=0.0)
    assert fake.now_s == 100.0 + 0.25 + 2.0 + 0.5, "the second step makes up for the first, the third cannot"
    assert (pacer.steps, pacer.late_steps) == (3, 2)
    assert pacer.late_s == pytest.approx(0.5)
    assert fake.sleeps == 1
    assert pacer.notes()["emulated_late_steps"] == 2


def test_emulation_reports_the_ratio_of_computed_to_predicted_time() -> None:
    """Three times as long, however much of it the step before had left: that one is counted with it."""
    fake = FakeTime()
    pacer = StepPacer(SecondPerToken(), 1.0, fake.clock, fake.sleep)
    run(pacer, fake, [1] * 5, work_s=3.0, gap_s=0.0)
    assert pacer.took_s / pacer.predicted_s == pytest.approx(3.0)
    quick = StepPacer(SecondPerToken(), 1.0, fake.clock, fake.sleep)
    run(quick, fake, [1] * 5, work_s=0.3, gap_s=0.0)
    assert quick.notes()["emulated_took_s"] == pytest.approx(quick.predicted_s)


def test_lateness_to_recover_is_bounded() -> None:
    fake = FakeTime()
    pacer = StepPacer(SecondPerToken(), 1.0, fake.clock, fake.sleep, host_s=0.0)
    run(pacer, fake, [1] * 50, work_s=2.0, gap_s=0.0)
    assert pacer.late_steps == 50
    slow = fake.now_s
    run(pacer, fake, [1] * 50, work_s=0.5, gap_s=0.0)
    assert fake.now_s - slow == pytest.approx(49.0), "one step's time is caught up, not fifty"


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12))
def test_step_works_convert_to_perf_step_batches(shapes: list[tuple[int, int]]) -> None:
    result = steps_of([SequenceWork(row, start, [0] * new) for row, (new, start) in enumerate(shapes)])
    assert result.tokens[0] == sum(new for new, _ in shapes)
    decodes = [start for new, start in shapes if new == 1 and start]
    assert (result.decodes[0], result.decode_context[0]) == (len(decodes), sum(decodes))
    assert result.sequences[0] == len(shapes)


@pytest.mark.parametrize("speed_up", [1.0, 10.0])
def test_paced_executor_gives_equal_tokens_in_the_predicted_time(speed_up: float) -> None:
    fake, alone = FakeTime(), local(HYBRID)
    timer = roofline(LLAMA, A10, 1)
    pacer = StepPacer(timer, speed_up, fake.clock, fake.sleep, host_s=0.0)
    paced: Executor = LocalExecutor(alone.runner, alone.size, pacer)
    assert generate(paced, PROMPTS[:3]) == generate(alone, PROMPTS[:3])
    # 64 tokens of each prompt at first, then 62 and two decodes, and so on.
    row = paced.open()
    paced.grow(row, 100)
    begin = fake.now_s
    paced.step([SequenceWork(row, 0, PROMPTS[2][:100], "none")], [])
    assert fake.now_s - begin == pytest.approx(float(timer.step_s(steps(100))[0]) / speed_up)
    paced.close(row)
    paced.check()
    assert paced.notes()["emulated_late_steps"] == 0


def test_paced_layers_are_sent_evenly_over_the_step() -> None:
    fake, alone = FakeTime(), local(HYBRID)
    timer = roofline(LLAMA, A10, 1)
    paced = LocalExecutor(alone.runner, alone.size, StepPacer(timer, 1.0, fake.clock, fake.sleep))
    row, seen = paced.open(), {}
    paced.grow(row, 50)

    def deliver(_: int, chunks: tuple[KvChunk, ...]) -> None:
        seen[chunks[0].layer] = fake.now_s - 100.0

    work = SequenceWork(row, 0, PROMPTS[2][:50], "none")
    paced.begin(StepInputs([work], [], [CacheExport(row, 0, 50)], deliver))()
    whole = float(timer.step_s(steps(50))[0])
    assert [seen[layer] for layer in range(5)] == pytest.approx([whole * part / 5 for part in range(1, 6)])


def test_emulated_kv_transfer_takes_the_time_of_the_network_card() -> None:
    fake = FakeTime()
    pace = EmulatedNic(LLAMA, 8, AlphaBeta(0.5, 1e9), 2.0, fake.clock)
    chunks = [KvChunk(layer, "kv", 0, 100, "float32", (1,), b"") for layer in range(8)]
    assert sum(map(pace.kv_bytes, chunks)) == pytest.approx(kv_bytes(LLAMA, 100))
    whole = KvChunk(0, "kv", 0, 100, "float32", (100, 2, 4, 64), bytes(4 * 100 * 2 * 4 * 64))
    assert 0.26 < pace.kv_bytes(packed(whole, "int4")) / pace.kv_bytes(whole) < 0.29
    dues = [pace.due_s(chunk) for chunk in chunks]
    item = kv_bytes(LLAMA, 100) / 8 / 1e9 / 2.0
    assert dues == pytest.approx([100.0 + item * count + 0.25 for count in range(1, 9)])
    fake.now_s += 50
    assert pace.due_s(chunks[0]) == pytest.approx(150.0 + item + 0.25)
    assert alpha_beta(A10.network_gbps).beta_bytes_per_s < A10.network_gbps * 1e9 / 8


def test_emulated_engine_sends_kv_at_the_bandwidth_of_its_card() -> None:
    service = service_of(
        executor_of(emulate="A10:llama-3.1-8b"), EngineSettings(max_running=4, token_budget=64), name="x"
    )
    chunks = [KvChunk(layer, "kv", 0, 512, "float32", (1,), b"") for layer in range(3)]
    began = time.monotonic()
    due_s = [service.kv_transfer.due_s(chunk) or 0.0 for chunk in chunks]
    assert due_s == sorted(due_s)
    assert due_s[-1] - began >= kv_bytes(LLAMA, 512) / alpha_beta(A10.network_gbps).beta_bytes_per_s > 0.01


def test_emulated_kv_blocks_follow_the_gpu_memory() -> None:
    """Llama-3.1-8B leaves an A10 (24 GB, 0.9 usable, 16.06 GB of weights) a few GB of KV of 131072 bytes a token."""
    blocks = emulated_blocks(LLAMA, A10, 1)
    assert 20_000 < blocks * BLOCK_TOKENS < 45_000
    assert emulated_blocks(LLAMA, nodes.node_type("H100"), 1) > 8 * blocks
    assert mock_model("A10:llama-3.1-8b").blocks() == blocks
    assert mock_model("A10,A10:llama-3.1-8b").blocks() > 3 * blocks


@pytest.mark.parametrize(
    "text",
    [
        *("", "A10", "A10:", ":llama-3.1-8b", "A11:llama-3.1-8b"),
        *("A10:llama-9", "A10:llama-3.1-8b:2", "A10:x:y:z"),
    ],
)
def test_invalid_emulations_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        mock_model(text)


def executor_of(emulate: str | None = None, kv_blocks: int | None = None) -> Executor:
    return executor_maker(emulate, 1.0, kv_blocks)(PLAIN, RandomSource(SEED), SIZE, "cpu")


def test_serve_options_select_the_executor(tmp_path: Path) -> None:
    assert isinstance(executor_of(), LocalExecutor)
    paced = executor_of(emulate="A10:llama-3.1-8b")
    assert isinstance(paced, LocalExecutor)
    assert paced.pacer is not None
    assert paced.size.blocks == emulated_blocks(LLAMA, A10, 1)
    assert paced.nic is not None
    assert executor_of(emulate="A10:llama-3.1-8b", kv_blocks=SIZE.blocks).size == SIZE


def test_emulated_engine_in_one_process_has_the_pace_of_its_pipeline() -> None:
    """At the pace of a round through all stages, as the mock of the same layout has it."""
    stages = (Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("1xL4", 1),)))
    text = json.dumps(encode(EmulatedReplica("Llama-3.1-8B", Layout(stages))))
    executor, mock = executor_of(emulate=text), mock_model(text)
    assert isinstance(executor, LocalExecutor)
    assert executor.size.blocks == mock.blocks() > emulated_blocks(LLAMA, A10, 1)
    assert executor.pacer is not None
    works = [SequenceWork(row, 500 + row, [1]) for row in range(6)]
    executor.pacer.begin(works)
    predicted_s = lasting(mock.timer())(works)
    assert executor.pacer.due_s - executor.pacer._start_s == pytest.approx(predicted_s)
    alone_s = float(roofline(LLAMA, A10, 1).step_s(steps_of(works))[0])
    assert predicted_s != pytest.approx(alone_s, rel=0.05)


def test_emulation_speed_up_must_be_positive() -> None:
    for speed_up in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="speed"):
            mock_model("A10:llama-3.1-8b", speed_up)
        with pytest.raises(InputError, match="speed"):
            StepPacer(SecondPerToken(), speed_up)
