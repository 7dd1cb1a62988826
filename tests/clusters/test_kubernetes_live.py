"""`potluck up --on kubernetes` against a fake API server: a node lost under load loses no request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_server import Kube, potluck_itself
from live_plans import write_plans

from potluck.control.service_view import ServiceView

WITHIN_S = 180.0


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    (tmp_path / "pods").mkdir()
    result = Kube(tmp_path / "pods", potluck_itself)
    for name in ("node-a", "node-b", "node-c"):
        result.add_node(name, "NVIDIA-A10", 1, "near")
    yield result
    result.close()


def potluck(*words: str) -> list[str]:
    return [sys.executable, "-m", "potluck.cli.main", *words]


def status(state: Path) -> dict[str, Any]:
    """What `potluck status --json` would say, without another process."""
    service = ServiceView(state)
    try:
        return service.status(time.time())
    finally:
        service.close()


def test_lost_kubernetes_node_under_load_loses_no_request(kube: Kube, tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, [("homogeneous", ("mixed",), "near")] * 2)
    state = tmp_path / "state"
    words = ("--state", str(state), "--engine", "mock", "--averages", "--port", "0", "--json")
    on = ("--on", "kubernetes", "--cluster", kube.url, "--image", "registry/potluck:1")
    process = subprocess.Popen(
        potluck("up", str(plan), str(spec), *words, *on), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        load = ("--rate", "4", "--requests", "40", "--input", "50", "--output", "20", "--timeout", "120")
        bench = subprocess.Popen(potluck("bench", url, *load, "--json"), stdout=subprocess.PIPE, text=True)
        until_s = time.monotonic() + WITHIN_S
        while status(state)["open_requests"] < 2:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        lost = min({pod["spec"]["nodeName"] for pod in kube.objects["pods"].values()})
        kube.lose(lost)
        document = json.loads(bench.communicate(timeout=WITHIN_S)[0])
        assert (document["answered"], document["errors"]) == (40, {})
        while True:  # until another node has its place
            now = status(state)
            ready = [item for item in now["replicas"] if item["state"] == "ready"]
            if len(ready) == 2 and not now["lacking"]:
                break
            assert time.monotonic() < until_s, now
            time.sleep(0.2)
        after = {pod["spec"]["nodeName"] for pod in kube.objects["pods"].values()}
        assert after == {"node-a", "node-b", "node-c"} - {lost}
    finally:
        process.terminate()
        process.wait(WITHIN_S)
        process.stdout.close()
    assert kube.objects["pods"] == {}, "nothing is left in the cluster"
