"""`potluck calibrate`: predictions beside own runs, and a fit to them; `lab/accuracy.py`: the stored figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from accuracy_study.command import RUNS, study_figures
from accuracy_study.serving import possible

from potluck.cli.engine.calibrate import fit_cluster
from potluck.cli.engine.own_runs import log_ratios, works
from potluck.cli.engine.run_tables import placed, read_runs
from potluck.cli.main import run
from potluck.core.errors import InputError
from potluck.perf.closed_loop import served
from potluck.perf.operators.calibration import bundled, linked
from potluck.perf.timers.engine_host import BenchClient, EngineHost, engines, own_cluster, usual_host
from potluck.plan.timing.rate_cache import name_of


def score(*arguments: str) -> int:
    return run(["calibrate", "--score", *arguments])


def study(*arguments: str) -> int:
    return run(arguments, study_figures, "lab/accuracy.py")


SOURCE = Path(__file__).parents[2] / "src"
DATA = Path(os.environ.get("POTLUCK_DATA", Path(__file__).parents[3] / "shared" / "data")) / "measured"
HEAD = "model,gpu,tp,isl,osl,concurrency,ttft_ms,tpot_ms"


def table(folder: Path, factor: float, gpu: str = "L40S") -> Path:
    """Runs that take `factor` times as long as is predicted for them."""
    rows = [
        f"Llama-3.1-8B,{gpu},1,{isl},200,{users},100,10" for isl in (500, 2000) for users in (1, 4, 16, 32)
    ]
    path = folder / "runs.csv"
    path.write_text("\n".join([HEAD, *rows]), encoding="utf-8")
    runs = [placed(item) for item in read_runs(path).runs]
    of_any = ("vllm", "dense", "")
    (fit,) = [e for e in engines() if (e.engine, e.kind, e.version) == of_any]
    result = served(works(runs), fit.host, fit.client)
    lines = [
        f"{item.run.model},{gpu},1,{item.run.input_tokens},200,{item.run.concurrency},"
        f"{result.ttft_s[i] * 1e3 * factor},{result.tpot_s[i] * 1e3 * factor}"
        for i, item in enumerate(runs)
    ]
    path.write_text("\n".join([HEAD, *lines]), encoding="utf-8")
    return path


def test_runs_as_predicted_are_within_their_error_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(str(table(tmp_path, 1.0))) == 0
    out = capsys.readouterr().out
    assert re.search(r"throughput +0 % +[+-]0.0% +100%", out)
    assert "can be trusted as far as their bars say" in out
    assert out.count("1 x L40S") == 8, "each run is shown"


def test_runs_far_from_their_prediction_exit_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(str(table(tmp_path, 2.0)), "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["holds"] is False
    assert body["found"]["bias"]["rate"] == pytest.approx(1.0, abs=0.01)
    first = body["found"]["figures"][0]
    assert first["predicted"] == pytest.approx(2.0 * first["measured"], rel=0.01)
    assert first["measured"] < first["low"] < first["predicted"] < first["high"]
    assert score(str(table(tmp_path, 2.0))) == 1
    assert "promise too much: plan with --confidence 0.9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEAD}\nNo-Such-Model,L40S,1,500,200,4,100,10\n", "runs.csv: model: unknown 'No-Such-Model'"),
        (f"{HEAD}\nLlama-3.1-8B,L40S,3,500,200,4,100,10\n", "runs.csv: tp: 3 does not divide"),
        ("a,b\n1,2\n", "runs.csv: model: no such column"),
        (f"{HEAD},dtype\nPhi-4,L40S,1,500,200,4,100,10,fp6\n", "runs.csv: format: 'fp6' is not modelled"),
    ],
)
def test_runs_that_cannot_be_scored_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    assert score(str(path)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_physically_impossible_runs_are_excluded(tmp_path: Path) -> None:
    """A token in a tenth of the time that it takes to read the weights; those that are predicted are allowed."""
    path = table(tmp_path, 1.0)
    assert all(possible(placed(item)) for item in read_runs(path).runs)
    path.write_text(f"{HEAD}\nLlama-3.1-8B,L40S,1,500,200,8,100,1.8", encoding="utf-8")
    assert not possible(placed(read_runs(path).runs[0]))


def test_weight_format_of_a_run_is_the_used_one_or_noted_as_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published, whatever a table calls it; narrower where it says so; what nobody measured is named."""
    cases = {
        ("Llama-3.1-8B", "nvfp4", ""): "nvfp4",
        ("Llama-3.1-8B", "bfloat16", ""): "bf16",
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8", ""): "fp8_block",
        ("deepseek-ai/DeepSeek-V3", "fp8", ""): "fp8_block",
        ("deepseek-ai/DeepSeek-V3", "fp8_block", "nvfp4"): "nvfp4",
        ("openai/gpt-oss-120b", "nvfp4", ""): "mxfp4",
        ("Llama-3.1-8B", "awq", ""): "int4",
    }
    path = tmp_path / "runs.csv"
    for (model, gemm, moe), kind in cases.items():
        row = f"{model},L40S,8,500,200,4,100,10,{gemm},{moe}"
        path.write_text(f"{HEAD},gemm_quant_mode,moe_quant_mode\n{row}\n", encoding="utf-8")
        assert placed(read_runs(path).runs[0]).model.mostly == kind, model
    score(str(path))
    assert "estimated from other formats: int4 products, weights only on L40S" in capsys.readouterr().out


