"""Pipelines say what one process says: any stages, any sharing, any cut; and what is wrong is said plainly."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_workers import (
    HYBRID,
    PLAIN,
    PROMPTS,
    SECRET,
    SEED,
    SIZE,
    Loop,
    generate,
    local,
    pipeline,
    placed,
    standing,
    weighted,
)

from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import (
    CacheExport,
    Executor,
    SequenceWork,
    StepInputs,
    TokenDraw,
    WorkerLost,
)
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.pipeline import worker
from potluck.engine.pipeline.launch import launch, microbatches_for, parse_stages
from potluck.engine.pipeline.pipeline_connection import LinkError
from potluck.engine.pipeline.pipeline_executor import LEAST_TOKENS, PipelineExecutor, cut
from potluck.engine.pipeline.remote_worker import RemoteWorker
from potluck.engine.pipeline.worker import serve
from potluck.kv.chunks import KvChunk, KvManifest, token_hash

TOKENS = PROMPTS[2]


@pytest.fixture(scope="module")
def workers() -> list[tuple[str, int]]:
    return standing(4)


@pytest.fixture(scope="module")
def alone() -> LocalExecutor:
    return local(HYBRID)


@pytest.fixture(scope="module")
def expected(alone: LocalExecutor) -> list[list[SampledToken]]:
    return generate(alone)


@pytest.fixture(scope="module")
def shared() -> Iterator[PipelineExecutor]:
    """Three stages, two workers in the second; for tests that leave it as they found it."""
    executor = pipeline(HYBRID, "1,3x2,1", standing(4))
    yield executor
    executor.check()
    executor.shutdown()


@pytest.mark.parametrize("stages", ["5", "2,3", "4x2,1", "3,1,1", "1,2x2,2", "1,1,2,1"])
def test_stages_say_what_one_process_says(
    stages: str, workers: list[tuple[str, int]], expected: list[list[SampledToken]]
) -> None:
    executor = pipeline(HYBRID, stages, workers)
    try:
        assert generate(executor) == expected
        executor.check()
    finally:
        executor.shutdown()


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_no_chunk_matters(chunk: int, shared: PipelineExecutor, expected: list[list[SampledToken]]) -> None:
    prompts = PROMPTS[:3] if chunk > 1 else PROMPTS[:2]
    assert generate(shared, prompts, chunk=chunk) == expected[: len(prompts)]


def test_chance_and_probabilities_are_the_same(shared: PipelineExecutor, alone: LocalExecutor) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=2)
    result, expected = generate(shared, sampling=sampling), generate(alone, sampling=sampling)
    assert shared.exact == alone.exact
    if alone.exact.holds:
        assert result == expected
    else:
        assert [[choice.token for choice in text] for text in result] == [
            [choice.token for choice in text] for text in expected
        ]
    assert all(choice.logprob is not None and len(choice.top) == 2 for text in result for choice in text)


def test_workers_of_a_stage_take_requests_in_proportion(workers: list[tuple[str, int]]) -> None:
    first, second = placed("2x2,1x2", workers)
    stages = [weighted(first, 3.0, 1.0), weighted(second, 1.0, 1.0)]
    executor = launch(PLAIN, stages, SIZE, seed=SEED, secret=SECRET)
    try:
        rows = [executor.open() for _ in range(8)]
        paths = [tuple(remote.place for remote, _ in executor.workers(row)) for row in rows]
        assert Counter(path[0] for path in paths) == {0: 6, 1: 2}
        assert Counter(path[1] for path in paths) == {0: 4, 1: 4}
        for row in rows:
            executor.close(row)
        executor.check()
    finally:
        executor.shutdown()


def cargo(executor: Executor, row: int, start: int, stop: int) -> list[KvChunk]:
    layers = range(executor.config.model.layer_count)
    result = [chunk for layer in layers for chunk in executor.export(row, layer, start, stop)]
    return [replace(chunk, data=bytes(chunk.data)) for chunk in result]


def manifest(executor: Executor, start: int, stop: int) -> KvManifest:
    return KvManifest(executor.fingerprint, start, stop, token_hash(TOKENS[:stop]))


def arrive(executor: Executor, row: int, chunks: list[KvChunk], start: int, stop: int) -> None:
    arrival = executor.arrival(row, manifest(executor, start, stop), TOKENS)
    for chunk in chunks:
        arrival.accept(chunk)
    arrival.finish()
    assert executor.held(row) == stop


def tail(executor: Executor, row: int, held: int) -> int:
    """The token behind the whole prompt, computed from `held` on."""
    executor.grow(row, len(TOKENS))
    work = SequenceWork(row, held, TOKENS[held:])
    return executor.step([work], [TokenDraw(Sampling(), len(TOKENS))])[0].token


@pytest.mark.parametrize("cut", [1, 16, 33, 101])
def test_caches_go_in_and_out_by_layer(
    cut: int, shared: PipelineExecutor, alone: LocalExecutor, expected: list[list[SampledToken]]
) -> None:
    """Through a pipeline and back: one process to the pipeline, another stretch there, and on to one process."""
    text, middle = expected[2][0].token, min(cut + 20, len(TOKENS) - 1)
    for first, second in ((alone, shared), (shared, alone)):
        row = first.open()
        first.grow(row, cut)
        first.step([SequenceWork(row, 0, TOKENS[:cut], "none")], [])
        there = second.open()
        arrive(second, there, cargo(first, row, 0, cut), 0, cut)
        second.grow(there, middle)
        second.step([SequenceWork(there, cut, TOKENS[cut:middle], "none")], [])
        back = first.open()
        arrive(first, back, cargo(second, there, 0, middle), 0, middle)
        assert tail(first, back, middle) == text
        assert tail(second, there, middle) == text
        for executor, used in ((first, row), (first, back), (second, there)):
            executor.close(used)
    alone.check()
    shared.check()


def test_layers_go_out_while_the_step_runs_in_order(shared: PipelineExecutor, alone: LocalExecutor) -> None:
    result: dict[str, list[KvChunk]] = {"shared": [], "alone": []}
    for name, executor in (("shared", shared), ("alone", alone)):
        row, other = executor.open(), executor.open()
        for item in (row, other):
            executor.grow(item, len(TOKENS))

        def deliver(of: int, chunks: tuple[KvChunk, ...], want: int = row, name: str = name) -> None:
            assert of == want
            result[name] += [replace(chunk, data=bytes(chunk.data)) for chunk in chunks]

        works = [SequenceWork(other, 0, TOKENS[:50], "none"), SequenceWork(row, 0, TOKENS, "none")]
        executor.begin(StepInputs(works, [], [CacheExport(row, 0, len(TOKENS))], deliver))()
        assert result[name] == cargo(executor, row, 0, len(TOKENS))
        executor.close(row)
        executor.close(other)
    assert result["shared"] == result["alone"]
    layers = [chunk.layer for chunk in result["shared"]]
    assert layers == sorted(layers)


def test_steps_under_way_at_once_do_not_disturb_each_other(
    shared: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    """Two groups of requests go round in turn; each says what it would say alone."""
    prompts = [PROMPTS[:2], PROMPTS[2:]]
    rows = [[shared.open() for _ in group] for group in prompts]
    tokens = [[list(item) for item in group] for group in prompts]
    for row in (item for group in rows for item in group):
        shared.grow(row, 150)

    def begin(group: int) -> Callable[[], list[SampledToken]]:
        held = [shared.held(row) for row in rows[group]]
        works = [SequenceWork(r, h, t[h:]) for r, h, t in zip(rows[group], held, tokens[group], strict=True)]
        return shared.begin(StepInputs(works, [TokenDraw(Sampling(), len(item)) for item in tokens[group]]))

    runs = [begin(0), begin(1)]
    for turn in range(12):
        group = turn % 2
        for sequence, sampled_token in zip(tokens[group], runs[group](), strict=True):
            sequence.append(sampled_token.token)
        if turn < 10:
            runs[group] = begin(group)
    text = [item[-6:] for group in tokens for item in group]
    assert text == [[sampled_token.token for sampled_token in item] for item in expected]
    for row in (item for group in rows for item in group):
        shared.close(row)


def test_a_bad_hand_over_is_one_error_and_the_pipeline_lives_on(
    shared: PipelineExecutor, alone: LocalExecutor, expected: list[list[SampledToken]]
) -> None:
    row = alone.open()
    alone.grow(row, 40)
    alone.step([SequenceWork(row, 0, TOKENS[:40], "none")], [])
    good = cargo(alone, row, 0, 40)
    alone.close(row)
    wrong = [
        replace(good[1], data=good[1].data[:-4]),
        replace(good[1], dtype="float16"),
        replace(good[1], layer=9),
        replace(good[-1], stop=39),
    ]
    for chunk in wrong:
        there = shared.open()
        arrival = shared.arrival(there, manifest(shared, 0, 40), TOKENS)
        with pytest.raises(InputError):
            arrival.accept(chunk)
        shared.close(there)
    there = shared.open()
    with pytest.raises(InputError, match="are missing"):
        shared.arrival(there, manifest(shared, 0, 40), TOKENS).finish()
    shared.close(there)
    there = shared.open()
    with pytest.raises(InputError, match="other weights"):
        shared.arrival(there, replace(manifest(shared, 0, 40), fingerprint="x"), TOKENS)
    shared.close(there)
    shared.check()
    assert generate(shared, PROMPTS[:1]) == expected[:1]


def test_what_cannot_be_run_is_refused_and_changes_nothing(
    shared: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    loop = Loop(shared, PROMPTS[1:2], most=64)
    row = loop.rows[0]
    good = [TokenDraw(Sampling(), 5)]
    for work in (
        SequenceWork(row, 0, [9999]),
        SequenceWork(row, 0, [-1]),
        SequenceWork(row, 3, [1]),
        SequenceWork(row, 0, [1] * 65),
    ):
        with pytest.raises(InputError):
            shared.step([work], good)
    with pytest.raises(InputError):
        shared.step([SequenceWork(row, 0, [1])], [])
    with pytest.raises(CapacityError):
        shared.grow(row, SIZE.max_tokens + 1)
    while len(loop.said[0]) < 4:
        loop.step(64)
    loop.close()
    assert loop.said[0] == expected[1][:4]


def test_a_pipeline_is_refused_for_a_reason(workers: list[tuple[str, int]]) -> None:
    with pytest.raises(InputError, match="have 4 layers, the model has 5"):
        pipeline(HYBRID, "1,3", workers)
    with pytest.raises(LinkError, match="secret|closed"):
        launch(PLAIN, placed("3", workers), SIZE, seed=SEED, secret=b"another secret altogether")
    with pytest.raises(InputError, match="is missing"):
        launch(PLAIN, placed("1,2", workers), SIZE, directory="/nowhere/at/all", secret=SECRET)
    executor = pipeline(PLAIN, "1,2", workers)  # they still stand
    executor.shutdown()


@pytest.mark.parametrize(
    "text", ["", "x", "3x", "0", "3x0", "-1", "3@", "3@host", "3@host:0", "2x2@h:1", "3x999"]
)
def test_stages_that_make_no_sense(text: str) -> None:
    with pytest.raises(PotluckError, match="stages"):
        parse_stages(text)


def test_stages_as_written() -> None:
    one, two = parse_stages("3, 5x2")
    assert (one.layers, len(one.places), two.layers, len(two.places)) == (3, 1, 5, 2)
    _, far = parse_stages("3,5@a:7000+[::1]:7001")
    assert [place.address for place in far.places] == [("a", 7000), ("[::1]", 7001)]


SIZES = st.lists(st.one_of(st.just(1), st.integers(1, 600)), min_size=1, max_size=24)


@given(SIZES, st.integers(1, 6), st.data())
def test_pieces_make_up_the_works_in_order(sizes: list[int], batches: int, data: st.DataObject) -> None:
    works = [SequenceWork(row, row * 3, list(range(size))) for row, size in enumerate(sizes)]
    paths = [(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))) for _ in sizes]
    result = cut(works, paths, batches, 1)
    assert 1 <= len(result) <= batches
    assert all(result)
    for index, work in enumerate(works):
        pieces = [piece for batch in result for piece in batch if piece.work == index]
        assert [token for piece in pieces for token in piece.part.tokens] == list(work.tokens)
        assert [piece.part.start for piece in pieces] == [
            work.start + sum(len(before.part.tokens) for before in pieces[:place])
            for place in range(len(pieces))
        ]
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.part.logits for piece in pieces] == ["none"] * (len(pieces) - 1) + ["last"]
        assert {piece.path for piece in pieces} == {paths[index]}
        assert all(len(piece.part.tokens) >= LEAST_TOKENS for piece in pieces if len(pieces) > 1)
        rows = [{piece.part.row for piece in batch} for batch in result]
        assert all(len(rows[place]) == len(batch) for place, batch in enumerate(result))


@given(SIZES, st.integers(1, 6))
def test_micro_batches_are_about_as_large_as_each_other(sizes: list[int], batches: int) -> None:
    """None is larger than its share by more than a piece that could not be cut."""
    works = [SequenceWork(row, 0, [0] * size) for row, size in enumerate(sizes)]
    result = cut(works, [(0,)] * len(works), batches, 1)
    goal = -(-sum(sizes) // min(batches, sum(sizes)))
    for batch in result:
        assert sum(len(piece.part.tokens) for piece in batch) <= goal + 2 * LEAST_TOKENS


def test_decodes_are_shared_out_and_one_alone_is_not() -> None:
    works = [SequenceWork(row, 5, [1]) for row in range(8)]
    result = cut(works, [(row % 2,) for row in range(8)], 2, 4)
    assert [[piece.path for piece in batch] for batch in result] == [[(0,)] * 4, [(1,)] * 4]
    assert len(cut(works[:1], [(0,)], 4, 1)) == 1
    assert len(cut(works, [(0,)] * 8, 2, 5)) == 1, "too few tokens to be worth it"


def test_a_long_chunk_is_spread_over_the_stages() -> None:
    result = cut([SequenceWork(0, 10, [0] * 400)], [(0,)], 4, 100)
    assert [len(batch[0].part.tokens) for batch in result] == [100] * 4


@pytest.mark.parametrize(
    ("text", "lanes"), [("4", 1), ("3,3", 2), ("2,4", 1), ("2,2,2", 3), ("1,3x2,1,1", 2), ("1,1,1,1", 4)]
)
def test_no_more_batches_go_round_than_the_slowest_stage_has_time_for(text: str, lanes: int) -> None:
    assert microbatches_for(parse_stages(text)) == lanes


@pytest.fixture(scope="module")
def expected_returns() -> list[list[SampledToken]]:
    return generate(local(PLAIN), count=6)


class Stage:
    """Workers at addresses of their own, each of which can end, and stand there again."""

    def __init__(self, count: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.addresses = [("127.0.0.1", int(listener.getsockname()[1])) for listener in self.listeners]
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
    expected_returns: list[list[SampledToken]], stage: int, worker: int, place: int
) -> None:
    """Of the first stage, of one that two share, of the last."""
    workers = Stage(4)
    executor = pipeline(PLAIN, "1,1x2,1", workers.addresses)
    assert executor._rejoining is not None
    executor._rejoining._retry_s = 0.05
    try:
        assert generate(executor, count=6) == expected_returns
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
        assert generate(executor, count=6) == expected_returns
        assert executor.degraded() == ""
        executor.check()
    finally:
        executor.shutdown()


WAIT_S = 60.0  # Nobody is given up because the machine has much else to do.


@pytest.fixture(scope="module")
def expected_loss() -> list[list[SampledToken]]:
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


def keep_stepping_loss(loop: Loop) -> None:
    for _ in range(100):
        loop.step(200)


def go_on_without(loop: Loop, lost: tuple[int, ...], expected_loss: list[list[SampledToken]]) -> None:
    """Those that are lost are closed; the others say what they would have said."""
    left = [index for index, row in enumerate(loop.rows) if row not in lost]
    while any(len(loop.said[index]) < 8 for index in left):
        loop.step(64, left)
    assert [loop.said[index][:8] for index in left] == [expected_loss[index] for index in left]
    loop.close()


def test_processes_say_what_one_process_says(
    processes: PipelineExecutor, expected_loss: list[list[SampledToken]]
) -> None:
    assert generate(processes, count=8) == expected_loss
    assert processes.health() == ""
    processes.check()


def test_a_worker_that_dies_between_steps_loses_its_own_requests(
    processes: PipelineExecutor, expected_loss: list[list[SampledToken]]
) -> None:
    loop = Loop(processes, PROMPTS)
    loop.step(200)
    victim = second_stage(processes, loop.rows[0])
    has = [row for row in loop.rows if second_stage(processes, row) is victim]
    os.kill(pid(victim), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="stage 1 worker . is gone") as caught:
        keep_stepping_loss(loop)
    assert sorted(caught.value.rows) == sorted(has)
    assert 0 < len(has) < len(loop.rows)
    assert processes.health() == ""
    assert "1 of 4 workers are lost" in processes.degraded()
    assert victim.name in processes.degraded()
    assert processes.notes()["pipeline_workers_lost"] == 1
    go_on_without(loop, caught.value.rows, expected_loss)
    processes.check()
    assert generate(processes, count=8) == expected_loss, "new requests go to the workers that are left"


def test_a_worker_that_dies_in_a_step_loses_its_own_requests(
    processes: PipelineExecutor, expected_loss: list[list[SampledToken]]
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
    go_on_without(loop, caught.value.rows, expected_loss)
    processes.check()


def test_a_worker_that_hangs_is_given_up_and_without_workers_nothing_begins(
    processes: PipelineExecutor,
) -> None:
    loop = Loop(processes, PROMPTS[:2])
    os.kill(pid(second_stage(processes, loop.rows[0])), signal.SIGSTOP)
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
        keep_stepping_loss(loop)
    assert set(caught.value.rows) <= set(loop.rows)
    loop.close()
    executor.check()
    assert len(generate(executor, PROMPTS[:2])) == 2
    executor.shutdown()


def test_a_worker_serves_one_driver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BUSY_S", 0.05)
    addresses = standing(1)
    first = pipeline(PLAIN, "3", addresses)
    with pytest.raises(LinkError, match="does it serve another driver"):
        pipeline(PLAIN, "3", addresses)
    assert len(generate(first, PROMPTS[:1], count=1)) == 1
    first.shutdown()
