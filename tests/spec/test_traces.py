"""Trace files: formats, gzip, and the line of every problem."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from spec_texts import changed_spec, data_folder, only_problem, parsed_spec

from potluck.core.errors import InputError
from potluck.spec import traces
from potluck.spec.traces import TraceRequest, hit_tokens, load_trace, open_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

2023-11-16 18:15:56.6805900,100,1
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1030, "output_length": 20, "hash_ids": [0, 1, 3]},
    {"timestamp": 4000, "input_length": 600, "output_length": 30, "hash_ids": [9, 1]},
    {"timestamp": 4000, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
]


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(folder: Path, text: str | bytes, name: str = "trace.csv") -> str:
    with pytest.raises(InputError) as caught:
        load_trace(write(folder, text, name))
    return str(caught.value)


def test_azure_trace_is_read(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, AZURE.replace("\n", "\r\n")))
    assert trace.format_name == "azure"
    assert trace.input_tokens.tolist() == [374, 396, 100]
    assert trace.output_tokens.tolist() == [44, 109, 1]
    assert trace.span_s == pytest.approx(10.0)
    assert trace.rate_per_s == pytest.approx(0.2)
    assert trace.prefix_hit_share is None


def test_azure_trace_with_time_zone_and_reordered_columns_is_read(tmp_path: Path) -> None:
    text = "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens\n7,2024-05-10 00:00:00+00:00,9\n"
    name, requests = open_trace(write(tmp_path, text))
    assert name == "azure"
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(9, 7)]


def test_burstgpt_trace_counts_failed_requests(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, BURST))
    assert trace.format_name == "burstgpt"
    assert trace.output_tokens.tolist() == [18, 1]
    assert trace.empty_outputs == 1
    assert trace.span_s == 40.5


def test_mooncake_trace_has_its_prefix_hit_share(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in MOONCAKE)
    trace = load_trace(write(tmp_path, gzip.compress(text.encode()), "t.jsonl.gz"))
    assert trace.format_name == "mooncake"
    assert trace.rate_per_s == pytest.approx(0.75)
    # Block 1 of the third request was seen, but not behind block 9; the last one's third block is part full.
    assert trace.prefix_hit_share == pytest.approx((1024 + 0 + 1100) / (1100 + 1030 + 600 + 1100))


def test_prefix_hits_end_at_the_first_unseen_block() -> None:
    assert hit_tokens(TraceRequest(0, 5000, 1, (1, 2, 3)), {1, 3}) == 512
    assert hit_tokens(TraceRequest(0, 5000, 1, ()), {1, 3}) == 0


BAD = [
    (AZURE.replace("396", "x"), "trace.csv:3: ContextTokens must be a whole number, is 'x'"),
    (AZURE.replace("396", "-1"), "trace.csv:3: ContextTokens must be between 1 and 10,000,000, is -1"),
    (AZURE.replace("396", "0"), "trace.csv:3: ContextTokens must be between 1 and"),
    (AZURE.replace("396", "3.5"), "trace.csv:3: ContextTokens must be a whole number, is 3.5"),
    (AZURE.replace("396", "nan"), "trace.csv:3: ContextTokens must be a whole number, is nan"),
    (AZURE.replace("396", "1e99"), "trace.csv:3: ContextTokens must be between"),
    (AZURE.replace("396,", ""), "trace.csv:3: has 2 columns, the header has 3"),
    (AZURE.replace("100,1", "100,1,5"), "trace.csv:5: has 4 columns"),
    (
        AZURE.replace("2023-11-16 18:15:50", "noon"),
        "trace.csv:3: TIMESTAMP must be a time, is 'noon.9951690'",
    ),
    (AZURE.splitlines()[0], "trace.csv: has no requests"),
    (
        AZURE.replace("Generated", "Generate"),
        "column 'GeneratedTokens' is missing; did you mean 'GenerateTok",
    ),
    (BURST.replace("45.5", "inf"), "trace.csv:3: Timestamp must be a time, is 'inf'"),
    ("a,b\n1,2\n", "trace.csv:1: is no known trace"),
    ("", "trace.csv:1: is empty"),
    ("\x00\n", "trace.csv:1: is no known trace"),
    (b"\xff\xfe", "trace.csv:1: is not UTF-8 text"),
    (AZURE.encode() + b"\xff\n", "trace.csv:6: is not UTF-8 text"),
    ('{"timestamp": 0}\n', "trace.csv:1: 'input_length' is missing"),
    ('{"timestamp": 0, "input_len": 3, "output_length": 3}\n', "did you mean 'input_len'?"),
    ('{"timestamp": 0, "input_length": 3, "output_length": 3}\n[]\n', "trace.csv:2: is not a JSON object"),
    ('{"timestamp": 0, "input_length": 3, "output_length": 3}\n\n{\n', "trace.csv:3: is not JSON"),
    ('{"timestamp": NaN, "input_length": 3, "output_length": 3}\n', "trace.csv:1: timestamp must be a time"),
    ('{"timestamp": "x", "input_length": 3, "output_length": 3}\n', "trace.csv:1: timestamp must be a time"),
    ('{"timestamp": 0, "input_length": true, "output_length": 3}\n', "input_length must be a whole number"),
    ('{"timestamp": 0, "input_length": 3, "output_length": 3, "hash_ids": [[]]}', "hash_ids must be a list"),
    ('{"a": ' + "[" * 100_000, "trace.csv:1: is not JSON"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_invalid_trace_line_is_refused_by_its_number(text: str | bytes, says: str, tmp_path: Path) -> None:
    assert says in refused(tmp_path, text)


def test_damaged_gzip_trace_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:16:46,{i * 7919 % 5003 + 1},{i % 97}\n" for i in range(500))
    packed = gzip.compress((AZURE + rows).encode())
    assert "cannot be read" in refused(tmp_path, packed[:-20], "t.csv.gz")
    assert "cannot be read" in refused(tmp_path, packed[:30] + b"\0" * 20 + packed[50:], "t.csv.gz")


def test_trace_with_too_long_lines_or_too_many_requests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 100)
    assert "trace.csv:6: is longer than" in refused(tmp_path, AZURE + "1" * 101)
    monkeypatch.setattr(traces, "MAX_REQUESTS", 2)
    assert "trace.csv: has more than 2 requests" in refused(tmp_path, AZURE)


def test_missing_trace_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.csv: does not exist"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is not a file"):
        load_trace(tmp_path)


def with_trace(rest: str = "") -> str:
    lines = "      rate_per_s: 4\n      input: 1024\n      output: {mean: 200, cv: 0.5}\n"
    return changed_spec(lines, f"      trace: t.jsonl\n{rest}")


def test_trace_in_a_spec_sets_rate_lengths_and_prefix_hits(tmp_path: Path) -> None:
    write(tmp_path, "".join(json.dumps(row) + "\n" for row in MOONCAKE), "t.jsonl")
    model = parsed_spec(with_trace(), tmp_path).models[0]
    assert model.traffic.rate_per_s == pytest.approx(0.75)
    assert model.traffic.mean_input_tokens == pytest.approx(957.5)
    assert model.traffic.mean_output_tokens == pytest.approx(25)
    assert model.traffic.prefix_hit_share == pytest.approx(2124 / 3830)
    assert model.lengths_from == "mooncake trace t.jsonl, 4 requests"
    given = (
        parsed_spec(with_trace("      rate_per_s: 3\n      prefix_hit_share: 0\n"), tmp_path)
        .models[0]
        .traffic
    )
    assert (given.rate_per_s, given.prefix_hit_share) == (3, 0)


def test_invalid_trace_in_a_spec_is_refused_with_its_line(tmp_path: Path) -> None:
    assert only_problem(with_trace(), tmp_path) == (
        "potluck.yaml:6: models[0].traffic.trace: t.jsonl: does not exist"
    )
    write(tmp_path, json.dumps(MOONCAKE[0]), "t.jsonl")
    assert "all its requests come at one moment" in only_problem(with_trace(), tmp_path)
    write(tmp_path, json.dumps(MOONCAKE[0]) + "\n7\n", "t.jsonl")
    assert "6: models[0].traffic.trace: t.jsonl:2: is not a JSON object" in only_problem(
        with_trace(), tmp_path
    )
    both = with_trace("      input: 5\n")
    assert "traffic: has both a trace and input; keep one of them" in only_problem(both, tmp_path)
    assert "models[0].traffic.trace: " in only_problem(with_trace().replace("t.jsonl", '"a\\0b"'), tmp_path)


PUBLIC = [
    ("azure_llm_2023_conv", "csv", 19_366),
    ("azure_llm_2023_code", "csv", 8_819),
    ("mooncake_fast25_conversation", "jsonl", 12_031),
    ("mooncake_fast25_synthetic", "jsonl", 3_993),
]


@pytest.mark.parametrize(("name", "kind", "rows"), PUBLIC)
def test_public_traces_have_their_published_totals(name: str, kind: str, rows: int) -> None:
    path = data_folder() / f"{name}.{kind}.gz"
    if not path.is_file():
        pytest.skip("the public traces are not here; set POTLUCK_DATA to their folder")
    known = json.loads((data_folder() / "summary_stats.json").read_text("utf-8"))[name]
    trace = load_trace(path)
    assert len(trace) == rows == known["rows"]
    assert trace.input_tokens.mean() == pytest.approx(known["input"]["mean"], abs=0.051)
    assert trace.output_tokens.mean() == pytest.approx(known["output"]["mean"], abs=0.051)
    assert trace.span_s == pytest.approx(known["duration_s"], abs=0.051)
    assert trace.rate_per_s == pytest.approx(known["mean_rate_rps"], rel=1e-3)
    blocks = known.get("infinite_cache_prefix_block_hit_ratio")
    if blocks is not None:
        # Theirs counts blocks; ours tokens, of which a prompt's last block has fewer.
        assert trace.prefix_hit_share == pytest.approx(blocks, abs=0.015)