def test_score_option_refuses_an_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD, encoding="utf-8")
    assert score(str(path), "--out", str(tmp_path / "fit.json")) == 2
    assert "--out goes with a fit, not with --score" in capsys.readouterr().err


def test_score_counts_runs_of_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    paths = [str(table(tmp_path, 1.0)), str(table(tmp_path / "other", 1.0))]
    assert score(*paths, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["files"] == ["runs.csv", "runs.csv"]
    assert body["found"]["runs"] == 16


def test_calibrate_needs_nothing_outside_the_package(tmp_path: Path) -> None:
    path = table(tmp_path, 1.0)
    code = f"""
import sys
from potluck.cli.main import run
assert run(["calibrate", "--score", {str(path)!r}]) == 0
assert run(["calibrate", {str(path)!r}, "--out", {str(tmp_path / "c.json")!r}]) == 0
assert not set(sys.modules).intersection(("accuracy_study", "scipy", "pyarrow"))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_accuracy_command_shows_stored_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert study("--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert {score["question"] for score in scores} == {"calibrated", "GPU left out", "model left out"}
    assert study() == 0
    out = capsys.readouterr().out
    assert "GPU left out" in out
    assert "Median error of whole serving runs" in out


def test_calibrate_option_needs_measured_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study("--calibrate") == 2
    assert "--data" in capsys.readouterr().err
    assert study("--data", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "aic_a100_sxm_gemm_perf.parquet" in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of one's own for what is calibrated, forgotten afterwards."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own_cluster.cache_clear()
    yield tmp_path / "potluck" / "cluster.json"
    monkeypatch.undo()
    own_cluster.cache_clear()


def test_own_runs_calibrate_host_and_links(
    tmp_path: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow host on slow links is found, errors of runs left out are halved, and everyone reads what is kept."""
    shapes = product((1, 4), (500, 2000), (100, 300), (1, 4, 16, 64))
    lines = [f"Llama-3.1-8B,H100-SXM,{tp},{isl},{osl},{c},100,10" for tp, isl, osl, c in shapes]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, *lines]), encoding="utf-8")
    runs = [placed(item) for item in read_runs(path).runs]
    host, client = EngineHost(2e-3, 3e-5, 2e-4), BenchClient(0.3, 0.5, 0.1)
    seen = served(works(runs, linked(bundled(), {"nvswitch": 3.0})), host, client)
    rows = (
        f"{line.rsplit(',', 2)[0]},{seen.ttft_s[i] * 1e3},{seen.tpot_s[i] * 1e3}"
        for i, line in enumerate(lines)
    )
    path.write_text("\n".join([HEAD, *rows]), encoding="utf-8")
    before = name_of(b"a plan")
    assert run(["calibrate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert all(found["after"][metric] < found["before"][metric] / 2 for metric in ("rate", "ttft", "tpot"))
    cluster = own_cluster()
    assert cluster is not None
    assert cluster.runs == len(runs)
    assert cluster.links["nvswitch"] == pytest.approx(3.0, rel=0.2)
    assert usual_host().fixed_s == pytest.approx(2e-3, rel=0.2)
    assert usual_host().request_s == pytest.approx(0.1, rel=0.2)
    assert name_of(b"a plan") != before, "plans that were timed before are not taken for these"
    assert run(["calibrate", str(path), "--json", "--out", str(tmp_path / "there" / "c.json")]) == 0
    again = json.loads(capsys.readouterr().out)["found"]["cluster"]["links"]
    assert again["nvswitch"] == pytest.approx(3.0, rel=0.2), "of what ships, not of what was fitted"
    assert run(["calibrate", str(path)]) == 0
    assert "every command uses it" in capsys.readouterr().out
    own_home.write_text("{}", encoding="utf-8")
    own_cluster.cache_clear()
    with pytest.raises(InputError, match="calibrate` writes .* remove it"):
        own_cluster()
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[:4]), encoding="utf-8")
    assert run(["calibrate", str(path), "--tp", "0"]) == 2


