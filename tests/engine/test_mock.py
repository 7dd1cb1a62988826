"""Engines that pretend: the same tokens however requests are cut, and no KV but the right one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_helpers import transfer_kv
from mock_helpers import HYBRID, LLAMA, TIMER, VOCAB, WINDOWED, WORDS, MockLoopHarness, executor

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Model
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.emulated import steps_of
from potluck.engine.compute.executor import CacheExport, RunnerSize, SequenceWork, StepInputs, TokenDraw
from potluck.engine.loop.jobs import JobComputed, JobEnded, LayerSent
from potluck.engine.mock.mock_engine import StepDurations
from potluck.engine.mock.mock_executor import (
    EMPTY_HISTORY,
    FACTOR,
    MASK,
    SPREAD,
    ChunkTimes,
    Vocabulary,
    after,
    chunk_of,
    times_of,
)
from potluck.engine.mock.mock_transfer import KvSizes, MockKvTransfer, NicSchedule
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.kv.codec_layout import Codec
from potluck.kv.peer_connections import LinkReport
from potluck.perf.memory import kv_bytes
from potluck.perf.transfer import AlphaBeta

SIZE = RunnerSize(8, 400, 4096)
SAMPLED = Sampling(temperature=0.8, seed=11)
CODECS: tuple[Codec, ...] = ("raw", "int8", "int4")


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def answer(tokens: list[int], output: int, sampling: Sampling = SAMPLED) -> list[int]:
    return MockLoopHarness().answer(tokens, output, sampling=sampling)


# Histories.


@given(st.lists(st.integers(0, 200_000), max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_mock_history_hash_does_not_depend_on_chunking(tokens: list[int], cuts: list[int]) -> None:
    by_hand = EMPTY_HISTORY
    for token in tokens:
        by_hand = (by_hand * FACTOR + (token + 1) * SPREAD) & MASK
    result, places = EMPTY_HISTORY, [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, stop in pairwise(places):
        result = after(result, tokens[start:stop])
    assert result == by_hand


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.data())
def test_different_history_gives_different_mock_tokens(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[place] += 1
    many = Vocabulary(1 << 40, range(1 << 32))  # type: ignore[arg-type]
    drawn = [many.draw(after(EMPTY_HISTORY, item), Sampling(), 0).token for item in (tokens, other)]
    assert drawn[0] != drawn[1]


# Cuts.


@settings(max_examples=60)
@given(
    st.integers(2, 300),
    st.lists(st.integers(1, 299), max_size=3, unique=True),
    st.integers(0, 9),
    st.integers(16, 200),
    st.sampled_from([Sampling(), SAMPLED, replace(SAMPLED, seed=1 << 70)]),
    st.booleans(),
)
def test_mock_tokens_do_not_depend_on_segments_chunks_or_resumption(
    length: int, cuts: list[int], streamed: int, chunk: int, way: Sampling, late: bool
) -> None:
    """Split over several engines, in chunks, and begun anew behind what was streamed."""
    tokens, output = prompt(length, length), 12
    expected = answer(tokens, output, way)
    tokens, rest = tokens + expected[:streamed], output - streamed
    places = [0, *sorted(cut for cut in cuts if cut < len(tokens) - 1)]
    harnesses = [MockLoopHarness(chunk=chunk, budget=chunk + 18, most_blocks=None) for _ in places]
    before: tuple[MockLoopHarness, int] | None = None
    for n, (brain_loop, start) in enumerate(zip(harnesses, places, strict=True)):
        last = n == len(places) - 1
        stop = None if last else places[n + 1]
        key = brain_loop.submit(tokens, rest if last else 0, start=start, stop=stop, sampling=way)
        if before is not None:
            transfer_kv(before[0], before[1], brain_loop, key, late=late)
        before = brain_loop, key
    harnesses[-1].run()
    assert harnesses[-1].tokens(key) == expected[streamed:]
    for brain_loop in harnesses:
        assert brain_loop.loop.idle
        brain_loop.loop.check()


def test_mock_seed_matters_only_with_a_temperature() -> None:
    tokens = prompt(40)
    greedy = answer(tokens, 20, Sampling())
    assert greedy == answer(tokens, 20, Sampling(seed=5))
    sampled = [answer(tokens, 20, Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1]
    assert len({tuple(item) for item in (greedy, sampled[0], sampled[2])}) == 3


def test_mock_tokens_do_not_depend_on_batch_or_preemption() -> None:
    brain_loop = MockLoopHarness(blocks=24)
    keys = [brain_loop.submit(prompt(60, seed), 40, sampling=SAMPLED) for seed in range(6)]
    brain_loop.run()
    assert brain_loop.loop.counters.preemptions > 0
    assert [brain_loop.tokens(key) for key in keys] == [answer(prompt(60, seed), 40) for seed in range(6)]


# Wrong KV.


def receive_and_draw(chunks: list[KvChunk], tokens: list[int], start: int = 0) -> None:
    """Put chunks of [start, all of these) into a row, and draw a token behind them."""
    made = executor(SIZE)
    row = made.open()
    incoming = made.arrival(row, KvManifest("f", start, len(tokens), token_hash(tokens)), [*tokens, 1])
    for chunk in chunks:
        incoming.accept(chunk)
    incoming.finish()
    made.grow(row, len(tokens) + 1)
    (choice,) = made.step([SequenceWork(row, len(tokens), [1])], [TokenDraw(Sampling(), len(tokens) + 1)])
    assert choice == WORDS.draw(after(EMPTY_HISTORY, [*tokens, 1]), Sampling(), len(tokens) + 1)


def test_mock_engine_accepts_only_kv_of_the_same_tokens() -> None:
    tokens = prompt(50)
    layers = range(KvSizes(LLAMA).layers)
    right = [chunk_of(after(EMPTY_HISTORY, tokens), layer, 0, 50) for layer in layers]
    receive_and_draw(right, tokens)
    other = [chunk_of(after(EMPTY_HISTORY, [*tokens[:-1], 0]), layer, 0, 50) for layer in layers]
    flipped = replace(right[3], data=bytes([right[3].data[0] ^ 4]) + bytes(right[3].data)[1:])
    for wrong, says in (
        ([*right[:3], other[3], *right[4:]], "layer 3 latent: is not the KV of these tokens"),
        ([*right[:3], flipped, *right[4:]], "layer 3 latent: is not the KV of these tokens"),
        ([*right[:3], replace(right[2], layer=3), *right[4:]], "is not the KV of these tokens"),
        (right[:-1], "are missing, the first is layer 3"),
        ([*right, right[0]], "is not expected, or came before"),
        ([replace(right[0], first=1), *right[1:]], "is not the KV of these tokens"),
        ([replace(right[0], shape=(2, 8)), *right[1:]], "expected float32 \\[1, 16\\]"),
    ):
        with pytest.raises(FormatError, match=says):
            receive_and_draw(wrong, tokens)
    with pytest.raises(InputError, match="does not go on from the 0 tokens held"):
        receive_and_draw(right, tokens, start=10)


def test_mock_step_beyond_the_held_tokens_is_refused() -> None:
    made = executor(SIZE)
    row = made.open()
    made.grow(row, 64)
    with pytest.raises(InputError, match="holds 0 tokens and 4 blocks, the step goes from 5 to 6"):
        made.step([SequenceWork(row, 5, [1])], [TokenDraw(Sampling(), 6)])
    with pytest.raises(CapacityError, match="no room for 4097 tokens"):
        made.grow(row, 4097)
    with pytest.raises(AssertionError, match="1 rows and 4 blocks"):
        made.check()
    made.close(row)
    made.check()


# What it weighs.


@pytest.mark.parametrize(
    "model", [LLAMA, HYBRID, WINDOWED, replace(LLAMA, name="s", layers=LLAMA.layers[:3])]
)
@pytest.mark.parametrize("tokens", [1, 1000])
def test_mock_chunk_sizes_equal_those_of_the_large_model(model: Model, tokens: int) -> None:
    cargo = KvSizes(model)
    chunks = [chunk_of(EMPTY_HISTORY, layer, 0, tokens) for layer in range(cargo.layers)]
    whole = sum(cargo.kv_bytes(chunk, 0) for chunk in chunks)
    assert whole == pytest.approx(kv_bytes(model, tokens), abs=cargo.layers)


def test_codecs_shrink_mock_kv_without_changing_it() -> None:
    kv_transfer = MockKvTransfer(KvSizes(LLAMA), AlphaBeta(0.0, 1e9))
    chunk = chunk_of(123, 3, 10, 138, times=ChunkTimes(1.0, 2.0, 3.0))
    weights = []
    for codec in CODECS:
        small = kv_transfer.packed(chunk, codec)
        assert small.codec == codec
        assert replace(kv_transfer.restored(small), data=b"") == replace(chunk, data=b"")
        assert kv_transfer.restored(small).data == chunk.data
        weights.append(kv_transfer.kv_bytes(small) / kv_transfer.kv_bytes(chunk))
    assert weights == pytest.approx([1.0, 0.5234, 0.2734], abs=1e-3)
    small = kv_transfer.packed(chunk, "int4")
    with pytest.raises(FormatError, match="not what a mock engine sends"):
        kv_transfer.restored(replace(small, data=bytes(small.data)[:-1] + b"1"))


# Prefixes.


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_mock_kv_is_sent_scaled_and_reported_in_full_size(codec: Codec) -> None:
    """One for a hundred; the receiver finds what was sent, and links are told in bytes of KV."""
    transfer = MockKvTransfer(KvSizes(LLAMA), AlphaBeta(0.0, 1e9), bytes_per_real=100.0)
    made = chunk_of(77, 1, 0, 5000)
    sent = made if codec == "raw" else transfer.packed(made, codec)
    sent = transfer.leaves("peer", sent)
    assert len(sent.data) + len(sent.parameters) == pytest.approx(transfer.kv_bytes(sent) / 100.0, rel=1e-3)
    assert transfer.here_s("peer", sent) is None
    assert transfer.restored(sent) == made
    told = transfer.told(LinkReport("peer", 1, 5.0, 7, 0, 0.0, 0.0, 2, 3))
    assert (told.moved_bytes, told.goodput_bytes_per_s, told.retransmits, told.queue_bytes) == (
        700,
        500.0,
        200,
        300,
    )


@pytest.mark.parametrize("model", [LLAMA, HYBRID])
def test_mock_prefixes_are_found_and_evicted_for_requests(model: Model) -> None:
    cargo = KvSizes(model)
    states = 3 * cargo.state_tokens // BLOCK_TOKENS if cargo.exact else 0
    brain_loop = MockLoopHarness(model, blocks=40 + int(states), most_blocks=None)
    tokens = prompt(100)
    first = brain_loop.answer(tokens, 4)
    assert brain_loop.answer(tokens, 4) == first
    assert brain_loop.end(2).times.cached_tokens == 96
    assert brain_loop.spare.used_bytes >= 6 * BLOCK_TOKENS * cargo.token_bytes
    named = brain_loop.spare.changes().added
    assert len(named) == len(set(named)) >= 6
    brain_loop.answer(
        prompt(16 * brain_loop.pretended.size.blocks - 40, 1), 4
    )  # It needs all but a few blocks.
    assert set(named[:6]) <= set(brain_loop.spare.changes().removed)
    assert brain_loop.answer(tokens, 4) == first


def test_mock_prefix_cache_of_zero_blocks_keeps_nothing() -> None:
    brain_loop = MockLoopHarness(most_blocks=0)
    brain_loop.answer(prompt(100), 2)
    assert (brain_loop.spare.used_bytes, brain_loop.spare.everything().added) == (0, ())
    brain_loop = MockLoopHarness(most_blocks=3)
    brain_loop.answer(prompt(100), 2)
    assert len(brain_loop.spare.everything().added) == 3


# Pace.


def test_mock_steps_take_their_predicted_time() -> None:
    now_s = 50.0

    def clock() -> float:
        return now_s

    made = executor(SIZE, clock=clock)
    row = made.open()
    made.grow(row, 600)
    works = [SequenceWork(row, 0, prompt(512), "last"), *(SequenceWork(row, 512 + n, [1]) for n in range(40))]
    expected_s = 0.0
    for place, work in enumerate(works):
        land = made.begin(StepInputs([work], [TokenDraw(Sampling(), 0)]))
        expected_s += float(TIMER.step_s(steps_of([work]))[0])
        assert made.due_s is not None
        assert made.due_s - 50.0 == pytest.approx(expected_s, rel=2e-3)
        now_s = made.due_s + (0.0005 if place % 2 else 0.0)  # A wake-up is late now and then.
        land()
        assert made.due_s is None
    notes = made.notes()
    assert notes["emulated_steps"] == 41
    assert notes["emulated_predicted_s"] == pytest.approx(expected_s, rel=2e-3)
    assert notes["emulated_late_s"] == pytest.approx(0.0005 * 20)
    assert notes["emulated_late_steps"] == 0


LASTING = StepDurations(TIMER)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=64))
def test_interpolated_mock_step_times_equal_the_timer(contexts: list[int]) -> None:
    works = [SequenceWork(row, context, [0]) for row, context in enumerate(contexts)]
    assert LASTING(works) == pytest.approx(float(TIMER.step_s(steps_of(works))[0]), rel=5e-3)


# Ends.


def test_mock_outputs_end_randomly_only_with_a_mean_length() -> None:
    words = replace(WORDS, mean_tokens=20)
    lengths = []
    for seed in range(60):
        brain_loop = MockLoopHarness(words=words)
        key = brain_loop.submit(prompt(20, seed), 400, ends=frozenset({2}))
        brain_loop.run()
        assert (brain_loop.tokens(key)[-1] == 2) == (brain_loop.end(key).reason == "stop")
        lengths.append(len(brain_loop.tokens(key)))
    assert 12 < sum(lengths) / len(lengths) < 32
    brain_loop = MockLoopHarness(words=words)
    brain_loop.answer(prompt(20), 100, sampling=Sampling(barred=(2,), barred_before=120), ends=frozenset({2}))
    assert 2 not in brain_loop.tokens(1)
    assert len(answer(prompt(20), 100)) == 100


def test_barred_tokens_are_not_drawn() -> None:
    few = Vocabulary(6, (3, 4))
    assert {few.draw(n, Sampling(barred=(3,), barred_before=9), 1).token for n in range(50)} == {4}
    assert few.draw(1, Sampling(barred=(3, 4), barred_before=9), 1).token == 0
    assert {few.draw(n, Sampling(barred=(3,), barred_before=1), 1).token for n in range(50)} == {3, 4}
    with pytest.raises(InputError, match="--mean-output: this model has no token that ends"):
        Vocabulary(6, (3,), None, 10)


def test_mock_log_probabilities_are_consistent() -> None:
    choice = WORDS.draw(7, Sampling(logprobs=5), 3)
    assert choice.top[0] == (choice.token, choice.logprob)
    assert len({token for token, _ in choice.top}) == 5
    assert sorted(choice.top, key=lambda pair: -pair[1]) == list(choice.top)
    assert WORDS.draw(7, Sampling(logprobs=0), 3).top == ()


def test_changed_mock_pace_applies_from_the_next_step() -> None:
    one = executor(RunnerSize(4, 64, 512), clock=lambda: 0.0)
    row = one.open()
    one.grow(row, 64)
    lengths = []
    for start, pace in ((0, 1.0), (16, 3.0), (32, 1.0)):
        one.change_pace(pace)
        one.begin(StepInputs([SequenceWork(row, start, tuple(range(3, 19)), "none")], []))
        lengths.append(
            one._pacer._length_s
            / one._step_duration_s([SequenceWork(row, start, tuple(range(3, 19)), "none")])
        )
        one._under_way = False
    assert lengths == pytest.approx([1.0, 3.0, 1.0])


SIZE_HANDOVER = RunnerSize(8, 200, 4096, 512)


def prompt_handover(count: int) -> tuple[int, ...]:
    return tuple((7 * place + 3) % 400 for place in range(count))


def test_received_mock_kv_is_limited_by_the_receiver_card() -> None:
    """A card of 1 GB/s: chunks that come faster queue there, slower ones do not, and pauses are not made up for."""
    now_s = [10.0]
    kv_transfer = MockKvTransfer(KvSizes(LLAMA), AlphaBeta(0.0, 1e9), clock=lambda: now_s[0])
    each_s = kv_transfer.kv_bytes(chunk_of(1, 0, 0, 992)) / 1e9
    sent_times = ChunkTimes(each_s, 0.0, 0.0)
    chunks = [chunk_of(1, layer, 0, 992, times=sent_times) for layer in range(KvSizes(LLAMA).layers)]
    here_s = [kv_transfer.here_s("peer", chunk) for chunk in chunks]
    assert here_s == pytest.approx([10.0 + (place + 1 / 8) * each_s for place in range(len(chunks))])
    now_s[0] = 11.0
    for chunk in chunks:
        assert kv_transfer.here_s("peer", chunk) == pytest.approx(now_s[0] + each_s / 8)
        now_s[0] += 2 * each_s


def test_slow_link_of_one_sender_does_not_delay_another() -> None:
    """The card is shared; what one sender's link brings only later takes nothing of it before."""
    now_s = 10.0
    clock = lambda: now_s  # noqa: E731
    cargo = KvSizes(LLAMA)
    thin, wide, receiver = (
        MockKvTransfer(cargo, AlphaBeta(0.0, rate), clock=clock) for rate in (1e6, 1e9, 1e9)
    )
    chunks = [chunk_of(1, layer, 0, 992) for layer in range(cargo.layers)]
    size = receiver.kv_bytes(chunks[0])
    for chunk in chunks:
        slow_s = receiver.here_s("thin", thin.leaves("receiver", computed(chunk, now_s)))
    assert slow_s == pytest.approx(10.0 + len(chunks) * size / 1e6)
    quick = [receiver.here_s("wide", wide.leaves("receiver", computed(item, now_s))) for item in chunks]
    assert quick[0] < 10.0 + 3 * size / 1e9
    assert quick[-1] <= 10.0 + 2 * len(chunks) * size / 1e9 + 1e-6
    third = MockKvTransfer(cargo, AlphaBeta(0.0, 1e9), clock=clock)
    last = [receiver.here_s("third", third.leaves("receiver", computed(item, now_s))) for item in chunks]
    assert last[-1] >= 10.0 + 2 * len(chunks) * size / 1e9, "but two that send at once share it"


