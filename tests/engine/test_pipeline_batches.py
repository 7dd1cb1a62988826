"""How steps are cut into micro-batches: nothing is lost, order is kept, and they are of like size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.engine.compute.work import SequenceWork
from potluck.engine.pipeline.launch import lanes_of, parse_stages
from potluck.engine.pipeline.step_parts import LEAST_TOKENS, cut

SIZES = st.lists(st.one_of(st.just(1), st.integers(1, 600)), min_size=1, max_size=24)


@given(SIZES, st.integers(1, 6), st.data())
def test_pieces_make_up_the_works_in_order(sizes: list[int], batches: int, data: st.DataObject) -> None:
    works = [SequenceWork(row, row * 3, list(range(size))) for row, size in enumerate(sizes)]
    paths = [(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))) for _ in sizes]
    found = cut(works, paths, batches, 1)
    assert 1 <= len(found) <= batches
    assert all(found)
    for index, work in enumerate(works):
        pieces = [piece for batch in found for piece in batch if piece.work == index]
        assert [token for piece in pieces for token in piece.part.tokens] == list(work.tokens)
        assert [piece.part.start for piece in pieces] == [
            work.start + sum(len(before.part.tokens) for before in pieces[:place])
            for place in range(len(pieces))
        ]
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.part.logits for piece in pieces] == ["none"] * (len(pieces) - 1) + ["last"]
        assert {piece.path for piece in pieces} == {paths[index]}
        assert all(len(piece.part.tokens) >= LEAST_TOKENS for piece in pieces if len(pieces) > 1)
        rows = [{piece.part.row for piece in batch} for batch in found]
        assert all(len(rows[place]) == len(batch) for place, batch in enumerate(found))


@given(SIZES, st.integers(1, 6))
def test_micro_batches_are_about_as_large_as_each_other(sizes: list[int], batches: int) -> None:
    """None is larger than its share by more than a piece that could not be cut."""
    works = [SequenceWork(row, 0, [0] * size) for row, size in enumerate(sizes)]
    found = cut(works, [(0,)] * len(works), batches, 1)
    goal = -(-sum(sizes) // min(batches, sum(sizes)))
    for batch in found:
        assert sum(len(piece.part.tokens) for piece in batch) <= goal + 2 * LEAST_TOKENS


def test_decodes_are_shared_out_and_one_alone_is_not() -> None:
    works = [SequenceWork(row, 5, [1]) for row in range(8)]
    found = cut(works, [(row % 2,) for row in range(8)], 2, 4)
    assert [[piece.path for piece in batch] for batch in found] == [[(0,)] * 4, [(1,)] * 4]
    assert len(cut(works[:1], [(0,)], 4, 1)) == 1
    assert len(cut(works, [(0,)] * 8, 2, 5)) == 1, "too few tokens to be worth it"


def test_a_long_chunk_is_spread_over_the_stages() -> None:
    found = cut([SequenceWork(0, 10, [0] * 400)], [(0,)], 4, 100)
    assert [len(batch[0].part.tokens) for batch in found] == [100] * 4


@pytest.mark.parametrize(
    ("text", "lanes"), [("4", 1), ("3,3", 2), ("2,4", 1), ("2,2,2", 3), ("1,3x2,1,1", 2), ("1,1,1,1", 4)]
)
def test_no_more_batches_go_round_than_the_slowest_stage_has_time_for(text: str, lanes: int) -> None:
    assert lanes_of(parse_stages(text)) == lanes
