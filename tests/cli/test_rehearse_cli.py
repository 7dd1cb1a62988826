"""Plans that are checked by simulation, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_services import chat_spec

from potluck.cli.main import run
from potluck.cli.planning.rehearsal import evidence_line
from potluck.cli.up.prepare import PlanChoices, PreparedPlan, prepared
from potluck.core.values.plan import Plan, plan_from_json
from potluck.rehearse import evidence
from potluck.rehearse.evidence import Evidence
from potluck.spec.load_spec import load_spec

SPEC = chat_spec(
    "ttft_ms: 1000, tpot_ms: 60",
    "%s",
    "1xL40S, available: %d, price_usd_per_h: 1.9",
    "1xA10G, available: %d, price_usd_per_h: 1.0",
)
TRAFFIC = "rate_per_s: 8, input: 600, output: 80"
LITTLE = ("rate_per_s: 2, input: 600, output: 80", 4)  # Where all strategies plan: some search long.
QUICK = ["--rehearse", "--no-explain", "--strategy", "melange", "--requests", "1500"]


def a_spec(folder: Path, traffic: str = TRAFFIC, available: int = 12) -> Path:
    path = folder / "potluck.yaml"
    path.write_text(SPEC % (traffic, available, available))
    return path


def test_simulated_plan_search_is_printed_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert run(["plan", str(a_spec(tmp_path)), *QUICK, "--cv", "6", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for words in (
        "SLOs met in simulation",
        "Plans simulated",
        " fresh ",
        "chat: SLO attainment",
        "(target 90 %, fresh runs, arrival CV 6).",
        "more than the cheapest plan for mean traffic",
        "Predictions",
    ):
        assert words in text
    plan = plan_from_json(out.read_text())
    assert sum(share.rate_per_s for share in plan.shares) == pytest.approx(8.0)


def test_plan_json_has_every_simulated_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(a_spec(tmp_path)), *QUICK, "--cv", "6", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    message = body["rehearsal"]
    assert message["holds"]
    assert (message["ended"], message["reason"]) == (
        "holds_in_fresh_runs",
        "meets its SLOs in fresh simulation runs",
    )
    last = message["steps"][-1]
    assert last["fresh"]
    assert last["cost_usd_per_h"] == body["plan"]["cost_usd_per_h"]
    assert last["models"][0]["at_least"] >= last["models"][0]["promised"]
    assert last["models"][0]["answer_lengths"] >= 20
    assert last["made"]["chat"].startswith("melange")


def test_plan_without_attainment_exits_with_3_and_shows_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(a_spec(tmp_path, available=1)), *QUICK, "--cv", "6"]) == 3
    text = capsys.readouterr().out
    assert "SLOs MISSED in simulation" in text
    assert "Warning: no plan met its SLOs in simulation: no plan serves" in text
    assert "limited by: home: 1x" in text
    assert "(target 90 %, arrival CV 6); SLO missed" in text
    assert "Predictions" in text


def test_spec_trace_is_used_for_simulated_arrivals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All requests come in bursts, which no made-up arrivals of this rate have: more is needed than on averages."""
    rng = np.random.default_rng(1)
    start = np.repeat(np.arange(24) * 30.0, 180)
    when = np.sort(start + rng.uniform(0, 2.0, len(start)))
    rows = [f"2024-01-01 00:{int(t // 60):02d}:{t % 60:09.6f},600,80" for t in when]
    (tmp_path / "bursts.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    path = a_spec(tmp_path, "trace: bursts.csv")
    assert run(["plan", str(path), *QUICK, "--json"]) == 0
    bursts = json.loads(capsys.readouterr().out)["plan"]["cost_usd_per_h"]
    assert run(["plan", str(path), *QUICK, "--cv", "1", "--json"]) == 0
    assert bursts > 1.5 * json.loads(capsys.readouterr().out)["plan"]["cost_usd_per_h"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--averages", "--cv", "2"], "--cv: is for simulated plans; leave --averages out"),
        (["--averages", "--requests", "500"], "--requests: is for simulated plans"),
        (["--averages", "--rehearse"], "--rehearse: is for simulated plans"),
        (["--rehearse", "--cv", "-1"], "--cv: must not be negative"),
        (["--rehearse", "--requests", "1"], "--requests"),
    ],
)
def test_simulation_options_are_refused_with_averages(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(a_spec(tmp_path)), "--strategy", "melange", *options]) == 2
    assert says in capsys.readouterr().err


def test_plan_without_demand_is_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(a_spec(tmp_path, "rate_per_s: 0, input: 600, output: 80")), *QUICK]) == 0
    assert "simulat" not in capsys.readouterr().out


SHORT = ["--no-explain", "--strategy", "melange", "--requests", "1500"]


