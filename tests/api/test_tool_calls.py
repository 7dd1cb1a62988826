"""Parsing of tool calls in text, independent of chunk boundaries."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.tool_calls import (
    CALL_JSON_MAX_DEPTH,
    CLOSING_TAG,
    OPENING_TAG,
    CallFormat,
    JsonObjectScanner,
    ToolCallParser,
)

Parsed = tuple[str, list[tuple[int, str, str]]]


def parse_pieces(pieces: list[str], form: CallFormat = "tagged", parallel: bool = True) -> Parsed:
    parser = ToolCallParser(form, parallel=parallel)
    content = "".join(map(parser.feed, pieces)) + parser.end()
    return content, [(call.index, call.name, call.arguments) for call in parser.calls]


def call_text(name: object, arguments: object) -> str:
    return f"{OPENING_TAG}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSING_TAG}"


CALLS: dict[str, tuple[str, Parsed]] = {
    "one call": (call_text("f", {"a": 1}), ("", [(0, "f", '{"a": 1}')])),
    "text before": ("Well.\n" + call_text("f", {}), ("Well.\n", [(0, "f", "{}")])),
    "text around": (f"a {call_text('f', {})} b", ("a  b", [(0, "f", "{}")])),
    "white space around": (f"\n {call_text('f', {})}\n", ("", [(0, "f", "{}")])),
    "two calls": (f"{call_text('f', {})}\n{call_text('g', {})}", ("", [(0, "f", "{}"), (1, "g", "{}")])),
    "two calls and text": (f"{call_text('f', {})}\nand\n{call_text('g', {})}", (
        "\nand\n", [(0, "f", "{}"), (1, "g", "{}")])),
    "no white space": ('<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [(0, "f", "{}")])),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", [(0, "f", "{}")])),
    "null arguments": (call_text("f", None), ("", [(0, "f", "{}")])),
    "another order": (
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', ("", [(0, "f", '{"a": [1]}')])),
    "tags in a string": (call_text("f", {"a": "</tool_call><tool_call>}{"}), (
        "", [(0, "f", '{"a": "</tool_call><tool_call>}{"}')])),
    "a quote in a string": (call_text("f", {"a": 'x"}\\'}), ("", [(0, "f", '{"a": "x\\"}\\\\"}')])),
    "a line end in a string": ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', (
        "", [(0, "f", '{"a": "x\\ny"}')])),
    "letters of other scripts": ('<tool_call>{"name": "f", "arguments": {"a": "\\u014csaka"}}</tool_call>', (
        "", [(0, "f", '{"a": "Ōsaka"}')])),
    "a call within a broken one": (
        f"<tool_call>{call_text('f', {})}", ("<tool_call>", [(0, "f", "{}")])),
    "a closing tag is missing": (
        f'<tool_call>{{"name": "f"}}{call_text("g", {})}', ('<tool_call>{"name": "f"}', [(0, "g", "{}")])),
    "a brace is missing": (
        f'<tool_call>{{"name": "f", "arguments": {{}}</tool_call>{call_text("g", {})}',
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', [(0, "g", "{}")])),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CALLS.values(), ids=CALLS.keys())
def test_tool_calls_are_parsed_whole_and_character_by_character(text: str, expected: Parsed) -> None:
    assert parse_pieces([text]) == expected
    assert parse_pieces(list(text)) == expected


PLAIN = [
    "",
    " \n",
    "just text",
    "a < b and <tool",
    "<tool_call>",
    "<tool_call> and <tool_call>",
    "x</tool_call>",
    f"{OPENING_TAG}{{}}{CLOSING_TAG}",
    f"{OPENING_TAG}[]{CLOSING_TAG}",
    f'{OPENING_TAG}"f"{CLOSING_TAG}',
    f"{OPENING_TAG}f(x){CLOSING_TAG}",
    call_text("", {}),
    call_text(5, {}),
    call_text("f", [1]),
    call_text("f", "text"),
    call_text("f", {})[:-1],
    call_text("f", {})[: -len(CLOSING_TAG)],
    call_text("f", {})[:20],
    f" \n{call_text('f', {})[:20]}",
    f'{OPENING_TAG}{{"name": "f", "arguments": {{"a": 1e999}}}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f", "arguments": {{"a": NaN}}}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f", "arguments": {{"a": "\\ud800"}}}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f", "arguments": {{"a": {"9" * 9000}}}}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f", "arguments": {{"a": {"[" * 5000}{"]" * 5000}}}}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f",}}{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f"}} x{CLOSING_TAG}',
    f'{OPENING_TAG}{{"name": "f"}}</tool_CALL>',
]


@pytest.mark.parametrize("text", PLAIN)
def test_invalid_and_unfinished_tool_calls_are_plain_text(text: str) -> None:
    assert parse_pieces([text]) == (text, [])
    assert parse_pieces(list(text)) == (text, [])


PIECES = st.sampled_from([
    "<", "tool", "<tool_call>", "</tool_call>", "</", ">", "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n",
    "é", "1", "-", "true", "x", '"name"', '"name": "f"', '"arguments": {}', call_text("f", {"a": [1, {"b": "}"}]}),
    call_text("g", {}), '<tool_call>{"name": "f"', '"arguments": {"a": ',
])  # fmt: skip


@given(st.lists(PIECES, max_size=14), st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_tool_call_parsing_does_not_depend_on_chunking(
    parts: list[str], places: list[int], parallel: bool
) -> None:
    text = "".join(parts)
    cuts = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    forms: tuple[CallFormat, ...] = ("tagged", "bare")
    for form in forms:
        whole = parse_pieces([text], form, parallel)
        assert parse_pieces([text[a:b] for a, b in pairwise(cuts)], form, parallel) == whole
        assert parse_pieces(list(text), form, parallel) == whole


@given(
    st.lists(
        st.tuples(
            st.text(max_size=8).filter(lambda text: "<" not in text),
            st.text(min_size=1, max_size=5),
            st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_written_tool_calls_are_parsed_back_with_surrounding_text(
    rows: list[tuple[str, str, dict[str, Any]]],
) -> None:
    text = "".join(before + call_text(name, arguments) for before, name, arguments in rows)
    content, calls = parse_pieces([text])
    assert content == "".join(before for before, _, _ in rows if before.strip())
    assert [(index, name, json.loads(arguments)) for index, name, arguments in calls] == [
        (index, name, arguments) for index, (_, name, arguments) in enumerate(rows)
    ]


def test_text_is_passed_on_at_once_and_a_possible_tag_is_held_back() -> None:
    parser = ToolCallParser()
    assert [parser.feed(piece) for piece in ("Hi", " <to", "ol", "s> ", "<tool_call", ">", "{")] == [
        "Hi", " ", "", "<tools> ", "", "", "",
    ]  # fmt: skip
    assert parser.feed(" oops") == "<tool_call>{ oops"


def test_only_the_first_tool_call_counts_without_parallel_calls() -> None:
    text = f"{call_text('f', {})}{call_text('g', {})}"
    assert parse_pieces([text], parallel=False) == ("", [(0, "f", "{}")])


def test_bare_form_parses_one_tool_call_without_tags() -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    assert parse_pieces(list(text), "bare") == ("", [(0, "f", '{"a": 1}')])
    assert parse_pieces([text + "\n"], "bare") == ("", [(0, "f", '{"a": 1}')])
    for plain in (text[:-1], "[1]", "{}", ""):
        assert parse_pieces(list(plain), "bare") == (plain, [])


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from([None, 1]),
    st.text(max_size=5),
)
def test_scanner_finds_the_end_of_every_json_object(value: Any, indent: int | None, rest: str) -> None:
    text = json.dumps({"value": value}, indent=indent)
    scanner = JsonObjectScanner()
    assert scanner.feed(text + rest, 0) == len(text)
    assert (scanner.complete, scanner.invalid) == (True, False)


def test_scanner_refuses_deeply_nested_objects() -> None:
    for depth, invalid in ((CALL_JSON_MAX_DEPTH, False), (CALL_JSON_MAX_DEPTH + 1, True)):
        scanner = JsonObjectScanner()
        scanner.feed('{"a":' * (depth - 1) + "{" + "}" * depth, 0)
        assert (scanner.invalid, scanner.complete) == (invalid, not invalid)
