"""`potluck schedule` and `frontier`: output, written files and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_services import chat_spec

from potluck.cli.main import run as run_command
from potluck.core.values.plan import plan_from_json

SPEC = chat_spec(
    "ttft_ms: 2000, tpot_ms: 60",
    "rate_by_hour: [2, 2, 12, 6], input: 800, output: 200",
    "1xL40S, available: 8, price_usd_per_h: 1.86",
    "1xL40S, available: 8, price_usd_per_h: 0.7, spot: true, preemptions_per_h: 0.1",
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path


class Shown(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Shown]:
    def called(*args: object) -> Shown:
        return Shown(run_command([str(arg) for arg in args]), *capsys.readouterr())

    return called


def test_schedule_prints_its_steps_and_writes_a_plan_per_step(
    spec: Path, tmp_path: Path, run: Callable[..., Shown]
) -> None:
    shown = run("schedule", spec, "--strategy", "melange", "--out", tmp_path / "day")
    assert shown.exit_code == 0, shown.stderr
    assert "00:00-12:00" in shown.stdout
    assert "The best single plan" in shown.stdout
    names = sorted(path.name for path in (tmp_path / "day").iterdir())
    assert names == ["plan-0000.json", "plan-1200.json", "plan-1800.json", "static.json"]
    for name in names:
        assert plan_from_json((tmp_path / "day" / name).read_text(encoding="utf-8")).fraction == 1
    body = json.loads(run("schedule", spec, "--strategy", "melange", "--json").stdout)
    assert sum(step["hours"] for step in body["steps"]) == 24
    assert body["usd_per_day"] < body["static"]["usd_per_day"]


@pytest.mark.slow
@pytest.mark.parametrize("against", ["availability", "spot"])
def test_frontier_prints_a_row_for_each_plan(
    spec: Path, against: str, run: Callable[..., Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("frontier", spec, "--strategy", "melange", "--against", against, "--values", "0,0.5,1")
    shown = run(*words)
    assert shown.exit_code == 0, shown.stderr
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    assert sum("█" in line for line in shown.stdout.splitlines()) == 3
    costs = [point["usd_per_h"] for point in json.loads(run(*words, "--json").stdout)["points"]]
    assert costs == sorted(costs, reverse=against == "spot")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("frontier", "--values", "0.5,x"), "--values: '0.5,x' is not a comma-separated list"),
        (("frontier", "--against", "spot", "--values", "2"), "--values: must be between 0 and 1, one is 2"),
        (
            ("frontier", "--against", "availability", "--survive", "zone"),
            "--survive: zone needs nodes with a zone",
        ),
        (("schedule", "--strategy", "best"), "strategy: unknown 'best'"),
        (("schedule", "--time-limit", "0"), "time-limit: must be positive"),
    ],
)
def test_schedule_and_frontier_refuse_invalid_input_in_one_line(
    spec: Path, args: tuple[str, ...], problem: str, run: Callable[..., Shown]
) -> None:
    shown = run(args[0], spec, *args[1:])
    assert shown.exit_code == 2
    assert problem in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_schedule_refuses_a_spec_without_rates_by_hour(spec: Path, run: Callable[..., Shown]) -> None:
    spec.write_text(SPEC.replace("rate_by_hour: [2, 2, 12, 6]", "rate_per_s: 4"), encoding="utf-8")
    shown = run("schedule", spec)
    assert shown.exit_code == 2
    assert "no model has rates by hour" in shown.stderr
    spec.write_text(SPEC.replace(", spot: true, preemptions_per_h: 0.1", ", zone: b"), encoding="utf-8")
    assert "spot needs spot nodes" in run("frontier", spec, "--against", "spot").stderr
