"""A cache that crosses as bytes: at every cut, for every kind of layer, and with everything that can be wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from engine_models import KINDS, WINDOW, equal_logits, greedy_tokens, logits_of, open_row, prompt, runner
from hypothesis import given
from hypothesis import strategies as st
from loop_helpers import LoopHarness, harness
from torch import Tensor

from potluck.core.errors import FormatError, PotluckError
from potluck.core.values.model import Model
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.compute.handover import (
    IncomingHandover,
    _Batch,
    _Expected,
    batches,
    manifest,
    pack,
    ranges,
)
from potluck.engine.compute.runner import Runner
from potluck.engine.loop.jobs import JobComputed, LayerSent
from potluck.engine.memory import pinned
from potluck.engine.mock.mock_executor import EMPTY_HISTORY, PART_FOLLOWS, chunk_of
from potluck.engine.mock.mock_transfer import KvSizes, MockKvTransfer
from potluck.kv.assembly import MissingParts
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.perf.transfer import AlphaBeta

LENGTH, NEXT = 300, 40
TOKENS = prompt(LENGTH)


def chunks(engine: Runner, row: int, start: int, stop: int) -> list[KvChunk]:
    layers = range(engine.config.model.layer_count)
    result = [chunk for layer in layers for chunk in pack(engine, row, layer, start, stop)]
    return [replace(chunk, data=bytes(chunk.data)) for chunk in result]


def receive_chunks(engine: Runner, row: int, manifest: KvManifest, cargo: list[KvChunk]) -> None:
    arrival = IncomingHandover(engine, row, manifest, TOKENS)
    for chunk in cargo:
        arrival.accept(chunk)
    arrival.finish()


def whole_logits(engine: Runner) -> tuple[Tensor, list[int]]:
    row = open_row(engine, LENGTH)
    logits = logits_of(engine, row, TOKENS, [LENGTH])
    text = greedy_tokens(engine, row, logits, 3)
    engine.tables.close(row)
    return logits, text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "window", "latent", "linear", "hybrid"])
def test_transferred_cache_at_every_cut_gives_equal_tokens(kind: str) -> None:
    """The hybrid has all kinds of layers and is cut at every third token, the others at every seventh. Behind every
    seventh cut, and near the end, all the rest is computed, behind the others the next tokens."""
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, text = whole_logits(receiver)
    source = open_row(sender, LENGTH)
    for cut in range(1, LENGTH):
        sender.step([SequenceWork(source, cut - 1, TOKENS[cut - 1 : cut], "none")])
        if cut % 7 and (kind != "hybrid" or cut % 3):
            continue
        row = receiver.tables.open()
        receive_chunks(receiver, row, manifest(sender, TOKENS, 0, cut), chunks(sender, source, 0, cut))
        stop = LENGTH if cut % 7 == 0 else min(cut + NEXT, LENGTH)
        receiver.tables.grow(row, stop)
        logits = receiver.step([SequenceWork(row, cut, TOKENS[cut:stop])])
        assert equal_logits(logits, expected[stop - 1 : stop]), cut
        if stop == LENGTH and cut % 10 == 0:
            assert greedy_tokens(receiver, row, logits, 3) == text
        receiver.tables.close(row)
    receiver.tables.check()


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_only_tokens_missing_at_the_receiver_are_transferred(kind: str) -> None:
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, _ = whole_logits(receiver)
    source, row = open_row(sender, LENGTH), open_row(receiver, LENGTH)
    logits_of(sender, source, TOKENS[:211], [211])
    logits_of(receiver, row, TOKENS[:70], [70])
    cargo = chunks(sender, source, 70, 211)
    receive_chunks(receiver, row, manifest(sender, TOKENS, 70, 211), cargo)
    assert equal_logits(logits_of(receiver, row, TOKENS[211:], [LENGTH]), expected[211:])
    for chunk in cargo:
        entries = chunk.stop - chunk.first
        assert (
            entries == {"kv": 141, "latent": 141, "conv": 0, "memory": 0}[chunk.part] or entries == WINDOW - 1
        )


def damaged_chunks(cargo: list[KvChunk]) -> dict[str, list[KvChunk]]:
    first, rest = cargo[0], cargo[1:]
    nan = torch.full((len(first.data) // 4,), torch.nan).numpy().tobytes()
    return {
        "a chunk short": rest,
        "a chunk twice": [first, *cargo],
        "too few bytes": [replace(first, data=first.data[:-4]), *rest],
        "too many bytes": [replace(first, data=bytes(first.data) + b"1234"), *rest],
        "another shape": [replace(first, shape=first.shape[::-1]), *rest],
        "a vast shape": [replace(first, shape=(2**62, 2**62)), *rest],
        "another format": [replace(first, dtype="float16"), *rest],
        "another layer": [replace(first, layer=9), *rest],
        "another part": [replace(first, part="latent"), *rest],
        "other tokens": [replace(first, first=first.first + 1), *rest],
        "another end": [replace(first, stop=first.stop + 1), *rest],
        "no numbers": [replace(first, data=nan), *rest],
    }


@pytest.mark.parametrize("kind", ["full", "linear", "hybrid"])
def test_invalid_chunk_is_refused_in_one_line_without_side_effects(kind: str) -> None:
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, _ = whole_logits(receiver)
    source = open_row(sender, LENGTH)
    logits_of(sender, source, TOKENS[:90], [90])
    kv_manifest, cargo = manifest(sender, TOKENS, 0, 90), chunks(sender, source, 0, 90)
    for what, bad in damaged_chunks(cargo).items():
        row = receiver.tables.open()
        with pytest.raises(PotluckError) as caught:
            receive_chunks(receiver, row, kv_manifest, bad)
        assert "\n" not in str(caught.value), what
        assert str(caught.value).startswith("hand-over"), what
        assert receiver.tables.lengths[row] == 0
        receiver.tables.close(row)
        receiver.tables.check()
    row = receiver.tables.open()
    receive_chunks(receiver, row, kv_manifest, cargo)
    receiver.tables.grow(row, LENGTH)
    assert equal_logits(logits_of(receiver, row, TOKENS[90:], [LENGTH]), expected[90:])


def test_kv_of_another_model_or_other_tokens_is_refused() -> None:
    engine = runner(KINDS["full"])
    row = engine.tables.open()
    good = manifest(engine, TOKENS, 0, 90)
    for bad in (
        replace(good, fingerprint=runner(KINDS["window"]).fingerprint),
        replace(good, token_hash=token_hash(TOKENS[1:91])),
        replace(good, start=5),
        replace(good, start=90),
        replace(good, stop=LENGTH + 1),
        replace(good, start=-1),
    ):
        with pytest.raises(PotluckError, match="^hand-over: "):
            IncomingHandover(engine, row, bad, TOKENS)
    IncomingHandover(engine, row, good, TOKENS)


def test_kv_that_a_row_does_not_hold_cannot_be_sent() -> None:
    engine = runner(KINDS["hybrid"])
    row = open_row(engine, LENGTH)
    logits_of(engine, row, TOKENS[:90], [90])
    for layer, start, stop in ((0, 0, 89), (1, 0, 91), (1, 50, 50), (2, -1, 90), (2, 0, 40), (4, 0, 90)):
        with pytest.raises(PotluckError):
            pack(engine, row, layer, start, stop)
    assert pack(engine, row, 1, 0, 40)[0].shape == (40, 2, 2, 16)


def kv_piece(first: int, stop: int, layer: int = 0, part: str = "kv") -> KvChunk:
    return KvChunk(layer, part, first, stop, "float32", (stop - first, 1), b"")  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 20), st.randoms())
def test_chunks_of_a_layer_complete_it_in_any_order(sizes: list[int], start: int, random: object) -> None:
    stops = [start]
    for size in sizes:
        stops.append(stops[-1] + size)
    parts = [kv_piece(a, b) for a, b in pairwise(stops)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    books = MissingParts({(0, "kv"): (start, stops[-1])})
    for part in parts:
        with pytest.raises(FormatError, match="missing"):
            books.must_be_whole()
        books.take(part)
        with pytest.raises(FormatError):
            books.take(part)  # twice
    books.must_be_whole()
    assert books.missing == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (kv_piece(5, 25), r"is of \[5, 25\), expected of \[0, 10\), \[20, 30\)"),
        (kv_piece(12, 14), "expected of"),
        (kv_piece(25, 31), "expected of"),
        (kv_piece(22, 22), "expected of"),
        (kv_piece(24, 22), "expected of"),
        (kv_piece(0, 10, layer=1), "is not expected"),
        (kv_piece(0, 10, part="latent"), "is not expected"),
    ],
)
def test_unexpected_chunk_is_refused(wrong: KvChunk, says: str) -> None:
    books = MissingParts({(0, "kv"): (0, 30)})
    books.take(kv_piece(10, 20))
    with pytest.raises(FormatError, match=says):
        books.take(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_row_transferred_step_by_step_continues_exactly(kind: str) -> None:
    """The receiver goes on exactly as if it had computed all of it."""
    tokens = prompt(300)
    one, two = harness(kind), harness(kind)
    sender, receiver = one.executor.runner, two.executor.runner  # type: ignore[attr-defined]
    source, row = sender.tables.open(), receiver.tables.open()
    sender.tables.grow(source, 300)
    arrival = IncomingHandover(receiver, row, manifest(sender, tokens, 0, 290), tokens)
    left = []
    for start, stop in ((0, 100), (100, 101), (101, 230), (230, 290)):
        run_to(sender, source, tokens, start, stop)
        for layer in range(sender.config.model.layer_count):
            left += [replace(p, data=bytes(p.data)) for p in pack(sender, source, layer, start, stop, 290)]
    assert {(p.layer, p.part) for p in left} == set(ranges(KINDS[kind].model, 0, 290))
    for chunk in reversed(left):
        arrival.accept(chunk)
    arrival.finish()
    receiver.tables.grow(row, 300)
    ours = run_to(receiver, row, tokens, 290, 300)
    theirs = run_to(sender, source, tokens, 290, 300)
    assert ours.tolist() == theirs.tolist()


def run_to(runner, row, tokens, start, stop):  # type: ignore[no-untyped-def]
    from potluck.engine.compute.executor import SequenceWork

    return runner.step([SequenceWork(row, start, tokens[start:stop], "last")])


@pytest.mark.parametrize("kind", ["full", "latent", "hybrid"])
def test_kv_is_sent_after_each_prefill_chunk(kind: str) -> None:
    engine = harness(kind, chunk=50, budget=50)
    key = engine.submit(prompt(300), stop=290)
    engine.loop.attach(key, 0, engine.now_s)
    turns = []
    while not any(isinstance(event, JobComputed) for event in engine.said.get(key, [])):
        engine.turn()
        turns.append(sent_chunk_count(engine, key))
    engine.run()
    growing = [n for n in turns if n]
    assert len(set(growing)) >= 5  # of six steps; windows and states leave with the last
    assert [event.last for event in engine.said[key] if isinstance(event, LayerSent)].count(True) == 1
    assert engine.end(key).reason == "handed_on"


def test_late_receiver_gets_the_kv_computed_before() -> None:
    engine = harness("full", chunk=50, budget=50)
    key = engine.submit(prompt(300), stop=290)
    engine.turn()
    engine.turn()
    assert sent_chunk_count(engine, key) == 0
    engine.loop.attach(key, 30, engine.now_s)
    engine.run()
    books = MissingParts(ranges(KINDS["full"].model, 30, 290))
    for chunk in engine.chunks(key):
        books.take(chunk)
    books.must_be_whole()
    assert engine.end(key).reason == "handed_on"


def sent_chunk_count(engine: LoopHarness, key: int) -> int:
    return len(engine.chunks(key)) if key in engine.said else 0


@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
@pytest.mark.parametrize("since", [0, 7])
def test_mock_kv_chunks_have_the_size_of_the_whole(kind: str, since: int) -> None:
    model: Model = KINDS[kind].model
    kv_transfer = MockKvTransfer(KvSizes(model), AlphaBeta(0.0, 1e9))
    stops = (since, 100, 400, 430, 431)
    for layer in range(KvSizes(model).layers):
        whole = kv_transfer.kv_bytes(chunk_of(EMPTY_HISTORY, layer, since, 431))
        parts = [
            chunk_of(EMPTY_HISTORY, layer, first, stop, since if stop == 431 else PART_FOLLOWS)
            for first, stop in pairwise(stops)
        ]
        assert sum(map(kv_transfer.kv_bytes, parts)) == pytest.approx(whole, abs=2 * len(parts))


@given(st.lists(st.integers(1, 40 << 20), max_size=30))
def test_host_copies_are_batched_in_layer_order_up_to_a_size(sizes: list[int]) -> None:
    some = list(batches(sizes, lambda size: size))
    assert [size for batch in some for size in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= pinned.PIECE_BYTES for batch in some)
    assert all(sum(one) + after[0] > pinned.PIECE_BYTES - 256 * len(one) for one, after in pairwise(some))


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 3))
def test_layer_pieces_are_complete_when_the_last_one_arrives(random: object, count: int, start: int) -> None:
    wanted = {layer: _Expected("kv", start, torch.float32, (7, 2, 2, 3)) for layer in range(count)}
    values = {layer: torch.randn(7, 2, 2, 3) for layer in wanted}
    pieces = [
        KvChunk(layer, "kv", start + a, start + b, "float32", (b - a, 2, 2, 3), whole[a:b].numpy().tobytes())
        for layer, whole in values.items()
        for a, b in ((0, 2), (2, 7))
    ]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    batch = _Batch(wanted, pinned.PinnedPool(1))
    assert [batch.takes(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for layer, item, part in batch.cut(batch.host.view(torch.float32)):
        assert torch.equal(part.view(item.shape), values[layer])


def test_pinned_memory_is_reused_once_unreferenced() -> None:
    pool = pinned.PinnedPool(1)
    first = pool.take(100)
    place = first.data_ptr()
    part = memoryview(first[10:20].numpy())
    del first
    second, others = pool.take(100), pool.take(100, waits=True)
    assert place not in (second.data_ptr(), others.data_ptr())
    del part
    assert pool.take(7).data_ptr() == place
    assert len(pool.take(pinned.PIECE_BYTES + 1)) == pinned.PIECE_BYTES + 1
