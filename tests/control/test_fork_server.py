"""Engines that are forked: as good as those that are started, and found again by their mark."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from potluck.cli.engine.fork_server import MODULES, PRETENDED
from potluck.control.launchers.local_launcher import FORK_MARK, OWNER_MARK, ForkServer, engines_of
from potluck.control.launchers.process import alive, end

WITHIN_S = 60.0
TINY = """
import threading, time
from potluck.cli.engine import fork_server
fork_server.load = lambda style: {load}
fork_server.main()
"""


def _fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str) -> ForkServer:
    """The real one, but that it loads nothing: engines import what they need."""
    (tmp_path / "tiny_fork_server.py").write_text(TINY.format(load=load))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    marks = {OWNER_MARK: str(tmp_path), FORK_MARK: "1"}
    return ForkServer(marks, tmp_path / "logs" / "nursery.log", "tiny_fork_server")


@pytest.fixture
def fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    found = _fork_server(tmp_path, monkeypatch, "None")
    yield found
    found.close()
    for pid in engines_of(str(tmp_path)):
        end(pid, insist=True)


def _until(what: object) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.parametrize("module", sorted({*MODULES, *PRETENDED}))
def test_what_it_loads_is_there(module: str) -> None:
    """Where something is not, it ends, and every engine is started from nothing: ten times the work, and no word."""
    assert find_spec(module) is not None


def test_a_forked_engine_runs_logs_ends_and_is_cleared_away(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    assert fork_server.fork(["--version"], log) is None, "not before it is ready"
    assert fork_server.wait_ready(WITHIN_S)
    pid = fork_server.fork(["--version"], log)
    assert pid is not None
    _until(lambda: not alive(pid))
    assert log.read_text().startswith("potluck, version")


def test_it_outlives_the_fork_server_and_is_known_by_its_mark(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    assert fork_server.wait_ready(WITHIN_S)
    arguments = ["engine", "serve", "--emulate", "A10:llama-3.1-8b", "--pretend", "--port", "0", "--json"]
    log = tmp_path / "two.log"
    pid = fork_server.fork(arguments, log)
    assert pid is not None
    _until(lambda: log.exists() and '"url"' in log.read_text())
    fork_server.close()
    assert alive(pid)
    assert list(engines_of(str(tmp_path))) == [pid], "the nursery itself is no engine"
    assert fork_server.fork(arguments, log) is None, "who asks then starts a process instead"
    end(pid)
    _until(lambda: not alive(pid))


def test_one_that_stands_still_is_given_up_and_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    assert fork_server.wait_ready(WITHIN_S)
    process = fork_server._process
    os.kill(process.pid, signal.SIGSTOP)
    assert fork_server.fork(["--version"], tmp_path / "log") is None, "who asks then starts a process instead"
    assert process.returncode == -signal.SIGKILL
    assert list(engines_of(str(tmp_path))) == []


def test_with_threads_it_refuses_to_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    found = _fork_server(tmp_path, monkeypatch, waits)
    try:
        assert found.wait_ready(WITHIN_S)
        assert found.fork(["--version"], tmp_path / "log") is None
        assert not (tmp_path / "log").exists()
    finally:
        found.close()


def test_one_that_cannot_load_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _fork_server(tmp_path, monkeypatch, "1 / 0")
    assert not found.wait_ready(WITHIN_S)
    assert found.fork(["--version"], tmp_path / "log") is None