def computed(chunk: KvChunk, at_s: float) -> KvChunk:
    return chunk_of(7, chunk.layer, chunk.first, chunk.stop, times=ChunkTimes(at_s, at_s, at_s))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 5)), min_size=1, max_size=12))
def test_network_card_schedule_runs_one_transfer_at_a_time_without_idling(
    asked: list[tuple[float, float]],
) -> None:
    card, step_s = NicSchedule(), 0.25
    asked = [(round(at / step_s) * step_s, max(1, round(span / step_s)) * step_s) for at, span in asked]
    busy: set[int] = set()
    for at_s, for_s in asked:
        cells, cell = [], round(at_s / step_s)
        while len(cells) < for_s / step_s:
            if cell not in busy:
                cells.append(cell)
            cell += 1
        busy.update(cells)
        assert card.book(at_s, for_s, 0.0) == pytest.approx((cells[-1] + 1) * step_s)


@pytest.mark.parametrize("late_s", [0.0, 0.02])
@pytest.mark.parametrize("cards", [(3e9, 1e9), (1e9, 3e9), (1e8, 1e9), (1e11, 1e11), (4e9, 4e9)])
def test_mock_kv_transfer_takes_the_time_of_the_formula(cards: tuple[float, float], late_s: float) -> None:
    """Each of the large model's layers leaves when it is computed, and the slower card says how fast; that chunks
    themselves are late on their way is nothing."""
    now_s, alpha_s = 5.0, 0.001
    clock = lambda: now_s  # noqa: E731
    made, cargo = executor(RunnerSize(4, 100, 1 << 12, 1 << 12), clock=clock), KvSizes(LLAMA)
    sender = MockKvTransfer(cargo, AlphaBeta(alpha_s, cards[0]), clock=clock)
    receiver = MockKvTransfer(cargo, AlphaBeta(alpha_s, cards[1]), clock=clock)
    row, here_s = made.open(), []
    made.grow(row, 800)
    work = SequenceWork(row, 0, prompt_handover(800), "none")

    def deliver(_row: int, chunks: tuple[KvChunk, ...]) -> None:
        nonlocal now_s
        now_s += late_s / 2
        left = sender.leaves("peer", chunks[0])
        now_s += late_s / 2
        here_s.append(receiver.here_s("peer", left) - late_s / 2)

    made.begin(StepInputs([work], [], [CacheExport(row, 0, 800)], deliver))
    while len(here_s) < cargo.layers:
        now_s = max(now_s, made.due_s or 0.0)
        made.deliver(now_s)
    prefill_s = float(TIMER.step_s(steps_of([work]))[0])
    wire_s = kv_bytes(LLAMA, 800) / min(cards)
    layer_s = wire_s / LLAMA.layer_count
    late_s = max(0.0, layer_s - prefill_s / LLAMA.layer_count)
    tail_s = float(layer_s + (LLAMA.layer_count - 1) * late_s + alpha_s)
    assert here_s[-1] == pytest.approx(5.0 + prefill_s + tail_s, abs=1e-6)


