"""The tutorial, as a reader would do it: its files written, its commands run in order, by processes of their own."""

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
from book import sample
from book.assemble import ROOT
from book.text import blocks

from potluck.cli.main import run
from potluck.control.ending import stop_all
from potluck.control.store.store import Store
from potluck.core.values.plan import Plan, plan_from_json

TEXT = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
WITHIN_S = 400.0
"""For machines that have much else to do."""
ELSEWHERE = ("git clone POTLUCK potluck && cd potluck", "make up", "source .venv/bin/activate")
"""Not run here: tests/cli/test_up_demo.py has what `make up` starts."""


def shown_commands() -> list[str]:
    lines = [
        line for block in blocks(TEXT) if block.language == "console" for line in block.text.splitlines()
    ]
    return [line.removeprefix("$ ") for line in lines]


@dataclass
class Reader:
    """Somebody at a terminal in an empty home."""

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
        return {**os.environ, "HOME": str(self.home), "COLUMNS": sample.COLUMNS}

    def serve(self, command: str) -> None:
        """In another terminal, until it says where; at a free port, as others may be here."""
        words = [*self.words(command), "--port", "0", "--json"]
        self.up = subprocess.Popen(
            words, cwd=self.home, env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watchdog = threading.Timer(WITHIN_S, self.up.kill)
        watchdog.start()
        assert self.up.stdout is not None
        assert self.up.stderr is not None
        line = self.up.stdout.readline()
        watchdog.cancel()
        assert line, self.up.stderr.read()
        self.url = json.loads(line)["url"]

    def ask(self, command: str) -> str:
        """What curl would."""
        words = shlex.split(command)
        assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
        head = dict([words[words.index("-H") + 1].split(": ")])
        asked = urllib.request.Request(
            f"{self.url}/v1/chat/completions", words[words.index("-d") + 1].encode(), head
        )
        with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def status(self) -> dict[str, Any]:
        """Asked for often, so in this process."""
        (state,) = (path.parent for path in self.home.rglob("state.db"))
        with redirect_stdout(io.StringIO()) as printed:
            assert run(["status", "--json", "--state", str(state)]) == 0
        found = json.loads(printed.getvalue())
        assert isinstance(found, dict)
        return found

    def fleet(self) -> list[str]:
        """Replicas that serve, once nothing is missing and nothing is too much."""
        until_s = time.monotonic() + WITHIN_S
        while True:
            found = self.status()
            if not found["lacking"] and {each["state"] for each in found["replicas"]} == {"ready"}:
                return sorted(each["replica"] for each in found["replicas"])
            assert time.monotonic() < until_s, found
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
            store = Store(path)
            stop_all(store, "the test is over", 5.0)
            store.close()


def test_the_tutorial_can_be_followed(reader: Reader) -> None:
    commands = shown_commands()
    assert tuple(commands[:3]) == ELSEWHERE
    (reader.home / "potluck.yaml").write_text(sample.spec())
    said: dict[str, str] = {}
    before: list[str] = []
    for command in commands[3:]:
        if command.startswith("curl "):
            assert reader.ask(command)
        elif command.startswith("potluck up "):
            reader.serve(command)
            before = reader.fleet()
        else:
            if command == "potluck down":
                after = reader.fleet()
            said[command] = reader.run(command)
    assert "potluck.yaml is valid" in said["potluck check potluck.yaml"]
    printed = said[" ".join(("potluck", *sample.COMMAND))]
    assert sample.heads(printed) == sample.heads(sample.in_page()), "run: python -m book.sample"
    _must_be_as_told((reader.home / "plan.json").read_text())
    assert [("L40S" in name, "L4 " in name) for name in before] == [(True, False)], "it begins with the L40S"
    assert after, "something serves at the end"
    assert all("1xL4 " in name for name in after), after
    assert "by hand" in said["potluck events"]
    bench = next(text for command, text in said.items() if command.startswith("potluck bench"))
    assert "10 of 10 requests answered" in bench
    assert reader.up is not None
    assert reader.up.wait(WITHIN_S) == 0, "down ends what `up` looks after"


def _must_be_as_told(text: str) -> None:
    """The prose gives two prices: the plan's, and the one of L4s, which does not hold."""
    plan: Plan = plan_from_json(text)
    prices = [float(each) for each in re.findall(r"\$(\d+\.\d+)", TEXT)]
    assert prices == [1.60, pytest.approx(plan.cost_usd_per_h)]
    assert [plan.template(each.template).name for each in plan.deployments] == ["chat: mixed 1xL40S tp1"]
