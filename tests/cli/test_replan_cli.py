"""`potluck replan`: changes given as options, and the answers to them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli.main import run
from potluck.cli.planning import replan as replan_module
from potluck.cli.planning.replan import LiveService
from potluck.core.values.plan import Plan, plan_from_json

SPEC = """\
models:
- model: Llama-3.1-8B
  name: chat
  slo: {ttft_ms: 2000, tpot_ms: 60}
  traffic: {rate_per_s: 8, input: 1000, output: 200}
fleet:
  regions:
  - name: home
    nodes:
    - {node: 1xL40S, available: 6, price_usd_per_h: 1.9}
    - {node: 1xA10G, available: 6, price_usd_per_h: 1.0}
  - name: lab
    nodes:
    - {node: 1xRTX4090, available: 2, price_usd_per_h: 0.5}
links:
- {between: [home, lab], gbps: 10, rtt_ms: 20}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A plan and its spec, which no test changes."""
    folder = tmp_path_factory.mktemp("replan")
    spec, plan = folder / "potluck.yaml", folder / "plan.json"
    spec.write_text(SPEC)
    assert run(["plan", str(spec), "--averages", "--out", str(plan), "--no-explain"]) == 0
    return str(plan), str(spec)


def replan_steps(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert run(["replan", *options, "--averages", "--json"]) == 0
    return {load["step"]: load for load in json.loads(capsys.readouterr().out)["answers"]}


@pytest.mark.slow
def test_replan_without_a_change_answers_with_reroute(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replan_steps(list(files), capsys)["reroute"]["served_fraction"] == 1
    assert run(["replan", *files, "--averages"]) == 0
    out = capsys.readouterr().out
    assert "reroute (best)" in out
    assert "at once" in out


def test_replan_after_lost_nodes_reallocates_and_writes_the_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_from_json(Path(files[0]).read_text())
    (region, node), count = max(plan.nodes.items(), key=lambda item: item[1])
    out = tmp_path / "new.json"
    result = replan_steps([*files, "--lose", f"{region}:{node}={count}", "--out", str(out)], capsys)
    assert result["reroute"]["served_fraction"] < 1
    assert result["reallocate"]["served_fraction"] > result["reroute"]["served_fraction"]
    assert result["reallocate"]["time_s"] > 30
    assert plan_from_json(out.read_text()).fraction > 0


def test_replan_accepts_a_higher_rate_and_a_slower_link(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = replan_steps([*files, "--rate", "chat=3x", "--link", "home:lab=0.5gbps"], capsys)
    assert result["reroute"]["served_fraction"] < 1
    assert result["reallocate"]["served_fraction"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lose", "home:1xL40S"], "lose"),
        (["--lose", "home:1xL40S=99"], "has only"),
        (["--lose", "hom:1xL40S=1"], "lose: region: unknown 'hom'; did you mean 'home'?"),
        (["--lose", "home:8xB200=1"], "lose: node"),
        (["--rate", "chatt=2x"], "rate: model: unknown 'chatt'; did you mean 'chat'?"),
        (["--link", "home:mars=3"], "link: unknown 'home:mars'"),
        (["--price", "home:1xL40S=-3"], "price"),
        (["--time-limit", "0"], "time-limit"),
    ],
)
def test_replan_refuses_invalid_options_in_one_line(
    files: tuple[str, str], options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replan", *files, *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_replan_refuses_a_spec_given_as_plan(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replan", files[1], files[1]]) == 2
    assert "is no plan but looks like a spec; the plan (JSON) is named first" in capsys.readouterr().err


CHANCE = """\
engine: embedded
models:
- model: Llama-3.1-8B
  name: chat
  slo: {ttft_ms: 2000, tpot_ms: 80}
  traffic: {rate_per_s: 3, input: {mean: 600, cv: 0.6}, output: {mean: 100, cv: 0.5}}
fleet:
  regions:
  - name: office
    nodes:
    - {node: 1xL4, available: %d, price_usd_per_h: 0.80}
    - {node: 1xL40S, available: 1, price_usd_per_h: 1.86}
