"""Operator commands over a prepared state folder and a mock admin port."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_services import QuietHandler, output_of, serving_handler

from potluck.control.control_values import EngineInstance, EngineSpec
from potluck.control.launchers.local_launcher import NAME_MARK, OWNER_MARK
from potluck.control.launchers.process import ProcessId, alive, end, spawn, started_at
from potluck.control.local_stack import owner_of
from potluck.control.manual_changes import leaving
from potluck.control.state_store import StateStore
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, Template, plan_from_json

LAYOUT = single("1xA10", 1, 2)
TEMPLATE = Template(
    "t", "homogeneous", "words", (NodeCount("1xA10", 1),), (PlannedReplica("mixed", LAYOUT),), (), "measured"
)
PLAN = Plan("auto", (TEMPLATE,), (Deployment("t", "east", 2),), (), (), (), (), 1.5, 0.0)
METRICS = """# TYPE vllm:request_success_total counter
vllm:request_success_total{{model_name="words"}} {n}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="words"}} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="words"}} 0
vllm:time_to_first_token_seconds_bucket{{le="0.3",model_name="words"}} {n}
vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="words"}} {n}
# TYPE potluck_usd_per_hour gauge
potluck_usd_per_hour{{model="words"}} 1.5
# TYPE potluck_usd_per_million_tokens gauge
potluck_usd_per_million_tokens{{model="words"}} 0.25
"""


def _replica(name: str, state: str) -> dict[str, Any]:
    status = {"queued": 1, "running": 2, "free_blocks": 75, "total_blocks": 100, "step_s": 0.02}
    return {
        "replica": name,
        "model": "words",
        "region": "east",
        "role": "mixed",
        "state": state,
        "by_hand": False,
        "doubted": False,
        "pace": 1.25,
        "open_requests": 3,
        "status": status if state == "ready" else None,
    }


class AdminPort:
    """Answers as the gateway would; `asked` is what it was sent."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.scraped = 0
        self.url = ""
        port = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                assert self.headers["Authorization"] == "Bearer secret"
                if self.path == "/metrics":
                    port.scraped += 1
                    self.say(200, METRICS.format(n=10 * port.scraped, tokens=1000 * port.scraped).encode())
                else:
                    self.say(200, json.dumps(SNAPSHOT).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                port.asked.append((f"{self.command} {self.path}", body))
                if body.get("replica", "t@east#0/0") != "t@east#0/0":
                    self.say(404, json.dumps({"error": {"message": "replica: unknown 'x'"}}).encode())
                    return
                message = {
                    "replica": "t@east#0/0",
                    "with_it": [],
                    "open_requests": 3,
                    "role": body.get("role"),
                }
                message |= {"changed": ["t@east#0/0"], "cordoned": ["h:1"]}
                self.say(200, json.dumps({**message, "before": "prefill", "planned": "prefill"}).encode())

            do_PUT = do_POST

        self.handler = Handler


SNAPSHOT = {
    "plan": {"version": 1, "strategy": "auto"},
    "scaling": "cauchy",
    "copies": [{"template": "t", "region": "east", "usd_per_h": 0.75}],
    "regions": [
        {"name": "east", "offers": [{"node": "1xA10", "price_usd_per_h": 0.75, "available": 4}]},
        {"name": "west", "offers": [{"node": "1xL4", "price_usd_per_h": 0.75, "available": 4}]},
    ],
    "models": {"words": {"ready": True, "why": "", "slo": {"ttft_s": 1.5, "tpot_s": 0.06}, "usd_per_h": 1.5}},
    "replicas": [_replica("t@east#0/0", "ready"), _replica("t@east#1/0", "starting")],
    "engines": [],
    "wanted": {"replicas": [{"id": f"t@east#{n}/0", "model": "words", "draining": False} for n in range(2)]},
    "links": [{"source": "east", "target": "west", "utilisation": 0.37, "queued_bytes": 2e9, "gbps": 10.0}],
    "open_requests": 3,
    "notices": ["this machine computes 3.1 times slower"],
    "notes": ["words: mixed t@west: 1 wanted, but there are no nodes"],
    "problems": [],
}


@pytest.fixture
def admin_port() -> Iterator[AdminPort]:
    made = AdminPort()
    with serving_handler(made.handler) as made.url:
        yield made


@pytest.fixture
def folder(tmp_path: Path, admin_port: AdminPort) -> Path:
    """A service whose gateway and controller are this very process."""
    store = StateStore(tmp_path / "state.db")
    store.add_plan(PLAN, time.time() - 60, "potluck up")
    me = {"pid": os.getpid(), "started": started_at(os.getpid())}
    store.set("gateway", {**me, "url": "http://127.0.0.1:1", "admin": admin_port.url})
    store.set("controller", me)
    engine_spec = EngineSpec("words", LAYOUT, "east")
    store.put(EngineInstance("words-1", engine_spec, "up", time.time(), "http://e1", "t@east#0/0"))
    store.put(EngineInstance("words-2", engine_spec, "starting", time.time() - 9, "", "t@east#1/0"))
    store.note(time.time(), "start", "words-2 for t@east#1/0", "the plan wants it")
    store.close()
    (tmp_path / "admin.key").write_text("secret")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "words-1.log.1").write_text("long ago\n")
    (tmp_path / "logs" / "words-1.log").write_text("first\nsecond\n")
    return tmp_path


