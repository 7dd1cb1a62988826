"""A service on this machine from `potluck up` to `potluck down`, with all operator commands."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_services import WITHIN_S, output_of, running_service

from potluck.cli.main import run
from potluck.control.launchers.local_launcher import OWNER_MARK
from potluck.control.launchers.process import marked
from potluck.control.local_stack import living, owner_of
from potluck.control.state_store import StateStore


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Path, str, subprocess.Popen[str]]]:
    """A state folder, the address of what runs there, and what looks after it."""
    with running_service(tmp_path, 2) as (state, ready, process):
        with urllib.request.urlopen(f"{ready['page']}/", timeout=WITHIN_S) as answer:
            assert b"<title>Potluck</title>" in answer.read()
        yield state, ready["url"], process


def _cordoned(capsys: pytest.CaptureFixture[str], state: Path, url: str, load: tuple[str, ...]) -> None:
    """A replica that gets nothing new while the other serves, and is not replaced."""
    output_of(capsys, "fleet", "cordon", "unit1@near#1/0", "--state", state)
    assert json.loads(output_of(capsys, "bench", url, "--rate", "20", *load, "--json"))["answered"] == 8
    document = json.loads(output_of(capsys, "status", "--json", "--state", state))
    assert [(item["replica"], item["cordoned"]) for item in document["replicas"]] == [
        ("unit0@near#0/0", False),
        ("unit1@near#1/0", True),
    ]
    assert "cordoned: nothing" in output_of(capsys, "fleet", "uncordon", "unit1@near#1/0", "--state", state)


@pytest.mark.slow
def test_service_is_watched_loaded_drained_and_stopped(
    service: tuple[Path, str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    state, url, process = service
    until_s = time.monotonic() + WITHIN_S
    while True:  # the model is served once one of its replicas is there
        document = json.loads(output_of(capsys, "status", "--json", "--state", state))
        assert document["models"]["live"]["ready"]
        if [item["state"] for item in document["replicas"]] == ["ready", "ready"]:
            break
        assert time.monotonic() < until_s, document
        time.sleep(0.1)
    assert document["lacking"] == []
    load = ("--requests", "8", "--input", "20", "--output", "4", "--slo", "ttft=30s,tpot=5s")
    bench = json.loads(output_of(capsys, "bench", url, "--rate", "20", *load, "--json"))
    assert (bench["loop"], bench["answered"], bench["attainment"]) == ("open", 8, 1.0)
    assert bench["output_tokens"] == 32
    assert "closed loop, 2 concurrent requests" in output_of(
        capsys, "bench", url, "--concurrency", "2", *load
    )
    while True:  # records are written every second
        rows = json.loads(output_of(capsys, "usage", "--json", "--state", state))
        if rows and rows[0]["requests"] == 16:
            break
        assert time.monotonic() < until_s, rows
        time.sleep(0.2)
    assert (rows[0]["model"], rows[0]["answered"], rows[0]["output_tokens"]) == ("live", 16, 64)
    assert "unit0@near#0/0" in output_of(capsys, "top", "--once", "--every", "0.2", "--state", state)
    _cordoned(capsys, state, url, load)
    store = StateStore(state / "state.db")
    engines = {instance.replica: instance.name for instance in store.instances()}
    output_of(capsys, "fleet", "drain", "unit0@near#0/0", "--state", state)
    until_s = time.monotonic() + WITHIN_S
    while True:  # until a fresh engine has taken its place
        document = json.loads(output_of(capsys, "status", "--json", "--state", state))
        ready = {item["replica"]: item["engine"] for item in document["replicas"] if item["state"] == "ready"}
        if len(ready) == 2 and "unit0@near#0/0" not in ready:
            break
        assert time.monotonic() < until_s, document
        time.sleep(0.2)
    assert engines["unit0@near#0/0"] not in ready.values(), "the engine that was drained is used no more"
    assert ready["unit1@near#1/0"] == engines["unit1@near#1/0"], "the other was left alone"
    assert "unit0@near#0/0  (by hand)" in output_of(capsys, "events", "--state", state)
    _replanned(capsys, state, store)
    _handed_back(capsys, state, store)
    gateway = store.get("gateway")
    assert output_of(capsys, "down", "--state", state) == "stopped\n"
    assert process.wait(WITHIN_S) == 0
    assert not living(gateway)
    assert list(marked(OWNER_MARK, owner_of(store))) == [], "no engine is left"
    assert store.instances() == ()
    assert run(["status", "--state", str(state)]) == 1
    store.close()


def _versions(capsys: pytest.CaptureFixture[str], state: Path) -> set[int]:
    status = json.loads(output_of(capsys, "status", "--json", "--state", state))
    top = json.loads(output_of(capsys, "top", "--once", "--every", "0.2", "--json", "--state", state))
    store = StateStore(state / "state.db")
    place = store.get("gateway")
    store.close()
    with urllib.request.urlopen(f"{place['admin']}/live", timeout=WITHIN_S) as answer:  # what the page reads
        first = next(line for line in answer if line.startswith(b"data: "))
    page = json.loads(first.removeprefix(b"data: "))["tables"]["plan"]["now"]
    return {status["plan"]["version"], top["plan"]["version"], page["version"]}


def _handed_back(capsys: pytest.CaptureFixture[str], state: Path, store: StateStore) -> None:
    newest, first = store.plan(), store.plan(1)
    assert newest is not None
    assert first is not None
    assert _versions(capsys, state) == {newest.version}
    template = newest.plan.templates[0].name
    assert run(["fleet", "scale", f"{template}@near=1000", "--state", str(state)]) == 2
    assert "1000 cannot be had: near has " in capsys.readouterr().err
    body = json.loads(output_of(capsys, "fleet", "scale", "--auto", "--json", "--state", state))
    assert (body["version"], body["as_version"]) == (newest.version + 1, 1)
    after = store.plan()
    assert after is not None
    assert after.plan == first.plan
    assert _versions(capsys, state) == {newest.version + 1}


def _replanned(capsys: pytest.CaptureFixture[str], state: Path, store: StateStore) -> None:
    asked = ("replan", "--live", "--state", state, "--rate", "live=14", "--averages")
    newest = store.plan()
    assert newest is not None
    document = json.loads(output_of(capsys, *asked, "--apply", "--json"))
    assert (document["version"], document["best"]) == (newest.version, "reallocate")
    assert "applied plan 2: reallocate" in document["done"]
    after = store.plan()
    assert after is not None
    assert after.version == newest.version + 1
    assert after.reason.startswith("by hand: replan --live")
    plan = after.plan
    wanted = sum(
        deployment.count * len(plan.template(deployment.template).replicas) for deployment in plan.deployments
    )
    names = {deployment.template for deployment in plan.deployments if deployment.count}
    until_s = time.monotonic() + WITHIN_S
    while True:
        status = json.loads(output_of(capsys, "status", "--json", "--state", state))
        ready = [item for item in status["replicas"] if item["state"] == "ready"]
        if len(ready) == wanted and {item["replica"].split("@")[0] for item in ready} == names:
            break
        assert time.monotonic() < until_s, status
        time.sleep(0.2)
    assert "nothing changed" in output_of(capsys, *asked, "--apply")
    assert run([str(item) for item in asked[:4]] + ["--apply", "plan.json", "spec.yaml"]) == 2
    capsys.readouterr()
