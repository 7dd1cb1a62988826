"""`potluck up --attach`: what it plans for servers that somebody else started, and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from potluck.cli.up.attach import asked, attach, planned_for, read_entries
from potluck.cli.up.gpus import must_have_chips
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.local_launcher import LocalLauncher
from potluck.control.launchers.process import ProcessId
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment, Plan, PlannedReplica, Template
from potluck.engine import shipped_model

SPEC = """
models:
  - {model: Llama-3.1-8B, slo: {ttft_ms: 4000, tpot_ms: 60}, traffic: {rate_per_s: 4, input: 500, output: 80}}
fleet:
  regions:
    - name: here
      nodes: [{node: 1xL40S, available: 2}, {node: 1xL4, available: 2}]
"""


def roster(folder: Path, *lines: str) -> Path:
    file = folder / "servers.yaml"
    file.write_text("engines:\n" + "".join(f"  - {{{line}}}\n" for line in lines))
    return file


def test_plain_servers_are_planned_as_whole_replicas(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    entries = read_entries(roster(tmp_path, "url: 'http://127.0.0.1:1', kind: openai, token_ids: true"))
    planned = planned_for(entries, (tmp_path / "spec.yaml",), 10.0, lambda line: None)
    kinds = {planned.plan.template(deployment.template).kind for deployment in planned.plan.deployments}
    assert kinds == {"homogeneous"}


def test_without_a_spec_or_a_server_there_is_nothing_to_attach(tmp_path: Path) -> None:
    file = roster(tmp_path, "url: 'http://127.0.0.1:1'")
    with pytest.raises(InputError, match="does not answer"):
        attach(file, (), None, (), 1.0, False)
    file.write_text("engines: []\n")
    with pytest.raises(InputError, match="names no server"):
        read_entries(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_entries(tmp_path / "nothing.yaml")


def test_engines_of_vllm_are_started_with_the_planned_layout() -> None:
    def make(*widths: int) -> EngineSpec:
        return EngineSpec("m", Layout(tuple(Stage(16, (StageNode("8xH100", tp),)) for tp in widths)), "here")

    maker = EngineCommands("vllm", (("m", Path("dir")),), python="py", more=("--dtype", "float32"))
    words = maker.command(make(4, 4), 8000, 9000)
    assert words[4:6] == ["vllm", "--json"]
    assert words[words.index("--tensor-parallel") + 1] == "4"
    assert words[words.index("--stages") + 1] == "16,16"
    assert words[-5:] == ["--python", "py", "--", "--dtype", "float32"]
    with pytest.raises(InputError, match="same tensor parallelism"):
        maker.command(make(4, 2), 8000, 9000)


def test_gpus_of_this_machine_are_given_to_each_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four GPUs to each of two engines, ports in a row for their workers, and no third engine."""
    chips = tuple(("1xH100", f"GPU-{place}") for place in range(4))
    maker = EngineCommands("vllm", (("m", Path("dir")),), chips=chips, gpus=(("8xH100", "1xH100"),))
    make = EngineSpec("m", Layout((Stage(32, (StageNode("8xH100", 2, ep="tp"),)),)), "here")
    spawned: list[tuple[list[str], dict[str, str]]] = []

    def spawn(command: list[str], marks: dict[str, str], log: Path) -> ProcessId:
        spawned.append((command, marks))
        return ProcessId(len(spawned), 1)

    monkeypatch.setattr("potluck.control.launchers.process.spawn", spawn)
    launcher = LocalLauncher(maker, tmp_path, "me", free=lambda: None)
    launcher.start("a", make)
    launcher.start("b", make)
    assert [marks["CUDA_VISIBLE_DEVICES"] for _, marks in spawned] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert all("--expert-parallel" in command for command, _ in spawned)
    with pytest.raises(CapacityError, match="1xH100"):
        launcher.start("c", make)
    with pytest.raises(InputError, match="spreads experts"):
        maker.command(EngineSpec("m", Layout((Stage(32, (StageNode("8xH100", 2, ep="dp"),)),)), "here"), 1, 2)


def test_a_plan_for_more_gpus_than_there_are_is_refused() -> None:
    template = Template(
        "t", "homogeneous", "m", (), (PlannedReplica("mixed", single("2xL4", 2, 32)),), (), "measured"
    )
    plan = Plan("x", (template,), (Deployment("t", "here", 2),), (), (), (), (), 0.0, 0.0)
    chips = tuple(("1xL4", f"GPU-{place}") for place in range(3))
    maker = EngineCommands("vllm", (("m", Path("dir")),), chips=chips, gpus=(("2xL4", "1xL4"),))
    with pytest.raises(InputError, match="4 GPUs of type 1xL4, this machine has 3"):
        must_have_chips(plan, maker)
    must_have_chips(plan, replace(maker, chips=()))


class Server(BaseHTTPRequestHandler):
    said: ClassVar[dict[int, dict[str, object]]] = {}

    def do_GET(self) -> None:
        result = self.said[self.server.server_address[1]].get(self.path)  # type: ignore[index]
        self.send_response(404 if result is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(result).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def servers() -> Iterator[Callable[[dict[str, object]], str]]:
    made: list[HTTPServer] = []

    def start(said: dict[str, object]) -> str:
        server = HTTPServer(("127.0.0.1", 0), Server)
        Server.said[server.server_address[1]] = said
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def test_without_a_spec_servers_are_asked_what_they_are(
    tmp_path: Path, servers: Callable[[dict[str, object]], str]
) -> None:
    model = {"id": "m", "owned_by": "vllm", "root": str(shipped_model())}
    plain = servers({"/v1/models": {"data": [model]}})
    other = servers({"/v1/models": {"data": [{"id": "Qwen2.5-7B", "owned_by": "sglang"}]}})
    engines = [
        servers({"/status": {"fingerprint": "f", "model": "e", "role": role}})
        for role in ("prefill", "decode", "mixed")
    ]
    (tmp_path / "key").write_text("secret")
    lines = [f"url: '{plain}', key_file: key", f"url: '{other}'", *(f"url: '{engine}'" for engine in engines)]
    file = roster(tmp_path, *lines)
    (tmp_path / "made").mkdir()
    inputs, made = asked(read_entries(file), file, tmp_path / "made")
    assert [model.name for model in inputs.spec.models] == ["m", "Qwen2.5-7B", "e"]
    assert inputs.spec.models[0].files == str(shipped_model()), "where the server says that its model lies"
    shapes = {
        template.name: [replica.role for replica in template.replicas] for template in inputs.plan.templates
    }
    assert sorted(map(tuple, shapes.values())) == [("mixed",), ("mixed",), ("mixed",), ("prefill", "decode")]
    entries = read_entries(made)
    assert [(entry.kind, entry.model, entry.token_ids) for entry in entries[:2]] == [
        ("openai", "m", True),
        ("openai", "Qwen2.5-7B", False),
    ]
    assert entries[0].key == "secret"
    assert [(entry.kind, entry.model) for entry in entries[2:]] == [
        ("segments", "e"),
        ("segments", "e"),
        ("openai", "e"),
    ]
    with pytest.raises(InputError, match="names no model"):
        asked(read_entries(roster(tmp_path, f"url: '{servers({})}'")), file, tmp_path)
