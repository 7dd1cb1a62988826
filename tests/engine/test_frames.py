"""Hand-overs as bytes, and stop strings: whatever the cuts, the same comes out; whatever is damaged is refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import FormatError, InputError
from potluck.engine.frames import (
    Closing,
    FrameReader,
    Opening,
    Problem,
    closing,
    opening,
    parcel_frames,
    problem,
)
from potluck.engine.handover import Manifest, Parcel
from potluck.engine.stops import StopScanner

ABOUT = Manifest("f" * 32, 3, 9, "ab" * 32)
PARCELS = [
    Parcel(0, "kv", 3, 9, "float32", (6, 2, 1, 2), bytes(range(96))),
    Parcel(1, "memory", 9, 9, "bfloat16", (3,), b"abcdef"),
]
STREAM = b"".join(
    [
        opening(ABOUT, 2),
        *(b"".join(map(bytes, parcel_frames(parcel))) for parcel in PARCELS),
        problem("a line"),
        closing(2),
    ]
)
FRAMES = [Opening(ABOUT, 2), *PARCELS, Problem("a line"), Closing(2)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_cut_of_the_stream_gives_the_same_frames(cuts: list[int]) -> None:
    reader, found = FrameReader(1000), []
    places = [0, *sorted(cuts), len(STREAM)]
    for start, stop in pairwise(places):
        found += reader.feed(STREAM[start:stop])
    reader.close()
    assert found == FRAMES


@settings(max_examples=300)
@given(st.integers(0, len(STREAM) * 8 - 1))
def test_any_damaged_bit_is_noticed(bit: int) -> None:
    data = bytearray(STREAM)
    data[bit // 8] ^= 1 << bit % 8
    reader = FrameReader(1000)
    with pytest.raises(FormatError):  # noqa: PT012  either may notice
        reader.feed(bytes(data))
        reader.close()


@pytest.mark.parametrize("cut", [1, 20, 30, len(STREAM) - 1])
def test_a_stream_that_ends_early_is_noticed(cut: int) -> None:
    reader = FrameReader(1000)
    reader.feed(STREAM[:cut])
    with pytest.raises(FormatError, match="cut short"):
        reader.close()


def test_nothing_is_taken_that_is_larger_than_agreed() -> None:
    with pytest.raises(FormatError, match="larger"):
        FrameReader(95).feed(STREAM)
    huge = struct.pack("<4sBBHIQI", b"PLKV", 1, 2, 0, 10, 1 << 50, 0)
    with pytest.raises(FormatError, match="larger"):
        FrameReader(1 << 30).feed(huge)


def test_a_parcel_whose_sizes_disagree_is_refused() -> None:
    lies = Parcel(0, "kv", 3, 9, "float32", (7, 2, 1, 2), bytes(96))
    with pytest.raises(FormatError, match="shape"):
        FrameReader(1000).feed(b"".join(map(bytes, parcel_frames(lies))))


WORDS = st.text("ab", max_size=12)


@given(
    WORDS,
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_stop_strings_are_found_across_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for start, stop in pairwise(places):
        shown += scanner.feed(text[start:stop])
        # Shown text is final: it is never taken back.
        assert text.startswith(shown)
    found = first_complete(text, stops)
    assert scanner.found == found[1]
    if found[1] is None:
        assert shown + scanner.rest() == text
    else:
        assert shown == text[: found[0]]
        assert scanner.feed("more") == scanner.rest() == ""


def first_complete(text: str, stops: list[str]) -> tuple[int, str | None]:
    """Where the stop string begins that is complete first, the longest of those; by trying every character."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return len(text), None


def test_a_stop_that_is_complete_ends_it_whatever_began_before() -> None:
    for pieces in (["aba"], ["ab", "a"], ["a", "b", "a"]):
        scanner = StopScanner(["aba", "b"])
        assert "".join(map(scanner.feed, pieces)) == "a"
        assert scanner.found == "b"


def test_nothing_is_held_back_without_need() -> None:
    scanner = StopScanner(["abc"])
    assert [scanner.feed(piece) for piece in ("xa", "b", "x", "ab", "c")] == ["x", "", "abx", "", ""]
    assert scanner.found == "abc"
    with pytest.raises(InputError):
        StopScanner([""])
