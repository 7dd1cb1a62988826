"""Machines of a cluster as a market, and resource requests to Ray for planned nodes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.cli.main import run
from potluck.control.launchers.process import ProcessId, alive, started_at
from potluck.control.launchers.ray_actors import (
    HOST,
    PORT,
    PYTHON,
    ProcessActor,
    ask_of,
    cluster_nodes,
    must_name_regions,
)
from potluck.control.market import ClusterMarket, ClusterNode, Market, NodeTypeLabels, Quote, quotes_of
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.types import NodeOffer, Region

L4, A100 = NodeTypeLabels(1, ("L4",)), NodeTypeLabels(2, ("A100-80", "A100"))
SPELLINGS = {"1xL4": L4, "2xA100-80": A100}
REGIONS = (
    Region("east", (NodeOffer("1xL4", 0.8, 9), NodeOffer("2xA100-80", 7.0, 9))),
    Region("west", (NodeOffer("1xL4", 0.7, 9),)),
)


def node(name: str, resources: dict[str, float], alive: bool = True, **labels: str) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0, **resources}, "Labels": labels}


NODES = [
    node("a", {"GPU": 4.0, "accelerator_type:L4": 1.0}, region="east"),
    node("b", {"GPU": 5.0, "accelerator_type:A100": 1.0}, region="east"),
    node("c", {"L4": 3.0, "node:10.0.0.1": 1.0}, region="west"),
    node("d", {"GPU": 8.0, "accelerator_type:L4": 1.0}, alive=False, region="west"),
]


def test_cluster_market_counts_available_nodes_without_lost_or_silent_ones() -> None:
    def available(*silent: str) -> list[int | None]:
        return [quote.available for quote in quotes_of(cluster_nodes(NODES, silent), SPELLINGS, REGIONS)]

    assert available() == [4, 2, 3]
    assert available("a") == [0, 2, 3]
    unlabelled = [replace(host, region="") for host in cluster_nodes(NODES)]
    assert [quote.available for quote in quotes_of(unlabelled, SPELLINGS, REGIONS[1:])] == [7]


@given(
    st.lists(st.tuples(st.sampled_from(["L4", "A100", "A100-80", "T4"]), st.integers(0, 9), st.booleans()))
)
def test_available_nodes_count_whole_gpu_groups_of_each_healthy_machine(
    machines: list[tuple[str, int, bool]],
) -> None:
    there = [
        ClusterNode(str(place), "east", ((name, count),), well)
        for place, (name, count, well) in enumerate(machines)
    ]
    counts = {quote.node: quote.available for quote in quotes_of(there, SPELLINGS, REGIONS[:1])}
    assert counts["1xL4"] == sum(count for name, count, well in machines if name == "L4" and well)
    assert counts["2xA100-80"] == sum(
        count // 2 for name, count, well in machines if name.startswith("A100") and well
    )


class Prices:
    market = Market((Quote("east", "1xL4", 0.3, 1),))
    problem = "line 3 is odd"
    spec: tuple[Region, ...] = ()
    regions: tuple[Region, ...] = ()

    def look(self) -> None: ...

    def changes(self) -> str:
        return ""


def test_cluster_market_combines_file_prices_with_cluster_counts() -> None:
    there = [list(cluster_nodes(NODES))]
    market = ClusterMarket(lambda: there[0], SPELLINGS, REGIONS, Prices())
    market.look()
    assert market.problem == "line 3 is odd"
    assert market.regions[0].offers[0] == NodeOffer("1xL4", 0.3, 4)
    assert "4 x 1xL4 in east at $0.30/h" in market.changes()
    there[0] = list(cluster_nodes(NODES, ("a",)))
    market.look()
    assert market.changes() == "0 x 1xL4 in east at $0.30/h"


def test_ray_request_uses_accelerator_type_own_resource_or_label() -> None:
    typed = ask_of(L4, 2, "east", NODES)
    assert (typed.gpus, dict(typed.resources), dict(typed.labels)) == (
        2,
        {"accelerator_type:L4": 0.001},
        {"region": "east"},
    )
    own = ask_of(L4, 2, "west", NODES[2:], ("c", "long gone"))
    assert (own.gpus, dict(own.resources)) == (0, {"L4": 2.0})
    assert own.labels["ray.io/node-id"] == "!in(c)", (
        "one that is silent is left alone, one that is gone not named"
    )
    labelled = [node("e", {"GPU": 1.0}, **{"ray.io/accelerator-type": "L4"})]
    assert dict(ask_of(L4, 1, "east", labelled).labels) == {"ray.io/accelerator-type": "L4"}
    assert cluster_nodes(labelled)[0].count(L4) == 1
    assert ask_of(A100, 2, "east", NODES).bundle == {"GPU": 2, "accelerator_type:A100": 0.001}
    with pytest.raises(CapacityError, match="no node of the Ray cluster has T4; it has A100, L4"):
        ask_of(NodeTypeLabels(1, ("T4",)), 1, "east", NODES)


def test_several_regions_require_region_labels_on_nodes() -> None:
    must_name_regions(NODES, {"east", "west"})
    must_name_regions([node("a", {"L4": 1.0})], {"east"})
    with pytest.raises(InputError, match="ray start --labels=region=NAME"):
        must_name_regions([node("a", {"L4": 1.0})], {"east", "west"})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_missing_ray_or_kubeconfig_is_reported_with_a_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--on", "ray", "--engine", "mock", "--state", str(tmp_path)]) == 2
    assert "--on: ray: needs Ray; install potluck[ray]" in capsys.readouterr().err
    assert run(["up", "--on", "kubernetes", "--cluster", "/no/file", "--state", str(tmp_path)]) == 2
    assert "--cluster: /no/file cannot be read; name a kubeconfig, or a URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was begun"


ENGINE = """
import socket, sys
print("listens", flush=True)
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


def process_actor(name: str, errand: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ProcessActor:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return ProcessActor(name, errand, {}, here=lambda: ("127.0.0.1", "node-1"))


def wait_until(what: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 60.0
    while not (result := what()):
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)
    return result


def test_supervised_engine_is_started_reported_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = process_actor("m-1", "engine", monkeypatch, tmp_path)
    assert it.report()["state"] == "starting", "nobody has begun it"
    for _ in range(2):  # it is begun once
        it.begin([PYTHON, "-S", "-c", ENGINE, HOST, PORT])
    text = wait_until(lambda: (result := it.report())["state"] == "up" and result)
    assert text["address"].startswith("127.0.0.1:")
    assert text["node"] == "node-1"
    assert (text["log"], it.report(text["log_at"])["log"]) == (b"listens\n", b"")
    it.stop()
    assert (
        wait_until(lambda: (outcome := it.report())["state"] == "dead" and outcome)["problem"]
        == "was asked to end"
    )
    it.forget()
    assert list(tmp_path.rglob("m-1*")) == [], "its log is removed"


def test_reserving_actor_is_up_at_once_and_a_missing_program_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process_actor("s", "reserve", monkeypatch, tmp_path).report()["state"] == "up"
    broken = process_actor("b", "engine", monkeypatch, tmp_path)
    broken.begin(["/no/such/program"])
    assert "could not be started" in broken.report()["problem"]


def test_supervised_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", TWO], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    pid = ProcessId(number, started_at(number) or 0)
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not alive(pid))
