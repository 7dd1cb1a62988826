"""Several steps under way at once: the same tokens, whoever leaves or is lost meanwhile, and nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
from engine_models import KINDS, VOCAB, prompt
from loop_helpers import LoopHarness, alone, harness

from potluck.core.replica.batch import BatchLimits, BatchStep
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import (
    CacheExport,
    RunnerSize,
    SequenceWork,
    StepInputs,
    TokenDraw,
    WorkerLost,
    last_drawn,
)
from potluck.engine.compute.handover import ranges
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.loop import engine_loop
from potluck.engine.loop.jobs import OutputToken
from potluck.engine.loop.microbatches import Microbatches, RunningStep
from potluck.engine.model.checkpoint import RandomSource
from potluck.kv.assembly import MissingParts

SIZE = RunnerSize(24, 1000, 1024, 512)


class Late(LocalExecutor):
    """Steps are computed when they are awaited; touching a row that is under way is an error."""

    microbatches = 3

    def __init__(self, kind: str, size: RunnerSize = SIZE) -> None:
        super().__init__(Runner(KINDS[kind], RandomSource(7), size), size)
        self.under_way: set[int] = set()
        self.most_at_once = 0
        self.lose: Callable[[set[int]], Sequence[int]] = lambda _: ()

    def step(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        return super().begin(StepInputs(works, draws))()

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        mine = {work.row for work in step.works}
        assert not mine & self.under_way
        self.under_way |= mine
        self.most_at_once = max(self.most_at_once, len(self.under_way))

        def land() -> list[SampledToken]:
            self.under_way -= mine
            lost = self.lose(mine)
            if lost:
                raise WorkerLost(lost, "worker 2 is gone")
            return super(Late, self).begin(step)()

        return land

    def close(self, row: int) -> None:
        assert row not in self.under_way
        super().close(row)

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        assert row not in self.under_way
        super().grow(row, tokens, since)


def late(kind: str, **fields: int) -> LoopHarness:
    return LoopHarness(KINDS[kind], executor=Late(kind), **fields)  # type: ignore[arg-type]


ASKS = [(length, output) for length in (1, 30, 77, 150) for output in (1, 9, 20)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_microbatches(kind: str) -> None:
    engine, plain = late(kind, chunk=40, prefix_bytes=200_000), harness(kind)
    keys = [engine.submit(prompt(length, output), output) for length, output in ASKS]
    engine.run()
    assert engine.executor.most_at_once > len(ASKS) / 2  # type: ignore[attr-defined]
    for key, (length, output) in zip(keys, ASKS, strict=True):
        assert engine.tokens(key) == plain.answer(prompt(length, output), output)
    assert engine.loop.counters.checks


def test_lone_request_runs_in_any_microbatch() -> None:
    engine = late("full")
    assert [len(engine.answer(prompt(20), 5)) for _ in range(7)] == [5] * 7
    assert engine.loop.idle


def test_requests_that_end_during_a_step_leave_nothing_behind() -> None:
    chance = random.Random(3)
    engine = LoopHarness(KINDS["hybrid"], executor=Late("hybrid"), blocks=200, lease_s=0.3)
    keys: list[int] = []
    for _ in range(120):
        tokens = prompt(chance.randrange(2, 90), chance.randrange(4))
        if chance.random() < 0.3:
            keys.append(engine.submit(tokens, stop=chance.randrange(1, len(tokens) + 1)))
        else:
            keys.append(engine.submit(tokens, chance.randrange(1, 30)))
        engine.turn()
        if chance.random() < 0.6:
            engine.loop.cancel(chance.choice(keys[-8:]), engine.now_s)
    for _ in range(2000):
        engine.turn()
        if engine.loop.idle:
            break
    engine.loop.check()
    assert engine.loop.counters.checks == 1
    # Nobody fetches, and others wait for the rows.
    assert {engine.end(key).reason for key in keys} == {"length", "cancelled", "handed_on"}


@pytest.mark.parametrize("turns", range(1, 9))
def test_receiver_may_attach_at_any_step(turns: int) -> None:
    """Also while the last step of the sender's segment is under way."""
    sender = late("hybrid", chunk=16)
    source = sender.submit(prompt(50), stop=50)
    for _ in range(turns):
        sender.turn()
    about = sender.loop.attach(source, 0, sender.now_s)
    sender.run()
    assert sender.end(source).reason == "handed_on"
    books = MissingParts(ranges(KINDS["hybrid"].model, 0, about.stop))
    for chunk in sender.chunks(source):
        books.take(chunk)
    books.must_be_whole()


def test_lost_rows_end_in_every_microbatch() -> None:
    """Two of the rows that one step finds gone are under way in other lanes' steps."""
    engine = late("full")
    keys = [engine.submit(prompt(20, place), 12) for place in range(9)]
    for _ in range(6):
        engine.turn()
    executor = engine.executor
    assert isinstance(executor, Late)
    gone: set[int] = set()

    def lose(mine: set[int]) -> Sequence[int]:
        if not gone:
            gone.update([min(mine), *sorted(executor.under_way)[:2]])
            return sorted(gone)
        return sorted(gone & mine)

    executor.lose = lose
    engine.run()
    reasons = [engine.end(key).reason for key in keys]
    assert reasons.count("error") == len(gone) == 3
    assert reasons.count("length") == 6
    for place, (key, reason) in enumerate(zip(keys, reasons, strict=True)):
        if reason == "length":
            assert engine.tokens(key) == alone("full", 20, 12, place)
    assert engine.loop.idle


