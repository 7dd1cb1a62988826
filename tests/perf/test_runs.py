"""Tables of measured runs in whatever shape people have them, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from accuracy.runs import MeasuredRun, read_runs

from potluck.core.errors import InputError

HEAD = "model,GPU,TP size,ISL,OSL,max concurrency,mean_ttft_ms,TPOT (ms)"
ROW = "Llama-3.1-8B,H100-SXM,2,1000,200,16,120,9.5"


def written(folder: Path, text: str, name: str = "runs.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read_whatever_its_columns_are_called(tmp_path: Path) -> None:
    (run,) = read_runs(written(tmp_path, f"{HEAD}\n{ROW}\n")).runs
    assert (run.model, run.gpu, run.tp, run.concurrency) == ("Llama-3.1-8B", "H100-SXM", 2, 16)
    assert (run.ttft_s, run.tpot_s) == pytest.approx((0.12, 0.0095))
    assert run.requests_per_s == pytest.approx(16 / (0.12 + 199 * 0.0095))


def same(tmp_path: Path, runs: tuple[MeasuredRun, ...]) -> None:
    assert runs == read_runs(written(tmp_path, f"{HEAD}\n{ROW}\n")).runs


def test_other_formats_say_the_same(tmp_path: Path) -> None:
    row = dict(zip(HEAD.split(","), ROW.split(","), strict=True))
    same(tmp_path, read_runs(written(tmp_path, json.dumps([row]), "runs.json")).runs)
    same(tmp_path, read_runs(written(tmp_path, json.dumps({"runs": [row]}), "runs.json")).runs)
    same(tmp_path, read_runs(written(tmp_path, json.dumps(row) + "\n", "runs.jsonl")).runs)
    (tmp_path / "runs.csv.gz").write_bytes(gzip.compress(f"{HEAD}\n{ROW}\n".encode()))
    same(tmp_path, read_runs(tmp_path / "runs.csv.gz").runs)


def test_parquet_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = dict(zip(HEAD.split(","), ROW.split(","), strict=True))
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "runs.parquet")
    same(tmp_path, read_runs(tmp_path / "runs.parquet").runs)


def test_throughput_may_stand_for_times(tmp_path: Path) -> None:
    text = "model,gpu,input_tokens,output_tokens,concurrency,output_throughput\nPhi-4,A100-80,500,100,8,400\n"
    (run,) = read_runs(written(tmp_path, text)).runs
    assert run.requests_per_s == pytest.approx(4.0)
    assert run.ttft_s is None
    assert run.tpot_s is None


def test_rows_that_say_too_little_are_counted_and_the_rest_is_taken_once(tmp_path: Path) -> None:
    lacking = "Llama-3.1-8B,H100-SXM,2,1000,200,,120,9.5"
    table = read_runs(written(tmp_path, f"{HEAD}\n{ROW}\n{ROW}\n{lacking}\n"))
    assert (len(table.runs), table.left_out) == (1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "gpu,isl,osl,ttft_ms\nH100,1,1,1\n",
            "runs.csv: model: no such column; call it one of model, model_path",
        ),
        ("model,gpu,isl,osl\nPhi-4,H100,1,1\n", "runs.csv: tpot: nothing measured"),
        (
            f"{HEAD}\n{ROW.replace('120', 'soon')}\n",
            "runs.csv: row 2: mean_ttft_ms: must be a number, is 'soon'",
        ),
        (f"{HEAD}\n{ROW.replace('120', '-5')}\n", "runs.csv: row 2: mean_ttft_ms: must not be negative"),
        (f"{HEAD}\n", "runs.csv: model: no such column"),
        ("", "runs.csv: model: no such column"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_runs(written(tmp_path, text))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_what_is_no_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"runs\.csv"):
        read_runs(tmp_path / "runs.csv")
    with pytest.raises(InputError, match="one for each run"):
        read_runs(written(tmp_path, '"text"', "runs.json"))
