"""The loop: the same tokens however the work is cut, batched, preempted or handed over, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from loop_helpers import KINDS, VOCAB, harness, manifest, prompt, reference_answer, transfer_kv

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import SequenceWork, StepInputs, TokenDraw
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.loop import engine_loop
from potluck.engine.loop.jobs import Job, JobEnded

LENGTH, OUTPUT = 150, 12


@pytest.fixture(params=["awaited", "ahead"], autouse=True)
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step awaited before the next is made, and begun before the last one's tokens are known, as on a GPU."""
    monkeypatch.setattr(LocalExecutor, "ordered", request.param == "ahead")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_tokens_do_not_depend_on_chunk_size(kind: str, chunk: int) -> None:
    assert harness(kind, chunk=chunk).answer(prompt(LENGTH), OUTPUT) == reference_answer(kind, LENGTH, OUTPUT)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_other_requests(kind: str) -> None:
    engine, chance, keys = harness(kind), random.Random(3), list[int]()
    for place in range(17):
        if place == 8:
            mine = engine.submit(prompt(LENGTH), OUTPUT)
        else:
            keys.append(engine.submit(prompt(chance.randrange(1, 90), place), chance.randrange(1, 20)))
        engine.turn()
    engine.run()
    assert engine.tokens(mine) == reference_answer(kind, LENGTH, OUTPUT)
    assert all(engine.end(key).reason == "length" for key in keys)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_preemption(kind: str) -> None:
    # The important one grows into what the other has.
    engine = harness(kind, blocks=22)
    mine = engine.submit(prompt(LENGTH), 40)
    other = engine.submit(prompt(150, 5), 60, priority=1)
    engine.run()
    assert engine.loop.counters.preemptions > 0
    assert engine.tokens(mine) == reference_answer(kind, LENGTH, 40)
    assert engine.tokens(other) == reference_answer(kind, 150, 60, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [0, 2, 5, 99])
@pytest.mark.parametrize("cut", [1, 50, 64, LENGTH])
def test_tokens_do_not_depend_on_a_kv_transfer(kind: str, turns: int, cut: int) -> None:
    first, second = harness(kind, chunk=40), harness(kind)
    source, other = first.submit(prompt(LENGTH), stop=cut), first.submit(prompt(20, 1), 12)
    target = second.submit(prompt(LENGTH), OUTPUT, start=cut)
    transfer_kv(first, source, second, target, turns=turns)
    assert second.tokens(target) == reference_answer(kind, LENGTH, OUTPUT)
    assert first.end(source).reason == "handed_on"
    assert first.tokens(other) == reference_answer(kind, 20, 12, 1)
    assert first.loop.idle
    assert second.loop.idle


def test_kv_copied_to_the_host_is_bounded_by_its_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "HOST_KV_MAX_BYTES", 1)
    engine = harness("full", rows=22)  # Two may hand on at once.
    keys = [engine.submit(prompt(40, place), stop=40) for place in range(5)]
    for key in keys:
        engine.loop.attach(key, 0, engine.now_s)
    waits = bool(engine.executor.ordered)
    for begun in (2, 4, 5):
        engine.run()
        done = [key for key in keys if any(isinstance(event, JobEnded) for event in engine.said.get(key, ()))]
        assert done == (keys[:begun] if waits else keys)
        for key in done:
            engine.loop.delivered(key)
    assert not engine.loop.host_bytes
    assert engine.loop.idle


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_tokens_do_not_depend_on_two_kv_transfers(kind: str) -> None:
    one, two, three = harness(kind), harness(kind), harness(kind)
    a = one.submit(prompt(LENGTH), stop=37)
    b = two.submit(prompt(LENGTH), start=37, stop=120)
    c = three.submit(prompt(LENGTH), OUTPUT, start=120)
    transfer_kv(one, a, two, b)
    transfer_kv(two, b, three, c, late=True)
    assert three.tokens(c) == reference_answer(kind, LENGTH, OUTPUT)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_a_cached_prefix(kind: str) -> None:
    engine = harness(kind, prefix_bytes=10_000_000)
    assert engine.answer(prompt(LENGTH), OUTPUT) == reference_answer(kind, LENGTH, OUTPUT)
    again = engine.submit(prompt(LENGTH), OUTPUT)
    engine.run()
    assert engine.tokens(again) == reference_answer(kind, LENGTH, OUTPUT)
    assert engine.end(again).times.cached_tokens == (LENGTH - 1) // 16 * 16
    # A conversation goes on behind what was answered.
    more = prompt(LENGTH) + reference_answer(kind, LENGTH, OUTPUT) + prompt(30, 9)
    turn = engine.submit(more, OUTPUT)
    engine.run()
    assert engine.tokens(turn) == harness(kind).answer(more, OUTPUT)
    assert engine.end(turn).times.cached_tokens >= LENGTH


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_prefix_cached_at_the_receiver_is_not_transferred(kind: str) -> None:
    first, second = harness(kind), harness(kind, prefix_bytes=10_000_000)
    second.answer(prompt(LENGTH), 1)
    source = first.submit(prompt(LENGTH), stop=LENGTH)
    target = second.submit(prompt(LENGTH), OUTPUT, start=LENGTH)
    transfer_kv(first, source, second, target)
    assert second.tokens(target) == reference_answer(kind, LENGTH, OUTPUT)
    sent = first.chunks(source)
    assert all(chunk.first >= 100 for chunk in sent if chunk.part in ("kv", "latent"))