def test_lost_rows_of_a_step_are_removed_with_their_draws_and_exports() -> None:
    works = [SequenceWork(row, 0, [1], "none" if row == 2 else "last") for row in (1, 2, 3)]
    draws = [TokenDraw(Sampling(seed=row), 1) for row in (1, 3)]
    req = RunningStep(BatchStep([], 3, 0, 0, []), 0.0, works, draws, [CacheExport(2, 0, 1)])
    assert req.lost(WorkerLost([2, 9], "gone")) == {2, 9}
    assert req.lost(WorkerLost([9], "gone")) == req.lost(RuntimeError()) | {9} == {1, 2, 3, 9}
    req.without({1})
    assert (req.works, req.draws, req.drawn) == (works[1:], draws[1:], [3])
    req.without({2, 9})
    assert (req.works, req.draws, req.exports, req.tokens) == (works[2:], draws[1:], [], 1)


CUTS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.8}, {"logprobs": 2}, {"presence_penalty": 1.5})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_steps_begun_ahead_give_equal_tokens(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops, is cancelled, preempted or hands on while the next step is under way, in any company."""

    def answered(ordered: bool) -> tuple[LoopHarness, set[int]]:
        monkeypatch.setattr(LocalExecutor, "ordered", ordered)
        chance, whole = random.Random(seed), set[int]()
        engine = harness(kind, blocks=34, rows=12, max_running=8, chunk=40, prefix_bytes=60_000, lease_s=0.2)
        unknown = set[int]()  # rows whose next token was not known when they went on
        monkeypatch.setattr(engine_loop, "last_drawn", lambda row: unknown.add(row) or last_drawn(row))
        for _ in range(60):
            tokens, output = prompt(chance.randrange(2, 120), chance.randrange(4)), chance.randrange(-10, 40)
            ends = frozenset(chance.sample(range(VOCAB), VOCAB // 16))
            sampling = Sampling(float(chance.random() < 0.7), seed=7, **chance.choice(CUTS))  # type: ignore[arg-type]
            stop = len(tokens) if output < 1 else None
            key = engine.submit(tokens, max(0, output), stop=stop, ends=ends, sampling=sampling)
            for _ in range(chance.randrange(3)):
                engine.turn()
            if chance.random() < 0.2:
                engine.loop.cancel(key, engine.now_s)
            elif stop is None:
                whole.add(key)
        engine.run(most=9000)
        engine.now_s += 1.0  # leases end
        engine.run()
        assert engine.loop.idle
        assert bool(unknown) == ordered
        return engine, whole

    (plain, whole), (ahead, _) = answered(ordered=False), answered(ordered=True)
    for key in whole:
        one, two = (
            [e.choice for e in each.said[key] if isinstance(e, OutputToken)] for each in (plain, ahead)
        )
        assert one == two
        assert plain.end(key).reason == ahead.end(key).reason
    assert {"stop", "length", "cancelled", "handed_on"} <= ahead.loop.counters.ended.keys()
    assert ahead.loop.counters.preemptions > 0


def test_microbatch_count_is_limited_by_the_longest_request() -> None:
    limits = BatchLimits(100, 64, 10)
    counts = [len(Microbatches(limits, 4, tokens).all) for tokens in (1600, 801, 800, 400, 16)]
    assert counts == [1, 1, 2, 4, 4]
    assert len(Microbatches(BatchLimits(100, 64, 2), 4, 16).all) == 2
    lanes = Microbatches(limits, 3, 100)
    assert (lanes.limits.total_blocks, lanes.limits.max_running, lanes.most_tokens) == (99, 9, 33 * 16)
    for key in range(6):
        lanes.add(key, 10, 0, 5, 0)
    assert [len(lane.batcher.keys()) for lane in lanes.all] == [2, 2, 2]
    assert lanes.reserve(9, 500)
    assert not lanes.reserve(10, 530)
    lanes.cancel(9)
    for key in (*range(6), 77):
        lanes.cancel(key)
    assert lanes.free_blocks == 99
    assert not lanes.keys()


def test_stopped_engine_refuses_every_later_request() -> None:
    """Nothing that is asked is left without an answer, whenever it is asked."""
    from potluck.engine.loop.loop_thread import LoopStopped, LoopThread

    loop_thread = LoopThread(harness("full").loop)
    loop_thread.start()
    futures = []
    asker = threading.Thread(
        target=lambda: futures.extend(loop_thread.ask(lambda _, now: now) for _ in range(4000))
    )
    asker.start()
    loop_thread.stop()
    asker.join()
    problems = [future.exception(timeout=30) for future in futures]
    assert len(problems) == 4000
    assert all(problem is None or isinstance(problem, LoopStopped) for problem in problems)
    assert isinstance(loop_thread.ask(lambda _, now: now).exception(30), LoopStopped)
