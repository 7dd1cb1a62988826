"""The tutorial, as a reader would do it: its files written, its commands run in order, by processes of their own, and
what they print compared with what the page shows."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docsite import sample
from docsite.assemble import ROOT
from docsite.shown import Shown, alike, same, shown
from docsite.text import blocks

from potluck.cli.main import run
from potluck.control.local_stack import stop_all
from potluck.control.state_store import StateStore
from potluck.core.values.plan import Plan, plan_from_json

TEXT = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
WITHIN_S = 400.0  # For machines that have much else to do.
COLUMNS = "80"
EXACT = ("potluck check ", "potluck plan ")
"""Commands that print the same whenever and wherever they are run."""
ELSEWHERE = ("git clone POTLUCK potluck && cd potluck", "make up", "source .venv/bin/activate")
"""Not run here: tests/cli/test_up_demo.py has what `make up` starts."""


@dataclass
class Reader:
    home: Path
    url: str = ""
    up: subprocess.Popen[str] | None = None

    def words(self, command: str) -> list[str]:
        words = shlex.split(command)
        assert words[0] == "potluck", command
        return [sys.executable, "-m", "potluck.cli.main", *words[1:]]

    def run(self, command: str) -> str:
        done = subprocess.run(
            self.words(command),
            cwd=self.home,
            env=self.env(),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def env(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), "COLUMNS": COLUMNS}

    def serve(self, command: str) -> str:
        """In another terminal, until it has said all; at a free port, as others may be here."""
        words = [*self.words(command), "--port", "0"]
        self.up = subprocess.Popen(
            words, cwd=self.home, env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watchdog = threading.Timer(WITHIN_S, self.up.kill)
        watchdog.start()
        assert self.up.stdout is not None
        assert self.up.stderr is not None
        lines = []
        for line in self.up.stdout:
            lines.append(line)
            if '"max_tokens"' in line:
                break
        watchdog.cancel()
        assert lines, self.up.stderr.read()
        self.url = lines[0].split()[-1]
        return "".join(lines)

    def ask(self, command: str) -> str:
        """What curl would."""
        words = shlex.split(command)
        assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
        head = dict([words[words.index("-H") + 1].split(": ")])
        asked = urllib.request.Request(
            f"{self.url}/v1/chat/completions", words[words.index("-d") + 1].encode(), head
        )
        with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
            text = str(answer.read().decode())
        assert json.loads(text)["choices"][0]["message"]["content"]
        return text

    def status(self) -> dict[str, Any]:
        (state,) = (path.parent for path in self.home.rglob("state.db"))
        with redirect_stdout(io.StringIO()) as printed:
            assert run(["status", "--json", "--state", str(state)]) == 0
        document = json.loads(printed.getvalue())
        assert isinstance(document, dict)
        return document

    def fleet(self) -> list[str]:
        """Replicas that serve, once nothing is missing and nothing is too much."""
        until_s = time.monotonic() + WITHIN_S
        while True:
            result = self.status()
            if not result["lacking"] and {item["state"] for item in result["replicas"]} == {"ready"}:
                return sorted(item["replica"] for item in result["replicas"])
            assert time.monotonic() < until_s, result
            time.sleep(0.5)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    try:
        yield someone
    finally:
        if someone.up is not None:
            someone.up.kill()
            someone.up.wait()
            for stream in (someone.up.stdout, someone.up.stderr):
                assert stream is not None
                stream.close()
        for path in tmp_path.rglob("state.db"):
            store = StateStore(path)
            stop_all(store, "the test is over", 5.0)
            store.close()


def must_match(each: Shown, printed: str, home: Path) -> None:
    if each.command.startswith(EXACT):
        assert same(each.output, printed), f"{each.command} prints:\n{printed}"
    else:
        assert alike(each.output, printed, str(home)), f"{each.command} prints:\n{printed}"


@pytest.mark.slow
def test_tutorial_commands_print_what_the_page_shows(reader: Reader) -> None:
    message = list(shown(TEXT))
    assert tuple(entry.command for entry in message[:3]) == ELSEWHERE
    assert all(entry.output for entry in message[3:]), "every command is shown with what it prints"
    (reader.home / "potluck.yaml").write_text(sample.spec())
    before: list[str] = []
    for item in message[3:]:
        command = item.command
        if command.startswith("curl "):
            printed = reader.ask(command)
        elif command.startswith("potluck up "):
            printed = reader.serve(command)
            before = reader.fleet()
        else:
            if command == "potluck down":
                after = reader.fleet()
            printed = reader.run(command)
        must_match(item, printed, reader.home)
    _must_be_as_told((reader.home / "plan.json").read_text())
    assert [("L40S" in name, "L4 " in name) for name in before] == [(True, False)], "it begins with the L40S"
    assert len(after) == 3, "three L4 serve at the end"
    assert all("1xL4" in name for name in after), after
    assert reader.up is not None
    assert reader.up.wait(WITHIN_S) == 0, "down ends what `up` looks after"


def _must_be_as_told(text: str) -> None:
    """The prose gives two prices: the plan's, and the one of L4s, which does not hold."""
    plan: Plan = plan_from_json(text)
    prose = TEXT
    for block in blocks(TEXT):
        prose = prose.replace(block.text, "")
    prices = [float(item) for item in re.findall(r"\$(\d+\.\d+)", prose)]
    assert prices == [1.60, pytest.approx(plan.cost_usd_per_h)]
    assert [plan.template(deployment.template).name for deployment in plan.deployments] == [
        "chat: mixed 1xL40S tp1"
    ]


@pytest.mark.slow
def test_explained_plan_equals_the_printed_one() -> None:
    assert same(sample.in_page(), sample.printed()), "run: PYTHONPATH=src:tools python -m docsite.sample"


@pytest.mark.parametrize(
    ("said", "printed", "exact", "live"),
    [
        ("a 3\n", "a 3\n", True, True),
        ("a 3\n", "a 4\n", False, True),
        ("a 3\n", "b 3\n", False, False),
        ("a\n...\nc\n", "a\nx\ny\nc\n", True, True),
        ("a\n...\nc\n", "a\nc\n", True, True),
        ("a\n...\n", "a\n", True, True),
        ("a\n...\nc\n", "a\nx\n", False, False),
        ("costs $1.86/h\n", "costs $1.60/h\n", False, False),
        ("10 of 10 requests\n", "9 of 10 requests\n", False, False),
        ("took 4.2 s\n", "took 380 ms\n", False, True),
        ("words that\nare folded\n", "words\nthat are folded\n", False, True),
        ("in ~/x\n", "in /tmp/me/x\n", False, True),
        ("chat-1c478792 runs\n", "chat-aaaaaaaa runs\n", False, True),
        ("best state after 3.1 ms, so\n", "best state after 9 s, so\n", True, True),
        ("a\n", "notice: this machine computes 3.1 times slower: not the plan's\na\n", False, True),
    ],
)
def test_tutorial_outputs_are_compared_strictly(said: str, printed: str, exact: bool, live: bool) -> None:
    assert same(said, printed) is exact
    assert alike(said, printed, "/tmp/me") is live