def test_small_prefix_cache_evicts_without_wrong_tokens() -> None:
    for kind, room in (("full", 60_000), ("hybrid", 200_000)):
        engine = harness(kind, prefix_bytes=room, chunk=32, max_running=2)
        chance = random.Random(4)
        wanted: dict[int, list[int]] = {}
        plain = harness(kind)
        base = prompt(200, 11)
        keys = {}
        ends = [(chance.randrange(20, 200), chance.randrange(1, 40)) for _ in range(5)]
        for turn in range(14):
            shared, own = ends[chance.randrange(5)]
            tokens = base[:shared] + prompt(own, shared)
            wanted[turn] = plain.answer(tokens, 4)
            keys[turn] = engine.submit(tokens, 4)
            engine.turn()
        engine.run()
        assert {turn: engine.tokens(key) for turn, key in keys.items()} == wanted
        assert engine.prefixes.used_bytes <= room
        assert engine.loop.counters.prefix_hits > 0


def test_sampled_tokens_depend_on_seed_and_position_only() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    single = harness("full").answer(prompt(40), 20, sampling=sampling)
    crowd = harness("full", chunk=9)
    for other in range(5):
        crowd.submit(prompt(30, other), 10)
    assert crowd.answer(prompt(40), 20, sampling=sampling) == single
    # A replay behind the tokens that were streamed goes on with the same ones.
    assert harness("full").answer(prompt(40) + single[:8], 12, sampling=sampling) == single[8:]


def test_end_token_ends_the_answer() -> None:
    whole = reference_answer("full", 40, 20)
    engine = harness("full")
    key = engine.submit(prompt(40), 20, ends=frozenset({whole[5]}))
    engine.run()
    assert engine.tokens(key) == whole[: whole.index(whole[5]) + 1]
    assert engine.end(key).reason == "stop"


def test_requests_run_in_order_of_priority() -> None:
    engine = harness("full", max_running=1, rows=4)
    keys = [engine.submit(prompt(20, n), 5, priority=n) for n in range(3)]
    engine.run()
    began = [engine.end(key).times.began_s or 0 for key in keys]
    assert began[0] > began[1] > began[2]


