"""Replicas over several nodes with a fake vLLM start, fail and restart together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_vllm import command
from vllm_kit import SOURCE, free_port

from potluck.cli.main import run
from potluck.core.errors import InputError
from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.vllm.adapter.node_group import difference, must_be_alike
from potluck.vllm.adapter.vllm_process import GpuShape, NodePlace, VllmSettings, environment

WITHIN_S = 60.0


class Node:
    """`potluck engine vllm` on one of the machines: loopback addresses, in a test."""

    def __init__(self, folder: Path, rank: int, master: int, *more: str, key: str = "k") -> None:
        self.port, self.log = free_port(), folder / f"node-{rank}-{time.monotonic_ns()}.log"
        words = [
            *(sys.executable, "-m", "potluck.cli.main", "engine", "vllm", "--model", "m", "--stages", "3,1"),
            *("--nodes", "2", "--node-rank", str(rank), "--master", f"127.0.0.1:{master}", "--tensor-parallel", "2"),
            *("--host", f"127.0.0.{rank + 1}", "--port", str(self.port), "--kv-port", "9000"),
            *("--python", command(folder), *more),
        ]  # fmt: skip
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), "POTLUCK_API_KEY": key}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=variables)

    def ended(self) -> tuple[int, str]:
        return self.process.wait(WITHIN_S), self.log.read_text()

    def call(self, path: str, body: object = None, method: str | None = None) -> object:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": "Bearer k", "Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            text = answer.read()
        return json.loads(text) if path != "/segments" else text

    @property
    def below(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])


def until(what: Callable[[], bool], *nodes: Node) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not what():
        sound = time.monotonic() < until_s and all(node.process.poll() is None for node in nodes)
        assert sound, [node.log.read_text()[-2000:] for node in nodes]
        time.sleep(0.05)


def serving(node: Node) -> bool:
    return "Serving m" in node.log.read_text()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    master, nodes = free_port(), []

    def start(rank: int, *more: str, key: str = "k") -> Node:
        nodes.append(Node(tmp_path, rank, master, *more, key=key))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_vllm_nodes_serve_as_one_and_restart_together(group: Callable[..., Node]) -> None:
    second, first = group(1), group(0)
    until(lambda: serving(first), first, second)
    status = first.call("/status")
    assert isinstance(status, dict)
    assert status["kv"] == "127.0.0.1:9000,127.0.0.2:9002?tensor=2&layers=3,1"
    first.call("/peers", {"peers": ["10.0.0.9:9000"]}, "PUT")
    until(lambda: "10.0.0.9:9000" in second.log.read_text(), second)

    asked: list[bytes] = []
    body = {"request": "r", "model": "m", "tokens": [9], "max_tokens": 2}
    asking = threading.Thread(target=lambda: asked.append(_lines(first, body)))
    asking.start()
    until(lambda: first.call("/status")["running"] + first.call("/status")["waiting"] == 1, first)  # type: ignore[index]
    below = [first.below, second.below]
    second.process.kill()
    assert first.ended()[0] == 2
    assert "node 1 is gone" in first.log.read_text()
    until(lambda: not any(map(alive, below)))
    asking.join(WITHIN_S)
    assert b"try_again" in asked[0], "and whoever waited is told at once"

    first, second = group(0), group(1)
    until(lambda: serving(first), first, second)
    os.kill(second.below, signal.SIGKILL)  # vLLM alone, there
    assert (first.ended()[0], second.ended()[0]) == (2, 2)
    assert "node 1 failed: signal 9 ended it" in first.log.read_text()

    first, second = group(0), group(1)
    until(lambda: serving(first), first, second)
    first.process.kill()
    code, log = second.ended()
    assert (code, "the first node ended this replica: it is gone" in log) == (2, True)


def _lines(node: Node, body: object) -> bytes:
    try:
        return node.call("/segments", body)  # type: ignore[return-value]
    except urllib.error.HTTPError as error:
        return error.read()


def test_stopping_one_vllm_node_drains_all(group: Callable[..., Node]) -> None:
    first, second = group(0), group(1)
    until(lambda: serving(first), first, second)
    second.process.terminate()
    assert (first.ended()[0], second.ended()[0]) == (0, 0)


def test_vllm_nodes_with_different_settings_are_refused_by_name(group: Callable[..., Node]) -> None:
    group(0)
    code, log = group(1, "--", "--dtype", "float32").ended()
    assert (code, "flags behind -- is ['--dtype', 'float32'] there, [] on the first node" in log) == (2, True)
    code, log = group(1, key="other").ended()
    assert (code, "all nodes of a replica need the same key" in log) == (2, True)


def test_several_vllm_nodes_without_a_key_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reaches the port where nodes meet could join them."""
    monkeypatch.delenv("POTLUCK_API_KEY", raising=False)
    words = (
        "--model m --stages 3,1 --nodes 2 --node-rank 1 --master 10.0.0.5:7000 --host 10.0.0.6 --kv-port 9000"
    )
    assert run(["engine", "vllm", *words.split()]) == 2
    assert "--api-key-file: is needed for several machines" in capsys.readouterr().err


def test_invalid_node_places_and_shapes_are_refused_by_option() -> None:
    shape = GpuShape(2, (20, 12))
    for place, field in (
        (NodePlace(2, 2, ("a", 1)), "--node-rank"),
        (NodePlace(3, 0, ("a", 1)), "--nodes"),
        (NodePlace(2, 0), "--master"),
    ):
        with pytest.raises(InputError, match=field):
            place.checked(shape)
    assert NodePlace(2, 1, ("a", 1)).checked(shape).workers(shape) == 2


def test_vllm_nodes_may_differ_in_memory_and_model_path(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, place = GpuShape(2, (20, 12)), NodePlace(2, 0, ("127.0.0.1", 1))
    ours = VllmSettings("/a", "m", "p", shape, place, more=("--x", "--gpu-memory-utilization", "0.9"))
    theirs = VllmSettings("/b", "m", "q", shape, place, more=("--gpu-memory-utilization=0.5", "--x"))
    assert difference(must_be_alike(ours), must_be_alike(theirs)) == ""
    assert "--stages" in difference(
        must_be_alike(ours), must_be_alike(VllmSettings("/a", "m", "p", GpuShape(2, (16, 16)), place))
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = environment(ours)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["VLLM_HOST_IP"]) == ("4,5", "127.0.0.1")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("version", "problem"),
    [("", "has no vLLM; "), ("0.30.1", f"has vLLM 0.30.1; this was tested with {VLLM_VERSION}")],
)
def test_python_without_the_supported_vllm_is_refused_at_once(
    tmp_path: Path, version: str, problem: str
) -> None:
    words = [sys.executable, "-m", "potluck.cli.main", "engine", "vllm", "--model", "m", "--python"]
    done = subprocess.run(
        [*words, command(tmp_path, version)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert problem in done.stderr
    assert "--python" in done.stderr
