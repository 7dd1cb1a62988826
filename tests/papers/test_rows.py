"""What a reproduction says, and how orders are compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.rows import Row, inversions

FIGURES = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 100.0), min_size=2)


def test_off_is_a_share_of_the_published_figure() -> None:
    assert Row("t", "s", "m", "u", 4.0, 5.0).off == pytest.approx(0.25)
    assert Row("t", "s", "m", "u", None, 5.0).off is None


@given(FIGURES, st.floats(0.5, 2.0))
def test_scaling_all_figures_keeps_the_order(figures: dict[str, float], factor: float) -> None:
    assert inversions(figures, {name: value * factor for name, value in figures.items()}) == []


@given(FIGURES)
def test_turning_figures_round_inverts_every_pair_that_differs(figures: dict[str, float]) -> None:
    turned = {name: -value for name, value in figures.items()}
    values = list(figures.values())
    unlike = sum(a > b for a in values for b in values)
    assert len(inversions(figures, turned)) == unlike


def test_a_tie_in_the_paper_cannot_be_inverted_when_ties_are_asked_for() -> None:
    assert inversions({"a": 1.02, "b": 1.0}, {"a": 1.0, "b": 2.0}) == [("a", "b")]
    assert inversions({"a": 1.02, "b": 1.0}, {"a": 1.0, "b": 2.0}, tie=0.05) == []
