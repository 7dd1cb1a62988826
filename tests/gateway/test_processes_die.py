"""The Brain process is killed during answers: streams continue and a successor adopts them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_fleet import LiveFleet
from live_plans import COMBO, MODEL, WHOLE, write_plans

from potluck.cli.main import run
from potluck.core.values.plan import plan_from_json
from potluck.core.values.types import NodeOffer, Region
from potluck.engine import shipped_model
from potluck.gateway.openai.keys import new_key
from potluck.gateway.operator_state import OperatorState
from potluck.gateway.registry.engine_list import read_engines
from potluck.loadgen.load_client import TimedRequest, shoot

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
STREAMS = 24


def children_of(pid: int) -> dict[int, str]:
    result = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(item): Path(f"/proc/{item}/cmdline").read_text() for item in result}


def brain_process_of(fleet: LiveFleet) -> int:
    assert fleet.gateway is not None
    assert fleet.gateway.popen is not None
    children = children_of(fleet.gateway.popen.pid).items()
    (brain_loop,) = [pid for pid, text in children if "worker_process" not in text]
    return brain_loop


def post_json(url: str, body: dict[str, Any], key: str = "") -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def status_of(url: str, body: dict[str, Any], key: str) -> int:
    try:
        post_json(url, body, key)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def wait_until(holds: Callable[[], bool], within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def snapshot(fleet: LiveFleet) -> Any:
    with urllib.request.urlopen(f"{fleet.admin}/snapshot", timeout=30) as answer:
        return json.load(answer)


def timed_requests() -> list[TimedRequest]:
    made = []
    for place in range(STREAMS):
        drawn = {"temperature": 0.8, "seed": place} if place % 2 else {}
        prompt = [5 + (place * 7 + n) % 150 for n in range(30 + place)]
        made.append(TimedRequest(place * 0.02, MODEL, prompt, 40, extra=drawn))
    return made


@pytest.mark.slow
def test_streams_continue_while_the_brain_process_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, log, usage = tmp_path / "keys", tmp_path / "log", tmp_path / "usage.jsonl"
    key, line = new_key("one")
    limited, other = new_key("few")
    keys.write_text(f"{line}\n{json.dumps({**json.loads(other), 'requests_per_min': 3})}\n")
    plan, spec = write_plans(tmp_path, [*WHOLE, *COMBO])
    files = ("--files", f"{MODEL}={shipped_model()}")
    gateway = (*files, "--workers", "2", "--log", str(log), "--keys", str(keys), "--usage", str(usage))
    with LiveFleet(plan, spec, gateway=gateway, engine=("--mock",)) as fleet:
        shots = timed_requests()
        for request in shots:
            request.key = key
        bodies = [{**json.loads(request.body()), "stream": False} for request in shots]
        lone = str(fleet.engines[0].said["url"])
        with ThreadPoolExecutor(STREAMS) as pool:
            expected = [item["choices"][0]["text"] for item in pool.map(lambda b: post_json(lone, b), bodies)]
        short = {"model": MODEL, "prompt": [5, 6], "max_tokens": 1}
        used = [status_of(fleet.url, short, limited) for _ in range(2)]

        first = brain_process_of(fleet)

        def strike() -> None:
            while sum(request.pieces > 5 for request in shots) < STREAMS // 4:
                time.sleep(0.005)
            os.kill(first, signal.SIGKILL)

        striking = threading.Thread(target=strike, daemon=True)
        striking.start()
        shoot(fleet.url, shots, keep_text=True, within_s=60.0)
        striking.join(10)
        assert [request.problem for request in shots] == [""] * STREAMS
        assert [request.text for request in shots] == expected
        assert brain_process_of(fleet) != first

        # Limits hold across it.
        assert [*used, *(status_of(fleet.url, short, limited) for _ in range(3))] == [200, 200, 200, 429, 429]
        wait_until(lambda: '["RequestAdopted",' in log.read_text())  # what is not flushed dies with it
        os.kill(brain_process_of(fleet), signal.SIGKILL)
        # Whoever has an answer has a record, whatever becomes of the desk.
        records = [json.loads(line) for line in usage.read_text().splitlines()]
        assert sum(record["status"] == 200 for record in records) == STREAMS + 3
        assert len({record["id"] for record in records}) == len(records)
        assert status_of(fleet.url, short, key) == 200, "one that comes meanwhile waits"
        wait_until(lambda: snapshot(fleet)["open_requests"] == 0)  # the last news may be on their way
        assert fleet.gateway is not None
        assert fleet.gateway.popen is not None
        family = children_of(fleet.gateway.popen.pid)
        assert len(family) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in family), "all end with the gateway"
    assert run(["replay", str(log)]) == 0, capsys.readouterr().err
    assert "3 runs: all the same" in capsys.readouterr().out


def test_operator_state_survives_a_restart(tmp_path: Path) -> None:
    operator_state = OperatorState(tmp_path)
    assert (operator_state.plan()[0], operator_state.entries(), operator_state.market()) == (None, None, None)
    plan = plan_from_json(write_plans(tmp_path, [*WHOLE, *COMBO])[0].read_text())
    listed = {"url": "https://h:1", "kind": "openai", "model": "m", "token_ids": True}
    entries = read_engines(json.dumps({"engines": [listed, {"url": "http://[::1]:2", "index": 3}]}), "")
    market = (Region("near", (NodeOffer("1xA10", 0.5, 3),)),)
    operator_state.planned(plan, 7, "more load")
    operator_state.enlisted(entries)
    operator_state.quoted(market)
    after = OperatorState(tmp_path)
    assert (after.plan(), after.entries(), after.market()) == ((plan, 7, "more load"), entries, market)


def test_startup_error_of_the_brain_process_is_one_line(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    command = [sys.executable, "-m", "potluck.cli.main", "serve", str(plan), str(spec), "--workers", "2"]
    command += ["--port", "0", "--admin-port", "0", "--engines", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "none.yaml" in line


def test_all_gateway_processes_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    command = [sys.executable, "-m", "potluck.cli.main", "serve", str(plan), str(spec), "--workers", "2"]
    command += ["--port", "0", "--admin-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        family = children_of(parent.pid)
        assert len(family) == 3
        parent.kill()
    wait_until(lambda: not any(map(_is_alive, family)))


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


sys.path.insert(0, str(ROOT / "tools"))


TOKENS = 60


def pid_of(fleet: LiveFleet) -> int:
    assert fleet.gateway is not None
    assert fleet.gateway.popen is not None
    return fleet.gateway.popen.pid


def children_named(pid: int, title: str) -> list[int]:
    result = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(item) for item in result if title in Path(f"/proc/{item}/cmdline").read_text()]


def repeat_request(
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


def kill_when_heard(pids: Callable[[], list[int]]) -> Callable[[bytes], None]:
    done: list[int] = []

    def heard(data: bytes) -> None:
        if data.count(b"data: ") > 10 and not done:
            done.extend(pids())
            for pid in done:
                os.kill(pid, signal.SIGKILL)

    return heard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "title"), [((), "potluck-gateway"), (("--workers", "2"), "worker_process")]
)
def test_interrupted_stream_continues_for_a_repeated_request(
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
            first, _, whole = repeat_request(
                fleet.url, name, kill_when_heard(lambda: children_named(parent, title))
            )
            assert not whole
            second, headers, whole = repeat_request(fleet.url, name)
        finally:
            over.set()
            knocking.join()
        assert refused == [], "the parent holds the port"
        assert whole
        assert second.startswith(first), "drawn as it would have been, under the same name"
        assert headers["x-potluck-replayed"] == "1"
        third, headers, whole = repeat_request(fleet.url, name)
        assert (third, whole) == (second, True)
        (record,) = [json.loads(line) for line in usage.read_text().splitlines()]
        assert (record["request"], record["output_tokens"], record["status"]) == ("again", TOKENS, 200)


@pytest.mark.slow
def test_running_answers_finish_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    with LiveFleet(plan, spec, gateway=("--files", f"{MODEL}={shipped_model()}")) as fleet:
        parent = pid_of(fleet)
        (child,) = children_named(parent, "potluck-gateway")
        _, _, whole = repeat_request(fleet.url, {}, kill_when_heard(lambda: [parent]))
        assert whole
        until_s = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not Path(f"/proc/{child}").exists(), "nobody would take its place: it ends"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(fleet.url.rsplit(":", 1)[1])))


@pytest.mark.slow
def test_gateway_with_takeover_outlives_its_supervisor(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    state, takeover = tmp_path / "state", tmp_path / "takeover"
    words = ("--files", f"{MODEL}={shipped_model()}", "--takeover", str(takeover), "--state", str(state))
    with LiveFleet(plan, spec, gateway=words) as fleet:
        parent = pid_of(fleet)
        (child,) = children_named(parent, "potluck-gateway")
        os.kill(parent, signal.SIGKILL)
        assert repeat_request(fleet.url, {})[2], "it serves on"
        succeeding = threading.Thread(target=fleet.succeed)
        whole = repeat_request(fleet.url, {}, lambda data: None if succeeding.ident else succeeding.start())[
            2
        ]
        assert whole
        succeeding.join()
        assert repeat_request(fleet.url, {})[2]
        until_s = time.monotonic() + 120
        while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