@pytest.mark.skipif(not (DATA / RUNS).is_file(), reason="measured data is not here; point POTLUCK_DATA at it")
@pytest.mark.parametrize(
    ("version", "other"), [("0.12.0", "trtllm"), ("1.0.0rc3", "vllm"), ("0.5.1.post1", "vllm")]
)
def test_thirty_calibration_runs_halve_the_error_of_other_runs(version: str, other: str) -> None:
    every = [placed(item) for item in read_runs(DATA / RUNS).runs if item.version == version]
    runs = sorted((e for e in every if e.kind == "dense"), key=lambda e: crc32(repr(e.run).encode()))
    (usual_fit,) = [e for e in engines() if (e.engine, e.kind, e.version) == (other, "dense", "")]
    found, rest = fit_cluster(runs[:30], usual_fit), runs[30:]
    own = served(works(rest, linked(bundled(), found.cluster.links)), found.cluster.host, found.client)
    off = (log_ratios(r, rest) for r in (served(works(rest), usual_fit.host, usual_fit.client), own))
    before, after = (np.median(np.abs(np.expm1(rows)), axis=1).mean() for rows in off)
    assert after < before / 2


def test_vllm_bench_and_aiperf_results_are_read(tmp_path: Path) -> None:
    """`vllm bench serve --save-result` has totals, aiperf means with their units; neither has the GPU."""
    totals = {"completed": 100, "total_input_tokens": 51_200, "total_output_tokens": 12_800}
    times = {"mean_ttft_ms": 80.0, "mean_tpot_ms": 9.0, "request_throughput": 3.5}
    means = {"input_sequence_length": 512.0, "output_sequence_length": 128.0, "request_throughput": 3.5}
    units = {"time_to_first_token": ("ms", 80.0), "inter_token_latency": ("sec", 0.009)}
    asked = {"endpoint": {"model_names": ["Llama-3.1-8B"]}, "loadgen": {"concurrency": 8}}
    exported = {name: {"unit": "", "avg": mean, "p50": 1.0} for name, mean in means.items()}
    exported |= {name: {"unit": unit, "avg": mean} for name, (unit, mean) in units.items()}
    vllm = {"backend": "vllm", "model_id": "Llama-3.1-8B", "max_concurrency": 8, **totals, **times}
    for body in (vllm, {"input_config": asked, **exported}, {"input_config": asked, "records": exported}):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(body), encoding="utf-8")
        with pytest.raises(InputError, match="or say --gpu"):
            read_runs(path)
        (result,) = read_runs(path, {"gpu": "L40S", "tp": 2}).runs
        assert (result.model, result.gpu, result.tp, result.concurrency) == ("Llama-3.1-8B", "L40S", 2, 8)
        assert (result.input_tokens, result.output_tokens, result.requests_per_s) == (512, 128, 3.5)
        assert (result.ttft_s, result.tpot_s) == (pytest.approx(0.08), pytest.approx(0.009))
