"""A controller killed at random moments converges with real processes and leaves no orphans."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_controller import PLAN

from potluck.control.launchers.local_launcher import NAME_MARK, OWNER_MARK
from potluck.control.launchers.process import marked
from potluck.control.local_stack import owner_of, stop_all
from potluck.control.state_store import StateStore
from potluck.core.values.plan import plan_mark

PROCESS = Path(__file__).with_name("controller_process.py")
KILLS = 3
WITHIN_S = 60.0


class WantingGateway:
    """A gateway that wants some replicas, and knows which engines it was told of."""

    def __init__(self) -> None:
        self.replicas: list[str] = []
        self.fleet: list[dict[str, str]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                item = {"template": "t", "index": 0, "model": "m", "region": "east", "role": "mixed"}
                item |= {"draining": False, "unit": "u", "url": ""}  # type: ignore[dict-item]
                wanted = [{**item, "id": name} for name in gateway.replicas]
                known = {"epoch": "e", "decisions": [], "thinks": "", "ended": {}}
                self.answer({"replicas": wanted, "replan": None, "plan_mark": plan_mark(PLAN), **known})

            def do_PUT(self) -> None:
                gateway.fleet = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["engines"]
                self.answer({})

            def answer(self, body: object) -> None:
                text = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def gateway() -> Iterator[WantingGateway]:
    made = WantingGateway()
    yield made
    made.server.shutdown()
    made.server.server_close()


def running(store: StateStore) -> list[str]:
    return [marks[NAME_MARK] for _, marks in marked(OWNER_MARK, owner_of(store)) if NAME_MARK in marks]


def test_repeatedly_killed_controller_converges_with_real_processes(
    tmp_path: Path, gateway: WantingGateway
) -> None:
    store = StateStore(tmp_path / "state.db")
    store.add_plan(PLAN, 0.0, "begin")
    chance = random.Random(int.from_bytes(os.urandom(4)))
    command = [sys.executable, str(PROCESS), str(tmp_path), gateway.url]
    process = subprocess.Popen(command)
    try:
        for _ in range(KILLS):
            gateway.replicas = [f"r{n}" for n in chance.sample(range(6), chance.randint(1, 4))]
            time.sleep(chance.uniform(0.2, 1.2))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = subprocess.Popen(command)
        gateway.replicas = ["x", "y", "r0"]
        until_s = time.monotonic() + WITHIN_S
        while time.monotonic() < until_s:
            names = running(store)
            message = sorted(item["replica"] for item in gateway.fleet)
            kept = sorted(instance.name for instance in store.instances())
            if message == ["r0", "x", "y"] and len(names) == 3 and sorted(names) == kept:
                break
            time.sleep(0.1)
        assert message == ["r0", "x", "y"]
        assert len(names) == 3
        assert sorted(names) == kept
        assert Counter(instance.replica for instance in store.instances()) == Counter(["r0", "x", "y"])
        assert {item["url"] for item in gateway.fleet} == {instance.url for instance in store.instances()}
    finally:
        process.kill()
        process.wait()
        stop_all(store, "the test is over", 5.0)
    assert running(store) == []


def test_two_controller_processes_of_one_state_never_act_at_once(
    tmp_path: Path, gateway: WantingGateway
) -> None:
    store = StateStore(tmp_path / "state.db")
    store.add_plan(PLAN, 0.0, "begin")
    gateway.replicas = ["a", "b"]
    command = [sys.executable, str(PROCESS), str(tmp_path), gateway.url]
    both = [subprocess.Popen(command) for _ in range(2)]
    try:
        until_s = time.monotonic() + WITHIN_S
        while len(gateway.fleet) < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(0.5)
        assert len(running(store)) == 2
        assert [happening.kind for happening in store.happenings()].count("start") == 2
    finally:
        for item in both:
            item.kill()
            item.wait()
        stop_all(store, "the test is over", 5.0)
