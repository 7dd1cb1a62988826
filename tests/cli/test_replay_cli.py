"""`potluck replay`, and `potluck simulate --from-log`, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_simulate import SPEC

from potluck.cli.main import run


@pytest.fixture(scope="module")
def simulated_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("replay")
    spec, plan, log = folder / "potluck.yaml", folder / "plan.json", folder / "run.log"
    spec.write_text(SPEC)
    assert run(["plan", str(spec), "--averages", "--out", str(plan), "--no-explain"]) == 0
    assert run(["simulate", str(plan), str(spec), "--requests", "120", "--log", str(log)]) == 0
    return plan, spec, log


def test_replay_accepts_a_log_and_detects_a_changed_one(
    simulated_log: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = simulated_log[2]
    capsys.readouterr()
    assert run(["replay", str(log)]) == 0
    assert "in 1 run: all the same" in capsys.readouterr().out
    other = tmp_path / "other.log"
    lines = log.read_text().splitlines(keepends=True)
    place = next(i for i, text in enumerate(lines) if '["Run"' in text)
    lines[place] = lines[place].replace(",[[", ",[]]\n", 1)
    lines[place] = f"{lines[place].split(',[]]')[0]},[]]\n"
    other.write_text("".join(lines))
    assert run(["replay", str(other)]) == 1
    out = capsys.readouterr().out
    assert f"line {place + 1}: RequestArrived" in out
    assert "instead of []" in out
    assert run(["replay", str(other), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["same"]
    assert document["difference"].startswith(f"line {place + 1}")


def test_truncated_log_is_read_with_a_note_and_an_invalid_one_refused(
    simulated_log: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.log"
    cut.write_bytes(simulated_log[2].read_bytes()[:-5])
    capsys.readouterr()
    assert run(["replay", str(cut)]) == 0
    assert "is cut off and was passed over" in capsys.readouterr().err
    assert run(["simulate", *map(str, simulated_log[:2]), "--from-log", str(cut), "--json"]) == 0
    shown = capsys.readouterr()
    assert "is cut off and was passed over" in shown.err
    assert json.loads(shown.out)
    for name, content, says in (
        ("x", b"\xff\xfe", "is not a log"),
        ("y", b"", "is empty"),
        ("z", b"{}", "is not the beginning"),
    ):
        (tmp_path / name).write_bytes(content)
        assert run(["replay", str(tmp_path / name)]) == 2
        shown = capsys.readouterr()
        assert says in shown.err
        assert shown.err.count("\n") == 1
    assert run(["replay", str(tmp_path / "nowhere")]) == 2


def test_simulate_from_log_reproduces_its_requests(
    simulated_log: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, spec, log = map(str, simulated_log)
    again = tmp_path / "again.log"
    assert run(["simulate", plan, spec, "--from-log", log, "--log", str(again)]) == 0
    assert again.read_bytes() == simulated_log[2].read_bytes()
    assert run(["simulate", plan, spec, "--from-log", log, "--requests", "30", "--rate", "2", "--json"]) == 0
    capsys.readouterr()
    assert run(["simulate", plan, spec, "--from-log", log, "--workload", "sharegpt"]) == 2
    assert "--from-log: has its own requests" in capsys.readouterr().err
    other = tmp_path / "other.yaml"
    other.write_text(SPEC.replace("name: chat", "name: talk"))
    assert run(["simulate", plan, str(other), "--from-log", log]) == 2
    assert "log: model" in capsys.readouterr().err
