"""What is exported can be deployed: labels, lengths and memory, weights, secrets, images; and `--check` proves it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from export_helpers import COMBO, RANKS, command_options, fleet, runner, template

from potluck.catalog import gpus, nodes
from potluck.cli.main import cli
from potluck.cli.planning.export_check import checked_export, vllm_flags
from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment, Plan, PlannedReplica, Template, plan_to_json
from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.export import compose, shell, skypilot
from potluck.export.compose import ComposeOptions
from potluck.export.placement import WeightsSource
from potluck.export.skypilot import SkyOptions, infra_of
from potluck.spec.load_spec import load_spec

ROOT = Path(__file__).parents[2]
KINDS = ("commands", "compose", "kubernetes", "skypilot")
HUB = ("--weights", "chat=hf://meta-llama/Llama-3.1-8B-Instruct")
SPEC = """models:
  - model: {model}
    name: chat
    slo: {{ttft_ms: 4000, tpot_ms: 90}}
    traffic: {{rate_per_s: 1, input: {input}, output: 200}}
fleet:
  regions:
    - name: us-east-1
      nodes:
        - {{node: 1xH100, available: 9, price_usd_per_h: 4}}
        - {{node: 1xL4, available: 9, price_usd_per_h: 1, spot: true}}
        - {{node: 1xMI300X, available: 9, price_usd_per_h: 3}}
        - {{node: 1xMI325X, available: 9, price_usd_per_h: 3}}
{policy}"""


def one_node_template(node: str, layers: int, model: str = "chat") -> Template:
    one = PlannedReplica("mixed", single(nodes.node_type(node).name, 1, layers))
    return template("one", "homogeneous", model, {nodes.node_type(node).name: 1}, one)


def written(
    folder: Path, made: Template, model: str = "Llama-3.1-8B", prompt: int = 1000, policy: str = ""
) -> list[str]:
    plan = Plan("auto", (made,), (Deployment(made.name, "us-east-1", 2),), (), (), (), (), 1.0, 0.0)
    (folder / "plan.json").write_text(plan_to_json(plan))
    (folder / "potluck.yaml").write_text(SPEC.format(model=model, input=prompt, policy=policy))
    return [str(folder / "plan.json"), str(folder / "potluck.yaml")]


def exported(folder: Path, kind: str, *words: str, made: Template | None = None, **spec: Any) -> Result:
    paths = written(folder, made or one_node_template("1xH100", 32), **spec)
    return runner().invoke(cli, ["export", kind, *paths, "--out", str(folder / "out"), *words])


def manifests_in(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted((folder / "out" / "plain").glob("*.yaml"))]
    return [item for text in texts for item in yaml.safe_load_all(text)]


def named(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (item,) = [one for one in objects if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return item


def test_gpu_node_labels_are_those_of_the_device_plugins() -> None:
    unknown = {name for name in gpus.names() if not gpus.node_label(gpus.gpu(name)).value}
    assert unknown == {"MI325X"}
    known = {"H100": "NVIDIA-H100-80GB-HBM3", "A100-80": "NVIDIA-A100-SXM4-80GB", "T4": "Tesla-T4"}
    for name, value in (known | {"V100-16": "Tesla-V100-SXM2-16GB", "B200": "NVIDIA-B200"}).items():
        assert gpus.node_label(gpus.gpu(name)).value == value
    amd = gpus.node_label(gpus.gpu("MI300X"))
    assert (amd.key, amd.resource) == ("amd.com/gpu.product-name", "amd.com/gpu")
    values = [gpus.node_label(gpus.gpu(name)).value for name in gpus.names()]
    assert len(set(values)) == len(values)
    for value in values:
        assert re.fullmatch(r"[\w.-]{0,63}", value)


@pytest.mark.parametrize(
    ("node", "label", "resource"),
    [
        ("1xL4", {"nvidia.com/gpu.product": "NVIDIA-L4"}, "nvidia.com/gpu"),
        ("1xMI300X", {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "amd.com/gpu"),
        ("1xMI325X", {"amd.com/gpu.product-name": "MI325X"}, "amd.com/gpu"),
    ],
)
def test_pods_request_the_gpu_resource_of_the_vendor(
    tmp_path: Path, node: str, label: dict[str, str], resource: str
) -> None:
    done = exported(tmp_path, "kubernetes", made=one_node_template(node, 32))
    assert ("label of MI325X: unknown" in done.stderr) == (node == "1xMI325X"), done.stderr
    pod = named(manifests_in(tmp_path), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {**label, "topology.kubernetes.io/region": "us-east-1"}
    assert pod["tolerations"][0]["key"] == resource
    (engine,) = pod["containers"]
    assert engine["resources"] == {"requests": {"cpu": "4", "memory": "27Gi"}, "limits": {resource: 1}}


def test_gpu_label_can_be_overridden(tmp_path: Path) -> None:
    exported(tmp_path, "kubernetes", "--gpu-label", "L4=mine", made=one_node_template("1xL4", 32))
    pod = named(manifests_in(tmp_path), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == "mine"


def test_exported_engines_get_the_planned_context_and_memory_share(tmp_path: Path) -> None:
    """Qwen3-32B leaves 5 GB for KV on one H100: 40,960 tokens, its own length, would need ten."""
    big = {"model": "Qwen3-32B", "prompt": 12_000}
    done = exported(tmp_path, "commands", made=one_node_template("1xH100", 64), **big)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "chat-0-us-east-1-0-box0.sh").read_text()
    assert "--max-tokens 16384 " in text
    assert "-- --gpu-memory-utilization 0.92 &" in text
    shutil.rmtree(tmp_path / "out")
    exported(tmp_path, "commands", made=one_node_template("1xH100", 64), model="Qwen3-32B", prompt=17_000)
    text = (tmp_path / "out" / "chat-0-us-east-1-0-box0.sh").read_text()
    assert "--max-tokens 19248 " in text  # what fits, in whole blocks, where twice as much would not
    shutil.rmtree(tmp_path / "out")
    done = exported(
        tmp_path, "commands", made=one_node_template("1xH100", 64), model="Qwen3-32B", prompt=20_000
    )
    assert "its longest request has 20,200 tokens, and KV of 19,263 fits there" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_exported_pipeline_uses_the_memory_share_of_its_smallest_gpu(tmp_path: Path) -> None:
    lies = Layout((Stage(22, (StageNode("1xH100-SXM", 1),)), Stage(10, (StageNode("1xL4", 1),))))
    made = template("two", "pipeline", "chat", {"1xH100-SXM": 1, "1xL4": 1}, PlannedReplica("mixed", lies))
    done = exported(tmp_path, "kubernetes", made=made)
    assert done.exit_code == 0, done.output
    sets = [item for item in manifests_in(tmp_path) if item["kind"] == "StatefulSet"]
    containers = [item["spec"]["template"]["spec"]["containers"][0] for item in sets]
    assert [item["command"][-1] for item in containers] == ["0.95", "0.95"]
    memory = [int(item["resources"]["requests"]["memory"].removesuffix("Gi")) for item in containers]
    assert memory[0] > memory[1] > 12


def test_exported_gateway_has_two_replicas_and_a_disruption_budget(tmp_path: Path) -> None:
    done = exported(tmp_path, "kubernetes", policy="policy: {scaling: cauchy}\n")
    objects = manifests_in(tmp_path)
    gateway = named(objects, "Deployment")["spec"]
    assert (gateway["replicas"], gateway["strategy"]["rollingUpdate"]["maxUnavailable"]) == (2, 0)
    assert named(objects, "PodDisruptionBudget", "gateway")["spec"]["minAvailable"] == 1
    (container,) = gateway["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    words = container["command"]
    assert words[words.index("--gateways") :][:4] == [
        *("--gateways", "2", "--secret-file", "/etc/potluck/gateway.secret")
    ]
    assert words[words.index("--policy") + 1] == "scaling=none"
    assert "scaling: cauchy is off" in done.stderr
    shutil.rmtree(tmp_path / "out")
    done = exported(tmp_path, "kubernetes", "--gateways", "1", policy="policy: {scaling: cauchy}\n")
    objects = manifests_in(tmp_path)
    assert named(objects, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert "gateway" not in [
        one["metadata"]["name"] for one in objects if one["kind"] == "PodDisruptionBudget"
    ]
    assert "is off" not in done.stderr


def test_exported_kustomize_base_is_complete(tmp_path: Path) -> None:
    exported(tmp_path, "kubernetes", *HUB)
    out = tmp_path / "out"
    base = yaml.safe_load((out / "kustomization.yaml").read_text())
    objects = [one for path in base["resources"] for one in yaml.safe_load_all((out / path).read_text())]
    (config,) = base["configMapGenerator"]
    keys = dict(item.split("=") for item in config["files"])
    assert all((out / path).is_file() for path in keys.values())
    (volume,) = [
        one["configMap"]
        for one in named(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
        if one["name"] == "plan"
    ]
    assert volume["name"] == config["name"]
    assert [item["key"] for item in volume["items"]] == list(keys)
    assert not [one for one in objects if one["kind"] == "ConfigMap"]  # the generator makes it
    plain = (out / "plain" / "10-plan.yaml").read_text()
    assert "  potluck.yaml: |\n    models:\n      - model: Llama-3.1-8B\n" in plain
    data = yaml.safe_load(plain)["data"]
    assert data["plan.json"] == (tmp_path / "plan.json").read_text()
    assert base["namespace"] == "potluck" == named(objects, "Deployment")["metadata"]["namespace"]


def test_weights_are_pulled_before_engines_start(tmp_path: Path) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    ).validate
    done = exported(tmp_path, "kubernetes", *HUB)
    objects = manifests_in(tmp_path)
    for item in objects:
        validate(item, "1.33", strict=True)
    (pull,) = named(objects, "Job")["spec"]["template"]["spec"]["containers"]
    marked = "touch /models/chat/.complete"
    folder = "--local-dir /models/chat"
    assert pull["command"][2] == f"hf download meta-llama/Llama-3.1-8B-Instruct {folder} && {marked}"
    secret = {"name": "potluck-hub", "key": "token", "optional": True}
    assert pull["env"][0] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    claim = named(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for kind in ("StatefulSet", "Deployment"):
        (waits,) = named(objects, kind)["spec"]["template"]["spec"]["initContainers"]
        assert "/models/chat/.complete" in waits["command"][2]
    assert "weights of chat" not in done.stderr
    shutil.rmtree(tmp_path / "out")
    done = exported(tmp_path, "kubernetes", "--volume", "/mnt/models")
    volumes = named(manifests_in(tmp_path), "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["hostPath"] == {"path": "/mnt/models", "type": "Directory"}
    assert "weights of chat: must be in /models/chat" in done.stderr


def test_gateway_without_engines_beside_it_pulls_tokenizers(tmp_path: Path) -> None:
    """Two models, of which the first machine runs one: the gateway beside it reads what both need."""
    line = "hf download org/other --include '*.j*' --local-dir /models/documents"
    weights = {"documents": WeightsSource("hf://org/other@main"), "chat": WeightsSource("hf://org/chat")}
    placed = fleet((COMBO, "us-east-1", 1), (RANKS, "us-east-1", 1))
    for text in (
        shell.files(placed, command_options(), {}, weights)["gateway.sh"],
        skypilot.files(placed, command_options(), SkyOptions({}, "true", "/models", weights))["launch.sh"],
    ):
        assert line.replace("other ", "other --revision main ") in text
    files = compose.files(placed, command_options(), {}, ComposeOptions("p", "v", weights), [])
    services = yaml.safe_load(files[f"compose-{placed.boxes[0].name}.yaml"])["services"]
    assert list(services["gateway"]["depends_on"]) == ["pull-documents", "pull-chat"]
    assert "--include" in services["pull-documents"]["command"]
    assert "--include" not in services["pull-chat"]["command"]


@pytest.mark.parametrize(
    ("kind", "words", "line"),
    [
        ("kubernetes", (*HUB, "--volume", "/mnt"), "cannot share a folder of each node"),
        ("kubernetes", ("--weights", "chat=hf://llama"), "is not like hf://ORG/NAME"),
        ("compose", ("--weights", "chat=s3://bucket"), "only hf://ORG/NAME is pulled"),
        ("skypilot", ("--weights", "chat=ftp://x"), "must begin with hf://"),
        ("kubernetes", ("--gpu-label", "L5=x"), "unknown 'L5'"),
    ],
)
def test_impossible_export_is_refused_in_one_line(
    tmp_path: Path, kind: str, words: tuple[str, ...], line: str
) -> None:
    done = exported(tmp_path, kind, *words)
    assert isinstance(done.exception, InputError)
    assert line in str(done.exception)


def test_skypilot_tasks_install_mount_and_stay_in_their_region(tmp_path: Path) -> None:
    done = exported(
        tmp_path, "skypilot", "--weights", "chat=s3://bucket/llama", made=one_node_template("1xL4", 32)
    )
    task = yaml.safe_load((tmp_path / "out" / "chat-0-us-east-1-0-box0.yaml").read_text())
    assert f"pip install vllm=={VLLM_VERSION}" in task["setup"]
    assert task["file_mounts"] == {"/models/chat": "s3://bucket/llama"}
    resources = task["resources"]
    assert (resources["infra"], resources["use_spot"]) == ("aws/us-east-1", True)
    assert "spot machines (chat-0-us-east-1-0-box0" in done.stderr
    known = {"us-east-1": "aws", "ap-southeast-2": "aws", "europe-west4": "gcp", "us-central1": "gcp"}
    for region, cloud in (known | {"westus2": "azure", "swedencentral": "azure"}).items():
        assert infra_of(region) == f"{cloud}/{region}"
    assert [infra_of(region) for region in ("lab", "east", "us-east", "eu")] == [""] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_settings_left_out_of_the_export_are_listed(tmp_path: Path, kind: str) -> None:
    done = exported(tmp_path, kind, "--json", made=one_node_template("1xL4", 32))
    lines = json.loads(done.stdout)["left_out"]
    assert [f"potluck: to do: {line}" for line in lines] == done.stderr.splitlines()
    about = {line.split(" ")[0].rstrip(":") for line in lines}
    all_of_them = {"weights", "spot", "TLS"}
    own = {
        "commands": {"addresses", "secrets", "clients'"},
        "compose": {"addresses", "secrets", "clients'", "images"},
        "kubernetes": {"secrets", "volume", "images"},
        "skypilot": {"software", "keys"},
    }
    assert about == all_of_them | own[kind]


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def with_config(path: Path) -> None:
    """A model's folder as it is downloaded: its config beside weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"\0" * 64)


