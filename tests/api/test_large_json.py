"""Large JSON bodies: read in short steps with the results of the fast parser, up to a limit of values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api import large_json
from potluck.api.http import compact, parse_object
from potluck.api.large_json import read_large_object
from potluck.core.errors import FormatError, InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["prompt", "tokens", "a", "é"]) | st.text(), VALUES, max_size=5)


def outcome(read: Any, raw: bytes) -> object:
    try:
        return read(raw)
    except FormatError:
        return "refused"


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), st.integers(12, 40))
def test_large_object_equals_that_of_the_fast_parser(
    body: dict[str, Any], ascii_only: bool, indent: int | None, window_bytes: int
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "WINDOW_BYTES", window_bytes)
        assert read_large_object(raw).values == parse_object(raw) == body


@given(
    OBJECTS,
    st.integers(0, 200),
    st.integers(0, 3),
    st.binary(max_size=2) | st.sampled_from([b",", b'"', b"]", b"}", b"\\", b"\\ud800", b"0", b" ", b"\xe6"]),
    st.integers(12, 40),
)
def test_damaged_object_is_refused_like_by_the_fast_parser(
    body: dict[str, Any], place: int, cut: int, inserted: bytes, window_bytes: int
) -> None:
    raw = json.dumps(body, ensure_ascii=False).encode()
    raw = raw[:place] + inserted + raw[place + cut :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "WINDOW_BYTES", window_bytes)
        assert outcome(lambda raw: read_large_object(raw).values, raw) == outcome(parse_object, raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[]}', b'{"prompt":[1]}', b'{"prompt":[1,]}', b'{"prompt":[,1]}', b'{"prompt":[1,,2]}',
        b'{"prompt":[1 2]}', b'{"prompt":[01]}', b'{"prompt":[[1,2],[3]]}', b'{"prompt":[1.5,2]}', b'{"prompt":[ ]}',
        b'{"prompt":[-1]}', b'{"prompt":[1', b'{"a":NaN}', b'{"a":1}x', b'{"a":"\t"}', b'{"a":tru}', b"",
        b"[1]", b'"a"',
        b'{"a":"\\ud83d\\ude00"}', b'{"a":"\\ud83d"}', b'{"a":"\\ude00\\ud83d"}', b'{"a":"\\x"}', b'{"a":1,"a":2}',
        b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", b'{"a":' + b"[" * 250 + b"]" * 250 + b"}",
        b'{"a":' + b"9" * 4400 + b"}",
    ],
)  # fmt: skip
def test_corner_case_equals_that_of_the_fast_parser(raw: bytes) -> None:
    assert outcome(lambda raw: read_large_object(raw).values, raw) == outcome(parse_object, raw)


def test_members_of_the_object_are_located() -> None:
    raw = b' { "a" : [1, {"b": 2}] ,"a":"x" , "prompt": [1,2 ] }'
    members = read_large_object(raw).members
    assert {name: raw[start:stop] for name, (start, stop) in members.items()} == {
        "a": b'"a":"x"',
        "prompt": b'"prompt": [1,2 ]',
    }


def test_reading_stops_at_the_first_value_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "VALUES_MAX", 100)
    good = {"a": [1] * 97, "b": 2, "prompt": [7] * 5_000}
    assert read_large_object(json.dumps(good).encode()).values == good | {"a": [1] * 97}
    for raw in (b'{"a":[%b' % (b"1," * 101), b"{%b" % (b'"a":1,' * 101)):
        with pytest.raises(InputError, match="body: has more than 100 values beside tokens"):
            read_large_object(raw + b"what follows is never read")


def test_only_prompt_token_lists_are_exempt_from_the_value_limit() -> None:
    numbers = json.dumps([7] * (large_json.VALUES_MAX + 1)).encode()
    read = read_large_object(b'{"prompt":%b}' % numbers).values["prompt"]
    assert read == [7] * (large_json.VALUES_MAX + 1)
    with pytest.raises(InputError, match="has more than"):
        read_large_object(b'{"metadata":%b}' % numbers)
    with pytest.raises(InputError, match="has more than"):
        read_large_object(b'{"a":{"prompt":%b}}' % numbers)


@given(VALUES, st.integers(1, 9), st.integers(1, 3))
def test_value_written_in_steps_equals_that_of_the_fast_writer(
    value: Any, written_chars: int, written_numbers: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "WRITTEN_CHARS", written_chars)
        patch.setattr(large_json, "WRITTEN_NUMBERS", written_numbers)
        assert large_json.large_json(value) == compact(value)


def test_large_value_is_written_in_small_pieces() -> None:
    value = {"prompt": list(range(100_000)), "messages": [{"role": "user", "content": "\n\u00e9" * 100_000}]}
    pieces = list(large_json._json_pieces(value))
    assert "".join(pieces).encode() == compact(value)
    assert max(map(len, pieces)) <= 6 * large_json.WRITTEN_CHARS
