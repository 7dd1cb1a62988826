"""All commands refuse and accept the same plans for an engine, with the same line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_services import chat_spec, output_of
from live_plans import COMBO, WHOLE, write_plans

from potluck.cli.main import run
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import plan_from_json, plan_to_json

SHARED = Layout((Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("1xA10", 1),) * 2)))
UNLIKE = Layout((Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("2xA10", 2),))))
PIPELINE = Layout((Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("1xA10", 1),))))


def write_plan_with_layout(folder: Path, layout: Layout, engine: str) -> tuple[Path, Path]:
    """A plan of one replica that is cut so, for a spec with this engine."""
    plan_path, spec_path = write_plans(folder, WHOLE)
    plan = plan_from_json(plan_path.read_text())
    (unit,) = plan.templates
    replicas = tuple(replace(replica, layout=layout) for replica in unit.replicas)
    counts = tuple(replace(unit.nodes[0], node=node, count=n) for node, n in layout.node_counts.items())
    whole = replace(plan, templates=(replace(unit, replicas=replicas, nodes=counts),))
    plan_path.write_text(plan_to_json(whole))
    more = "near, nodes: [{node: 2xA10, available: 9, price_usd_per_h: 2.0}, "
    spec_path.write_text(f"engine: {engine}\n{spec_path.read_text().replace('near, nodes: [', more)}")
    return plan_path, spec_path


def commands(plan: Path, spec: Path, folder: Path) -> list[list[str]]:
    both = [str(plan), str(spec)]
    return [
        ["simulate", *both],
        ["goodput", *both],
        ["up", *both, "--state", str(folder / "state")],
        ["up", *both, "--state", str(folder / "state"), "--engine", "mock"],
        ["export", "commands", *both, "--out", str(folder / "out")],
        ["export", "kubernetes", *both, "--out", str(folder / "out")],
        ["replan", *both, "--rate", "live=2x"],
        ["serve", *both, "--engines", str(folder / "none.yaml")],
        ["plan", str(spec), "--running", str(plan)],
    ]


@pytest.mark.parametrize(
    ("layout", "engine", "line"),
    [
        (
            SHARED,
            "vllm",
            "unit0: needs pipelines with several nodes in a stage, which vLLM does not do; plan again, with "
            "`limits: {max_stages: 1}`",
        ),
        (
            UNLIKE,
            "vllm",
            "unit0: needs pipelines with unlike tensor-parallel degrees, which vLLM does not do; plan again, with "
            "`limits: {max_stages: 1}`",
        ),
        (
            PIPELINE,
            "embedded",
            "unit0: needs pipelines, which the embedded engine does not do; plan again, with `engine: vllm` or "
            "`limits: {max_stages: 1}`",
        ),
        (PIPELINE, "openai", "unit0: needs pipelines, which a server of OpenAI's API does not do"),
    ],
)
def test_all_commands_refuse_an_unsupported_layout_with_the_same_line(
    layout: Layout, engine: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, spec = write_plan_with_layout(tmp_path, layout, engine)
    lines = {output_of(capsys, *words, rc=2) for words in commands(plan, spec, tmp_path)}
    (shown,) = lines
    assert line in shown
    assert str(plan) in shown


def test_plan_with_kv_transfer_is_refused_for_openai_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, spec = write_plans(tmp_path, COMBO)
    spec.write_text(f"engine: openai\n{spec.read_text()}")
    shown = output_of(capsys, "simulate", plan, spec, rc=2)
    assert "needs KV handed over between replicas, which a server of OpenAI's API does not do" in shown
    assert "plan again, with `engine: vllm` or `engine: embedded`" in shown


def test_simulate_and_export_accept_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, spec = write_plan_with_layout(tmp_path, PIPELINE, "vllm")
    output_of(capsys, "simulate", plan, spec, "--requests", 20)
    output_of(capsys, "export", "commands", plan, spec, "--out", tmp_path / "out")


def test_model_that_the_engine_does_not_support_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "potluck.yaml"
    node = "1xH100, available: 2, price_usd_per_h: 3"
    text = chat_spec("ttft_ms: 2000, tpot_ms: 80", "rate_per_s: 1, input: 100, output: 20", node)
    spec.write_text(f"engine: embedded\n{text.replace('Llama-3.1-8B', 'Kimi-Linear-48B-A3B')}")
    shown = output_of(capsys, "check", spec, rc=2)
    assert f"{spec}:3: models[0].model: needs linear attention of kind kda" in shown
    assert "which the embedded engine does not do; `engine: vllm` or `engine: openai` does" in shown


@pytest.mark.slow
def test_emulated_engine_serves_a_pipeline_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two A10 as one replica, through the gateway, each step at a pipeline's pace."""
    plan, spec = write_plan_with_layout(tmp_path, PIPELINE, "vllm")
    words = [
        "up",
        str(plan),
        str(spec),
        "--state",
        str(tmp_path / "state"),
        "--averages",
        "--check",
        "--json",
    ]
    assert run([*words, "--port", "0", "--within", "120"]) == 0, capsys.readouterr().err
    body = json.loads(capsys.readouterr().out)
    assert [answer["model"] for answer in body["answers"]] == ["live"]
    assert body["answers"][0]["text"]


def test_home_region_outside_the_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = map(str, write_plans(tmp_path, WHOLE))
    shown = output_of(capsys, "serve", *both, "--policy", "home=nearr", rc=2)
    assert "--policy.home" in shown
    assert "near" in shown
    assert len(shown.splitlines()) == 1
