"""`--profile`: measured step times replace predicted ones where they apply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_services import chat_spec

from potluck.catalog import models, nodes
from potluck.cli.main import run
from potluck.core.values.plan import Plan, plan_from_json
from potluck.perf.step_timer import steps
from potluck.perf.timers.profile import Profile, ProfilePoint, profile_to_json
from potluck.perf.timers.roofline import roofline

SPEC = chat_spec(
    "ttft_ms: 4000, tpot_ms: 120",
    "rate_per_s: 4, input: 1000, output: 200",
    "1xL40S, available: 8, price_usd_per_h: 1.9",
    "1xA10G, available: 8, price_usd_per_h: 1.0",
)


def write_profile(folder: Path, gpu: str, slower: float) -> Path:
    """A profile of steps that take so many times as long as predicted."""
    model, node = models.model("Llama-3.1-8B"), nodes.node_type(gpu)
    timer = roofline(model, node, 1)
    points = []
    for new in (0, 64, 256, 1024, 2048):
        for decodes in (0, 1, 8, 32, 128):
            for context in (128, 1024, 4096):
                if new or decodes:
                    shape = steps([[float(new)]], [[0.0]], float(decodes), float(decodes * context))
                    taken = slower * float(timer.step_s(shape)[0])
                    points.append(ProfilePoint(new, 0, decodes, decodes * context, taken))
    profile = Profile(gpu, "Llama-3.1-8B", 1, "potluck", {}, "2026-01-31", tuple(points))
    path = folder / f"{gpu}-{slower:g}.json"
    path.write_text(profile_to_json(profile))
    return path


def estimate_json(capsys: pytest.CaptureFixture[str], node: str, *options: str) -> dict[str, object]:
    asked = ["--model", "Llama-3.1-8B", "--node", node, "--tp", "1", "--input", "1024", "--output", "256"]
    assert run(["estimate", *asked, "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_estimate_with_a_profile_uses_the_measured_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_profile(tmp_path, "L40S", 3.0))
    plain, measured = estimate_json(capsys, "L40S"), estimate_json(capsys, "L40S", "--profile", path)
    for name in ("prefill_s", "decode_step_s"):
        assert measured[name] == pytest.approx(3 * plain[name], rel=0.02)  # type: ignore[operator]
    assert measured["kv_bytes"] == plain["kv_bytes"]
    assert measured["confidence"] == "measured"
    assert "measured 2026-01-31" in str(measured["basis"])
    # Two L40S of a node are two such replicas.
    twice = estimate_json(capsys, "2xL40S", "--profile", path)
    assert twice["requests_per_s"] == pytest.approx(2 * measured["requests_per_s"])  # type: ignore[operator]


def plan_and_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Plan, set[str]]:
    spec, out = tmp_path / "potluck.yaml", tmp_path / "plan.json"
    spec.write_text(SPEC)
    command = [
        *("plan", str(spec), "--averages", "--strategy", "melange", "--no-explain", "--out", str(out)),
        *options,
    ]
    assert run(command) == 0, capsys.readouterr().err
    capsys.readouterr()
    plan = plan_from_json(out.read_text())
    rented = {deployment.template for deployment in plan.deployments if deployment.count}
    used = {node.node for item in plan.templates if item.name in rented for node in item.nodes}
    return plan, used


def test_plan_with_a_profile_avoids_a_gpu_measured_as_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, before = plan_and_gpus(tmp_path, capsys)
    slow = [str(write_profile(tmp_path, gpu, 2.0)) for gpu in ("L40S", "A10G")]
    dear, _ = plan_and_gpus(tmp_path, capsys, "--profile", slow[0], "--profile", slow[1])
    assert dear.cost_usd_per_h > 1.5 * plain.cost_usd_per_h
    gpu = "L40S" if "1xL40S" in before else "A10G"
    _, after = plan_and_gpus(tmp_path, capsys, "--profile", str(write_profile(tmp_path, gpu, 20.0)))
    assert f"1x{gpu}" not in after
    same, _ = plan_and_gpus(tmp_path, capsys, "--profile", str(write_profile(tmp_path, gpu, 1.0)))
    assert same.cost_usd_per_h == pytest.approx(plain.cost_usd_per_h, rel=0.3)


def test_profile_that_does_not_apply_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for path, says in (
        (write_profile(tmp_path, "A10", 1.0), "is of Llama-3.1-8B on A10"),
        (tmp_path / "nowhere.json", "cannot be read"),
        (tmp_path / "broken.json", "format"),
    ):
        asked = ["--model", "Llama-3.1-8B", "--node", "L40S", "--input", "100", "--output", "100"]
        assert run(["estimate", *asked, "--profile", str(path)]) == 2
        shown = capsys.readouterr().err
        assert says in shown
        assert len(shown.splitlines()) == 1