def test_status_shows_running_and_missing_replicas_with_reasons(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "status", "--state", folder)
    for part in ("plan 1 (auto), $1.50/h", "2 x t in east", "model words: ready; TTFT <= 1.50 s", "words-1"):
        assert part in text
    assert re.search(r"missing: t@east#1/0: words-2 is starting, since \d+ s", text)
    assert "missing: words: mixed t@west: 1 wanted, but there are no nodes" in text
    assert "notice: this machine computes 3.1 times slower" in text
    document = json.loads(output_of(capsys, "status", "--state", folder, "--json"))
    assert (document["notices"], document["plan"]["version"]) == (SNAPSHOT["notices"], 1)
    assert document["lacking"][1]["what"] == "words: mixed t@west"
    first = document["replicas"][0]
    assert (first["engine"], first["pace"], first["kv_used"], first["waiting"]) == ("words-1", 1.25, 0.25, 1)
    assert [item["kind"] for item in document["notes"]] == ["start"]


@pytest.mark.parametrize("command", ["status", "top --once", "fleet drain x", "fleet scale t@east=1", "down"])
def test_operator_commands_without_a_service_fail_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing runs in" in output_of(capsys, *command.split(), "--state", tmp_path, rc=1)
    StateStore(tmp_path / "state.db").close()
    assert "nothing runs in" in output_of(capsys, *command.split(), "--state", tmp_path, rc=1)


def test_damaged_state_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.db").write_bytes(b"rubbish" * 1000)
    assert "state.db is damaged" in output_of(capsys, "status", "--state", tmp_path, rc=2)


def test_status_of_a_lost_gateway_shows_its_last_wanted_replicas(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str]
) -> None:
    store = StateStore(folder / "state.db")
    store.set("gateway", {**store.get("gateway"), "started": 1})
    store.set("wanted", {"replicas": [{"id": "t@east#2/0", "model": "words"}]})
    store.close()
    text = output_of(capsys, "status", "--state", folder)
    assert "gateway DOWN, controller up" in text
    assert "missing: t@east#2/0: no engine is there for it" in text
    assert "no gateway runs" in output_of(capsys, "top", "--once", "--state", folder, rc=1)
    assert admin_port.asked == []


def test_top_frame_fits_eighty_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "top", "--once", "--every", "0.2", "--state", folder)
    assert max(map(len, text.splitlines())) <= 80
    row = next(line for line in text.splitlines() if line.startswith("words"))
    assert float(row.split()[1]) > 1.0, "ten more answers than at the reading before"
    assert "200ms" in row, "half way between the bounds"
    assert "$0.25" in row
    assert "$1.50/h" in text
    heads = text.splitlines()[text.splitlines().index(row) - 2 :][:2]
    assert heads[0].split() == ["prompt", "output", "TTFT", "TTFT", "TPOT", "TPOT"]
    assert heads[1].split()[2:8] == ["tok/s", "tok/s", "p50", "p90", "p50", "p90"], "both kinds, named"
    replica = next(line for line in text.splitlines() if line.startswith("t@east#0/0"))
    assert replica.split()[1:] == ["mixed", "ready", "3", "1", "25%", "1.25", "20.0ms"]
    link = next(line for line in text.splitlines() if line.startswith("east > west"))
    assert link.split()[3:] == ["37%", "10", "2.00", "GB"]


