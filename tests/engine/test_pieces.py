"""A hand-over that leaves step by step: what is missing, in any order, and what it is not taken for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from engine_models import KINDS, prompt
from hypothesis import given
from hypothesis import strategies as st
from loop_kit import Desk, desk

from potluck.core.errors import FormatError
from potluck.core.values.model import Model
from potluck.engine.loop.messages import JobComputed, LayerSent
from potluck.engine.memory.handover import IncomingHandover, manifest, pack
from potluck.engine.memory.layer_parts import MissingParts, ranges
from potluck.engine.mock.history import NOTHING
from potluck.engine.mock.kv_sizes import KvSizes
from potluck.engine.mock.mock_chunks import MORE, parcel_of
from potluck.engine.mock.mock_transfer import MockKvTransfer
from potluck.kv.chunks import KvChunk
from potluck.perf.delays.transfer import AlphaBeta


def piece(first: int, stop: int, layer: int = 0, part: str = "kv") -> KvChunk:
    return KvChunk(layer, part, first, stop, "float32", (stop - first, 1), b"")  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 20), st.randoms())
def test_pieces_make_a_whole_in_any_order(sizes: list[int], start: int, random: object) -> None:
    stops = [start]
    for size in sizes:
        stops.append(stops[-1] + size)
    parts = [piece(a, b) for a, b in pairwise(stops)]
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
        (piece(5, 25), r"is of \[5, 25\), expected of \[0, 10\), \[20, 30\)"),
        (piece(12, 14), "expected of"),
        (piece(25, 31), "expected of"),
        (piece(22, 22), "expected of"),
        (piece(24, 22), "expected of"),
        (piece(0, 10, layer=1), "is not expected"),
        (piece(0, 10, part="latent"), "is not expected"),
    ],
)
def test_what_is_not_missing_is_refused(wrong: KvChunk, says: str) -> None:
    books = MissingParts({(0, "kv"): (0, 30)})
    books.take(piece(10, 20))
    with pytest.raises(FormatError, match=says):
        books.take(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_crosses_step_by_step(kind: str) -> None:
    """The receiver goes on exactly as if it had computed all of it."""
    tokens = prompt(300)
    one, two = desk(kind), desk(kind)
    sender, receiver = one.executor._runner, two.executor._runner  # type: ignore[attr-defined]
    source, row = sender.tables.open(), receiver.tables.open()
    sender.tables.grow(source, 300)
    arrival = IncomingHandover(receiver, row, manifest(sender, tokens, 0, 290), tokens)
    left = []
    for start, stop in ((0, 100), (100, 101), (101, 230), (230, 290)):
        run_to(sender, source, tokens, start, stop)
        for layer in range(sender.stack.first, sender.stack.last):
            left += [replace(p, data=bytes(p.data)) for p in pack(sender, source, layer, start, stop, 290)]
    assert {(p.layer, p.part) for p in left} == set(ranges(KINDS[kind].model, 0, 290))
    for parcel in reversed(left):
        arrival.accept(parcel)
    arrival.finish()
    receiver.tables.grow(row, 300)
    ours = run_to(receiver, row, tokens, 290, 300)
    theirs = run_to(sender, source, tokens, 290, 300)
    assert ours.tolist() == theirs.tolist()


def run_to(runner, row, tokens, start, stop):  # type: ignore[no-untyped-def]
    from potluck.engine.compute.runner import SequenceWork

    return runner.step([SequenceWork(row, start, tokens[start:stop], "last")])


@pytest.mark.parametrize("kind", ["full", "latent", "hybrid"])
def test_kv_leaves_with_each_chunk_and_not_with_the_last_one_only(kind: str) -> None:
    engine = desk(kind, chunk=50, budget=50)
    key = engine.submit(prompt(300), stop=290)
    engine.loop.attach(key, 0, engine.now_s)
    turns = []
    while not any(isinstance(event, JobComputed) for event in engine.said.get(key, [])):
        engine.turn()
        turns.append(sent(engine, key))
    engine.run()
    growing = [n for n in turns if n]
    assert len(set(growing)) >= 5  # of six steps; windows and states leave with the last
    assert [event.last for event in engine.said[key] if isinstance(event, LayerSent)].count(True) == 1
    assert engine.end(key).reason == "handed_on"


def test_who_attaches_late_gets_what_was_computed_before() -> None:
    engine = desk("full", chunk=50, budget=50)
    key = engine.submit(prompt(300), stop=290)
    engine.turn()
    engine.turn()
    assert sent(engine, key) == 0
    engine.loop.attach(key, 30, engine.now_s)
    engine.run()
    books = MissingParts(ranges(KINDS["full"].model, 30, 290))
    for parcel in engine.parcels(key):
        books.take(parcel)
    books.must_be_whole()
    assert engine.end(key).reason == "handed_on"


def sent(engine: Desk, key: int) -> int:
    return len(engine.parcels(key)) if key in engine.said else 0


@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
@pytest.mark.parametrize("since", [0, 7])
def test_pieces_of_a_pretended_cache_weigh_as_much_as_the_whole(kind: str, since: int) -> None:
    model: Model = KINDS[kind].model
    kv_transfer = MockKvTransfer(KvSizes(model), AlphaBeta(0.0, 1e9))
    stops = (since, 100, 400, 430, 431)
    for layer in range(KvSizes(model).layers):
        whole = kv_transfer.kv_bytes(parcel_of(NOTHING, layer, since, 431))
        parts = [
            parcel_of(NOTHING, layer, first, stop, since if stop == 431 else MORE)
            for first, stop in pairwise(stops)
        ]
        assert sum(map(kv_transfer.kv_bytes, parts)) == pytest.approx(whole, abs=2 * len(parts))
