"""Cost and load of a fleet are equal in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.cli.main import run

EXAMPLES = Path(__file__).parents[2] / "examples"
REGIONS = """fleet:
  regions:
    - name: near
      head_usd_per_h: 0.3
      storage_usd_per_gb_month: 2.0
      nodes:
        - {node: 1xL4, available: 5, price_usd_per_h: 0.7, reserved: %s}
        - {node: 1xA10G, available: 5, price_usd_per_h: 1.0}
"""
MODEL = """  - model: Llama-3.1-8B
    name: %s
    slo: {ttft_ms: 2000, tpot_ms: 90}
    traffic: {rate_per_s: %s, input: 400, output: 100}
"""


def spec_of(folder: Path, reserved: int, *rates_per_s: float) -> Path:
    models = "".join(MODEL % (f"m{place}", rate) for place, rate in enumerate(rates_per_s))
    path = folder / "potluck.yaml"
    path.write_text(f"models:\n{models}{REGIONS % reserved}")
    return path


def planned_and_simulated(
    spec: Path, folder: Path, capsys: pytest.CaptureFixture[str], requests: int = 1500
) -> tuple[dict[str, object], dict[str, object]]:
    out = folder / "plan.json"
    options = ["--averages", "--no-explain", "--time-limit", "10", "--strategy", "melange"]
    assert run(["plan", str(spec), *options, "--json", "--out", str(out)]) in (0, 3)
    plan = json.loads(capsys.readouterr().out)["plan"]
    command = ["simulate", str(out), str(spec), "--requests", str(requests), "--policy", "admission=false"]
    assert run([*command, "--policy", "scaling=none", "--json"]) in (0, 3)
    return plan, json.loads(capsys.readouterr().out)


def total_usd_per_h(plan: dict[str, object]) -> float:
    return plan["cost_usd_per_h"] + sum(charge["usd_per_h"] for charge in plan["charges"])  # type: ignore[operator,attr-defined,no-any-return]


@pytest.mark.parametrize("reserved", [0, 1, 5])
def test_plan_and_simulation_agree_on_cost_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reserved: int
) -> None:
    spec = spec_of(tmp_path, reserved, 1.5, 2.5)
    plan, run_json = planned_and_simulated(spec, tmp_path, capsys)
    assert run_json["cost_usd_per_h"] == pytest.approx(total_usd_per_h(plan), rel=1e-9)
    loads = {item["model"]: item for item in run_json["load"]}  # type: ignore[attr-defined]
    for prediction in plan["predictions"]:  # type: ignore[attr-defined]
        planned = prediction["demand_per_s"] / prediction["capacity_per_s"]
        simulated = loads[prediction["model"]]
        assert simulated["capacity_per_s"] == pytest.approx(prediction["capacity_per_s"], rel=1e-6)
        assert simulated["load"] == pytest.approx(planned, rel=0.15)
    busy = max(item["busy_share"] for item in run_json["hardware"])  # type: ignore[attr-defined]
    assert busy > max(item["load"] for item in loads.values()), "another figure, under another name"


def test_simulated_fleet_of_reserved_nodes_alone_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tmp_path, 5, 1.0)
    spec.write_text(spec.read_text().replace("head_usd_per_h: 0.3", "head_usd_per_h: 0").replace("2.0", "0"))
    plan, run_json = planned_and_simulated(spec, tmp_path, capsys, 200)
    assert total_usd_per_h(plan) == run_json["cost_usd_per_h"] == run_json["cost_usd"] == 0.0


def test_simulation_shows_load_and_busy_time_under_different_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tmp_path, 0, 1.0)
    planned_and_simulated(spec, tmp_path, capsys, 100)
    assert run(["simulate", str(tmp_path / "plan.json"), str(spec), "--requests", "300"]) in (0, 3)
    text = capsys.readouterr().out
    assert "time busy" in text
    assert "Utilization of the plan's copies" in text
    assert "time in steps" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one-node", "two-regions", "pool", "realistic", "cauchy"])
def test_example_costs_agree_in_plan_and_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan, run_json = planned_and_simulated(EXAMPLES / f"{name}.yaml", tmp_path, capsys)
    assert run_json["cost_usd_per_h"] == pytest.approx(total_usd_per_h(plan), rel=1e-3)
