"""A Ray cluster over network namespaces: a host cut off under load loses no request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from host_bed import Bed, Host, make_certificates, missing
from ray_helpers import NODES, STORE_BYTES
from test_ray_live import WITHIN_S, potluck, written

from potluck.control.state_store import StateStore

RAY = Path(sys.executable).parent / "ray"
TEMPORARY = Path("/tmp/ray")
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


class Cluster:
    """A head without GPUs, and a host for each kind of node. Each has a /tmp/ray of its own, as machines do."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self._folder = bed, folder
        self.head, *others = bed.hosts
        self.named = dict(zip(NODES, others, strict=True))
        self.address = f"{self.head.address}:6379"
        TEMPORARY.mkdir(exist_ok=True)
        self._running: dict[Host, tuple[Sequence[str], subprocess.Popen[bytes]]] = {}

    def on(self, host: Host, command: Sequence[str]) -> list[str]:
        mine = self._folder / host.name
        mine.mkdir(exist_ok=True)
        return host.inside(["sh", "-c", f'mount --bind {mine} {TEMPORARY} && exec "$@"', "sh", *command])

    def start(self) -> None:
        self._node(self.head, "--head", "--port", "6379", "--num-gpus", "0", "--include-dashboard=false")
        for name, host in self.named.items():
            more = NODES[name]
            words = ["--num-gpus", str(more["num_gpus"]), "--resources", json.dumps(more["resources"])]
            words += ["--labels", ",".join(f"{key}={value}" for key, value in more["labels"].items())]
            self._node(host, "--address", self.address, *words)
        until_s = time.monotonic() + WITHIN_S
        while self._nodes() < len(self.bed.hosts):
            assert time.monotonic() < until_s, "the cluster did not come together"
            for host, (words, process) in list(self._running.items()):
                if process.poll() is not None:  # Ray gives a node 30 s to start, on a busy machine too.
                    self._node(host, *words)

    def _node(self, host: Host, *words: str) -> None:
        common = ("--block", "--num-cpus", "1", "--object-store-memory", str(STORE_BYTES))
        command = self.on(host, [str(RAY), "start", "--node-ip-address", host.address, *common, *words])
        with (self._folder / f"{host.name}.log").open("wb") as log:
            self._running[host] = words, subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)

    def _nodes(self) -> int:
        alive = 'sum(node["Alive"] for node in ray.nodes())'
        line = f"import ray; ray.init(address={self.address!r}, log_to_driver=False); print({alive})"
        done = subprocess.run(
            self.on(self.head, [sys.executable, "-c", line]), capture_output=True, text=True, env=ENVIRONMENT
        )
        return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0

    def close(self) -> None:
        for _, process in reversed(self._running.values()):
            process.terminate()
        for _, process in self._running.values():
            process.wait(WITHIN_S)


@pytest.fixture
def cluster_over_hosts(tmp_path: Path) -> Iterator[Cluster]:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    with Bed(1 + len(NODES)) as bed:
        made = Cluster(bed, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.close()


def test_ray_host_cut_off_under_load_loses_no_request(cluster_over_hosts: Cluster, tmp_path: Path) -> None:
    cluster = cluster_over_hosts
    plan, spec = written(tmp_path)
    head, state = cluster.head, tmp_path / "state"
    words = ("--state", str(state), "--engine", "mock", "--averages", "--port", "0", "--json")
    where = ("--on", "ray", "--cluster", cluster.address, "--time-limit", "5")
    authority = make_certificates(tmp_path, [host.address for host in cluster.bed.hosts])
    tls = ("--engine-tls", f"{tmp_path}/%host%.pem", f"{tmp_path}/%host%.key", str(authority))
    process = subprocess.Popen(
        cluster.on(head, potluck("up", str(plan), str(spec), *words, *where, *tls)),
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        load = ("--rate", "4", "--requests", "60", "--input", "100", "--output", "20", "--timeout", "120")
        bench = subprocess.Popen(
            head.inside(potluck("bench", url, *load, "--json")), stdout=subprocess.PIPE, text=True
        )
        wait_for_status(head, state, lambda now: now["open_requests"] >= 2)
        store = StateStore(state / "state.db")
        assert all(instance.url.startswith("https://") for instance in store.instances())
        store.close()
        cluster.bed.cut(cluster.named["L4"])
        began_s = time.monotonic()
        document = json.loads(bench.communicate(timeout=WITHIN_S)[0])
        assert (document["answered"], document["errors"]) == (60, {})
        wait_for_status(head, state, planned_without)
        sys.stdout.write(f"planned for what is left {time.monotonic() - began_s:.0f} s after the cut\n")
    finally:
        process.terminate()
        process.wait(WITHIN_S)
        process.stdout.close()


def planned_without(now: dict[str, Any]) -> bool:
    """Whether the plan is for what is left, and all of it serves."""
    planned = {item["template"] for item in now["plan"]["deployments"] if item["count"]}
    ready = [item for item in now["replicas"] if item["state"] == "ready"]
    return "on 1xL4" not in planned and bool(ready) and not now["lacking"]


def wait_for_status(head: Host, state: Path, holds: Callable[[dict[str, Any]], bool]) -> None:
    until_s, now = time.monotonic() + WITHIN_S, dict[str, Any]()
    while not now or not holds(now):
        assert time.monotonic() < until_s, now
        done = subprocess.run(
            head.inside(potluck("status", "--state", str(state), "--json")), capture_output=True, text=True
        )
        now = json.loads(done.stdout) if done.returncode == 0 else {}
