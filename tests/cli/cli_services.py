"""Helpers of command tests: a spec of one model, a small HTTP server, a running service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from live_plans import write_plans

from potluck.cli.main import run
from potluck.control.local_stack import stop_all
from potluck.control.state_store import StateStore

WITHIN_S = 120.0  # For machines that have much else to do.


def chat_spec(slo: str, traffic: str, *nodes: str) -> str:
    offers = "".join(f"    - {{node: {node}}}\n" for node in nodes)
    model = f"- model: Llama-3.1-8B\n  name: chat\n  slo: {{{slo}}}\n  traffic: {{{traffic}}}\n"
    return f"models:\n{model}fleet:\n  regions:\n  - name: home\n    nodes:\n{offers}"


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object, rc: int = 0) -> str:
    """What a command prints; with an exit code its one line on stderr."""
    assert run([str(argument) for argument in arguments]) == rc, capsys.readouterr().err
    result = capsys.readouterr()
    if rc:
        assert result.err.count("\n") == 1, result.err
    return result.err if rc else result.out


class QuietHandler(BaseHTTPRequestHandler):
    def say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def serving_handler(handler: type[QuietHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def running_service(
    folder: Path, copies: int
) -> Iterator[tuple[Path, dict[str, Any], subprocess.Popen[str]]]:
    """The state folder of `potluck up`, what it says when it is ready, and its process."""
    plan, spec = write_plans(folder, [("homogeneous", ("mixed",), "near")] * copies)
    state = folder / "state"
    command = [sys.executable, "-m", "potluck.cli.main", "up", str(plan), str(spec)]
    command += ["--state", str(state), "--engine", "mock", "--averages", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog = threading.Timer(3 * WITHIN_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield state, json.loads(line), process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        store = StateStore(state / "state.db")
        stop_all(store, "the test is over", 5.0)
        store.close()
