"""`potluck simulate` and `potluck goodput`, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_services import chat_spec

from potluck.cli.common.render import percent
from potluck.cli.main import run
from potluck.core.brain.brain import Brain
from potluck.runtime.replay import replay
from potluck.sim.goodput import RateTrial, highest_rate

SPEC = chat_spec(
    "ttft_ms: 2000, tpot_ms: 60",
    "rate_per_s: 4, input: 1000, output: 200",
    "1xL40S, available: 3, price_usd_per_h: 1.9",
)
TWO = SPEC.replace(
    "fleet:",
    "- {model: Llama-3.1-8B, name: code, slo: {ttft_ms: 2000, tpot_ms: 60}, traffic: {rate_per_s: 1, input: 500,"
    " output: 20}}\nfleet:",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("sim")
    spec, plan = folder / "potluck.yaml", folder / "plan.json"
    spec.write_text(SPEC)
    assert run(["plan", str(spec), "--averages", "--out", str(plan), "--no-explain"]) == 0
    return str(plan), str(spec)


def test_simulate_writes_report_records_and_log(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{at_s: 20, kind: replica, replica: '*'}]")
    names = {"report": "r.html", "records": "r.jsonl", "log": "l.jsonl"}
    outs = [part for option, name in names.items() for part in (f"--{option}", str(tmp_path / name))]
    options = ["--requests", "300", "--seed", "3", "--faults", str(faults), *outs]
    assert run(["simulate", *files, *options]) == 0
    out = capsys.readouterr().out
    for word in (
        *("TTFT", "TPOT", "TBT", "E2E", "SLO attainment", "1xL40S", "output tokens per dollar"),
        "lost replica",
    ):
        assert word in out
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(rows) == 300
    assert {row["outcome"] for row in rows} <= {"answered", "refused"}
    assert rows[0]["decode_replica"].startswith("chat: ")
    assert "</html>" in (tmp_path / "r.html").read_text()
    with (tmp_path / "l.jsonl").open() as log:
        assert replay(log, Brain).difference == ""


def test_simulate_json_is_reproducible_by_seed(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = []
    for more in ([], [], ["--seed", "9"]):
        load = ("--workload", "azure-conv", "--rate", "3", "--requests", "200")
        assert run(["simulate", *files, *load, "--json", *more]) == 0
        result.append(json.loads(capsys.readouterr().out))
    assert result[0] == result[1]
    assert result[0] != result[2]
    assert result[0]["total"]["rate_per_s"] == pytest.approx(3.0, rel=0.3)


def test_simulated_models_share_the_total_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, plan = tmp_path / "two.yaml", tmp_path / "plan.json"
    spec.write_text(TWO)
    assert run(["plan", str(spec), "--averages", "--out", str(plan), "--no-explain"]) == 0
    capsys.readouterr()
    assert run(["simulate", str(plan), str(spec), "--rate", "10", "--requests", "500", "--json"]) == 0
    rates = {m["model"]: m["rate_per_s"] for m in json.loads(capsys.readouterr().out)["models"]}
    assert rates["chat"] == pytest.approx(8.0, rel=0.2)
    assert rates["code"] == pytest.approx(2.0, rel=0.4)
    assert run(["simulate", str(plan), str(spec), "--workload", "azure-conv"]) == 2
    assert "MODEL=NAME" in capsys.readouterr().err


def test_goodput_brackets_the_highest_rate_and_reports_it(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["goodput", *files, "--requests", "400", "--tolerance", "0.1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    held = [step["rate_per_s"] for step in document["steps"] if step["holds"]]
    missed = [step["rate_per_s"] for step in document["steps"] if not step["holds"]]
    assert max(held) == document["goodput_per_s"]
    assert min(missed) <= max(held) * 1.1 * 1.001
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["goodput", *files, "--requests", "400", "--tolerance", "0.1"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith(f"Goodput: {max(held):.4g} req/s; SLO attainment of chat ")
    assert f"(target 90 %). At {min(missed):.4g} req/s that of chat is " in last


def test_attainment_just_below_the_target_is_printed_with_more_digits() -> None:
    assert percent(0.9496, 0.95) == "94.96 %"
    assert percent(0.94999, 0.95) == "94.999 %"
    assert percent(0.9997, 0.9999) == "99.97 %"
    assert [percent(x, 0.95) for x in (0.94, 0.95, 0.9504)] == ["94.0 %", "95.0 %", "95.0 %"]


@pytest.mark.parametrize("limit", [0.001, 0.3, 1.0, 7.3, 2000.0])
def test_goodput_search_finds_the_threshold_rate(limit: float) -> None:
    steps, best_trial = highest_rate(
        lambda scale: RateTrial(scale, scale, scale <= limit, 0.0, 0.9, "m", 0.0, 0.0), 0.01
    )
    assert best_trial is not None
    assert best_trial.scale <= limit < best_trial.scale * 1.0101
    assert best_trial == max((step for step in steps if step.holds), key=lambda step: step.scale)


def test_goodput_search_ends_when_no_rate_attains_the_objective() -> None:
    steps, best_trial = highest_rate(
        lambda scale: RateTrial(scale, scale, False, 0.0, 0.9, "m", 0.0, 0.0), 0.01
    )
    assert best_trial is None
    assert len(steps) < 20


def test_slo_scale_and_slo_scan_change_the_judged_objectives(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(code: int, *options: str) -> dict[str, Any]:
        capsys.readouterr()
        common = ("--requests", "200", "--policy", "admission=false", "--json")
        assert run(["simulate", *files, *common, *options]) == code
        return json.loads(capsys.readouterr().out)

    strict = ran(3, "--slo-scale", "0.05", "--slo-scan")
    assert strict["models"][0]["slo"]["tpot_s"] == pytest.approx(0.06 * 0.05)
    scanned = strict["slo_scan"]
    assert [part["name"] for part in scanned["parts"]] == ["TTFT", "TPOT", "all"]
    whole = scanned["parts"][-1]
    assert strict["total"]["attainment"] == whole["attainment"][scanned["scales"].index(1.0)] == 0.0
    assert whole["least"][0] > 1.0
    assert ran(0, "--slo-scale", "100")["total"]["attainment"] == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["PLAN"], "name its spec too"),
        (["SPEC", "PLAN"], "is no plan but looks like a spec"),
        (["PLAN", "SPEC", "SPEC"], "takes a SPEC, or a PLAN and its SPEC"),
        (["PLAN", "SPEC", "--policy", "balanc=x"], "unknown 'balanc'; did you mean 'balance'"),
        (["PLAN", "SPEC", "--policy", "balance=x"], "balance: 'x' is not one of its values"),
        (["PLAN", "SPEC", "--policy", "retries"], "is not NAME=VALUE"),
        (["PLAN", "SPEC", "--policy", "retries=-1"], "retries: must not be negative"),
        (["PLAN", "SPEC", "--workload", "azure-con"], "did you mean 'azure-conv'"),
        (["PLAN", "SPEC", "--workload", "nothing.csv"], "nothing.csv"),
        (["PLAN", "SPEC", "--rate", "0"], "--rate: must be positive"),
        (["PLAN", "SPEC", "--slo-scale", "0"], "--slo-scale: must be positive"),
        (["PLAN", "SPEC", "--faults", "none.yaml"], "none.yaml"),
        (["PLAN", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_simulate_refuses_invalid_options_in_one_line(
    files: tuple[str, str], options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"PLAN": files[0], "SPEC": files[1]}
    capsys.readouterr()
    assert run(["simulate", *(named.get(option, option) for option in options)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_invalid_fault_is_refused_by_its_entry(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "f.yaml"
    faults.write_text("faults: [{at_s: 20, kind: link, source: home, target: moon, factor: 0}]")
    capsys.readouterr()
    assert run(["simulate", *files, "--requests", "10", "--faults", str(faults)]) == 2
    assert "home->moon" in capsys.readouterr().err


def test_simulated_market_changes_cost_and_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    market = tmp_path / "day.yaml"
    market.write_text(
        "offers: [{region: home, node: 1xL40S, price_usd_per_h: 1.0},"
        " {at_s: 40, region: home, node: 1xL40S, price_usd_per_h: 4.0}]"
    )
    options = ["--requests", "320", "--seed", "3", "--policy", "scaling=replan", "--json"]
    assert run(["simulate", *files, "--market", str(market), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert run(["simulate", *files, *options]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert document["cost_usd"] == pytest.approx(plain["cost_usd"] / 1.9 * 2.5, rel=0.1), (
        "40 s at 1, 40 s at 4"
    )
    market.write_text("offers: [{at_s: 40, region: home, node: 1xL4}]")
    assert run(["simulate", files[1], "--market", str(market)]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "offers[0].node" in text


def test_plan_deviations_fit_eighty_columns_without_losing_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from potluck.cli.simulating.simulate_output import show_planned
    from potluck.sim.results.plan_comparison import PlanDeviation, ValueRange

    name = "documents: pipeline 2xRTX4090 tp2 + 2xRTX4090 tp2 mixed@a-far-away-region#12/0 and 3 like it"
    monkeypatch.setenv("COLUMNS", "80")
    show_planned(
        [
            PlanDeviation("rate", name, ValueRange(0.123, 0.456), 0.789, "differs"),
            PlanDeviation("busy", "agrees", ValueRange(0.1, 0.2), 0.2, "agrees"),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Deviations from the plan"
    assert max(map(len, lines)) <= 80
    assert "0.789 req/s" in "\n".join(lines)
    assert all(word in " ".join(lines).split() for word in name.split())
