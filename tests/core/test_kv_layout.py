"""Transfers between worker layouts: every layer and head once; addresses; cut and joined chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import FormatError, InputError
from potluck.core.values.kv_layout import (
    KvAddress,
    KvCut,
    KvLayout,
    copies_of,
    heads_of,
    kv_address,
    reachable,
    sources,
)
from potluck.kv.chunks import HeadJoin, KvChunk, cut_chunk

LAYERS, HEADS = 12, (1, 2, 4, 8)


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=3)))
    bounds = [0, *cuts, LAYERS]
    stages = tuple(b - a for a, b in pairwise(bounds))
    return KvLayout(tensor, stages if len(stages) > 1 else ())


@given(layouts(), layouts(), st.sampled_from(HEADS))
@settings(max_examples=300)
def test_every_worker_receives_each_layer_and_head_once(
    sender: KvLayout, receiver: KvLayout, heads: int
) -> None:
    readers: dict[int, list[KvCut]] = {rank: [] for rank in range(sender.workers)}
    crossed = np.zeros((LAYERS, heads), int)
    for rank in range(receiver.workers):
        stage, place = divmod(rank, receiver.tensor)
        got = np.zeros((LAYERS, heads), int)
        wanted = sources(sender, receiver, rank, heads)
        if wanted[0].copy:  # somebody of the same stage with the same heads, who fetches
            (source,) = wanted
            assert source.rank // receiver.tensor == stage
            other = source.rank % receiver.tensor
            assert heads_of(heads, receiver.tensor, other) == heads_of(heads, receiver.tensor, place)
            assert not sources(sender, receiver, source.rank, heads)[0].copy
            continue
        for source in wanted:
            readers[source.rank].append(source.cut)
            (a, b), (c, d) = source.cut.layers, source.cut.heads
            have = sender.layers(source.rank // sender.tensor)
            assert source.cut.nothing or have[0] <= a < b <= have[1]
            held = heads_of(heads, sender.tensor, source.rank % sender.tensor)
            assert source.cut.nothing or held[0] <= c < d <= held[1]
            got[a : min(b, LAYERS), c:d] += 1
        first, stop = receiver.layers(stage)
        due = np.zeros_like(got)
        due[first : min(stop, LAYERS), slice(*heads_of(heads, receiver.tensor, place))] = 1
        assert np.array_equal(got, due)
        crossed += got
    assert (crossed == 1).all()  # also where heads are on several workers
    for cuts in readers.values():  # nobody waits for a reader that does not come
        assert sorted(cut.reader for cut in cuts) == list(range(len(cuts)))
        assert {cut.readers for cut in cuts} == {len(cuts)}


def test_tensor_parallel_degree_must_fit_the_kv_heads() -> None:
    assert [heads_of(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert copies_of(2, 8) == 4
    with pytest.raises(InputError, match="does not fit 8 KV heads"):
        heads_of(8, 3, 0)


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("10.0.0.5:9000", [("10.0.0.5", 9000)]),
        ("[::1]:9000?tensor=2", [("::1", 9000), ("::1", 9001)]),
        ("a:1,b:7?layers=20,12", [("a", 1), ("b", 7)]),
        ("a:1,b:7?tensor=2&layers=20,12", [("a", 1), ("a", 2), ("b", 7), ("b", 8)]),
    ],
)
def test_kv_address_survives_parsing_and_formatting(text: str, workers: list[tuple[str, int]]) -> None:
    address = kv_address(text)
    assert list(address.workers) == workers
    assert str(address) == text
    assert kv_address(str(address)) == address
    assert reachable(address, frozenset(workers))
    assert reachable(address, frozenset((host, 0) for host, _ in workers))
    assert not reachable(address, frozenset(workers[1:]))


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "a:0", "a:70000", ":1", "a:1?tensor=x", "a:1?tensor=0", "a:1?layers=3,4", "a:1,b:2",
        "a:1?more=1", "a:1?tensor=2000", "a:1,b:2?layers=3,0", "x" * 5000 + ":1", "a:1\n", 7,
    ],
)  # fmt: skip
def test_invalid_kv_address_is_refused(text: object) -> None:
    with pytest.raises(InputError, match="kv"):
        kv_address(text)


def test_kv_address_without_a_port_is_accepted_where_any_port_is_allowed() -> None:
    assert kv_address("Host", port=0) == KvAddress((("host", 0),))


def chunk(layer: int, first: int, stop: int, heads: int, rng: np.random.Generator) -> KvChunk:
    shape = (stop - first, 2, heads, 8)
    data = rng.integers(0, 256, int(np.prod(shape)) * 2, dtype=np.uint8)
    return KvChunk(layer, "kv", first, stop, "bfloat16", shape, data.tobytes())


@given(st.integers(0, 10**6), st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2)]))
@settings(max_examples=60)
def test_chunks_cut_by_heads_join_to_the_whole_in_any_order(seed: int, cut_in: tuple[int, int]) -> None:
    heads, parts = cut_in
    rng = np.random.default_rng(seed)
    whole = chunk(3, 5, 25, heads, rng)
    spans = [heads_of(heads, parts, rank) for rank in range(parts)]
    pieces = []
    for span in spans:
        part = cut_chunk(whole, KvCut(heads=span))
        assert part is not None
        at = sorted({0, 20, *rng.integers(0, 20, 3).tolist()})
        row = int(np.prod(part.shape[1:])) * 2
        for a, b in pairwise(at):
            data = bytes(part.data)[a * row : b * row]
            pieces.append(replace(part, first=5 + a, stop=5 + b, shape=(b - a, *part.shape[1:]), data=data))
    rng.shuffle(pieces)  # type: ignore[arg-type]
    join, out = HeadJoin(spans), bytearray(len(whole.data))
    row, seen = len(whole.data) // 20, 0
    for piece in pieces:
        for joined in join.take(piece):
            assert (joined.head, joined.shape[2]) == (0, heads)
            out[(joined.first - 5) * row : (joined.stop - 5) * row] = joined.data
            seen += joined.stop - joined.first
    assert seen == 20
    assert bytes(out) == bytes(whole.data)


def test_kv_cut_drops_other_layers_and_keeps_latents_whole() -> None:
    rng = np.random.default_rng(0)
    whole = chunk(3, 0, 4, 2, rng)
    assert cut_chunk(whole, KvCut(layers=(0, 3))) is None
    assert cut_chunk(whole, KvCut(layers=(3, 4))) is whole
    assert cut_chunk(replace(whole, head=2), KvCut(heads=(0, 2))) is None
    latent = KvChunk(3, "latent", 0, 4, "bfloat16", (4, 1, 8), b"\0" * 64)
    assert cut_chunk(latent, KvCut(heads=(0, 1))) is latent
    with pytest.raises(FormatError, match="not asked for"):
        list(HeadJoin([(0, 1), (1, 2)]).take(whole))
    with pytest.raises(FormatError, match="cannot be"):
        KvCut(reader=2, readers=2)