def test_logs_are_selected_by_engine_replica_or_role(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "words-1" in output_of(capsys, "logs", "--state", folder)
    assert output_of(capsys, "logs", "words-1", "--state", folder) == "long ago\nfirst\nsecond\n"
    assert output_of(capsys, "logs", "t@east#0/0", "--lines", "1", "--state", folder) == "second\n"
    assert "did you mean 'words-1'" in output_of(capsys, "logs", "words-9", "--state", folder, rc=2)


def test_events_command_prints_stored_events(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "start    words-2 for t@east#1/0  (the plan wants it)" in output_of(
        capsys, "events", "--state", folder
    )
    (line,) = output_of(capsys, "events", "--json", "--state", folder).splitlines()
    assert json.loads(line)["why"] == "the plan wants it"


def test_cordon_is_sent_to_the_gateway_for_a_replica_or_a_host(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("east#0/0", "words-1"):
        text = output_of(capsys, "fleet", "cordon", name, "--state", folder)
        assert text == "t@east#0/0 gets no new requests\ncordoned: h:1\n"
        assert admin_port.asked[-1] == ("POST /cordon", {"replica": "t@east#0/0"})
    at = ("--at", admin_port.url, "--key-file", folder / "admin.key")
    assert "gets new requests again" in output_of(capsys, "fleet", "uncordon", "east#0/0", *at)
    assert admin_port.asked[-1] == ("POST /uncordon", {"replica": "t@east#0/0"})
    assert json.loads(output_of(capsys, "fleet", "cordon", "10.0.0.5", *at, "--json"))["cordoned"] == ["h:1"]
    assert admin_port.asked[-1] == ("POST /cordon", {"node": "10.0.0.5"})
    assert "is a part of several" in output_of(capsys, "fleet", "cordon", "east", "--state", folder, rc=2)
    assert "leave out --state" in output_of(capsys, "fleet", "cordon", "x", *at, "--state", folder, rc=2)


def test_drain_is_sent_to_the_gateway_and_marks_its_engine_as_leaving(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "replica: unknown 'x'" in output_of(
        capsys, "fleet", "drain", "t@east#1/0", "--state", folder, rc=2
    )
    store = StateStore(folder / "state.db")
    assert leaving(store) == frozenset()
    assert "is a part of several" in output_of(capsys, "fleet", "drain", "east", "--state", folder, rc=2)
    assert "did you mean 't@east#" in output_of(
        capsys, "fleet", "drain", "t@east#2/0", "--state", folder, rc=2
    )
    assert len(admin_port.asked) == 1
    for name in ("t@east#0/0", "#0/0", "words-1"):
        assert "t@east#0/0 is draining; 3 open requests" in output_of(
            capsys, "fleet", "drain", name, "--state", folder
        )
    assert admin_port.asked[-1] == ("POST /drain", {"replica": "t@east#0/0"})
    assert leaving(store) == {"words-1"}
    last = store.happenings()[-1]
    assert (last.kind, last.what, last.why) == ("drain", "t@east#0/0", "by hand")


def test_flip_reports_how_long_the_role_holds(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "fleet", "flip", "t@east#0/0", "decode", "--state", folder)
    assert "is decode until it is flipped back to prefill" in text
    assert admin_port.asked == [("POST /flip", {"replica": "t@east#0/0", "role": "decode"})]
    assert "by hand" in output_of(capsys, "events", "--state", folder)
    assert "mixed" in output_of(capsys, "fleet", "flip", "t@east#0/0", "mixed", "--state", folder, rc=2)


def test_scale_makes_a_plan_version_that_holds_until_auto(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "fleet", "scale", "t@east=3", "--state", folder)
    assert "plan 2: t@east=3, $2.25/h (was $1.50/h)" in text
    assert "scaling (cauchy) continues from there" in text
    what, body = admin_port.asked[-1]
    assert what == "PUT /plan?why=by%20hand%3A%20t%40east%3D3&version=2", "one number everywhere"
    assert plan_from_json(json.dumps(body)).deployments == (Deployment("t", "east", 3),)
    store = StateStore(folder / "state.db")
    newest = store.plan()
    assert newest is not None
    assert (newest.version, newest.reason) == (2, "by hand: t@east=3")
    assert "nothing changed" in output_of(capsys, "fleet", "scale", "t@east=3", "--state", folder)
    text = output_of(capsys, "fleet", "scale", "--auto", "--state", folder)
    assert "plan 3: back to the planner's plan 1, $1.50/h (was $2.25/h)" in text
    what, body = admin_port.asked[-1]
    assert what == "PUT /plan?why=handed%20back%3A%20as%20version%201&version=3"
    assert plan_from_json(json.dumps(body)) == PLAN, "as it was before any was made by hand"
    assert (store.plan() or newest).plan == PLAN
    assert "nothing changed" in output_of(capsys, "fleet", "scale", "--auto", "--state", folder)
    assert "no copy is left for words" in output_of(capsys, "fleet", "scale", "t@east=0", "--state", folder)
    for wrong, line in (
        ("t@east", "not of that form"),
        ("u@east=1", "unknown 'u'"),
        ("t@north=1", "unknown"),
        ("t@west=1", "REGION: west has not all that a copy needs (1xA10); east has"),
        ("t@east=99", "COUNT: 99 cannot be had: east has 4 x 1xA10, enough for 4; ask for 4 at most"),
    ):
        before = len(admin_port.asked)
        assert line in output_of(capsys, "fleet", "scale", wrong, "--state", folder, rc=2)
        assert len(admin_port.asked) == before, "nothing was told"
    assert "and not both" in output_of(capsys, "fleet", "scale", "--state", folder, rc=2)


def _sleeping_process(folder: Path, name: str, **marks: str) -> ProcessId:
    return spawn(["sleep", "60"], marks, folder / f"{name}.log")


def test_down_is_carried_out_by_a_running_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = StateStore(tmp_path / "state.db")
    controller, gateway = _sleeping_process(tmp_path, "controller"), _sleeping_process(tmp_path, "gateway")
    try:
        store.set("controller", {"pid": controller.number, "started": controller.started})
        store.set("gateway", {"pid": gateway.number, "started": gateway.started})
        assert output_of(capsys, "down", "--state", tmp_path) == "stopped\n"
        assert not alive(controller)
        assert alive(gateway), "that is its controller's to end"
    finally:
        end(gateway, insist=True)
        end(controller, insist=True)


def test_down_ends_all_processes_without_a_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = StateStore(tmp_path / "state.db")
    gateway, engine = _sleeping_process(tmp_path, "gateway"), _sleeping_process(tmp_path, "engine")
    unwritten = _sleeping_process(tmp_path, "unwritten", **{OWNER_MARK: owner_of(store), NAME_MARK: "w"})
    stranger = _sleeping_process(tmp_path, "stranger")
    try:
        store.set("controller", {"pid": os.getpid(), "started": 1})
        store.set("gateway", {"pid": gateway.number, "started": gateway.started})
        place = {"pid": engine.number, "started": engine.started}
        store.put(EngineInstance("w-1", EngineSpec("words", LAYOUT, "east"), "up", 0.0, replica="r"), place)
        assert store.claim("one that was killed", time.time(), 0.5) is not None
        assert output_of(capsys, "down", "--state", tmp_path) == "stopped\n"
        assert not any(map(alive, (gateway, engine, unwritten)))
        assert alive(stranger)
        assert store.instances() == ()
        assert store.claim("a successor", time.time(), 1.0) is not None, "the lease is free again"
    finally:
        for pid in (gateway, engine, unwritten, stranger):
            end(pid, insist=True)


def test_only_running_service_is_selected_without_a_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "all"
    home.mkdir()
    monkeypatch.setattr("potluck.cli.fleet.service.STATE", home)
    for command in (["status"], ["top", "--once"], ["down"]):
        assert "potluck: nothing runs; start it with" in output_of(capsys, *command, rc=1)
    (home / "one").symlink_to(folder)
    StateStore(home / "two" / "state.db").close()
    assert "plan 1 (auto)" in output_of(capsys, "status")
    assert "answers at http://127.0.0.1:1 " in output_of(capsys, "bench", rc=2)
    (home / "three").symlink_to(folder)
    assert "several run: " in output_of(capsys, "status", rc=2)
    for name in ("one", "three"):
        (home / name).unlink()
    StateStore(home / "four" / "state.db").close()
    for command in (
        ["status"],
        ["top", "--once"],
        ["down"],
        ["fleet", "cordon", "x"],
        ["events", "--follow"],
    ):
        assert output_of(capsys, *command, rc=1) == "potluck: nothing runs; start it with `potluck up`\n"
    assert "nothing runs now, and several have ended: " in output_of(capsys, "logs", rc=2)


def test_engines_without_a_controller_are_found_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("potluck.cli.fleet.service.STATE", tmp_path)
    StateStore(tmp_path / "ended" / "state.db").close()
    store = StateStore(tmp_path / "left" / "state.db")
    engine = _sleeping_process(tmp_path, "engine")
    try:
        place = {"pid": engine.number, "started": engine.started}
        store.put(EngineInstance("w-1", EngineSpec("words", LAYOUT, "east"), "up", 0.0, replica="r"), place)
        assert "gateway DOWN, controller DOWN" in output_of(capsys, "status")
        assert output_of(capsys, "down") == "stopped\n"
        assert not alive(engine)
    finally:
        end(engine, insist=True)
