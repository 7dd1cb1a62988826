"""Damaged files at every option that takes one: exit code 2 and one line with the file's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_services import chat_spec

from potluck.cli.main import run

SPEC = chat_spec(
    "ttft_ms: 800, tpot_ms: 40",
    "rate_per_s: 2, input: 500, output: 100",
    "1xL40S, available: 4, price_usd_per_h: 1.5",
)
BAD = "there.file"
HUGE_BYTES = 40 << 30  # Of a file without a block on the disk: more than fits into memory.


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


MADE: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(bytes(range(255, -1, -1)) * 40),
    "empty": lambda path: path.write_bytes(b""),
    "folder": Path.mkdir,
    "utf-16": lambda path: path.write_text(SPEC, "utf-16"),
    "zeros": lambda path: path.write_bytes(bytes(9000)),
    "gzip, cut off": lambda path: path.write_bytes(b"\x1f\x8b\x08\x00garbage"),
    "not there": lambda path: None,
    "a link to itself": _loop,
    "huge": _huge,
    "unreadable": _unreadable,
}
KEYS = ("binary", "empty", "folder", "utf-16", "not there", "a link to itself", "huge", "unreadable")
"""What is no key; zeros and the like are bytes that somebody may have chosen."""
ESTIMATE = ("--model", "Llama-3.1-8B", "--node", "1xL4", "--input", "9", "--output", "9")
COMMANDS: list[list[str]] = [
    ["check", BAD],
    ["plan", BAD],
    ["plan", "SPEC", "--running", BAD],
    ["plan", "SPEC", "--profile", BAD],
    ["plan", "SPEC", "--market", BAD],
    ["compare", BAD],
    ["compare", "SPEC", "--market", BAD],
    ["schedule", BAD],
    ["estimate", *ESTIMATE, "--profile", BAD],
    ["replan", BAD, "SPEC", "--lose", "home:1xL40S=1"],
    ["replan", "PLAN", BAD, "--lose", "home:1xL40S=1"],
    ["replan", "PLAN", "SPEC", "--workload", f"./{BAD}"],
    ["simulate", BAD],
    ["simulate", BAD, "SPEC"],
    ["simulate", "PLAN", BAD],
    ["simulate", "PLAN", "SPEC", "--faults", BAD],
    ["simulate", "PLAN", "SPEC", "--market", BAD],
    ["simulate", "PLAN", "SPEC", "--profile", BAD],
    ["simulate", "PLAN", "SPEC", "--from-log", BAD],
    ["simulate", "PLAN", "SPEC", "--workload", f"./{BAD}"],
    ["goodput", BAD],
    ["goodput", BAD, "SPEC"],
    ["goodput", "PLAN", BAD],
    ["export", "compose", BAD, "SPEC", "--out", "made"],
    ["export", "kubernetes", "PLAN", BAD, "--out", "made"],
    ["replay", BAD],
    ["trace", "stats", BAD],
    ["trace", "convert", BAD, "--rate", "2", "--out", "made.csv"],
    ["trace", "convert", BAD, "--out", "made.csv"],
    ["catalog", "prices", "--from", "skypilot", BAD],
    ["up", BAD],
    ["up", BAD, "SPEC"],
    ["up", "PLAN", BAD],
    ["up", "--attach", BAD],
    ["serve", BAD, "SPEC"],
    ["serve", "PLAN", BAD],
    ["serve", "PLAN", "SPEC", "--engines", BAD],
    ["serve", "PLAN", "SPEC", "--history", BAD],
    ["bench", "--workload", f"./{BAD}"],
]
KEY_COMMANDS: list[list[str]] = [
    ["serve", "PLAN", "SPEC", "--admin-key-file", BAD],
    ["serve", "PLAN", "SPEC", "--engine-key-file", BAD],
    ["profile", "http://127.0.0.1:9", "--gpu", "A10", "--api-key-file", BAD],
]
CASES = [
    (command, how)
    for commands, kinds in ((COMMANDS, tuple(MADE)), (KEY_COMMANDS, KEYS))
    for place, command in enumerate(commands)
    for number, how in enumerate(kinds)
    if (place + number) % 4 == 0
]
"""Every place with a quarter of the kinds, and every kind in a quarter of the places."""


def test_bad_file_cases_cover_every_command_and_kind_of_damage() -> None:
    assert all(any(item == command for item, _ in CASES) for command in COMMANDS + KEY_COMMANDS)
    assert {how for _, how in CASES} == set(MADE)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("made")
    (folder / "spec.yaml").write_text(SPEC, "utf-8")
    made = folder / "plan.json"
    words = ["plan", str(folder / "spec.yaml"), "--averages", "--no-explain", "--out", str(made)]
    assert run(words) == 0
    return made.read_text("utf-8")


@pytest.mark.parametrize(("command", "how"), CASES, ids=[f"{' '.join(a)}: {b}" for a, b in CASES])
def test_damaged_file_is_refused_with_its_name_in_one_line(
    command: list[str],
    how: str,
    plan: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "unreadable" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in (("spec.yaml", SPEC), ("plan.json", plan)):
        (tmp_path / name).write_text(text, "utf-8")
    MADE[how](tmp_path / BAD)
    before = sorted(tmp_path.glob("[!.]*"))
    code = run([{"SPEC": "spec.yaml", "PLAN": "plan.json"}.get(word, word) for word in command])
    message = capsys.readouterr()
    assert code == 2, message.err
    (line,) = message.err.strip().splitlines()
    assert line.startswith("potluck: error: ")
    assert BAD in line
    assert len(line) < 400
    assert sorted(tmp_path.glob("[!.]*")) == before
