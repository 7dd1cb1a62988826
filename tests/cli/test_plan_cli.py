"""`potluck plan` and `potluck compare` through the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_services import chat_spec

from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.main import run
from potluck.cli.planning import plan_show
from potluck.cli.planning.plan import _hurried
from potluck.cli.planning.planning_options import NAMES
from potluck.cli.up.prepare import PlanChoices, prepared
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.core.values.plan import plan_from_json
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC = chat_spec(
    "ttft_ms: 2000, tpot_ms: 60",
    "rate_per_s: %s, input: 1000, output: 200",
    "1xL40S, available: 4, price_usd_per_h: 1.9",
    "1xA10G, available: 4, price_usd_per_h: 1.0",
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC % 4)
    return path


def test_plan_is_printed_explained_and_written(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert run(["plan", str(spec), "--averages", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for words in ("proven cheapest", "Predictions", "Why these GPUs", "Value of one node more or less"):
        assert words in text
    plan = plan_from_json(out.read_text())
    assert plan.strategy == "auto"
    assert f"${plan.cost_usd_per_h:.2f}/h" in text


def test_plan_figures_agree_in_terminal_page_and_file(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TTFT and TPOT in terminal, page and file are those of a simulation of the same plan at the same demand."""
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ["--strategy", "melange", "--no-explain"]
    assert run(["plan", str(spec), *options, "--out", str(out), "--html", str(page)]) == 0
    text, (seen,) = capsys.readouterr().out, plan_from_json(out.read_text()).predictions
    assert seen.simulated
    for value_s in (seen.ttft_s, seen.tpot_s):
        assert seconds(value_s) in text
        assert seconds(value_s) in page.read_text("utf-8")
    assert run(["plan", str(spec), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["predictions"][0]["tpot_s"] == seen.tpot_s
    assert run(["simulate", str(out), str(spec), "--requests", "3000", "--json"]) == 0
    (ran,) = json.loads(capsys.readouterr().out)["models"]
    assert seen.tpot_s == pytest.approx(ran["tpot_s"]["mean"], rel=0.1)
    assert seen.ttft_s == pytest.approx(ran["ttft_s"]["mean"], rel=0.2)
    assert seen.prompt_tokens_per_s == pytest.approx(4 * 1000, rel=0.01)


def test_single_copy_risk_has_the_same_words_in_every_output(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(SPEC % 1)
    page = tmp_path / "plan.html"
    options = ["--averages", "--strategy", "melange", "--no-explain"]
    assert run(["plan", str(spec), *options, "--html", str(page)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert run(["plan", str(spec), *options, "--json"]) == 0
    (risk,) = json.loads(capsys.readouterr().out)["risks"]
    assert risk["line"].startswith("single point of failure: mixed ")
    assert f"{risk['model']}: {risk['line']}." in text
    assert risk["line"] in page.read_text("utf-8")


def test_plan_json_has_the_plan_and_its_explanation(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(spec), "--averages", "--json", "--strategy", "melange"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["plan"]["strategy"] == "melange"
    assert body["explanation"]["models"][0]["model"] == "chat"


def test_plan_what_if_changes_the_fleet(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def nodes(*options: str) -> set[str]:
        assert run(["plan", str(spec), "--averages", "--json", "--no-explain", *options]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        return {item["node"] for template in plan["templates"] for item in template["nodes"]}

    assert nodes("--what-if", "home:1xL40S=0") == {"1xA10G"}
    assert nodes("--what-if", "home:A10G=0") == {"1xL40S"}


def test_plan_accepts_a_running_plan_and_a_start_penalty(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first.json"
    assert run(["plan", str(spec), "--averages", "--out", str(first), "--no-explain"]) == 0
    running = ("--running", str(first), "--init-penalty", "0.5")
    assert run(["plan", str(spec), "--averages", *running, "--no-explain", "--json"]) == 0
    capsys.readouterr()


def test_plan_with_too_much_demand_exits_with_3_and_names_the_constraint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC % 900)
    assert run(["plan", str(path), "--averages", "--no-explain", "--strategy", "melange"]) == 3
    out = capsys.readouterr().out
    assert "Demand cannot be met" in out
    assert "home: 1x" in out


@pytest.mark.slow
def test_compare_lists_every_strategy_with_auto_first(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(spec), "--averages", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = [row["strategy"] for row in rows]
    cauchys = ["cauchy", "cauchy-ce", "cauchy-mc", "cauchy-mce"]
    papers = ["cronus", "prfaas", "coral", "thunderserve", "hexgen", "distserve", "vllm-dp"]
    assert names == ["auto", "homo", "melange", *cauchys, *papers]
    assert [name.removeprefix("cauchy-") for name in names] == re.findall(r"\w[\w-]*", NAMES)
    assert all(row["cost_usd_per_h"] >= rows[0]["cost_usd_per_h"] - 1e-6 for row in rows)
    assert all(row["violations"] == [] for row in rows)
    for row in rows:
        low, high = row["range_usd_per_million_tokens"]
        assert low < row["usd_per_million_tokens"] < high
    assert run(["compare", str(spec), "--averages"]) == 0
    assert "$/M tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_compare_of_the_cauchy_example_has_a_plan_for_every_cauchy_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", str(EXAMPLES / "cauchy.yaml"), "--averages", "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    for name in ("cauchy", "cauchy-mc", "cauchy-mce"):
        assert rows[name]["served_fraction"] == 1
        assert rows[name]["goodput_per_s"] == pytest.approx(6.4)
    assert rows["cauchy-mc"]["cost_usd_per_h"] <= rows["cauchy"]["cost_usd_per_h"] + 1e-6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--strategy", "corral"], "strategy: unknown 'corral'; did you mean 'coral'?"),
        (["--headroom", "0"], "headroom"),
        (["--headroom", "1.5"], "headroom"),
        (["--time-limit", "-1"], "time-limit"),
        (["--budget", "-5"], "budget"),
        (["--what-if", "home=3"], "what-if"),
        (["--what-if", "mars:1xL40S=3"], "what-if: region: unknown 'mars'"),
        (["--what-if", "home:8xH100=3"], "what-if: node"),
        (["--what-if", "home:1xL40S=0", "--what-if", "home:1xA10G=0"], "fleet: has no GPUs"),
        (["--init-penalty", "-1"], "init_penalty"),
        (["--pin", "nothing@home=1"], "pin"),
    ],
)
def test_plan_refuses_invalid_options_in_one_line(
    spec: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(spec), "--averages", *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_plan_keeps_a_pinned_template(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pin = "chat: mixed 1xL40S tp1@home=2"
    assert run(["plan", str(spec), "--averages", "--json", "--no-explain", "--pin", pin]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    counts = {item["template"]: item["count"] for item in plan["deployments"]}
    assert counts["chat: mixed 1xL40S tp1"] >= 2


@pytest.mark.parametrize("strategy", ["auto", "melange", "coral", "distserve"])
def test_every_printed_template_can_be_pinned(
    spec: Path, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", str(spec), "--averages", "--time-limit", "6", "--strategy", strategy, "--json"]
    assert run([*options, "--no-explain"]) == 0
    deployments = json.loads(capsys.readouterr().out)["plan"]["deployments"]
    pins = [f"{item['template']}@{item['region']}={item['count']}" for item in deployments]
    for number, pin in enumerate(pins):
        out = tmp_path / f"{number}.json"
        assert run([*options, "--pin", pin, "--out", str(out)]) == 0
        body = json.loads(capsys.readouterr().out)
        counts = {(item["template"], item["region"]): item["count"] for item in body["plan"]["deployments"]}
        assert counts[deployments[number]["template"], deployments[number]["region"]] >= 1
        assert out.exists()
        pinned = [item for item in body["explanation"]["models"] if "pinned copies need" in item["unknown"]]
        assert all(item["answer"] == "not known" for item in pinned)


def test_pinning_the_only_node_leaves_its_questions_unanswered(capsys: pytest.CaptureFixture[str]) -> None:
    pin = "Llama-3.1-8B: mixed 1xRTX4090 tp1@desk=1"
    assert run(["plan", str(EXAMPLES / "one-node.yaml"), "--averages", "--pin", pin]) == 0
    assert "unknown: pinned copies need 1xRTX4090" in capsys.readouterr().out


def test_group_template_of_a_printed_plan_can_be_pinned_in_hexgen_and_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    options = ["plan", str(EXAMPLES / "one-node.yaml"), "--averages", "--json"]
    assert run([*options, "--strategy", "hexgen", "--no-explain", "--out", str(out)]) == 0
    (deployment,) = json.loads(capsys.readouterr().out)["plan"]["deployments"]
    assert ": group " in deployment["template"]
    pin = f"{deployment['template']}@desk=1"
    for more in (
        ["--strategy", "hexgen"],
        ["--strategy", "auto"],
        ["--strategy", "auto", "--running", str(out)],
    ):
        assert run([*options, *more, "--pin", pin]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["deployments"] == [deployment]


def test_pinned_group_that_no_search_finds_names_the_option_that_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    pin = "Llama-3.1-8B: group abcdef 1 mixed on 1 machine@desk=1"
    command = ["plan", str(EXAMPLES / "one-node.yaml"), "--averages", "--pin", pin, "--out", str(out)]
    assert run(command) == 2
    assert "give --running with the plan that has it" in capsys.readouterr().err
    assert not out.exists()


def test_simulated_plan_keeps_its_pins(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pinned copies are more than are needed: the search tries plans with fewer copies of other templates."""
    pin = "chat: mixed 1xL40S tp1@home=4"
    command = ["plan", str(spec), "--strategy", "melange", "--json", "--no-explain", "--requests", "300"]
    assert run([*command, "--pin", pin]) == 0
    counts = {
        item["template"]: item["count"] for item in json.loads(capsys.readouterr().out)["plan"]["deployments"]
    }
    assert counts["chat: mixed 1xL40S tp1"] >= 4


def test_strategy_that_cannot_keep_a_pin_is_refused(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pin = tmp_path / "plan.json", "chat: mixed 1xL40S tp1@home=4"
    assert (
        run(["plan", str(spec), "--averages", "--strategy", "cauchy", "--pin", pin, "--out", str(out)]) == 2
    )
    error = capsys.readouterr().err
    assert "--pin: cauchy plans" in error
    assert "use --strategy auto" in error
    assert not out.exists()


def test_failed_explanation_questions_leave_the_plan_and_name_the_reason(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever planning again with a change raises concerns that question alone."""
    real, calls = STRATEGIES["melange"], []

    def only_once(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        calls.append(settings)
        if len(calls) > 1:
            raise InputError("node", "is gone")
        return real(factory, settings)

    monkeypatch.setattr("potluck.cli.planning.plan.strategy_of", lambda name: only_once)
    out = tmp_path / "plan.json"
    assert run(["plan", str(spec), "--averages", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert len(calls) > 1
    assert "unknown: node: is gone" in text
    assert out.exists()


def test_plan_keeps_its_budget_or_names_it_as_binding(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(spec), "--averages", "--json", "--no-explain", "--budget", "1.2"]) == 3
    body = json.loads(capsys.readouterr().out)
    assert body["plan"]["cost_usd_per_h"] <= 1.2
    assert body["plan"]["fraction"] < 1
    assert "budget" in body["shortfall"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Llama-3.1-8B", "DeepSeek-V3", "chat: its weights and the KV of one prompt fit on no node on offer"),
        ("tpot_ms: 60", "tpot_ms: 0.01", "chat: its SLO (TTFT 2000 ms, TPOT 0.01 ms) cannot be met"),
    ],
)
def test_plan_that_would_serve_nothing_is_refused_with_its_reason(
    tmp_path: Path, old: str, new: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text((SPEC % 4).replace(old, new))
    assert run(["plan", str(path), "--averages"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_plan_without_demand_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC % 0)
    assert run(["plan", str(path), "--averages"]) == 0
    assert "Nothing to plan: all request rates are 0" in capsys.readouterr().out


def test_plan_of_a_fleet_with_one_node_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """What one node fewer would cost cannot be asked of a planner when there would be none at all."""
    assert run(["plan", str(EXAMPLES / "one-node.yaml"), "--averages"]) == 0
    assert "not enough" in capsys.readouterr().out.split("Value of one node more or less")[1]


def test_explanation_of_a_plan_says_where_one_node_fewer_is_not_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fleet with one node fewer lacks that type, and its templates were generated with it."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "models: [{model: Llama-3.1-8B, slo: {ttft_ms: 2000, tpot_ms: 100},"
        " traffic: {rate_per_s: 4, input: 300, output: 60}}]\n"
        "fleet: {regions: [{name: here, nodes: [{node: 1xL40S, available: 1, price_usd_per_h: 1.0},"
        " {node: 1xL4, available: 1, price_usd_per_h: 0.5}]}]}\n"
    )
    assert run(["plan", str(path), "--averages"]) == 0
    assert "not enough" in capsys.readouterr().out


def test_lossy_kv_is_planned_only_if_allowed_and_noted_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chat's KV needs most of a 10 Gbps card: in fewer bits, or over more nodes."""
    spec = EXAMPLES / "two-regions.yaml"
    options = ["--averages", "--strategy", "prfaas", "--no-explain"]
    assert run(["plan", str(spec), *options]) == 0
    assert "lossy" not in capsys.readouterr().out
    allowed, plan = tmp_path / "allowed.yaml", tmp_path / "plan.json"
    (tmp_path / "traces").symlink_to(EXAMPLES / "traces")
    allowed.write_text(spec.read_text() + "kv_codecs: [raw, int8, int4]\n")
    assert run(["plan", str(allowed), *options, "--out", str(plan)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "note: KV of chat crosses within lab in int8 (lossy: allowed by kv_codecs)."
    assert run(["simulate", str(plan), str(spec)]) == 2
    assert "kv_codecs: [raw, int8]" in capsys.readouterr().err


UNSERVABLE = """\
- model: Llama-3.1-8B
  name: hasty
  slo: {ttft_ms: 2000, tpot_ms: 0.01}
  traffic: {rate_per_s: 1, input: 1000, output: 200}
fleet:
"""


def test_unservable_model_does_not_prevent_plans_for_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text((SPEC % 4).replace("fleet:\n", UNSERVABLE))
    text = "hasty: its SLO (TTFT 2000 ms, TPOT 0.01 ms) cannot be met"
    assert run(["compare", str(path), "--averages", "--time-limit", "2"]) == 0
    assert text in capsys.readouterr().out
    # A plan that serves nothing of a model keeps no promise to it, however cheap it is.
    assert run(["plan", str(path), "--averages", "--no-explain", "--time-limit", "2"]) == 3
    assert text in capsys.readouterr().out
    assert run(["simulate", str(path), "--requests", "100", "--time-limit", "2"]) == 3
    assert text in capsys.readouterr().err
    result = prepared((path,), read_spec(path), PlanChoices(2.0, averages=True), lambda line: None)
    assert any(text in line for line in result.lines)
    assert {template.model for template in result.inputs.plan.templates} == {"chat"}


def test_plan_that_cannot_be_written_is_still_printed(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--averages", "--no-explain", "--strategy", "melange", "--out", "/dev/full"]
    assert run(["plan", str(spec), *options]) == 2
    caught = capsys.readouterr()
    assert "Predictions" in caught.out
    (line,) = caught.err.splitlines()
    assert "--out: /dev/full: No space left on device; what was computed is printed" in line


def test_unknown_node_values_are_shown_as_such() -> None:
    worth = plan_show._worth
    assert worth("not asked", None, "+") == "-"
    assert worth("not enough", None, "+") == "not enough"
    assert worth("not known", None, "+") == "not known"
    assert worth("costs", 1.25, "+") == "+$1.25"
    assert worth("costs", -0.001, "+") == "nothing"
    assert worth("costs", -0.5, "+") == "-$0.50, more components"
    assert plan_show._more(0.001) == "same cost"


def test_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "potluck.cli.main", "catalog", "gpus"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "potluck: error: output: No space left on device; free some, or write elsewhere\n"


def test_check_warns_of_objectives_that_look_like_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text((SPEC % 4).replace("ttft_ms: 2000", "ttft: 1"))
    assert run(["check", str(path)]) == 0
    assert "ttft_ms is 1 ms; objectives are in milliseconds, 1 s would be 1000" in capsys.readouterr().out


def test_template_kinds_skipped_for_lack_of_time_are_named() -> None:
    factory = TemplateFactory(load_problem(read_spec(None), 0.8, None, (), 0.0), out_of_time=lambda: True)
    assert _hurried(factory) == ()
    assert factory.pairs(factory.problem.demands[0]) == []
    assert "left out templates of these kinds: pair" in _hurried(factory)[0]
    factory.shortened_strategies["coral"] = "stopped early"
    assert _hurried(factory)[1].endswith("by the time limit: coral (stopped early)")
