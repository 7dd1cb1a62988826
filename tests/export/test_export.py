"""Plans as files: every GPU is given once, every command is one that Potluck knows, every file is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_helpers import COMBO, FOLDERS, RANKS, SINGLES, command_options, fleet, plan, runner, template
from hypothesis import given
from hypothesis import strategies as st

from potluck.cli.main import cli
from potluck.cli.planning.export_check import must_parse
from potluck.cli.serve import serve
from potluck.control.launchers.kubernetes_pods import ManifestOptions
from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import PlannedReplica, plan_to_json
from potluck.export import compose, manifests, shell, skypilot
from potluck.export.compose import ComposeOptions
from potluck.export.manifests import GpuLabel, KubernetesExport
from potluck.export.placement import PlacedPlan, label
from potluck.export.read_back import ReadCommand, shell_words
from potluck.export.skypilot import SkyOptions
from potluck.gateway.registry.engine_client import read_status
from potluck.gateway.registry.engine_list import read_engines

GOLDEN = Path(__file__).parent / "golden"
L40S = GpuLabel("nvidia.com/gpu.product", "NVIDIA-L40S", "nvidia.com/gpu")
CLUSTER = KubernetesExport(ManifestOptions("registry/potluck-vllm:1"), "registry/potluck:1", {"L40S": L40S})
IMAGES = ComposeOptions("potluck:1", "potluck-vllm:1")
SKY = SkyOptions({"us-east-1": "aws/us-east-1"}, "true")


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6), st.integers(1, 3))
def test_every_gpu_is_assigned_once(widths: list[int], copies: int) -> None:
    replicas = [PlannedReplica("mixed", single("4xL40S", width, 32)) for width in widths]
    made = template("one", "homogeneous", "chat", {"4xL40S": len(widths)}, *replicas)
    result = fleet((made, "us-east-1", copies))
    given_out = [
        (footing.box.name, gpu)
        for placement in result.placements
        for footing in placement.footings
        for gpu in footing.gpus
    ]
    assert len(given_out) == len(set(given_out)) == sum(widths) * copies
    assert len(result.boxes) == len(widths) * copies
    ports = [
        (placement.box.name, port)
        for placement in result.placements
        for port in (placement.port, placement.kv_port)
    ]
    assert len(ports) == len(set(ports))
    assert len({placement.name for placement in result.placements}) == len(result.placements)


def test_replica_beyond_its_nodes_or_regions_is_refused() -> None:
    made = template(
        "one", "homogeneous", "chat", {"1xL4": 1}, *[PlannedReplica("mixed", single("1xL4", 1, 32))] * 2
    )
    with pytest.raises(InputError, match="rents too few GPUs of 1xL4"):
        fleet((made, "lab", 1))
    with pytest.raises(InputError, match="region mars: is not in the spec"):
        fleet((COMBO, "mars", 1))


def test_named_machines_are_the_exported_boxes() -> None:
    lies = Layout(
        (Stage(16, (StageNode("4xL40S", 2, "rack A/1"),)), Stage(16, (StageNode("4xL40S", 2, "b"),)))
    )
    made = template(
        "group", "group", "chat", {"4xL40S": 2}, PlannedReplica("mixed", lies), PlannedReplica("mixed", lies)
    )
    result = fleet((made, "us-east-1", 1))
    assert [box.name for box in result.boxes] == ["rack-a-1", "b"]
    assert [footing.gpus for placement in result.placements for footing in placement.footings] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
    ]


@given(st.text(max_size=200))
def test_exported_labels_are_valid_dns_names(text: str) -> None:
    result = label(text)
    assert len(result) <= 50
    assert result == "" or (
        result.isascii() and result.replace("-", "").isalnum() and result == result.strip("-").lower()
    )


def words_of(files: dict[str, str]) -> list[tuple[str, ...]]:
    lines = [line for name, text in files.items() if name.endswith(".sh") for line in text.splitlines()]
    return [shell_words(line) for line in lines if line.startswith("CUDA_VISIBLE_DEVICES")]


@pytest.mark.parametrize(
    ("style", "deployed", "count"), [("vllm", COMBO, 8), ("vllm", RANKS, 4), ("embedded", SINGLES, 4)]
)
def test_exported_commands_are_accepted_by_the_engines(style: Any, deployed: Any, count: int) -> None:
    commands = words_of(shell.files(fleet((deployed, "us-east-1", 2)), command_options(style), {}))
    assert len(commands) == count
    for words in commands:
        must_parse(ReadCommand("box.sh", "1", words))


def test_exported_gateway_has_the_model_tokenizers(tmp_path: Path) -> None:
    for name in ("plan.json", "potluck.yaml", "engines.yaml", "keys.jsonl"):
        (tmp_path / name).write_text("")
    words = command_options().gateway(f"{tmp_path}/", str(tmp_path / "keys.jsonl"))
    asked = serve.make_context("serve", words[2:]).params
    assert asked["files"] == tuple(f"{name}={folder}" for name, folder in FOLDERS.items())
    for files in (
        shell.files(fleet((COMBO, "us-east-1", 1)), command_options(), {}),
        compose.files(fleet((COMBO, "us-east-1", 1)), command_options(), {}, IMAGES, []),
        manifests.files(fleet((COMBO, "us-east-1", 1)), command_options(), CLUSTER, {"plan.json": "{}"}),
        skypilot.files(fleet((COMBO, "us-east-1", 1)), command_options(), SKY),
    ):
        assert any("--files=chat=/models/chat" in text for text in files.values())


def test_exported_vllm_pipeline_has_a_process_per_stage() -> None:
    placed, addresses = fleet((RANKS, "us-east-1", 1)), {"documents-0-us-east-1-0-box0": "10.0.0.7"}
    first, second = words_of(shell.files(placed, command_options(), addresses))
    group = ("--stages", "20,12", "--nodes", "2")
    for rank, words in enumerate((first, second)):
        at = words.index("--stages")
        assert words[at : at + 8] == (*group, "--node-rank", str(rank), "--master", "10.0.0.7:7100")
    assert first[first.index("--port") + 1] == "8100"
    assert "--port" not in second
    assert "--api-key-file" in second  # with it they prove to each other that they belong together
    services = [
        yaml.safe_load(text)["services"]
        for name, text in compose.files(placed, command_options(), addresses, IMAGES, []).items()
        if name.startswith("compose-")
    ]
    assert [list(service) for service in services] == [
        ["documents-0-us-east-1-0-0", "gateway"],
        ["documents-0-us-east-1-0-0-rank1"],
    ]
    sky = skypilot.files(placed, command_options(), SKY)
    task = yaml.safe_load(sky["documents-0-us-east-1-0-box1.yaml"])
    assert "--master $POTLUCK_HOST_DOCUMENTS_0_US_EAST_1_0_BOX0:7100" in task["run"]
    assert task["envs"] == {"POTLUCK_HOST_DOCUMENTS_0_US_EAST_1_0_BOX0": ""}
    assert task["resources"]["ports"] == [9101]
    runs = [line for line in sky["launch.sh"].splitlines() if line.startswith("sky exec")]
    assert len(runs) == 1
    address = 'POTLUCK_HOST_DOCUMENTS_0_US_EAST_1_0_BOX0="$(ssh documents-0-us-east-1-0-box0 hostname'
    assert address in runs[0]
    assert runs[0].endswith("documents-0-us-east-1-0-box1 documents-0-us-east-1-0-box1.yaml &")


def test_exported_roster_is_read_by_the_gateway(tmp_path: Path) -> None:
    result = fleet((COMBO, "us-east-1", 2))
    (tmp_path / "engine.key").write_text("secret")
    text = shell.files(result, command_options(), {})["engines.yaml"].replace("/etc/potluck", str(tmp_path))
    entries = read_engines(text, "engines.yaml", tmp_path)
    assert [(entry.template, entry.index, entry.region, entry.key) for entry in entries] == [
        (placement.template, placement.index, "us-east-1", "secret") for placement in result.placements
    ]
    assert len({entry.url for entry in entries}) == 8


def manifest_objects(placed_plan: PlacedPlan) -> list[dict[str, Any]]:
    files = manifests.files(placed_plan, command_options(), CLUSTER, {"plan.json": "{}", "traces/a.csv": "1"})
    plain = {name: text for name, text in files.items() if name.startswith("plain/")}
    return [item for text in plain.values() for item in yaml.safe_load_all(text)]


def test_exported_manifests_are_valid_kubernetes_objects() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    ).validate
    result = manifest_objects(fleet((COMBO, "us-east-1", 3), (COMBO, "lab", 0)))
    for item in result:
        validate(item, "1.33", strict=True)
    sets = {
        entry["metadata"]["name"]: entry["spec"]["replicas"]
        for entry in result
        if entry["kind"] == "StatefulSet"
    }
    assert sets == {f"chat-0-us-east-1-{index}": 3 for index in range(4)}
    assert not any("secret" in json.dumps(entry).lower() for entry in result if entry["kind"] == "ConfigMap")


def test_a_pipeline_over_machines_is_sets_of_pods_that_address_each_other() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    ).validate
    result = manifest_objects(fleet((RANKS, "us-east-1", 2)))
    for item in result:
        validate(item, "1.33", strict=True)
    sets = [item for item in result if item["kind"] == "StatefulSet"]
    name = "documents-0-us-east-1-0"
    assert [item["metadata"]["name"] for item in sets] == [name, f"{name}-r1"]
    assert {(item["spec"]["replicas"], item["spec"]["serviceName"]) for item in sets} == {(2, name)}
    pods = [item["spec"]["template"] for item in sets]
    gpus = [pod["spec"]["nodeSelector"]["nvidia.com/gpu.product"] for pod in pods]
    assert gpus == ["A10G", "L4"]
    (engine,), (rank,) = (pod["spec"]["containers"] for pod in pods)
    masters = [words[words.index("--master") + 1] for words in (engine["command"], rank["command"])]
    assert masters == ["$(POD_IP):7100", f"{name}-$(POD_INDEX).{name}.potluck.svc:7100"]
    assert "POD_INDEX" in [variable["name"] for variable in engine["env"]]


@pytest.mark.parametrize("name", ["20-engines.yaml", "30-gateway.yaml", "40-network.yaml"])
def test_exported_kubernetes_files_equal_the_golden_files(name: str) -> None:
    result = manifests.files(fleet((COMBO, "us-east-1", 2)), command_options(), CLUSTER, {"plan.json": "{}"})
    assert result[f"plain/{name}"] == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    "name", ["chat-0-us-east-1-0-box0.yaml", "chat-0-us-east-1-0-box1.yaml", "launch.sh"]
)
def test_exported_skypilot_files_equal_the_golden_files(name: str) -> None:
    result = skypilot.files(fleet((COMBO, "us-east-1", 1)), command_options(), SKY)
    assert result[name] == (GOLDEN / name).read_text()


def test_exported_compose_services_have_their_gpus() -> None:
    result = compose.files(fleet((COMBO, "us-east-1", 1)), command_options(), {}, IMAGES, ["traces/a.csv"])
    data = yaml.safe_load(result["compose-chat-0-us-east-1-0-box0.yaml"])
    assert data["services"].keys() == {"chat-0-us-east-1-0-0", "chat-0-us-east-1-0-1", "gateway"}
    gpus = [
        datum["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, datum in data["services"].items()
        if name != "gateway"
    ]
    assert gpus == [["0", "1"], ["2", "3"]]
    assert data["secrets"] == {"engine.key": {"file": "./engine.key"}}
    assert "./traces/a.csv:/srv/traces/a.csv:ro" in data["services"]["gateway"]["volumes"]
    ranks = compose.files(fleet((RANKS, "us-east-1", 1)), command_options(), {}, IMAGES, [])
    data = yaml.safe_load(ranks["compose-documents-0-us-east-1-0-box1.yaml"])
    assert data["secrets"] == {}, "only the first rank serves HTTP"
    assert all(
        "/models/documents:/models/documents:ro" in datum["volumes"] for datum in data["services"].values()
    )


def test_engine_on_a_wildcard_address_is_reached_at_its_host() -> None:
    status = {"state": "ready", "model": "m", "fingerprint": "f", "role": "mixed", "problem": ""}
    counted = ("waiting", "running", "todo_tokens", "context_tokens", "free_blocks", "total_blocks")
    numbers = dict.fromkeys((*counted, "step_mean_s", "uptime_s", "max_tokens", "block_tokens"), 1)
    for listens, reached in {
        "0.0.0.0:9": "10.0.0.5:9",
        "10.1.1.1:9": "10.1.1.1:9",
        "[::]:9": "10.0.0.5:9",
    }.items():
        body = json.dumps({**status, **numbers, "kv": listens}).encode()
        assert read_status(body, "10.0.0.5").kv == reached


SPEC = """models:
  - model: Llama-3.1-8B
    name: chat
    slo: {ttft_ms: 800, tpot_ms: 40}
    traffic: {rate_per_s: 1, input: 100, output: 20}
