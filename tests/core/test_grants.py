"""Links shared out among their senders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.bandwidth_grants import EASED, GRANTED, KEPT, LEAST, LOSSY, eased, grants

wanted = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.floats(0, 1e10), min_size=1, max_size=8
)


@given(st.floats(1e3, 1e11), wanted)
def test_nobody_is_starved_and_the_link_is_never_overfilled(link: float, wants: dict[str, float]) -> None:
    found = grants(link, wants)
    whole = GRANTED * link
    assert found.keys() == wants.keys()
    assert sum(found.values()) == pytest.approx(whole)
    for sender, want in wants.items():
        even = whole / len(wants)
        assert found[sender] >= min(max(want, KEPT * even), even) * (1 - 1e-9)
    short = [sender for sender, want in wants.items() if found[sender] < want * (1 - 1e-9)]
    if short:  # then those that got less than they want got the same, and nobody more
        most = max(found.values())
        assert all(found[sender] == pytest.approx(most) for sender in short)


def test_what_nobody_wants_is_dealt_out_evenly() -> None:
    assert grants(100.0, {"a": 0.0, "b": 0.0}) == {"a": 45.0, "b": 45.0}
    assert grants(100.0, {"a": 10.0, "b": 200.0}) == {"a": pytest.approx(10.0), "b": pytest.approx(80.0)}
    assert grants(100.0, {}) == {}


def test_a_link_that_loses_is_eased_and_recovers() -> None:
    share = 1.0
    for _ in range(50):
        share = eased(share, LOSSY * 2)
    assert share == LEAST
    assert eased(1.0, LOSSY) == 1.0
    assert eased(1.0, LOSSY * 1.1) == EASED
    for _ in range(50):
        share = eased(share, 0.0)
    assert share == 1.0