def test_receiver_that_attaches_during_a_step_gets_layers_when_computed() -> None:
    """What was computed before it came leaves then, and not earlier."""
    now_s = 0.0
    made, cargo = executor(SIZE_HANDOVER, clock=lambda: now_s), KvSizes(LLAMA)
    sent: list[tuple[float, int, ChunkTimes | None]] = []
    tells = lambda _row, chunks: sent.append((now_s, chunks[0].layer, times_of(chunks[0])))  # noqa: E731
    row = made.open()
    made.grow(row, 64)
    assert not made.join(CacheExport(row, 0, 64))  # nothing is under way
    made.begin(StepInputs([SequenceWork(row, 0, prompt_handover(64), "none")], [], [], tells))
    length_s = made.due_s
    assert length_s is not None
    layer_s = length_s / cargo.layers
    now_s = 1.5 * layer_s
    assert made.join(CacheExport(row, 0, 64))
    while (due_s := made.due_s) is not None and len(sent) < cargo.layers:
        now_s = max(now_s, due_s)
        made.deliver(now_s)
    whens = [1.5 * layer_s, *(layer_s * (place + 1) for place in range(1, cargo.layers))]
    assert [(layer, when) for when, layer, _ in sent] == [
        (layer, pytest.approx(when)) for layer, when in enumerate(whens)
    ]
    firsts = [times.first_s for _, _, times in sent if times is not None]
    assert firsts == pytest.approx([1.5 * layer_s] * 2 + [layer_s * n for n in range(2, cargo.layers)])


