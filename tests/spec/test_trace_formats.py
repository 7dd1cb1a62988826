"""Trace formats: reading, writing and statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_texts import data_folder
from test_traces import AZURE, BURST, MOONCAKE, refused, write

from potluck.core.errors import InputError
from potluck.spec.traces import (
    FORMATS,
    Format,
    Trace,
    format_of,
    load_trace,
    trace_stats,
    window_counts,
    write_trace,
)

SHARE = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 41}, {"from": "gpt", "value": "y" * 8}]},
    {"id": "b", "conversations": []},
    {
        "id": "c",
        "conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "last word"}],
    },
    {
        "id": "d",
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "user", "tokens": 7},
            {"from": "assistant", "value": "z", "tokens": 9},
            {"from": "human", "value": "more"},
        ],
    },
]


def test_trace_times_that_go_back_are_refused_with_their_line(tmp_path: Path) -> None:
    swapped = AZURE.replace("18:15:56", "18:15:49")
    assert "trace.csv:5: TIMESTAMP goes back by 1.3" in refused(tmp_path, swapped)
    assert "trace.csv:3: Timestamp goes back by 1 s; sort" in refused(tmp_path, BURST.replace("45.5", "4"))
    rows = [MOONCAKE[1], MOONCAKE[0]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert "t.jsonl:2: timestamp goes back by 1 s" in refused(tmp_path, text, "t.jsonl")


@pytest.mark.parametrize("indent", [None, 1])
def test_sharegpt_trace_is_read_without_times(tmp_path: Path, indent: int | None) -> None:
    trace = load_trace(write(tmp_path, json.dumps(SHARE, indent=indent), "t.json"))
    assert trace.format_name == "sharegpt"
    # 41 and 8 bytes are 11 and 2 tokens of four; the last one brings its counts.
    assert trace.input_tokens.tolist() == [11, 7]
    assert trace.output_tokens.tolist() == [2, 9]
    assert trace.passed_over == 2
    assert trace.rate_per_s is None


def test_sharegpt_token_counts_follow_bytes_for_chinese_text(tmp_path: Path) -> None:
    talk = {"conversations": [{"from": "human", "value": "你好" * 10}, {"from": "gpt", "value": "好"}]}
    trace = load_trace(write(tmp_path, json.dumps([talk], ensure_ascii=False), "t.json"))
    assert trace.input_tokens.tolist() == [15]


BAD_SHARE = [
    ('[\n{"conversations": 3}\n]', "t.json: conversation 1: conversations must be a list, is 3"),
    ('[\n\n{"id": 1}\n]', "t.json: conversation 1: 'conversations' is missing"),
    ("[\n7\n]", "t.json: conversation 1: is not a JSON object"),
    ('[{"conversations": []}\n{"conversations": []}]', "t.json:2: is not JSON: Expecting ',' delimiter"),
    ('[\n{"conversations": [}]\n]', "t.json:2: is not JSON"),
    ('[{"conversations": []},\n', "t.json:2: is not JSON"),
    ('[{"conversations": []}]\n\nx', "t.json:3: is not JSON: Extra data"),
    ('[{"conversations": [7]}]', "t.json: conversation 1: every turn must be an object with 'from'"),
    (
        '[{"conversations": [{"from": "human", "value": 7}, {"from": "gpt", "value": ""}]}]',
        "needs 'value' or 'tokens'",
    ),
    (
        '[\n{"conversations": [{"from": "human", "tokens": -4}, {"from": "gpt", "tokens": 1}]}]',
        "t.json: conversation 1: tokens must be between 0 and",
    ),
    ("[]", "t.json: has no requests"),
    ("[", "t.json:1: is not JSON"),
    ("[" * 100_000, "t.json: is nested too deeply"),
    (b'[\n{"conversations": "\xff"}]', "t.json:2: is not UTF-8 text"),
]


@pytest.mark.parametrize(("text", "says"), BAD_SHARE)
def test_invalid_sharegpt_entry_is_refused_by_its_place(text: str | bytes, says: str, tmp_path: Path) -> None:
    assert says in refused(tmp_path, text, "t.json")


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | (
    st.dictionaries(st.sampled_from(["conversations", "from", "value", "tokens"]), inner, max_size=3)
)))  # fmt: skip
def test_any_sharegpt_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, entry: object
) -> None:
    path = write(tmp_path_factory.mktemp("share"), json.dumps([entry]), "t.json")
    message = ""
    try:
        assert len(load_trace(path)) == 1
    except InputError as error:
        message = str(error)
    assert "\n" not in message


tokens = st.integers(1, 10**6)
blocks = st.lists(st.integers(0, 2**62), max_size=3)
traces = st.lists(st.tuples(st.floats(0, 1e6), tokens, tokens, blocks), min_size=1, max_size=20)


def trace_of(rows: list[tuple[float, int, int, list[int]]]) -> Trace:
    rows = sorted(rows, key=lambda row: row[0])
    ids = [block for row in rows for block in row[3]]
    return Trace(
        "made",
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows], dtype=np.float64),
        np.array([row[2] for row in rows], dtype=np.float64),
        None,
        0,
        block_starts=np.cumsum([0, *(len(row[3]) for row in rows)]) if ids else None,
        block_ids=np.array(ids, dtype=np.int64) if ids else None,
    )


@given(traces, st.sampled_from(FORMATS), st.sampled_from(["", ".gz"]))
def test_written_trace_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[float, int, int, list[int]]],
    to: Format,
    packed: str,
) -> None:
    trace = trace_of(rows)
    path = tmp_path_factory.mktemp("written") / f"t.x{packed}"
    write_trace(trace, path, to)
    back = load_trace(path, blocks=True)
    assert back.format_name == to
    assert back.input_tokens.tolist() == trace.input_tokens.tolist()
    assert back.output_tokens.tolist() == trace.output_tokens.tolist()
    start_s = trace.time_s[0] if to == "azure" else 0.0
    assert back.time_s - back.time_s[0] == pytest.approx(trace.time_s - trace.time_s[0], abs=2e-6)
    assert back.time_s[0] == pytest.approx(start_s, abs=2e-6)
    if to == "mooncake" and trace.block_ids is not None:
        assert back.block_ids is not None
        assert back.block_ids.tolist() == trace.block_ids.tolist()
        assert back.block_starts is not None
        assert trace.block_starts is not None
        assert back.block_starts.tolist() == trace.block_starts.tolist()
    again = path.with_name(f"u.x{packed}")
    write_trace(trace, again, to)
    assert again.read_bytes() == path.read_bytes()


def test_traces_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    trace = trace_of([(0.0, 1, 1, [])])
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(trace, tmp_path / "no" / "t.csv", "azure")
    with pytest.raises(InputError, match="1970 to 9999"):
        write_trace(trace_of([(1e14, 1, 1, [])]), tmp_path / "t.csv", "azure")
    assert format_of(Path("a.csv.gz")) == "azure"
    assert format_of(Path("a.jsonl")) == "mooncake"
    with pytest.raises(InputError, match="give --to"):
        format_of(Path("a.txt"))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60), st.floats(1, 100))
def test_trace_window_counts_equal_a_plain_count(times: list[float], window_s: float) -> None:
    at = np.array(sorted(times))
    counts = window_counts(at, window_s)
    since = at - at[0]
    assert len(counts) == int(since[-1] // window_s)
    for i, count in enumerate(counts):
        # Right at an edge, division and multiplication may round to different sides.
        sure = ((since > i * window_s + 1e-9) & (since < (i + 1) * window_s - 1e-9)).sum()
        near = ((since >= i * window_s - 1e-9) & (since <= (i + 1) * window_s + 1e-9)).sum()
        assert sure <= count <= near


@pytest.mark.parametrize(
    "name", ["azure_llm_2023_conv.csv", "azure_llm_2023_code.csv", "mooncake_fast25_conversation.jsonl"]
)
def test_stats_of_public_traces_equal_published_values(name: str) -> None:
    path = data_folder() / f"{name}.gz"
    if not path.is_file():
        pytest.skip("the public traces are not here; set POTLUCK_DATA to their folder")
    known = json.loads((data_folder() / "summary_stats.json").read_text("utf-8"))[name.split(".")[0]]
    result = trace_stats(load_trace(path))
    assert result.gap_cv == pytest.approx(known["interarrival_cv"], abs=0.002)
    assert result.window_cv == pytest.approx(known["count_60s_cv"], abs=0.002)
    assert result.window_peak_to_mean == pytest.approx(known["peak_to_mean_60s"], abs=0.002)
    for spread, side in ((result.input_tokens, "input"), (result.output_tokens, "output")):
        for level in ("p50", "p90", "p99", "max"):
            assert getattr(spread, level) == pytest.approx(known[side][level], rel=1e-3)


def test_trace_stats_without_times_have_no_rate(tmp_path: Path) -> None:
    result = trace_stats(load_trace(write(tmp_path, json.dumps(SHARE), "t.json")))
    assert result.rate_per_s is None
    assert result.gap_cv is None
    assert result.window_cv is None
