"""Multisets of node types as numbers."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.plan.templates.pipeline import Multisets, multisets


@pytest.mark.parametrize(("kinds", "most"), [(1, 1), (1, 6), (3, 4), (5, 3), (20, 2)])
def test_multiset_ids_enumerate_every_multiset_once(kinds: int, most: int) -> None:
    space = multisets(kinds, most)
    every = [c for n in range(most + 1) for c in combinations_with_replacement(range(kinds), n)]
    assert space.count == len(every)
    assert sorted(map(space.types_of, range(space.count))) == sorted(every)


def test_multisets_of_corals_extended_setting_number_230229() -> None:
    space = multisets(20, 6)
    assert space.count == 230_229 + 1
    assert space.members.shape == (230_230, 6)
    assert space.sizes(np.array([0, 1, 20, 21, space.count - 1])).tolist() == [0, 1, 1, 2, 6]


def test_smaller_multisets_have_smaller_ids() -> None:
    space = multisets(7, 4)
    sizes = space.sizes(np.arange(space.count))
    assert (np.diff(sizes) >= 0).all()
    assert sizes.tolist() == [len(space.types_of(number)) for number in range(space.count)]


@given(st.integers(1, 12), st.data())
def test_multiset_counts_equal_the_multiplicity_of_each_type(kinds: int, data: st.DataObject) -> None:
    space = multisets(kinds, 4)
    ids = np.array(data.draw(st.lists(st.integers(0, comb(kinds + 4, 4) - 1), max_size=8)), np.int64)
    for number, row in zip(ids, space.counts(ids), strict=True):
        assert {t: int(c) for t, c in enumerate(row) if c} == Counter(space.types_of(int(number)))


@pytest.mark.parametrize(("kinds", "most"), [(0, 3), (256, 1), (3, 0), (3, 9), (200, 6)])
def test_multiset_space_of_invalid_size_is_refused(kinds: int, most: int) -> None:
    with pytest.raises(InputError):
        Multisets(kinds, most)


def test_multiset_id_outside_the_space_is_refused() -> None:
    space = multisets(3, 2)
    for number in (-1, space.count):
        with pytest.raises(InputError):
            space.types_of(number)