def test_plan_is_simulated_by_default_and_reports_attainment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_spec(tmp_path)
    assert run(["plan", str(path), *SHORT]) == 0
    text = capsys.readouterr().out
    assert "SLOs met in simulation" in text
    assert "simulated requests (target 90 %)." in text
    assert run(["plan", str(path), *SHORT[:3], "--averages"]) == 0
    assert "for mean traffic, not simulated" in capsys.readouterr().out


def test_plan_takes_the_cheapest_fleet_that_attains_the_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(a_spec(tmp_path)), *SHORT, "--cv", "6", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    steps = body["rehearsal"]["steps"]
    assert body["rehearsal"]["holds"]
    costs = [(step["cost_usd_per_h"], step["holds"]) for step in steps]
    assert body["plan"]["cost_usd_per_h"] == min(usd for usd, holds in costs if holds)
    assert any(usd < body["plan"]["cost_usd_per_h"] for usd, holds in costs if not holds)
    assert not any(step["fresh"] for step in steps)


def test_unservable_requests_count_as_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the prompts are beyond the model's context: no plan keeps a promise of nine in ten."""
    lengths = "rate_per_s: 4, input: {values: [600, 200000], weights: [1, 1]}, output: 80"
    assert run(["plan", str(a_spec(tmp_path, lengths)), *SHORT]) == 3
    text = capsys.readouterr().out
    assert "50 % of its requests exceed its context window" in text
    assert "of requests unserved by any plan, counted as misses" in text
    assert "(target 90 %); SLO missed" in text


@pytest.mark.slow
def test_plan_compare_and_frontier_agree_on_the_cost_of_a_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(a_spec(tmp_path, *LITTLE))
    assert run(["plan", path, "--no-explain", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]["cost_usd_per_h"]
    assert run(["compare", path, "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["auto"]["cost_usd_per_h"] == pytest.approx(plan)
    held = (row for row in rows.values() if (row["attained"] or 0) >= (row["promised"] or 1))
    assert plan <= min(row["cost_usd_per_h"] for row in held) * (1 + 1e-9)
    assert run(["frontier", path, "--values", "1", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["usd_per_h"] == pytest.approx(plan)


@pytest.mark.slow
def test_compare_shows_attainment_beside_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cv", "6", "--requests", "1500", "--json", "--time-limit", "2"]
    assert run(["compare", str(a_spec(tmp_path, *LITTLE)), *options]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["melange"]["promised"] == 0.9
    assert rows["melange"]["attained"] > 0.9
    assert rows["melange"]["requests"] > 300
    assert run(["compare", str(a_spec(tmp_path, *LITTLE)), "--averages", "--json", "--time-limit", "2"]) == 0
    averages = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert averages["melange"]["attained"] is None
    assert rows["melange"]["cost_usd_per_h"] > averages["melange"]["cost_usd_per_h"]


def test_plan_evidence_is_stored_and_reused_only_for_the_same_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` says what the fresh runs showed, not what a smaller sample would; with another spec it tries anew."""
    out, path = tmp_path / "plan.json", a_spec(tmp_path)
    assert run(["plan", str(path), *QUICK, "--out", str(out)]) == 0
    (proven,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" chat: SLO")]
    assert proven.endswith("simulated requests (target 90 %, fresh runs).")
    asked: list[Plan] = []

    def tried(_: object, plan: Plan, *__: object) -> tuple[Evidence, ...]:
        asked.append(plan)
        return (Evidence("chat", 0.9, (0.8, 1.0), 40),)

    monkeypatch.setattr(evidence, "evidence_of", tried)

    def said(spec: Path, plan: Path) -> PreparedPlan:
        return prepared((plan, spec), load_spec(spec), PlanChoices(5.0), lambda _: None)

    result = said(path, out)
    assert [f" {line}." for line in result.lines] == [proven]
    assert result.holds
    assert not asked
    other = tmp_path / "more.yaml"
    other.write_text(path.read_text().replace("rate_per_s: 8", "rate_per_s: 9"))
    result = said(other, out)
    assert len(asked) == 1
    assert not result.holds
    changed = tmp_path / "other.json"
    changed.write_text(out.read_text().replace('"count": ', '"count": 1'))
    said(path, changed)
    assert len(asked) == 2


def test_narrowly_attained_objective_is_not_reported_as_missed() -> None:
    kept = Evidence("chat", 0.95, (0.94, 0.96, 0.97), 900).summary()
    assert kept.verdict == "unsure"
    line = evidence_line(kept)
    assert "missed" not in line
    assert "(target 95 %); 95 % confident of 93.1 % only, more runs may decide" in line
    late = evidence_line(Evidence("chat", 0.95, (0.9496,) * 3, 9000).summary())
    assert "SLO attainment 94.96 % of 9,000 simulated requests (target 95 %); SLO missed" in late
    assert Evidence("chat", 0.95, (1.0,) * 3, 9000, answered=(0.9,) * 3).summary().verdict == "misses"
