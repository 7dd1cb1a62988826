"""Specs with a pool through `plan`, `compare` and `replan`, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.cli.main import run
from potluck.core.values.plan import plan_from_json
from potluck.plan.strategies import STRATEGIES

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC = """\
models:
- model: Llama-2-13B
  name: chat
  slo: {ttft_ms: 2500, tpot_ms: 100}
  traffic: {rate_per_s: 2, input: 900, output: 200}
pool:
  machines:
  - {name: node0, node: 2xA40, price_usd_per_h: 0.8}
  - {name: node1, node: 2xA5000, price_usd_per_h: 0.5}
  - {name: node2, node: 2xA5000, price_usd_per_h: 0.5}
  - {name: node3, node: 1xL4, price_usd_per_h: 0.6}
  gbps: 20
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pool")
    spec, plan = folder / "pool.yaml", folder / "plan.json"
    spec.write_text(SPEC)
    options = ["--strategy", "thunderserve", "--no-explain", "--time-limit", "4"]
    assert run(["plan", str(spec), "--averages", *options, "--out", str(plan)]) == 0
    return str(plan), str(spec)


def test_pool_plan_names_its_machines(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_from_json(Path(files[0]).read_text())
    assert plan.strategy == "thunderserve"
    assert {t.kind for t in plan.templates} == {"group"}
    assert {m for t in plan.templates for m in t.machines} <= {"node0", "node1", "node2", "node3"}
    assert run(["plan", files[1], "--averages", "--strategy", "thunderserve", "--time-limit", "3"]) == 0
    text = capsys.readouterr().out
    for words in (
        "Groups of machines",
        "of node0",
        "Group search in pool:",
        "Value of one node more or less",
    ):
        assert words in text


@pytest.mark.parametrize("written", [True, False])
def test_pool_groups_respect_the_gpu_limit(
    written: bool, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the spec or by the option; alone they would be larger."""
    spec, plan = tmp_path / "pool.yaml", tmp_path / "plan.json"
    spec.write_text(SPEC + "  max_group_gpus: 1\n" if written else SPEC)
    options = ["--averages", "--strategy", "thunderserve", "--no-explain", "--time-limit", "4"]
    options += [] if written else ["--max-group-gpus", "1"]
    assert run(["plan", str(spec), *options, "--out", str(plan)]) == 3  # so they serve less

    def largest(path: str | Path) -> int:
        replicas = [r for t in plan_from_json(Path(path).read_text()).templates for r in t.replicas]
        return max(sum(m.tp for stage in r.layout.stages for m in stage.nodes) for r in replicas)

    assert largest(plan) == 1 < largest(files[0])
    capsys.readouterr()
    assert run(["plan", str(EXAMPLES / "one-node.yaml"), "--max-group-gpus", "2"]) == 2
    assert "--max-group-gpus: is for groups of a `pool:`" in capsys.readouterr().err


def test_pool_plan_is_reproducible_by_seed(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*options: str) -> object:
        chosen = ("--averages", "--json", "--no-explain", "--strategy", "thunderserve")
        assert run(["plan", files[1], *chosen, *options]) == 0
        return json.loads(capsys.readouterr().out)

    assert plan("--seed", "3") == plan("--seed", "3")


def test_compare_runs_every_strategy_on_a_pool(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", files[1], "--averages", "--json", "--time-limit", "4"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(STRATEGIES)
    assert all(row["violations"] == [] for row in rows.values())
    best, result = rows["auto"], rows["thunderserve"]
    assert result["served_fraction"] > 0
    assert best["served_fraction"] >= result["served_fraction"] - 1e-6
    assert best["served_fraction"] > result["served_fraction"] or (
        best["cost_usd_per_h"] <= result["cost_usd_per_h"] + 1e-6
    )
    assert run(["check", files[1]]) == 0
    assert "is valid" in capsys.readouterr().out


def test_compare_names_strategies_that_do_not_apply_to_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.yaml"
    small = SPEC.replace("Llama-2-13B", "Llama-2-7B").replace("rate_per_s: 2", "rate_per_s: 0.1")
    model = small.split("models:\n")[1].split("pool:")[0]
    path.write_text(small.replace("pool:", model.replace("chat", "talk") + "pool:", 1))
    assert run(["compare", str(path), "--averages", "--json", "--time-limit", "2"]) == 0
    caught = capsys.readouterr()
    assert "thunderserve" not in [row["strategy"] for row in json.loads(caught.out)]
    assert "thunderserve plans one model at a time" in caught.err


def replan_steps(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert run(["replan", *options, "--json", "--time-limit", "3"]) == 0
    return {load["step"]: load for load in json.loads(capsys.readouterr().out)["answers"]}


def test_replan_avoids_lost_named_machines(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.json"
    result = replan_steps([*files, "--lose", "node1,node2", "--out", str(out)], capsys)
    assert result["reroute"]["served_fraction"] <= result["flip"]["served_fraction"] + 1e-6
    plan = plan_from_json(out.read_text())
    assert not {m for t in plan.templates for m in t.machines} & {"node1", "node2"}
    assert sum(plan.nodes.values()) <= 2
    assert replan_steps([*files, "--lose", "pool:2xA5000=1"], capsys)["reallocate"]["served_fraction"] > 0


@pytest.mark.slow
def test_replan_accepts_a_workload_of_other_lengths(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:00:{i:02d}.0,{100 + 10 * i},{20 + i}" for i in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    for text in ("chat=coding", str(trace)):
        assert replan_steps([*files, "--workload", text], capsys)["reallocate"]["served_fraction"] > 0, text
    assert replan_steps([*files, "--workload", "900/200"], capsys)["reroute"][
        "served_fraction"
    ] == pytest.approx(plan_from_json(Path(files[0]).read_text()).fraction)


def test_replan_truncates_prompts_beyond_the_context_and_reports_it(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replan", *files, "--workload", "9000/20", "--time-limit", "2"]) == 0
    assert "context of 4,096 tokens and were cut" in capsys.readouterr().err


def test_replan_accepts_slower_links_between_machines(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"node{i}" for i in range(4)]
    slow = [f"{a}:{b}=0.05gbps" for a in names for b in names if a != b]
    result = replan_steps([*files, *(text for item in slow for text in ("--link", item))], capsys)
    assert result["reroute"]["served_fraction"] <= 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lose", "node9"], "lose: machine: unknown 'node9'; did you mean 'node"),
        (["--lose", "node1,node1"], "'node1' is named twice"),
        (["--lose", "node0,node1,node2,node3"], "every machine of the pool; nothing is left"),
        (["--link", "node0:node9=3"], "link: machine: unknown 'node9'"),
        (["--link", "node0:node1=0"], "must be positive"),
        (["--workload", "codign"], "did you mean 'coding'?"),
        (["--workload", "talk=coding"], "workload: model: unknown 'talk'"),
        (["--workload", "0/3"], "lengths: input_tokens"),
        (["--lose", "node0,node1,node2"], "the remaining nodes cannot serve"),
    ],
)
def test_pool_replan_refuses_invalid_options_in_one_line(
    files: tuple[str, str], options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replan", *files, *options, "--time-limit", "2"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "options", "says"),
    [
        ("gbps: 20", "gbps: [[0, 1], [1, 0]]", [], ":12: pool.gbps: must be one number, or 4 rows of 4"),
        ("gbps: 20", "gbps: 0", [], ":12: pool.gbps: must be positive, is 0"),
        ("2xA40", "2xA41", [], ":8: pool.machines[0].node: '2xA41': unknown GPU 'A41'"),
        ("node1", "node0", [], ":9: pool.machines[1].name: duplicate machine 'node0'"),
        (
            "Llama-2-13B",
            "DeepSeek-V3",
            [],
            "chat: its weights and the KV of one prompt fit on no node on offer",
        ),
        ("tpot_ms: 100", "tpot_ms: 0.1", [], "cannot be met; the fastest"),
        (
            "pool:",
            "- {model: Llama-2-13B, slo: {ttft: 1, tpot: 1}, traffic: {rate_per_s: 1, input: 9, output: 9}}\npool:",
            ["--attainment", "simulated"],
            "--attainment: simulated is for groups of a pool: thunderserve plans one model at a time",
        ),
    ],
)
def test_invalid_pool_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(SPEC.replace(old, new, 1))
    chosen = ("--averages", "--strategy", "thunderserve", "--time-limit", "2")
    assert run(["plan", str(path), *chosen, *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
