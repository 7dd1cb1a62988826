"""Gateway and controller killed together restart by themselves, and clients continue."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_services import WITHIN_S, running_service
from live_plans import MODEL

from potluck.control.local_stack import living
from potluck.control.state_store import StateStore

TOKENS = 80


def children_of(pid: int) -> list[int]:
    return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stream_completion(url: str, heard: Callable[[bytes], None] = lambda data: None) -> tuple[bytes, bool]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WITHIN_S)
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    data = b""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Idempotency-Key": "once"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while part := answer.read1(65536):
            data += part
            heard(data)
        return data, data.endswith(b"[DONE]\n\n")
    except http.client.IncompleteRead:
        return data, False
    finally:
        connection.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_service_recovers_when_gateway_and_controller_are_killed_together(tmp_path: Path) -> None:
    with running_service(tmp_path, 1) as (state, ready, process):
        url = ready["url"]
        store = StateStore(state / "state.db")
        gateway, controller = store.get("gateway"), store.get("controller")
        assert gateway is not None
        assert controller is not None
        noted = len(store.happenings(most=1000))
        engines = {name: place["pid"] for name, place in store.places().items()}
        struck: list[int] = []

        def strike(data: bytes) -> None:
            if data.count(b"data: ") > 10 and not struck:
                struck.extend([gateway["pid"], *children_of(gateway["pid"]), controller["pid"]])
                for pid in struck:
                    os.kill(pid, signal.SIGKILL)

        first, whole = stream_completion(url, strike)
        assert not whole
        assert len(struck) == 3
        # Nobody listens, and nobody is refused; the answer goes on where it was.
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=WITHIN_S).close()
        second, whole = stream_completion(url)
        assert whole
        assert second.startswith(first)
        wait_until(lambda: living(store.get("gateway")) and living(store.get("controller")))
        again = store.get("gateway")
        assert again is not None
        assert (again["url"], again["admin"]) == (gateway["url"], gateway["admin"])
        assert {name: place["pid"] for name, place in store.places().items()} == engines, (
            "they were found again"
        )
        records = [json.loads(item) for item in (state / "usage.jsonl").read_text().splitlines()]
        assert [record["output_tokens"] for record in records] == [TOKENS]
        wait_until(
            lambda: "brain" in [happening.kind for happening in store.happenings(most=1000)[noted:]]
        )  # it took a turn
        # An engine that is killed now is replaced: what starts engines is loaded after the controller has resumed.
        os.kill(next(iter(engines.values())), signal.SIGKILL)
        wait_until(
            lambda: any(place["pid"] not in engines.values() for place in store.places().values() if place)
        )
        wait_until(lambda: stream_completion(url)[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0
        assert not living(again)
        store.close()
