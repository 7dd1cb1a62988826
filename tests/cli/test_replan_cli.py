"""`potluck replan`: what happened goes in as options, the ladder of answers comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.cli.main import run
from potluck.core.values.plan import plan_from_json

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


def answers(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert run(["replan", *options, "--json"]) == 0
    return {each["step"]: each for each in json.loads(capsys.readouterr().out)["answers"]}


def test_nothing_happened(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(list(files), capsys)
    assert found["reroute"]["served_fraction"] == 1
    assert run(["replan", *files]) == 0
    out = capsys.readouterr().out
    assert "reroute (best)" in out
    assert "at once" in out


def test_lost_nodes(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_from_json(Path(files[0]).read_text())
    (region, node), count = max(plan.nodes.items(), key=lambda item: item[1])
    out = tmp_path / "new.json"
    found = answers([*files, "--lose", f"{region}:{node}={count}", "--out", str(out)], capsys)
    assert found["reroute"]["served_fraction"] < 1
    assert found["reallocate"]["served_fraction"] > found["reroute"]["served_fraction"]
    assert found["reallocate"]["time_s"] > 30
    assert plan_from_json(out.read_text()).fraction > 0


def test_more_load_and_a_slower_link(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers([*files, "--rate", "chat=3x", "--link", "home:lab=0.5gbps"], capsys)
    assert found["reroute"]["served_fraction"] < 1
    assert found["reallocate"]["served_fraction"] == pytest.approx(1)


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
def test_bad_options_get_one_line(
    files: tuple[str, str], options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replan", *files, *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_file_that_is_no_plan(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replan", files[1], files[1]]) == 2
    assert "is not JSON" in capsys.readouterr().err