def test_mock_layers_are_sent_during_their_step() -> None:
    now_s = 0.0
    made = executor(SIZE_HANDOVER, clock=lambda: now_s)
    row, layers = made.open(), KvSizes(LLAMA).layers
    made.grow(row, 64)
    sent: list[tuple[float, int]] = []
    works = [SequenceWork(row, 0, prompt_handover(64), "none")]
    tells = lambda _row, chunks: sent.append((now_s, chunks[0].layer))  # noqa: E731
    land = made.begin(StepInputs(works, [], [CacheExport(row, 0, 64)], tells))
    length_s = float(TIMER.step_s(steps_of(works))[0])
    while made.due_s is not None and len(sent) < layers:
        now_s = made.due_s
        made.deliver(now_s)
    assert [layer for _, layer in sent] == list(range(layers))
    assert [when for when, _ in sent] == pytest.approx([length_s * (n + 1) / layers for n in range(layers)])
    assert land() == []


def test_mock_kv_transfer_starts_while_both_engines_compute() -> None:
    """A receiver that attaches during the only step of a prompt gets all of it with that step; and it gets a row
    although a step of its own is under way."""
    sender, receiver = MockLoopHarness(), MockLoopHarness()
    tokens = prompt_handover(100)
    source = sender.submit(tokens, stop=len(tokens) - 1)
    sender.turn()
    assert sender.loop.has_step_under_way
    busy = receiver.submit(prompt_handover(40), 8)
    receiver.turn()
    assert receiver.loop.has_step_under_way
    target = receiver.submit(tokens, 4, start=len(tokens) - 1)
    about = sender.loop.attach(source, receiver.have[target], sender.now_s)
    assert receiver.loop.expect(target, about) is not None
    sender.run()
    sent = [event for event in sender.said[source] if isinstance(event, LayerSent)]
    assert [event.last for event in sent] == [False] * 3 + [True]
    for event in sent:
        receiver.loop.accept(target, event.chunks[0])
    receiver.loop.arrived(target)
    receiver.run()
    alone = MockLoopHarness()
    whole = alone.submit(tokens, 4)
    alone.run()
    assert receiver.tokens(target) == alone.tokens(whole)
    assert len(receiver.tokens(busy)) == 8
    computed = [type(event) for event in sender.said[source] if not isinstance(event, JobEnded)]
    assert computed.index(JobComputed) > computed.index(LayerSent)
