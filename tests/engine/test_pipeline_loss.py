"""Workers as processes of their own, and what becomes of requests when one of them dies, or hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from pipeline_workers import HYBRID, PLAIN, PROMPTS, SEED, SIZE, Loop, generate, local, pipeline, standing

from potluck.core.errors import CapacityError
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import WorkerLost
from potluck.engine.pipeline import worker_listener
from potluck.engine.pipeline.launch import launch, parse_stages
from potluck.engine.pipeline.pipeline_connection import LinkError
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.pipeline.remote_worker import RemoteWorker

WAIT_S = 60.0
"""Nobody is given up because the machine has much else to do."""


@pytest.fixture(scope="module")
def expected() -> list[list[SampledToken]]:
    return generate(local(PLAIN), count=8)


@pytest.fixture(scope="module")
def processes() -> Iterator[PipelineExecutor]:
    """One worker, then three that share a stage. The tests below use them up, in their order."""
    executor = launch(PLAIN, parse_stages("1,2x3"), SIZE, seed=SEED, threads=1, wait_s=WAIT_S, returns=False)
    yield executor
    executor.shutdown()


def second_stage(executor: PipelineExecutor, row: int) -> RemoteWorker:
    return executor.workers(row)[1][0]


def pid(remote: RemoteWorker) -> int:
    assert remote.process is not None
    return remote.process.pid


def keep_stepping(loop: Loop) -> None:
    for _ in range(100):
        loop.step(200)


def go_on_without(loop: Loop, lost: tuple[int, ...], expected: list[list[SampledToken]]) -> None:
    """Those that are lost are closed; the others say what they would have said."""
    left = [index for index, row in enumerate(loop.rows) if row not in lost]
    while any(len(loop.said[index]) < 8 for index in left):
        loop.step(64, left)
    assert [loop.said[index][:8] for index in left] == [expected[index] for index in left]
    loop.close()


def test_processes_say_what_one_process_says(
    processes: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    assert generate(processes, count=8) == expected
    assert processes.health() == ""
    processes.check()


def test_a_worker_that_dies_between_steps_loses_its_own_requests(
    processes: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    loop = Loop(processes, PROMPTS)
    loop.step(200)
    victim = second_stage(processes, loop.rows[0])
    has = [row for row in loop.rows if second_stage(processes, row) is victim]
    os.kill(pid(victim), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="stage 1 worker . is gone") as caught:
        keep_stepping(loop)
    assert sorted(caught.value.rows) == sorted(has)
    assert 0 < len(has) < len(loop.rows)
    assert processes.health() == ""
    assert "1 of 4 workers are lost" in processes.degraded()
    assert victim.name in processes.degraded()
    assert processes.notes()["pipeline_workers_lost"] == 1
    go_on_without(loop, caught.value.rows, expected)
    processes.check()
    assert generate(processes, count=8) == expected, "new requests go to the workers that are left"


def test_a_worker_that_dies_in_a_step_loses_its_own_requests(
    processes: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    loop = Loop(processes, PROMPTS)
    loop.step(200)
    victim = second_stage(processes, loop.rows[0])
    has = [row for row in loop.rows if second_stage(processes, row) is victim]
    os.kill(pid(victim), signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (pid(victim), signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerLost, match=victim.name) as caught:
        loop.step(200)
    killer.join()
    assert sorted(caught.value.rows) == sorted(has)
    go_on_without(loop, caught.value.rows, expected)
    processes.check()


def test_a_worker_that_hangs_is_given_up_and_without_workers_nothing_begins(
    processes: PipelineExecutor,
) -> None:
    loop = Loop(processes, PROMPTS[:2])
    victim = second_stage(processes, loop.rows[0])
    os.kill(pid(victim), signal.SIGSTOP)
    processes._wait_s = 1.0
    with pytest.raises(WorkerLost, match="did not answer for 1 s") as caught:
        loop.step(200)
    assert set(caught.value.rows) == set(loop.rows)
    loop.close()
    with pytest.raises(CapacityError, match="no worker is left: stage 1 worker"):
        processes.open()
    assert processes.health().startswith("stage 1 has no worker left")
    assert processes.degraded() == ""
    processes.check()


def test_a_model_with_states_loses_the_whole_step() -> None:
    """Its survivors cannot be set back: their states have moved on."""
    executor = pipeline(HYBRID, "1,4x2", standing(3))
    loop = Loop(executor, PROMPTS)
    loop.step(200)
    second_stage(executor, loop.rows[0])._link.close()
    with pytest.raises(WorkerLost) as caught:
        keep_stepping(loop)
    assert set(caught.value.rows) <= set(loop.rows)
    loop.close()
    executor.check()
    assert len(generate(executor, PROMPTS[:2])) == 2
    executor.shutdown()


def test_a_worker_serves_one_driver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_listener, "BUSY_S", 0.05)
    addresses = standing(1)
    first = pipeline(PLAIN, "3", addresses)
    with pytest.raises(LinkError, match="does it serve another driver"):
        pipeline(PLAIN, "3", addresses)
    assert len(generate(first, PROMPTS[:1], count=1)) == 1
    first.shutdown()
