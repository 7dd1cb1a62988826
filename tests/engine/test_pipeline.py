"""Pipelines say what one process says: any stages, any sharing, any cut; and what is wrong is said plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
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
from potluck.engine.compute.executor import CacheExport, Executor, TokenDraw
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import SequenceWork
from potluck.engine.memory.handover import KvChunk, KvManifest, token_hash
from potluck.engine.pipeline.launch import launch, parse_stages
from potluck.engine.pipeline.pipeline_connection import LinkError
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.pipeline.pipeline_step import PipelineStep

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
def test_chunks_do_not_matter(
    chunk: int, shared: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    prompts = PROMPTS[:3] if chunk > 1 else PROMPTS[:2]
    assert generate(shared, prompts, chunk=chunk) == expected[: len(prompts)]


def test_chance_and_probabilities_are_the_same(shared: PipelineExecutor, alone: LocalExecutor) -> None:
    way = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=2)
    found, expected = generate(shared, way=way), generate(alone, way=way)
    assert shared.exact == alone.exact
    if alone.exact.holds:
        assert found == expected
    else:
        assert [[choice.token for choice in said] for said in found] == [
            [choice.token for choice in said] for said in expected
        ]
    assert all(choice.logprob is not None and len(choice.top) == 2 for said in found for choice in said)


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
    found = [parcel for layer in layers for parcel in executor.export(row, layer, start, stop)]
    return [replace(parcel, data=bytes(parcel.data)) for parcel in found]


def manifest(executor: Executor, start: int, stop: int) -> KvManifest:
    return KvManifest(executor.fingerprint, start, stop, token_hash(TOKENS[:stop]))


def arrive(executor: Executor, row: int, parcels: list[KvChunk], start: int, stop: int) -> None:
    arrival = executor.arrival(row, manifest(executor, start, stop), TOKENS)
    assert arrival.missing == len(parcels)
    for parcel in parcels:
        arrival.accept(parcel)
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
    said, middle = expected[2][0].token, min(cut + 20, len(TOKENS) - 1)
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
        assert tail(first, back, middle) == said
        assert tail(second, there, middle) == said
        for executor, used in ((first, row), (first, back), (second, there)):
            executor.close(used)
    alone.check()
    shared.check()


def test_layers_go_out_while_the_step_runs_in_order(shared: PipelineExecutor, alone: LocalExecutor) -> None:
    found: dict[str, list[KvChunk]] = {"shared": [], "alone": []}
    for name, executor in (("shared", shared), ("alone", alone)):
        row, other = executor.open(), executor.open()
        for each in (row, other):
            executor.grow(each, len(TOKENS))

        def deliver(of: int, parcels: tuple[KvChunk, ...], want: int = row, name: str = name) -> None:
            assert of == want
            found[name] += [replace(parcel, data=bytes(parcel.data)) for parcel in parcels]

        works = [SequenceWork(other, 0, TOKENS[:50], "none"), SequenceWork(row, 0, TOKENS, "none")]
        executor.step(works, [], [CacheExport(row, 0, len(TOKENS))], deliver)
        assert found[name] == cargo(executor, row, 0, len(TOKENS))
        executor.close(row)
        executor.close(other)
    assert found["shared"] == found["alone"]
    layers = [parcel.layer for parcel in found["shared"]]
    assert layers == sorted(layers)


def test_steps_under_way_at_once_do_not_disturb_each_other(
    shared: PipelineExecutor, expected: list[list[SampledToken]]
) -> None:
    """Two groups of requests go round in turn; each says what it would say alone."""
    prompts = [PROMPTS[:2], PROMPTS[2:]]
    rows = [[shared.open() for _ in group] for group in prompts]
    tokens = [[list(each) for each in group] for group in prompts]
    for row in (each for group in rows for each in group):
        shared.grow(row, 150)

    def begin(group: int) -> PipelineStep:
        held = [shared.held(row) for row in rows[group]]
        works = [SequenceWork(r, h, t[h:]) for r, h, t in zip(rows[group], held, tokens[group], strict=True)]
        return shared.submit(works, [TokenDraw(Sampling(), len(each)) for each in tokens[group]])

    runs = [begin(0), begin(1)]
    for turn in range(12):
        group = turn % 2
        for sequence, choice in zip(tokens[group], shared.collect(runs[group]), strict=True):
            sequence.append(choice.token)
        if turn < 10:
            runs[group] = begin(group)
    said = [each[-6:] for group in tokens for each in group]
    assert said == [[choice.token for choice in each] for each in expected]
    for row in (each for group in rows for each in group):
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
    for parcel in wrong:
        there = shared.open()
        arrival = shared.arrival(there, manifest(shared, 0, 40), TOKENS)
        with pytest.raises(InputError):
            arrival.accept(parcel)
        shared.close(there)
    there = shared.open()
    with pytest.raises(InputError, match="parcels are missing"):
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