def gateway_files(folder: Path, kind: str, place: Path) -> None:
    """Copy what the gateway of an export reads to where it reads it, as the platform does."""
    if kind != "kubernetes":
        shutil.copytree(folder / "out", place)
        return
    objects = manifests_in(folder)
    data = named(objects, "ConfigMap")["data"]
    pod = named(objects, "Deployment")["spec"]["template"]["spec"]
    (items,) = [volume["configMap"]["items"] for volume in pod["volumes"] if "configMap" in volume]
    for item in items:
        assert re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", item["key"])
        (place / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (place / item["path"]).write_text(data[item["key"]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["big", "models of mine/big__1"])
def test_export_with_a_model_folder_ships_its_config_and_no_weights(
    tmp_path: Path, kind: str, where: str
) -> None:
    with_config(tmp_path / where)
    done = exported(tmp_path, kind, model=f"./{where}")
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert f"copy {tmp_path / where} there, or --weights" in done.stderr
    before = load_spec(tmp_path / "potluck.yaml").models[0].model
    place = tmp_path / "elsewhere"
    gateway_files(tmp_path, kind, place)
    shutil.rmtree(tmp_path / where)
    assert load_spec(place / "potluck.yaml").models[0].model == before
    if kind == "compose":
        texts = [path.read_text() for path in (tmp_path / "out").glob("compose-*.yaml")]
        assert any(f"./{where}/config.json:/srv/{where}/config.json:ro" in text for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_export_refuses_a_model_folder_outside_the_spec_folder(tmp_path: Path, kind: str) -> None:
    inside, spec = tmp_path / "spec" / "big", tmp_path / "spec"
    with_config(inside)
    with_config(tmp_path / "outside")
    for model, line in (
        ("../outside", "is not in the folder of the spec, so it cannot travel with it"),
        (str(tmp_path / "outside"), "is not in the folder of the spec, so it cannot travel with it"),
        (str(inside), "is an absolute path, which an export cannot carry"),
    ):
        done = exported(spec, kind, model=model)
        assert isinstance(done.exception, InputError), done.output
        assert "model chat: model: " in str(done.exception)
        assert line in str(done.exception)
        assert not (spec / "out").exists()


def test_export_refuses_a_model_named_after_the_spec_folder(tmp_path: Path) -> None:
    """Elsewhere the folder has another name, and requests would ask for a model that is not there."""
    folder = tmp_path / "big"
    with_config(folder)
    paths = written(folder, one_node_template("1xH100", 32, "big"), "./config.json")
    text = (folder / "potluck.yaml").read_text()
    (folder / "potluck.yaml").write_text(text.replace("    name: chat\n", ""))
    done = runner().invoke(cli, ["export", "commands", *paths, "--out", str(folder / "out")])
    assert isinstance(done.exception, InputError)
    assert "add `name: big` to the spec" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_export_check_starts_the_written_files_and_asks_for_answers(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tokenizers", reason="potluck[gateway] is not installed")
    paths = written(tmp_path, one_node_template("1xL4", 32))
    done = runner().invoke(cli, ["export", kind, *paths, "--check", "--json", "--within", "240"])
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)["check"]
    assert body["passed"], body
    assert [row["state"] for row in body["engines"]] == ["up", "up"]
    assert [answer["model"] for answer in body["answers"]] == ["chat"]


@pytest.mark.parametrize(
    ("kind", "file", "before", "after", "line"),
    [
        ("commands", "chat-0-us-east-1-0-box0.sh", "--kv-port", "--kv-gate", "--kv-gate"),
        (
            "commands",
            "chat-0-us-east-1-0-box0.sh",
            "-- --gpu-mem",
            "-- --gpu-mom",
            "vLLM has no option --gpu-mom",
        ),
        ("commands", "chat-0-us-east-1-0-box0.sh", "engine vllm", "engine vlm", "no command 'vlm'"),
        ("commands", "gateway.sh", "--keys", "--kees", "--kees"),
        ("commands", "engines.yaml", "box0:8100", "box0:8200", "0 commands would listen there"),
        (
            "compose",
            "compose-chat-0-us-east-1-0-box0.yaml",
            "'8100'",
            "'8101'",
            "0 commands would listen there",
        ),
        (
            "kubernetes",
            "plain/20-engines.yaml",
            "clusterIP: None",
            "clusterIP: ''",
            "has no headless Service",
        ),
        ("kubernetes", "plain/20-engines.yaml", "replicas: 2", "replicas: 3", "where an engine would listen"),
        ("skypilot", "chat-0-us-east-1-0-box0.yaml", "--role mixed", "--role all", "'all' is not one of"),
    ],
)
def test_export_check_detects_an_invalid_file(
    tmp_path: Path, kind: str, file: str, before: str, after: str, line: str
) -> None:
    """The negative control: each would start, and fail far from here."""
    assert exported(tmp_path, kind, made=one_node_template("1xL4", 32)).exit_code == 0
    path = tmp_path / "out" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    plan = Plan(
        "auto",
        (one_node_template("1xL4", 32),),
        (Deployment("one", "us-east-1", 2),),
        (),
        (),
        (),
        (),
        1.0,
        0.0,
    )
    check = checked_export(kind, tmp_path / "out", plan, load_spec(tmp_path / "potluck.yaml"), 60.0)
    assert line in check.problem
    with pytest.raises(SystemExit) as ended:
        check.show(as_json=True)
    assert ended.value.code == 1


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_container_images_can_be_built_from_the_repository(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    for word, rest in lines:
        assert word in {"FROM", "ARG", "COPY", "RUN", "ENTRYPOINT", "CMD"}
        if word == "COPY":
            *sources, target = rest.split()
            assert target.startswith("/build/")
            assert all((ROOT / source).exists() for source in sources)
    steps = {line[0]: line[1] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (command,) = json.loads(steps["ENTRYPOINT"])
    assert command in project["scripts"]
    assert runner().invoke(cli, json.loads(steps["CMD"])).exit_code == 0
    extras = re.findall(r"EXTRAS=(\S+)", text) or re.findall(r"/build\[(\w+)\]", text)
    assert {extra for item in extras for extra in item.split(",")} <= set(project["optional-dependencies"])
    assert (name == "Dockerfile.vllm") == (steps["FROM"] == f"vllm/vllm-openai:v{VLLM_VERSION}")
    if "constraints.txt" in text:
        assert "constraints.txt" in next(rest for word, rest in lines if word == "COPY")


def test_docker_compose_accepts_the_exported_files(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("`docker compose` is not installed")
    exported(tmp_path, "compose", *HUB)
    out = tmp_path / "out"
    for name in ("engine.key", "keys.jsonl"):
        (out / name).write_text("x")
    for path in out.glob("compose-*.yaml"):
        done = subprocess.run(
            [docker, "compose", "-f", str(path), "config", "-q"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_vllm_flag_list_has_the_used_flags() -> None:
    assert {"--gpu-memory-utilization", "--max-model-len", "--quantization", "--nnodes"} <= vllm_flags()
