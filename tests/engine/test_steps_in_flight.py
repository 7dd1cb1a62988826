"""Steps that stay under way between turns: the same tokens, whatever ends meanwhile, and nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
from engine_models import KINDS, VOCAB, prompt
from loop_helpers import LoopHarness, harness

from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import (
    RunnerSize,
    SequenceWork,
    StepInputs,
    TokenDraw,
    last_drawn,
)
from potluck.engine.compute.handover import ranges
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.loop import engine_loop
from potluck.engine.loop.jobs import OutputToken
from potluck.engine.model.checkpoint import RandomSource
from potluck.kv.assembly import MissingParts

SIZE = RunnerSize(24, 1000, 1024, 512)


class Late(LocalExecutor):
    """Steps are computed when they are awaited; touching a row that is under way is an error."""

    def __init__(self, kind: str, size: RunnerSize = SIZE) -> None:
        super().__init__(Runner(KINDS[kind], RandomSource(7), size), size)
        self.under_way: set[int] = set()

    def step(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        return super().begin(StepInputs(works, draws))()

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        mine = {work.row for work in step.works}
        assert not mine & self.under_way
        self.under_way |= mine

        def land() -> list[SampledToken]:
            self.under_way -= mine
            return super(Late, self).begin(step)()

        return land

    def close(self, row: int) -> None:
        assert row not in self.under_way
        super().close(row)

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        assert row not in self.under_way
        super().grow(row, tokens, since)


def late(kind: str, **fields: float) -> LoopHarness:
    return LoopHarness(KINDS[kind], executor=Late(kind), await_steps=False, **fields)  # type: ignore[arg-type]


ASKS = [(length, output) for length in (1, 30, 77, 150) for output in (1, 9, 20)]


@pytest.mark.parametrize("kind", KINDS)
def test_engine_with_steps_in_flight_draws_the_tokens_of_one_that_awaits_each_step(kind: str) -> None:
    engine, plain = late(kind, chunk=40, prefix_bytes=200_000), harness(kind)
    keys = [engine.submit(prompt(length, output), output) for length, output in ASKS]
    engine.run()
    for key, (length, output) in zip(keys, ASKS, strict=True):
        assert engine.tokens(key) == plain.answer(prompt(length, output), output)
    assert engine.loop.counters.checks


def test_requests_that_end_during_a_step_leave_nothing_behind() -> None:
    chance = random.Random(3)
    engine = late("hybrid", blocks=200, lease_s=0.3)
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