fleet:
  regions:
    - name: us-east-1
      nodes:
        - {node: 4xL40S, available: 9, price_usd_per_h: 8}
        - {node: 1xL4, available: 9, price_usd_per_h: 1}
"""


def run(tmp_path: Path, *words: str, spec: str = SPEC) -> Any:
    (tmp_path / "plan.json").write_text(plan_to_json(plan((COMBO, "us-east-1", 1))))
    (tmp_path / "potluck.yaml").write_text(spec)
    kind, *rest = words
    return runner().invoke(
        cli, ["export", kind, str(tmp_path / "plan.json"), str(tmp_path / "potluck.yaml"), *rest]
    )


@pytest.mark.parametrize("kind", ["commands", "compose", "kubernetes", "skypilot"])
def test_export_command_writes_and_lists_all_files(tmp_path: Path, kind: str) -> None:
    done = run(tmp_path, kind, "--out", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)
    assert (body["machines"], body["engines"]) == (3, 4)
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in written) == body["files"]


@pytest.mark.parametrize(
    ("words", "line"),
    [(("--address", "box=1"), "--address: unknown 'box'"), (("--address", "box"), "'box' is not NAME=VALUE")],
)
def test_invalid_export_options_are_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    done = run(tmp_path, "commands", "--out", str(tmp_path / "out"), *words)
    assert isinstance(done.exception, InputError | SystemExit)
    assert line in (str(done.exception) + done.output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("embedded", "combo: needs tensor parallelism, which the embedded engine does not do"),
        (
            "openai",
            "combo: needs KV handed over between replicas, which a server of OpenAI's API does not do",
        ),
    ],
)
def test_plan_that_the_engine_cannot_run_is_refused(tmp_path: Path, engine: str, line: str) -> None:
    done = run(tmp_path, "commands", "--out", str(tmp_path / "out"), spec=f"engine: {engine}\n{SPEC}")
    assert isinstance(done.exception, InputError)
    assert f"{line}; plan again, with `engine: vllm`" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_non_empty_output_folder_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    done = run(tmp_path, "commands", "--out", str(tmp_path / "out"))
    assert "is not an empty folder" in str(done.exception) + done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