"""


def test_replan_answer_is_chosen_by_simulated_attainment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two L4 do on averages and miss when tried; without the L40S it takes three."""
    spec, plan = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    spec.write_text(CHANCE % 4)
    assert run(["plan", str(spec), "--averages", "--what-if", "office:1xL4=0", "--out", str(plan)]) == 0
    capsys.readouterr()
    words = ["replan", str(plan), str(spec), "--lose", "office:1xL40S=1"]
    assert run([*words, "--averages", "--json"]) == 0
    quick = json.loads(capsys.readouterr().out)
    assert (quick["answers"][-1]["cost_usd_per_h"], quick["rehearsed"]) == (1.6, [])
    assert run([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == "reallocate"
    assert document["answers"][-1]["cost_usd_per_h"] == pytest.approx(2.4)
    assert [item["verdict"] for item in document["rehearsed"]] == ["holds"]


def test_lost_nodes_are_taken_from_rented_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four L4 are rented, at most: with as many lost what runs has none left, whatever else is on offer."""
    spec, plan = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    spec.write_text(CHANCE % 4)
    assert run(["plan", str(spec), "--averages", "--what-if", "office:1xL40S=0", "--out", str(plan)]) == 0
    capsys.readouterr()
    words = ["replan", str(plan), str(spec), "--averages", "--json", "--lose"]
    assert run([*words, "office:1xL4=1"]) == 0
    one = {answer["step"]: answer for answer in json.loads(capsys.readouterr().out)["answers"]}
    assert one["reroute"]["served_fraction"] < 1
    assert one["reallocate"]["starts"] >= 1
    assert run([*words, "office:1xL4=2"]) == 0
    both = {answer["step"]: answer for answer in json.loads(capsys.readouterr().out)["answers"]}
    assert both["reroute"]["served_fraction"] == 0
    assert both["reallocate"]["served_fraction"] == 1


class RecordingService:
    """Stands for a service that runs: what it is told is put into force."""

    gateway_lives = True

    def __init__(self, plan: Plan, spec: Path) -> None:
        self.newest, self.folder, self.applied = SimpleNamespace(version=1, plan=plan), spec.parent, []
        self.client = SimpleNamespace(set_plan=lambda plan, *_: self.applied.append(plan))
        self.store = SimpleNamespace(
            plan=lambda: self.newest, add_plan=lambda *_: 2, note=lambda *_: None, get=lambda _: None
        )
        self.live = LiveService(1, plan, spec, (), (), style="emulated")


def test_replan_answer_that_misses_is_applied_only_with_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two L4 left nothing holds: the answer is shown, and refused with exit code 3."""
    spec, plan = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    spec.write_text(CHANCE % 2)
    assert run(["plan", str(spec), "--averages", "--what-if", "office:1xL4=0", "--out", str(plan)]) == 0
    capsys.readouterr()
    service = RecordingService(plan_from_json(plan.read_text()), spec)
    monkeypatch.setattr(replan_module, "opened", lambda _: nullcontext(service))
    monkeypatch.setattr(replan_module, "live_of", lambda _: service.live)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["replan", "--live", "--lose", "office:1xL40S=1", "--apply"]
    assert run(words) == 3
    text = capsys.readouterr().out
    assert "(target 90 %); SLO missed" in text
    assert "not applied: SLOs are missed in simulation. Add nodes, or apply it with --yes" in text
    assert service.applied == []
    assert run([*words, "--yes"]) == 0
    assert "applied plan 2: reallocate, $1.60/h (was $1.86/h)" in capsys.readouterr().out
    assert [item.cost_usd_per_h for item in service.applied] == [1.6]


def test_applied_replan_answer_compares_costs_with_the_same_charges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the head node: a plan that costs as much as before is not shown as dearer."""
    spec, out = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    spec.write_text((CHANCE % 4).replace("- name: office", "- name: office\n    head_usd_per_h: 0.5"))
    assert run(["plan", str(spec), "--averages", "--what-if", "office:1xL4=0", "--out", str(out)]) == 0
    plan = plan_from_json(out.read_text())
    assert plan.total_usd_per_h == plan.cost_usd_per_h + 0.5
    service: Any = RecordingService(plan, spec)
    answer: Any = SimpleNamespace(plan=replace(plan, deployments=()), step="flip", cost_usd_per_h=1.3)
    monkeypatch.setattr(replan_module, "with_gateway", lambda _: None)
    assert f"$1.30/h (was ${plan.total_usd_per_h:.2f}/h)" in replan_module.apply(
        service, service.live, answer
    )


def test_replan_reroutes_when_no_plan_keeps_the_minimum_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new plan serves nothing; routes over the copies that are left serve all."""
    spec, out = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    limits = "100, cv: 0.5}}\n  limits: {min_copies: 2}"
    text = CHANCE.replace("rate_per_s: 3", "rate_per_s: 0.2").replace("100, cv: 0.5}}", limits)
    spec.write_text("\n".join(line for line in (text % 2).splitlines() if "1xL40S" not in line) + "\n")
    assert run(["plan", str(spec), "--averages", "--out", str(out)]) == 0
    capsys.readouterr()
    assert run(["replan", str(out), str(spec), "--averages", "--lose", "office:1xL4=1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    served = {answer["step"]: answer["served_fraction"] for answer in document["answers"]}
    assert (document["best"], served["reroute"], served["reallocate"]) == ("reroute", 1.0, 0.0)