@pytest.mark.parametrize("kind", ["full-fancy", "latent"])
def test_tokens_do_not_depend_on_row_order_in_memory(kind: str) -> None:
    # The long one takes the home of the last, whose block then lies before that of the one before it.
    engine, plain = harness(kind, blocks=8, rows=4, max_running=2), harness(kind)
    lengths = (70, 5, 6, 7)
    rows = [engine.executor.open() for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        engine.executor.grow(row, length + 1)
        engine.executor.step([SequenceWork(row, 0, prompt(length, row), "none")], [])
    last = list(zip(rows, lengths, strict=True))[2:]
    works = [SequenceWork(row, length, [9]) for row, length in last]
    result = engine.executor.step(works, [TokenDraw(Sampling(), length + 1) for _, length in last])
    for (row, length), choice in zip(last, result, strict=True):
        assert plain.answer([*prompt(length, row), 9], 1) == [choice.token]


def test_random_cancellations_leak_no_blocks() -> None:
    chance = random.Random(8)
    engine = harness("hybrid", blocks=120, rows=8, max_running=5, chunk=30, prefix_bytes=100_000, lease_s=0.2)
    keys = []
    for _ in range(150):
        tokens = prompt(chance.randrange(2, 120), chance.randrange(4))
        kind = chance.randrange(4)
        if kind == 0:
            keys.append(engine.submit(tokens, stop=chance.randrange(1, len(tokens) + 1)))
        elif kind == 1:
            start = chance.randrange(min(2, len(tokens)), len(tokens) + 1)
            keys.append(engine.submit(tokens, 8, start=start))
            engine.loop.expect(keys[-1], manifest(engine, keys[-1], tokens, start))
        else:
            keys.append(engine.submit(tokens, chance.randrange(1, 30)))
        for _ in range(chance.randrange(3)):
            engine.turn()
        if chance.random() < 0.5:
            engine.loop.cancel(chance.choice(keys), engine.now_s)
    for _ in range(3000):
        engine.turn()
        for key in keys:  # those that wait for a cache that never comes
            if any(type(event).__name__ == "RowReady" for event in engine.said.get(key, ())):
                engine.loop.cancel(key, engine.now_s)
        if engine.loop.idle:
            break
    assert engine.loop.idle
    engine.loop.check()
    assert {"length", "cancelled", "error"} <= {engine.end(key).reason for key in keys}


def test_unclaimed_prefill_segment_ends_with_its_lease() -> None:
    engine = harness("full", lease_s=1.0)
    key = engine.submit(prompt(40), stop=40)
    engine.run()
    assert engine.loop.next_expiry_s() is not None
    engine.now_s += 2
    engine.turn()
    assert engine.end(key).reason == "error"
    engine.loop.check()
    with pytest.raises(InputError):
        engine.loop.attach(key, 0, engine.now_s)


def test_failed_step_ends_its_requests_and_later_ones_are_served() -> None:
    engine = harness("full")
    keys = [engine.submit(prompt(20, n), 10) for n in range(3)]
    engine.turn()
    begin = engine.executor.begin

    def broken(step: StepInputs) -> Callable[[], list[SampledToken]]:
        if len(step.works) == 3:
            raise RuntimeError("out of memory")
        return begin(step)

    engine.executor.begin = broken  # type: ignore[method-assign]
    engine.run()
    assert [(engine.end(key).reason, engine.end(key).problem) for key in keys] == [
        ("error", "out of memory")
    ] * 3
    assert engine.loop.counters.failures == 3
    assert engine.answer(prompt(20, 2), 10) == reference_answer("full", 20, 10, 2)
    engine.loop.check()


def test_prefix_that_cannot_be_exported_is_not_kept() -> None:
    engine = harness("full", prefix_bytes=1_000_000)

    def gone(*_: object) -> object:
        raise CapacityError("no memory to read it out")

    engine.executor.export = engine.executor.exports = gone  # type: ignore[method-assign, assignment]
    assert engine.answer(prompt(LENGTH), OUTPUT) == reference_answer("full", LENGTH, OUTPUT)
    assert engine.prefixes.used_bytes == 0
    # A cache that was to be fetched from there ends in an error that says so.
    key = engine.submit(prompt(40), stop=40)
    engine.run()
    engine.loop.attach(key, 0, engine.now_s)
    end = engine.end(key)
    assert (end.reason, end.problem, end.may_retry) == ("error", "no memory to read it out", True)
    engine.loop.check()


def test_missing_worker_for_incoming_kv_fails_only_that_request() -> None:
    engine = harness("full")
    begun, key = engine.submit(prompt(20), 10), engine.submit(prompt(40), 4, start=30)
    engine.turn()
    opened = engine.executor.open

    def none() -> int:
        raise CapacityError("no worker is left")

    engine.executor.open = none  # type: ignore[method-assign]
    assert engine.loop.expect(key, manifest(engine, key, prompt(40), 30)) is None
    engine.turn()
    assert engine.end(key).may_retry
    engine.executor.open = opened  # type: ignore[method-assign]
    engine.run()
    assert engine.end(begun).reason == "length"


def test_request_that_can_never_run_is_refused() -> None:
    engine = harness("full", blocks=10)
    with pytest.raises(CapacityError):
        engine.submit(prompt(150), 20)
    with pytest.raises(InputError, match="vocabulary"):
        engine.submit([1, VOCAB], 2)
    for wrong in ({"start": 30}, {"stop": 0}, {"start": 9, "stop": 9}, {"stop": 21}):
        with pytest.raises(InputError):
            Job(1, tuple(prompt(20)), **wrong)  # type: ignore[arg-type]
    assert engine.loop.idle


def test_refused_kv_transfer_frees_its_row() -> None:
    engine, sender = harness("full"), harness("full")
    target = engine.submit(prompt(40), 4, start=40)
    about = sender.loop.attach(sender.submit(prompt(40, 1), stop=40), 0, 0.0)
    with pytest.raises(InputError, match="other tokens"):
        engine.loop.expect(target, about)
    engine.loop.cancel(target, 1.0, "wrong")
    assert engine.end(target).problem == "wrong"
    engine.loop.check()
