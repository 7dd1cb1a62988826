"""A plan on three Ray nodes, one removed under load: every request is answered."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.control.service_view import ServiceView
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
    plan_to_json,
)

WITHIN_S = 180.0
PLACES = (("1xL4", "east"), ("1xA10", "east"), ("1xL40S", "west"))
SPEC = """models:
  - model: Llama-3.1-8B
    name: live
    slo: {ttft_ms: 20000, tpot_ms: 1000}
    traffic: {rate_per_s: 2, input: 100, output: 20}
fleet:
  regions:
    - name: east
      nodes:
        - {node: 1xL4, available: 2, price_usd_per_h: 0.8}
        - {node: 1xA10, available: 2, price_usd_per_h: 1.0}
    - {name: west, nodes: [{node: 1xL40S, available: 1, price_usd_per_h: 1.5}]}
links:
  - {between: [east, west], gbps: 10, rtt_ms: 1}
policy: {scaling: replan}
"""


def written(folder: Path) -> tuple[Path, Path]:
    """A plan with a replica on each kind of node, and its spec."""
    templates = tuple(
        Template(
            f"on {node}",
            "homogeneous",
            "live",
            (NodeCount(node, 1),),
            (PlannedReplica("mixed", single(node, 1, 32)),),
            (BucketCapacity(0, 0.0, 0.0, 1.0, 0.1, 0.02),),
            "measured",
        )
        for node, _ in PLACES
    )
    plan = Plan(
        "by hand",
        templates,
        tuple(Deployment(f"on {node}", region, 1) for node, region in PLACES),
        (LengthBucket("live", 0, 100_000, 2.0),),
        tuple(PlannedShare(f"on {node}", region, 0, "closed", 0.66) for node, region in PLACES),
        (),
        (),
        3.3,
        0.0,
    )
    (folder / "plan.json").write_text(plan_to_json(plan), "utf-8")
    (folder / "potluck.yaml").write_text(SPEC, "utf-8")
    return folder / "plan.json", folder / "potluck.yaml"


def potluck(*words: str) -> list[str]:
    return [sys.executable, "-m", "potluck.cli.main", *words]


@pytest.fixture
def running_service(cluster: tuple[Any, dict[str, Any]], tmp_path: Path) -> Iterator[tuple[Path, str]]:
    plan, spec = written(tmp_path)
    state = tmp_path / "state"
    words = ("--state", str(state), "--engine", "mock", "--averages", "--port", "0", "--json")
    where = ("--on", "ray", "--cluster", cluster[0].address, "--time-limit", "5")
    process = subprocess.Popen(
        potluck("up", str(plan), str(spec), *words, *where), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield state, json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(WITHIN_S)
        process.stdout.close()


def status(state: Path) -> dict[str, Any]:
    """What `potluck status --json` would say, without another process."""
    service = ServiceView(state)
    try:
        return service.status(time.time())
    finally:
        service.close()


def test_ray_node_removed_under_load_loses_no_request(
    cluster: tuple[Any, dict[str, Any]], running_service: tuple[Path, str]
) -> None:
    (rays, nodes), (state, url) = cluster, running_service
    before = status(state)
    assert sorted(item["replica"].split("@")[0] for item in before["replicas"]) == [
        "on 1xA10",
        "on 1xL4",
        "on 1xL40S",
    ]
    load = ("--rate", "4", "--requests", "60", "--input", "100", "--output", "20", "--timeout", "120")
    bench = subprocess.Popen(potluck("bench", url, *load, "--json"), stdout=subprocess.PIPE, text=True)
    until_s = time.monotonic() + WITHIN_S
    while status(state)["open_requests"] < 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    rays.remove_node(nodes["L4"], allow_graceful=False)
    out, _ = bench.communicate(timeout=WITHIN_S)
    document = json.loads(out)
    assert (document["answered"], document["errors"]) == (60, {})
    until_s = time.monotonic() + WITHIN_S
    while True:  # until the plan is for what is left, and all of it serves
        now = status(state)
        planned = {item["template"] for item in now["plan"]["deployments"] if item["count"]}
        ready = [item for item in now["replicas"] if item["state"] == "ready"]
        if "on 1xL4" not in planned and ready and not now["lacking"]:
            break
        assert time.monotonic() < until_s, now
        time.sleep(0.2)
    assert now["models"]["live"]["ready"]
    happened = subprocess.run(
        potluck("events", "--state", str(state)), capture_output=True, text=True, timeout=WITHIN_S
    ).stdout
    gone = next(line for line in happened.splitlines() if "  gone  " in line)
    assert nodes["L4"].node_id[:12] in gone
    assert "0 x 1xL4 in east" in happened, "the Brain was told that there are none"
    done = subprocess.run(potluck("down", "--state", str(state)), capture_output=True, timeout=WITHIN_S)
    assert done.returncode == 0
    import ray

    ray.init(address=rays.address, log_to_driver=False)
    try:
        assert ray.util.list_named_actors(all_namespaces=True) == []
    finally:
        ray.shutdown()
