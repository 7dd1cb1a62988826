"""`potluck up --attach`: plans for servers that are already running, and refusals."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_services import WITHIN_S, output_of
from stub_servers import Answers, StubServer, listing, llama_cpp, ollama, sglang, vllm

from potluck.cli.up.attach import (
    NOT_FOR_ATTACH,
    AttachShow,
    ProbedServer,
    attach,
    attachment_of,
    merged,
    planned,
    planned_for,
    probe_all,
    read_entries,
)
from potluck.cli.up.gpus import require_gpus
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.local_launcher import LocalLauncher
from potluck.control.launchers.process import ProcessId
from potluck.control.local_stack import stop_all
from potluck.control.state_store import StateStore
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import (
    Deployment,
    Plan,
    PlannedReplica,
    Template,
    plan_from_json,
    plan_to_json,
    price_text,
)
from potluck.engine import shipped_model
from potluck.gateway.registry.engine_client import NOT_PROBED
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.runtime.attached_plan import resolved_attached
from potluck.runtime.replica_models import ReplicaModels

SPEC = """
models:
  - {model: Llama-3.1-8B, slo: {ttft_ms: 4000, tpot_ms: 60}, traffic: {rate_per_s: 4, input: 500, output: 80}}
fleet:
  regions:
    - name: here
      nodes: [{node: 1xL40S, available: 2}, {node: 1xL4, available: 2}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def roster(folder: Path, *lines: str) -> Path:
    file = folder / "servers.yaml"
    file.write_text("engines:\n" + "".join(f"  - {{{line}}}\n" for line in lines))
    return file


def test_attached_plain_servers_are_planned_as_whole_replicas(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    entries = read_entries(roster(tmp_path, "url: 'http://127.0.0.1:1', kind: openai, token_ids: true"))
    planned = planned_for(entries, (tmp_path / "spec.yaml",), 10.0, lambda line: None)
    kinds = {planned.plan.template(deployment.template).kind for deployment in planned.plan.deployments}
    assert kinds == {"homogeneous"}


def test_servers_file_without_a_server_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("engines: []\n")
    with pytest.raises(InputError, match="names no server"):
        read_entries(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_entries(tmp_path / "nothing.yaml")


def test_vllm_engines_are_started_with_the_planned_layout() -> None:
    def make(*widths: int) -> EngineSpec:
        return EngineSpec("m", Layout(tuple(Stage(16, (StageNode("8xH100", tp),)) for tp in widths)), "here")

    engine_commands = EngineCommands("vllm", (("m", Path("dir")),), python="py", more=("--dtype", "float32"))
    words = engine_commands.command(make(4, 4), 8000, 9000)
    assert words[4:6] == ["vllm", "--json"]
    assert words[words.index("--tensor-parallel") + 1] == "4"
    assert words[words.index("--stages") + 1] == "16,16"
    assert words[-5:] == ["--python", "py", "--", "--dtype", "float32"]
    with pytest.raises(InputError, match="same tensor parallelism"):
        engine_commands.command(make(4, 2), 8000, 9000)


def test_local_gpus_are_divided_among_vllm_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four GPUs to each of two engines, ports in a row for their workers, and no third engine."""
    chips = tuple(("1xH100", f"GPU-{place}") for place in range(4))
    engine_commands = EngineCommands("vllm", (("m", Path("dir")),), chips=chips, gpus=(("8xH100", "1xH100"),))
    engine_spec = EngineSpec("m", Layout((Stage(32, (StageNode("8xH100", 2, ep="tp"),)),)), "here")
    spawned: list[tuple[list[str], dict[str, str]]] = []

    def spawn(command: list[str], marks: dict[str, str], log: Path) -> ProcessId:
        spawned.append((command, marks))
        return ProcessId(len(spawned), 1)

    monkeypatch.setattr("potluck.control.launchers.process.spawn", spawn)
    launcher = LocalLauncher(engine_commands, tmp_path, "me", free=lambda: None)
    launcher.start("a", engine_spec)
    launcher.start("b", engine_spec)
    assert [marks["CUDA_VISIBLE_DEVICES"] for _, marks in spawned] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert all("--expert-parallel" in command for command, _ in spawned)
    with pytest.raises(CapacityError, match="1xH100"):
        launcher.start("c", engine_spec)
    with pytest.raises(InputError, match="spreads experts"):
        engine_commands.command(
            EngineSpec("m", Layout((Stage(32, (StageNode("8xH100", 2, ep="dp"),)),)), "here"), 1, 2
        )


def test_plan_for_more_gpus_than_the_machine_has_is_refused() -> None:
    template = Template(
        "t", "homogeneous", "m", (), (PlannedReplica("mixed", single("2xL4", 2, 32)),), (), "measured"
    )
    plan = Plan("x", (template,), (Deployment("t", "here", 2),), (), (), (), (), 0.0, 0.0)
    chips = tuple(("1xL4", f"GPU-{place}") for place in range(3))
    engine_commands = EngineCommands("vllm", (("m", Path("dir")),), chips=chips, gpus=(("2xL4", "1xL4"),))
    with pytest.raises(InputError, match="4 GPUs of type 1xL4, this machine has 3"):
        require_gpus(plan, engine_commands)
    require_gpus(plan, replace(engine_commands, chips=()))


@pytest.fixture
def start() -> Iterator[Callable[..., StubServer]]:
    servers: list[StubServer] = []

    def start_one(answers: Answers, **options: Any) -> StubServer:
        servers.append(StubServer(answers, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def engine(role: str) -> Answers:
    """An engine of Potluck's, as far as it is asked."""
    status = {"fingerprint": "f", "model": "e", "role": role}
    model = {"id": "e", "object": "model", "owned_by": "potluck"}
    return {"/status": (200, json.dumps(status).encode()), "/v1/models": (200, listing(model))}


def test_attached_servers_are_recognised_by_their_answers(
    tmp_path: Path, start: Callable[..., StubServer]
) -> None:
    with_files = vllm("m")
    with_files["/v1/models"] = (200, listing({"id": "m", "owned_by": "vllm", "root": str(shipped_model())}))
    urls = [
        start(answers).url
        for answers in (
            with_files,
            sglang("Qwen2.5-7B"),
            engine("prefill"),
            engine("decode"),
            engine("mixed"),
        )
    ]
    file = roster(tmp_path, *(f"url: '{url}'" for url in urls))
    attachment = attachment_of(probe_all(read_entries(file)))
    assert attachment.directories == {"m": str(shipped_model())}, "where the server says that its model is"
    assert [(entry.kind, entry.model, entry.token_ids) for entry in attachment.entries] == [
        ("openai", "m", True),
        ("openai", "Qwen2.5-7B", False),
        ("segments", "e", False),
        ("segments", "e", False),
        ("openai", "e", False),
    ]
    plan = planned(attachment)
    shapes = [tuple(replica.role for replica in template.replicas) for template in plan.templates]
    assert sorted(shapes) == [("mixed",), ("mixed",), ("mixed",), ("prefill", "decode")]


def test_role_of_a_silent_server_is_queried_in_parallel_with_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such server delays the report about all of them by two time limits, not three."""
    monkeypatch.setattr("potluck.cli.up.attach.STATUS_TIMEOUT_S", 1.0)
    monkeypatch.setattr("potluck.gateway.registry.server_probe.PROBE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = roster(tmp_path, f"url: 'http://127.0.0.1:{silent.getsockname()[1]}'")
        began_s = time.monotonic()
        (server,) = probe_all(read_entries(file))
        took_s = time.monotonic() - began_s
    assert "/v1/models does not answer (did not answer within 0.5 s)" in server.problem
    assert took_s < 1.8, "/status within 1 s, beside /health and /v1/models within 0.5 s each"


def test_unprobed_server_is_reported_with_the_earlier_probe_result() -> None:
    entry = EngineEntry("http://h:1", "openai", "m")
    source = SimpleNamespace(from_spec=False, probed=(ProbedServer(entry, problem="http://h:1 hangs"),))
    show = AttachShow(None, ("m",), source, False, 0.0, False, 1.0)  # type: ignore[arg-type]
    seen = {"url": "http://h:1", "model": "m", "replica": "", "note": f"http://h:1 {NOT_PROBED}"}
    assert show._reasons([seen]) == {"http://h:1 (m)": "http://h:1 hangs"}
    assert show._reasons([{**seen, "note": "later"}]) == {"http://h:1 (m)": "later"}
    assert show._reasons([{**seen, "replica": "r", "note": ""}]) == {"http://h:1 (m)": ""}


def test_plan_of_attached_servers_has_no_hardware_and_no_price(
    tmp_path: Path, start: Callable[..., StubServer]
) -> None:
    file = roster(tmp_path, f"url: '{start(vllm('m')).url}'", f"url: '{start(ollama('n', 'o')).url}'")
    attachment = attachment_of(probe_all(read_entries(file)))
    plan = planned(attachment)
    assert [template.max_model_len for template in plan.templates] == [4096, 0, 0]
    assert plan.nodes == {}
    assert not plan.priced
    assert price_text(plan) == "unknown $/h"
    assert plan_from_json(plan_to_json(plan)) == plan
    models = ReplicaModels(resolved_attached(plan, {}))
    models.learn(plan)
    facts = models.facts().replicas.values()
    assert {item.assumed for item in facts} == {True}
    assert len({item.decode_step_s for item in facts}) == 1, "servers are alike until they were observed"


def test_context_limit_of_an_entry_is_kept_within_the_server_limit(
    tmp_path: Path, start: Callable[..., StubServer]
) -> None:
    lines = [
        f"url: '{start(vllm('m', 4096)).url}', max_model_len: 1000",
        f"url: '{start(vllm('m', 4096)).url}', max_model_len: 9000",
        f"url: '{start(llama_cpp('m')).url}', max_model_len: 2000",
        f"url: '{start(llama_cpp('m')).url}'",
    ]
    attachment = attachment_of(probe_all(read_entries(roster(tmp_path, *lines))))
    assert [entry.max_model_len for entry in attachment.entries] == [1000, 4096, 2000, 0]


def test_spec_model_is_matched_by_name_or_as_the_only_one(
    tmp_path: Path, start: Callable[..., StubServer]
) -> None:
    entries = read_entries(roster(tmp_path, f"url: '{start(ollama('org/a', 'b')).url}'"))
    probed = probe_all(entries)
    named = attachment_of(probed, ("a", "b"))
    assert [(entry.model, entry.served_model) for entry in named.entries] == [("b", "b")]
    strange = attachment_of(probed, ("x", "y"))
    assert [entry.model for entry in strange.entries] == [""]
    assert "lists org/a, b, none of the spec's models" in strange.lines[0]
    single = attachment_of(
        probe_all(read_entries(roster(tmp_path, f"url: '{start(vllm('org/a')).url}'"))), ("a",)
    )
    assert [(entry.model, entry.served_model) for entry in single.entries] == [("a", "org/a")]


def test_unreachable_server_and_unlisted_model_keep_their_place(
    tmp_path: Path, start: Callable[..., StubServer]
) -> None:
    server, other = start(ollama("a", "b")), start(vllm("c"))
    entries = read_entries(roster(tmp_path, f"url: '{server.url}'", f"url: '{other.url}'"))
    before = probe_all(entries)
    server.answers |= ollama("b", "new")
    other.close()
    after = attachment_of(merged(before, probe_all(entries)))
    assert [entry.model for entry in after.entries] == ["b", "new", "a", "c"]


def test_attach_is_refused_where_no_model_is_known(tmp_path: Path) -> None:
    options = {"port": None, "policy": (), "engine_ca": None, "state": tmp_path / "state"}
    asked: Any = SimpleNamespace(**options, **dict.fromkeys(NOT_FOR_ATTACH))
    with pytest.raises(InputError, match=r"no server tells its models.*:1 cannot be reached"):
        attach(roster(tmp_path, "url: 'http://127.0.0.1:1'"), (), asked)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "options",
    [("--model", "."), ("--shares", "50,50"), ("--market", "m.yaml"), ("--schedule", "."), ("--on", "ray")],
)
def test_options_for_own_engines_are_refused_with_attach(
    tmp_path: Path, options: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = roster(tmp_path, "url: 'http://127.0.0.1:1', model: m")
    output_of(capsys, "up", "--attach", file, *options, rc=2)


def test_attached_service_listens_on_the_given_host(
    tmp_path: Path,
    start: Callable[..., StubServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts: list[str] = []

    def run_stack(show: AttachShow) -> None:
        hosts.append(show.stack._settings.host)
        show.stack.close()

    monkeypatch.setattr("potluck.cli.up.run_service.run_stack", run_stack)
    file = roster(tmp_path, f"url: '{start(vllm('m')).url}'")
    for state, options in (("one", ()), ("two", ("--host", "0.0.0.0"))):
        output_of(capsys, "up", "--attach", file, "--state", tmp_path / state, *options)
    assert hosts == ["127.0.0.1", "0.0.0.0"]


@pytest.mark.slow
def test_attached_service_is_shown_and_stopped_like_any_other(
    tmp_path: Path, start: Callable[..., StubServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers, of which one is not there at first; status, events and down find them by --state."""
    server, late_port = start(vllm("m")), free_port()
    file = roster(tmp_path, f"url: '{server.url}'", f"url: 'http://127.0.0.1:{late_port}'")
    state = tmp_path / "state"
    command = [sys.executable, "-m", "potluck.cli.main", "up", "--attach", str(file)]
    command += ["--state", str(state), "--port", "0", "--json"]
    errors = tmp_path / "stderr"
    with errors.open("wb") as sink:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
    watchdog = threading.Timer(3 * WITHIN_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        assert first_line, (process.wait(WITHIN_S), errors.read_text())
        ready = json.loads(first_line)
        assert (ready["models"], ready["cost_usd_per_h"], ready["unserved"]) == (["m"], None, {})
        assert [item["usable"] for item in ready["servers"]] == [True, False]
        assert f":{late_port} cannot be reached" in ready["servers"][1]["reason"]
        shown = output_of(capsys, "status", "--state", state)
        assert "hardware and price unknown" in shown
        assert f"http://127.0.0.1:{late_port} cannot be reached" in shown
        start(vllm("m"), port=late_port)
        until_s = time.monotonic() + WITHIN_S
        while len(json.loads(output_of(capsys, "status", "--json", "--state", state))["replicas"]) < 2:
            assert time.monotonic() < until_s, "the late server is not used"
            time.sleep(0.2)
        assert "price unknown" in output_of(capsys, "top", "--once", "--every", "0.2", "--state", state)
        events = output_of(capsys, "events", "--state", state)
        assert f"http://127.0.0.1:{late_port} is not used" in events
        output_of(capsys, "down", "--state", state)
        assert process.wait(WITHIN_S) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        store = StateStore(state / "state.db")
        stop_all(store, "the test is over", 5.0)
        store.close()
