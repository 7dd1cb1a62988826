"""What looks after a process on a node: fills its command in, reports, ends it, takes it along."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck.control.launchers.process import ProcessId, alive, started_at
from potluck.control.launchers.ray_actors import HOST, PORT, PYTHON, SECRET_FILE, ProcessActor

ENGINE = """
import socket, sys
print(open(sys.argv[3]).read(), flush=True)
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    visitor, _ = server.accept()
    visitor.recv(65536)
    visitor.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok")
    visitor.close()
"""
TWO = """
import os, sys, time
from potluck.control.launchers.ray_actors import ProcessActor
it = ProcessActor("tied", "engine", {}, here=lambda: ("127.0.0.1", "n"))
it.begin([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(it._pid.number, flush=True)
time.sleep(600)
"""


def made(name: str, errand: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ProcessActor:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return ProcessActor(name, errand, {}, secret="s" * 20, here=lambda: ("127.0.0.1", "node-1"))


def until(what: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 60.0
    while not (found := what()):
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)
    return found


def test_an_engine_is_filled_in_reported_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = made("m-1", "engine", monkeypatch, tmp_path)
    assert it.report()["state"] == "starting", "nobody has begun it"
    for _ in range(2):  # it is begun once
        it.begin([PYTHON, "-S", "-c", ENGINE, HOST, PORT, SECRET_FILE])
    said = until(lambda: (found := it.report())["state"] == "up" and found)
    assert said["address"].startswith("127.0.0.1:")
    assert said["node"] == "node-1"
    assert (said["log"], it.report(said["log_at"])["log"]) == (b"s" * 20 + b"\n", b"")
    it.stop()
    assert until(lambda: (found := it.report())["state"] == "dead" and found)["problem"] == "was asked to end"
    it.forget()
    assert list(tmp_path.rglob("m-1*")) == [], "neither its log nor its secret is left"


def test_a_worker_says_its_port_and_who_only_stands_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = made("w", "worker", monkeypatch, tmp_path)
    script = "import sys, time; print(4711 if sys.stdin.read() == 's' * 20 + '\\n' else 0, flush=True); time.sleep(9)"
    worker.begin([PYTHON, "-S", "-c", script])
    assert until(lambda: worker.report()["address"]) == "127.0.0.1:4711"
    worker.forget()
    assert made("s", "stand", monkeypatch, tmp_path).report()["state"] == "up"
    broken = made("b", "engine", monkeypatch, tmp_path)
    broken.begin(["/no/such/program"])
    assert "could not be started" in broken.report()["problem"]


def test_what_it_looks_after_ends_with_it(tmp_path: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", TWO], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    pid = ProcessId(number, started_at(number) or 0)
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not alive(pid))
