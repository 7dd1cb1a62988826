"""`potluck init` and `potluck check`; every shipped example is a valid spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.cli.main import run
from potluck.spec.load_spec import load_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_initialised_spec_passes_check_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    assert "potluck check potluck.yaml" in capsys.readouterr().out
    assert run(["check"]) == 0
    out = capsys.readouterr().out
    for text in (
        *("Models", "Fleet", "Links", "chat", "8.03 B", "4xL40S", "catalog: aws/us-east-1", "is valid."),
    ):
        assert text in out
    assert "warning" not in out


def test_initialised_example_has_two_models_and_two_regions(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert run(["init", str(path)]) == 0
    spec = load_spec(path)
    assert len(spec.models) == len(spec.regions) == len(spec.links) == 2
    assert {node.gpu.name for node in spec.node_types} == {"RTX4090", "L4", "L40S", "H100-SXM"}


def test_commented_parts_of_the_initialised_example_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert run(["init", str(path)]) == 0
    lines = path.read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if "- node: {name: odd-box" in line)
    for i in range(start, start + 5):
        lines[i] = lines[i].replace("# ", "", 1)
    text = "\n".join(lines).replace("# budget_usd", "budget_usd").replace("# gpus:", "gpus:")
    path.write_text(text.replace("#   - {name: MyGPU", "  - {name: MyGPU"), "utf-8")
    spec = load_spec(path)
    assert spec.node_type("odd-box").gpus == 3
    assert spec.budget_usd_per_h == 60


def test_init_does_not_overwrite_a_file_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mine", "utf-8")
    assert run(["init", str(path)]) == 2
    assert capsys.readouterr().err == f"potluck: error: {path}: exists already; use --force to overwrite it\n"
    assert path.read_text("utf-8") == "mine"
    assert run(["init", str(path), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(path)}
    assert run(["init", str(tmp_path / "no" / "p.yaml")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def write_broken_spec(folder: Path) -> Path:
    path = folder / "p.yaml"
    assert run(["init", str(path)]) == 0
    text = path.read_text("utf-8").replace("ttft_ms: 1000 ", "ttft_ms: -5 ").replace("1xL4\n", "1xL5\n")
    path.write_text(text, "utf-8")
    return path


def test_check_prints_every_problem_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_broken_spec(tmp_path)
    capsys.readouterr()
    assert run(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first == f"potluck: error: {path}:9: models[0].slo.ttft_ms: must be positive, is -5"
    assert second.startswith(
        f"potluck: error: {path}:46: fleet.regions[0].nodes[1].node: '1xL5': unknown GPU"
    )


def test_check_json_of_an_invalid_spec_lists_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_broken_spec(tmp_path)
    capsys.readouterr()
    assert run(["check", str(path), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is False
    assert document["errors"][0] == {
        "file": str(path),
        "line": 9,
        "field": "models[0].slo.ttft_ms",
        "problem": "must be positive, is -5",
    }
    assert run(["check", str(tmp_path / "none.yaml"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["line"] == 0


def test_check_json_of_a_valid_spec_lists_models_and_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(EXAMPLES / "cauchy.yaml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is True
    assert document["errors"] == []
    assert document["models"][0]["parameters"] == 8_030_261_248
    assert document["models"][0]["mean_output_tokens"] == 1330
    assert [row["price_usd_per_h"] for row in document["fleet"]] == [5.38, 2.38, 3.0]
    assert sum(row["gpus"] * row["available"] for row in document["fleet"]) == 24


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_example_passes_check_without_warnings(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(path)]) == 0
    assert "warning" not in capsys.readouterr().out


def test_shipped_examples_exist() -> None:
    assert {"one-node", "two-regions", "cauchy"} <= {path.stem for path in EXAMPLES.glob("*.yaml")}


def spec_with(folder: Path, model: str, nodes: str, rest: str = "", traffic: str = "") -> Path:
    path = folder / "w.yaml"
    lengths = traffic or "{rate_per_s: 1, input: 100, output: 10}"
    path.write_text(
        f"models:\n  - {{model: {model}, slo: {{ttft: 900, tpot: 90}}, traffic: {lengths}}}\n"
        f"fleet:\n  regions:\n    - {{name: a, nodes: [{nodes}]}}\n"
        f"    - {{name: b, nodes: [{{node: 1xT4, available: 0, price_usd_per_h: 1}}]}}\n{rest}",
        "utf-8",
    )
    return path


L4 = "{node: 1xL4, available: 40, price_usd_per_h: 1}"


def test_check_warns_of_oversized_models_missing_links_and_low_budgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["check", str(spec_with(tmp_path, "Llama-3-70B", L4, "budget_usd_per_h: 0.5\n"))])
    out = capsys.readouterr().out
    assert "warning: Llama-3-70B: no single node holds its 141 GB of weights, it needs a pipeline" in out
    assert "warning: no link between a and b: no KV transfers between them" in out
    assert "warning: the budget is below $1.00 per hour, the price of the cheapest node" in out
    run(["check", str(spec_with(tmp_path, "DeepSeek-V3", L4.replace("40", "4")))])
    assert "no region holds its" in capsys.readouterr().out
    traffic = "{rate_per_s: 0, input: 200000, output: 9}"
    run(["check", str(spec_with(tmp_path, "Llama-3.1-8B", L4, traffic=traffic))])
    out = capsys.readouterr().out
    assert "some requests have 200,009 tokens, its context ends at 131,072" in out
    assert "rate_per_s is 0, so no nodes are planned for it" in out


def test_init_and_check_help_have_examples_and_the_json_option(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("init", "check"):
        assert run([command, "-h"]) == 0
        out = capsys.readouterr().out
        assert "Examples:" in out
        assert "--json" in out
