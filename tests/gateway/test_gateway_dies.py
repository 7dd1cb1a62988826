"""The process that answers is killed: its port stays open, another is there at once, and who asks again is not billed
twice."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from live_fleet import LiveFleet  # noqa: E402
from live_plans import MODEL, WHOLE, write_plans  # noqa: E402

from potluck.engine.shipped_model import shipped_model  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
TOKENS = 60


def pid_of(fleet: LiveFleet) -> int:
    assert fleet.gateway is not None
    assert fleet.gateway.popen is not None
    return fleet.gateway.popen.pid


def children_named(pid: int, title: str) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if title in Path(f"/proc/{each}/cmdline").read_text()]


def asked_again(
    url: str, headers: dict[str, str], heard: Callable[[bytes], None] = lambda data: None
) -> tuple[bytes, dict[str, str], bool]:
    """What came, with which headers, and whether it came whole."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": TOKENS, "stream": True}
    body |= {"temperature": 0.8, "ignore_eos": True}
    data = b""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while part := answer.read1(65536):
            data += part
            heard(data)
        return data, dict(answer.getheaders()), data.endswith(b"[DONE]\n\n")
    except http.client.IncompleteRead:
        return data, dict(answer.getheaders()), False
    finally:
        connection.close()


def killing(pids: Callable[[], list[int]]) -> Callable[[bytes], None]:
    """Kills once there are some tokens."""
    done: list[int] = []

    def heard(data: bytes) -> None:
        if data.count(b"data: ") > 10 and not done:
            done.extend(pids())
            for pid in done:
                os.kill(pid, signal.SIGKILL)

    return heard


@pytest.mark.parametrize(
    ("words", "title"), [((), "potluck-gateway"), (("--workers", "2"), "worker_process")]
)
def test_a_stream_that_was_cut_goes_on_for_whoever_asks_again(
    tmp_path: Path, words: tuple[str, ...], title: str
) -> None:
    usage = tmp_path / "usage.jsonl"
    plan, spec = write_plans(tmp_path, WHOLE)
    files = ("--files", f"{MODEL}={shipped_model()}", "--usage", str(usage))
    with LiveFleet(plan, spec, gateway=(*files, *words)) as fleet:
        parent = pid_of(fleet)
        name = {"x-request-id": "again"}
        refused: list[OSError] = []
        over = threading.Event()

        def knock() -> None:
            at = ("127.0.0.1", int(fleet.url.rsplit(":", 1)[1]))
            while not over.is_set():
                try:
                    socket.create_connection(at, timeout=30).close()
                except OSError as error:
                    refused.append(error)
                time.sleep(0.002)

        knocking = threading.Thread(target=knock)
        knocking.start()
        try:
            first, _, whole = asked_again(fleet.url, name, killing(lambda: children_named(parent, title)))
            assert not whole
            second, headers, whole = asked_again(fleet.url, name)
        finally:
            over.set()
            knocking.join()
        assert refused == [], "the parent holds the port"
        assert whole
        assert second.startswith(first), "drawn as it would have been, under the same name"
        assert headers["x-potluck-replayed"] == "1"
        third, headers, whole = asked_again(fleet.url, name)
        assert (third, whole) == (second, True)
        (record,) = [json.loads(line) for line in usage.read_text().splitlines()]
        assert (record["request"], record["output_tokens"], record["status"]) == ("again", TOKENS, 200)


def test_answers_under_way_end_although_the_supervisor_is_killed(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    with LiveFleet(plan, spec, gateway=("--files", f"{MODEL}={shipped_model()}")) as fleet:
        parent = pid_of(fleet)
        (child,) = children_named(parent, "potluck-gateway")
        _, _, whole = asked_again(fleet.url, {}, killing(lambda: [parent]))
        assert whole
        until_s = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not Path(f"/proc/{child}").exists(), "nobody would take its place: it ends"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(fleet.url.rsplit(":", 1)[1])))


def test_a_gateway_whose_ports_can_be_taken_over_outlives_its_supervisor(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    state, takeover = tmp_path / "state", tmp_path / "takeover"
    words = ("--files", f"{MODEL}={shipped_model()}", "--takeover", str(takeover), "--state", str(state))
    with LiveFleet(plan, spec, gateway=words) as fleet:
        parent = pid_of(fleet)
        (child,) = children_named(parent, "potluck-gateway")
        os.kill(parent, signal.SIGKILL)
        assert asked_again(fleet.url, {})[2], "it serves on"
        succeeding = threading.Thread(target=fleet.succeed)
        whole = asked_again(fleet.url, {}, lambda data: None if succeeding.ident else succeeding.start())[2]
        assert whole
        succeeding.join()
        assert asked_again(fleet.url, {})[2]
        until_s = time.monotonic() + 120
        while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
