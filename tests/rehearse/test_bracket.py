"""The search for one factor, against worlds in which the answer is known."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from potluck.rehearse.bracket import FactorBracket, refuted, told

FLOOR, CEILING, TOLERANCE = 0.8, 16.0, 0.05


@given(needed=st.floats(0.3, 20.0), copy=st.floats(0.02, 0.5))
def test_finds_the_least_that_holds_when_more_is_better(needed: float, copy: float) -> None:
    """Whole copies, each `copy` of the demand: what a plan has is its factor rounded up."""
    bracket = FactorBracket(FLOOR, CEILING)
    tried = []
    while not bracket.done:
        at = bracket.factor
        tried.append(at)
        copies = ceil(at / copy)
        bracket = told(bracket, at, float(copies), copies * copy >= needed, TOLERANCE)
        assert len(tried) < 20
    assert all(FLOOR <= at <= CEILING for at in tried)
    if ceil(CEILING / copy) * copy < needed:
        assert bracket.held is None
        return
    assert bracket.held in tried
    found = ceil(bracket.held / copy)
    least = max(ceil(FLOOR / copy), ceil(needed / copy))
    # At most the tolerance above the least, and a copy for rounding.
    assert least <= found <= max(least * (1 + TOLERANCE), least + 1)


@given(truth=st.lists(st.booleans(), min_size=60, max_size=60))
def test_ends_in_any_world_and_only_with_what_held(truth: list[bool]) -> None:
    """Nothing need be monotone: whatever is settled on has been seen to hold."""
    bracket = FactorBracket(FLOOR, CEILING)
    answers: dict[float, bool] = {}
    for holds in truth:
        if bracket.done:
            break
        at = bracket.factor
        holds = answers.setdefault(at, holds)
        bracket = told(bracket, at, at, holds, TOLERANCE)
    assert bracket.done
    if bracket.held is None:
        assert bracket.factor == CEILING
        assert not answers[CEILING]
    else:
        assert bracket.factor == bracket.held
        assert answers[bracket.held]


def test_stops_where_no_cheaper_plan_can_be() -> None:
    bracket = told(FactorBracket(FLOOR, CEILING), 1.0, 10.0, False, TOLERANCE)
    bracket = told(bracket, 1.5, 10.0, True, TOLERANCE)
    assert bracket.done
    assert bracket.held == 1.5


def test_a_refuted_factor_is_not_taken_again() -> None:
    bracket = told(FactorBracket(FLOOR, CEILING), 1.0, 10.0, False, TOLERANCE)
    bracket = refuted(told(bracket, 1.04, 11.0, True, TOLERANCE), 1.04, 11.0)
    assert bracket.held is None
    assert not bracket.done
    assert bracket.factor > 1.04
    assert told(bracket, bracket.factor, 12.0, True, TOLERANCE).held == bracket.factor
    assert refuted(bracket, CEILING, 50.0).done
