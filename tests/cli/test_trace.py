"""`potluck trace`: stats, scale, convert and make, and one line for invalid input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from potluck.cli.common.workloads import WorkloadOptions, load
from potluck.cli.main import run
from potluck.core.errors import InputError
from potluck.spec.traces import load_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.680590,374,44
2023-11-16 18:15:50.995169,396,109
2023-11-16 18:15:56.680590,100,1
"""


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": i * 100, "input_length": 1100 + i, "output_length": 5, "hash_ids": [0, 1, 100 + i]}
        for i in range(50)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def error_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_trace_stats_prints_rate_gaps_and_prefix_hits(
    azure: Path, mooncake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "stats", str(azure)]) == 0
    assert "0.2 requests/s" in capsys.readouterr().out
    assert run(["trace", "stats", str(mooncake), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["requests"] == 50
    assert document["rate_per_s"] == pytest.approx(10)
    assert document["gap_cv"] == pytest.approx(0, abs=1e-9)
    assert document["prefix_hit_share"] == pytest.approx(49 * 1024 / sum(range(1100, 1150)))
    assert document["input_tokens"]["max"] == 1149


@pytest.mark.parametrize("how", ["stretch", "superpose"])
def test_trace_convert_scales_a_trace_to_a_rate(mooncake: Path, tmp_path: Path, how: str) -> None:
    out = tmp_path / "scaled.jsonl.gz"
    command = ["trace", "convert", str(mooncake), "--rate", "30", "--how", how, "--out", str(out)]
    assert run(command) == 0
    scaled = load_trace(out, blocks=True)
    assert scaled.format_name == "mooncake"
    assert scaled.rate_per_s == pytest.approx(30, rel=0.1)
    assert len(scaled) == (50 if how == "stretch" else pytest.approx(150, abs=10))
    assert set(scaled.input_tokens) == set(load_trace(mooncake).input_tokens)
    assert scaled.block_ids is not None


def test_scaled_azure_trace_keeps_its_start_time(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "scaled.csv"
    assert run(["trace", "convert", str(azure), "--rate", "2", "--out", str(out)]) == 0
    assert load_trace(out).time_s[0] == pytest.approx(load_trace(azure).time_s[0], abs=1e-5)
    assert load_trace(out).span_s == pytest.approx(1.0, abs=1e-5)


def test_trace_convert_writes_other_formats(
    azure: Path, mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.csv"
    assert run(["trace", "convert", str(mooncake), "--to", "burstgpt", "--out", str(out)]) == 0
    assert "prefix block ids are left out" in capsys.readouterr().err
    assert load_trace(out).format_name == "burstgpt"
    assert load_trace(out).time_s == pytest.approx(load_trace(mooncake).time_s)
    back = tmp_path / "c.jsonl"
    assert run(["trace", "convert", str(azure), "--out", str(back)]) == 0
    assert load_trace(back).format_name == "mooncake"
    assert load_trace(back).output_tokens.tolist() == [44, 109, 1]


def test_trace_make_is_reproducible_and_has_the_given_rate(tmp_path: Path) -> None:
    def made(name: str, *more: str) -> bytes:
        out = tmp_path / name
        command = [
            *("trace", "make", "azure-conv", "--requests", "5000", "--seed", "3", "--out", str(out)),
            *more,
        ]
        assert run(command) == 0
        return out.read_bytes()

    assert made("a.csv", "--rate", "7") == made("b.csv", "--rate", "7")
    trace = load_trace(tmp_path / "a.csv")
    assert trace.rate_per_s == pytest.approx(7, rel=0.06)
    assert trace.input_tokens.mean() == pytest.approx(1155, rel=0.06)
    made("c.csv")
    assert load_trace(tmp_path / "c.csv").rate_per_s == pytest.approx(5.53, rel=0.06)


def test_converted_sharegpt_trace_gets_poisson_arrivals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = {"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 8}]}
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk] * 3000))
    out = tmp_path / "s.csv"
    assert run(["trace", "convert", str(path), "--rate", "5", "--out", str(out)]) == 0
    gaps = np.diff(load_trace(out).time_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)
    capsys.readouterr()
    assert "has no arrival times" in error_line(capsys, "trace", "convert", path, "--out", out)
    assert run(["trace", "stats", str(path)]) == 0
    assert "estimated" in capsys.readouterr().out


def test_trace_commands_refuse_invalid_input_in_one_line(
    azure: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert "none.csv: does not exist" in error_line(capsys, "trace", "stats", tmp_path / "none.csv")
    azure.write_text(AZURE.replace("396", "-3"))
    assert "a.csv:3: ContextTokens must be between" in error_line(capsys, "trace", "stats", azure)
    azure.write_text(AZURE.replace("18:15:56", "18:15:16"))
    assert "a.csv:4: TIMESTAMP goes back by" in error_line(
        capsys, "trace", "convert", azure, "--rate", 3, "--out", out
    )
    azure.write_text(AZURE.replace("GeneratedTokens", "Tokens"))
    assert "'GeneratedTokens' is missing" in error_line(capsys, "trace", "convert", azure, "--out", out)
    assert "--rate" in error_line(capsys, "trace", "convert", azure, "--rate", 0, "--out", out)
    unknown = error_line(capsys, "trace", "make", "nonsense-name", "--rate", 1, "--out", out)
    assert unknown.endswith("NAME: unknown 'nonsense-name' (`potluck catalog workloads` lists them)")
    assert "--rate: is needed" in error_line(capsys, "trace", "make", "prfaas", "--out", out)
    assert "neither .csv nor .jsonl" in error_line(
        capsys, "trace", "make", "coding", "--rate", 1, "--out", tmp_path / "x"
    )
    assert "cannot be written" in error_line(
        capsys, "trace", "make", "coding", "--rate", 1, "--out", tmp_path / "no" / "x.csv"
    )


def test_trace_workload_is_loaded_with_rate_requests_and_blocks(azure: Path, mooncake: Path) -> None:
    own = load(str(azure), "chat", WorkloadOptions())
    assert own.models == ("chat",)
    assert own.arrival_s.tolist() == pytest.approx([0, 4.314579, 10])
    assert len(load(str(azure), "chat", WorkloadOptions(requests=7))) == 7
    shared = load(str(mooncake), "chat", WorkloadOptions(rate_per_s=100))
    assert shared.blocks is not None
    assert shared.blocks.of(3) == (0, 1, 103)
    assert shared.rate_per_s == pytest.approx(100)
    named = load("mooncake", "chat", WorkloadOptions(requests=300))
    assert named.blocks is not None
    assert len(named) == 300
    with pytest.raises(InputError, match="did you mean 'azure-conv'"):
        load("azure-con", "chat", WorkloadOptions())


def test_trace_json_describes_the_written_file(
    mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made.csv"
    for words, requests, blocks in (
        (["convert", mooncake, "--rate", "2"], 50, True),
        (["convert", mooncake], 50, True),
        (["make", "azure-conv", "--requests", "70"], 70, False),
    ):
        arguments = ["trace", *words, "--to", "azure", "--out", out, "--json"]
        assert run([str(argument) for argument in arguments]) == 0
        text = capsys.readouterr()
        document = json.loads(text.out)
        assert text.err == ""
        assert (document["file"], document["format"], document["requests"]) == (str(out), "azure", requests)
        assert document["blocks_left_out"] is blocks
        assert document["rate_per_s"] == pytest.approx(load_trace(out).rate_per_s, rel=0.01)
