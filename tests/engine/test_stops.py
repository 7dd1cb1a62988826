"""Stop strings: whatever the cuts, the same comes out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.text_stream import StopScanner
from potluck.core.errors import InputError

WORDS = st.text("ab", max_size=12)


@given(
    WORDS,
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_stop_strings_are_found_across_any_chunking(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for start, stop in pairwise(places):
        shown += scanner.feed(text[start:stop])
        # Shown text is final: it is never taken back.
        assert text.startswith(shown)
    complete = first_complete(text, stops)
    assert scanner.found == complete[1]
    if complete[1] is None:
        assert shown + scanner.rest() == text
    else:
        assert shown == text[: complete[0]]
        assert scanner.feed("more") == scanner.rest() == ""


def first_complete(text: str, stops: list[str]) -> tuple[int, str | None]:
    """Where the stop string begins that is complete first, the longest of those; by trying every character."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return len(text), None


def test_first_complete_stop_string_ends_the_text() -> None:
    for pieces in (["aba"], ["ab", "a"], ["a", "b", "a"]):
        scanner = StopScanner(["aba", "b"])
        assert "".join(map(scanner.feed, pieces)) == "a"
        assert scanner.found == "b"


def test_text_that_cannot_start_a_stop_string_is_not_held_back() -> None:
    scanner = StopScanner(["abc"])
    assert [scanner.feed(piece) for piece in ("xa", "b", "x", "ab", "c")] == ["x", "", "abx", "", ""]
    assert scanner.found == "abc"
    with pytest.raises(InputError):
        StopScanner([""])
