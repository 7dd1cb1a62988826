"""Workers that were lost come back: the pipeline is whole again without a restart, and says what it always said."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from pipeline_workers import PLAIN, PROMPTS, SECRET, Loop, generate, local, pipeline

from potluck.core.errors import CapacityError
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import WorkerLost
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.pipeline.worker_listener import serve


@pytest.fixture(scope="module")
def expected() -> list[list[SampledToken]]:
    return generate(local(PLAIN), count=6)


class Stage:
    """Workers at addresses of their own, each of which can end, and stand there again."""

    def __init__(self, count: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.addresses = [("127.0.0.1", int(each.getsockname()[1])) for each in self.listeners]
        for place in range(count):
            self._stand(place)

    def _stand(self, place: int) -> None:
        threading.Thread(target=serve, args=(self.listeners[place], SECRET, True), daemon=True).start()

    def end(self, executor: PipelineExecutor, stage: int, worker: int, place: int) -> None:
        """Nobody listens there any more, and its connections are gone."""
        self.listeners[place].shutdown(socket.SHUT_RDWR)
        self.listeners[place].close()
        executor._stages[stage][worker]._link.close()

    def stand_again(self, place: int) -> None:
        self.listeners[place] = socket.create_server(self.addresses[place])
        self._stand(place)


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def keep_stepping(loop: Loop) -> None:
    for _ in range(100):
        loop.step(64)


@pytest.mark.parametrize(("stage", "worker", "place"), [(0, 0, 0), (1, 1, 2), (2, 0, 3)])
def test_a_worker_that_is_there_again_has_its_place_again(
    expected: list[list[SampledToken]], stage: int, worker: int, place: int
) -> None:
    """Of the first stage, of one that two share, of the last."""
    workers = Stage(4)
    executor = pipeline(PLAIN, "1,1x2,1", workers.addresses)
    assert executor._rejoining is not None
    executor._rejoining._retry_s = 0.05
    try:
        assert generate(executor, count=6) == expected
        loop = Loop(executor, PROMPTS)
        loop.step(64)
        workers.end(executor, stage, worker, place)
        with pytest.raises(WorkerLost):
            keep_stepping(loop)
        loop.close()
        if worker or stage == 1:
            assert executor.health() == ""
        else:
            assert "has no worker left" in executor.health()
            with pytest.raises(CapacityError, match="no worker is left"):
                executor.open()
        assert executor.notes()["pipeline_workers_lost"] == 1
        workers.stand_again(place)
        until(lambda: executor._rejoining is not None and executor._rejoining.awaited(stage))
        assert executor.health() == "", "requests may come, and it is taken in by the first"
        assert generate(executor, count=6) == expected
        assert executor.degraded() == ""
        executor.check()
    finally:
        executor.shutdown()
