"""`potluck up --model`: plans and engines for the GPUs of one machine, with a fake driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from potluck.catalog import gpus
from potluck.cli.common.inputs import load_problem
from potluck.cli.main import run
from potluck.cli.simulating.simulation import SimulationInputs, startups_of
from potluck.cli.up import gpus as up_gpus
from potluck.cli.up.gpus import (
    GpuSetup,
    LocalGpus,
    flags_of,
    gpu_of,
    maker_of,
    measured_briefly,
    mock_flags,
    shared_out,
    spec_text,
    vllm_flags,
)
from potluck.cli.up.prepare import PlanChoices, PreparedPlan, planned_for_all
from potluck.cli.up.up import start_s
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.local_capacity import LocalGpu, find_chips
from potluck.control.launchers.local_launcher import OWNER_MARK, LocalLauncher, engines_of
from potluck.control.launchers.process import alive, end, marked
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Plan
from potluck.engine import shipped_model
from potluck.perf.engine_limits import longest_tokens
from potluck.perf.memory import weight_bytes
from potluck.plan.current_problem import start_share
from potluck.runtime.replica_models import total_blocks
from potluck.spec.load_spec import load_spec

MIXED = "0, GPU-a, NVIDIA L4, 23034\n1, GPU-b, NVIDIA A10, 23028\n2, GPU-c, NVIDIA A10, 23028\n"
GB = 1_000_000_000
HYBRID = """models: [{model: prfaas-1t-hybrid, name: m, slo: {ttft_ms: 60000, tpot_ms: 150},
  traffic: {rate_per_s: 1, input: 27000, output: 1000}}]
fleet: {regions: [{name: near, nodes: [{node: 8xH20, available: 1, price_usd_per_h: 10}]}]}"""
PLAN = Plan("auto", (), (), (), (), (), (), 0.0, 0.0)


def _driver(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "said").write_text(text)
    tool = folder / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {folder / 'said'}\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_visible_gpus_are_those_reported_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _driver(tmp_path, monkeypatch, MIXED)
    assert [(gpu.uuid, gpu.name) for gpu in find_chips()] == [
        ("GPU-a", "NVIDIA L4"),
        ("GPU-b", "NVIDIA A10"),
        ("GPU-c", "NVIDIA A10"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    assert [gpu.index for gpu in find_chips()] == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_chips() == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_chips() == ()


@pytest.mark.parametrize(("text", "code"), [("No devices were found", 6), ("what, is, this", 0)])
def test_failing_gpu_driver_is_reported_in_one_line(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _driver(tmp_path, monkeypatch, text, code)
    with pytest.raises(CapacityError, match="nvidia-smi") as error:
        find_chips()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "A6000"),
    ],
)
def test_driver_gpu_names_map_to_the_catalog(name: str, text: str) -> None:
    memory = int(gpus.gpu(text).memory_gb * GB)
    assert gpu_of(LocalGpu(0, "GPU-a", name, memory)) == text
    with pytest.raises(InputError, match="a part of one"):
        gpu_of(LocalGpu(0, "GPU-a", name, memory // 4))


def test_unknown_gpu_is_refused_with_the_fields_to_add() -> None:
    with pytest.raises(InputError, match="GPU 3 .*RTX 2060.*gpus:.*fp16_tflops.*CUDA_VISIBLE_DEVICES"):
        gpu_of(LocalGpu(3, "GPU-a", "NVIDIA GeForce RTX 2060", 6 * GB))


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """A model that fills a small GPU's memory; only its description."""
    folder = tmp_path / "large"
    folder.mkdir()
    config = json.loads((shipped_model() / "config.json").read_text())
    config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("counts", [{"L4": 1, "A10": 2}, {"A100-80": 1, "L4": 3}, {"H200": 1}])
def test_plan_uses_exactly_the_gpus_of_the_machine(
    counts: dict[str, int], large_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(large_model, "large", Counter(counts), 1.0))
    spec = load_spec(path)
    rate_per_s, make = planned_for_all(spec, PlanChoices(10.0, here=True), lambda line: None)
    path.write_text(spec_text(large_model, "large", Counter(counts), rate_per_s))
    plan = make(load_spec(path)).plan
    assert plan.nodes == {("here", f"1x{gpu}"): count for gpu, count in counts.items()}, (
        "all of them, no more"
    )
    assert plan.fraction == pytest.approx(1.0)
    replicas = [replica for d in plan.deployments for replica in plan.template(d.template).replicas]
    assert all(len(replica.layout.stages) == 1 for replica in replicas)
    assert rate_per_s > 0.5


def _local_gpu(name: str, uuid: str) -> LocalGpu:
    return LocalGpu(0, f"GPU-{uuid}", f"NVIDIA {name}", 40 * GB)


def test_kv_blocks_follow_the_memory_that_weights_leave(large_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(large_model, "large", Counter({"L4": 1, "A100-40": 1}), 1.0))
    flags = flags_of(load_spec(path))
    blocks = {
        node: int(flags(EngineSpec("large", single(node, 1, 32), "here"))[1])
        for node in ("1xL4", "1xA100-40")
    }
    assert blocks["1xA100-40"] > blocks["1xL4"] > 0


def test_model_that_fits_no_gpu_is_refused(large_model: Path, tmp_path: Path) -> None:
    config = json.loads((large_model / "config.json").read_text())
    (large_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 120}))
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(large_model, "large", Counter({"L4": 2}), 1.0))
    with pytest.raises(CapacityError, match="large"):
        planned_for_all(load_spec(path), PlanChoices(10.0, here=True), lambda line: None)


@dataclass(frozen=True)
class SleepingEngines(EngineCommands):
    def command(self, engine_spec: EngineSpec, port: int, kv_port: int) -> list[str]:
        EngineCommands.command(self, engine_spec, port, kv_port)
        return [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    maker = SleepingEngines("gpu", chips=(("1xL4", "GPU-a"), ("1xA10", "GPU-b"), ("1xA10", "GPU-c")))
    yield LocalLauncher(maker, tmp_path, str(tmp_path), free=lambda: None)
    for pid in engines_of(str(tmp_path)):
        end(pid, insist=True)


def test_each_engine_gets_its_own_gpu(launcher: LocalLauncher) -> None:
    a10 = EngineSpec("m", single("1xA10", 1, 2), "here")
    places = {name: launcher.start(name, a10) for name in ("one", "two")}
    assert {place["chip"] for place in places.values()} == {"GPU-b", "GPU-c"}
    for place in places.values():
        environ = Path(f"/proc/{place['pid']}/environ")
        while not (variables := environ.read_bytes()):
            time.sleep(0.01)  # it has them from when it runs
        assert f"CUDA_VISIBLE_DEVICES={place['chip']}".encode() in variables.split(b"\0")
    with pytest.raises(CapacityError, match="all 2 GPUs of type 1xA10"):
        launcher.start("three", a10)
    os.kill(int(str(places["one"]["pid"])), 9)
    until_s = time.monotonic() + 30.0
    while launcher.look(places)[0].state != "dead":
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert launcher.start("three", a10)["chip"] == places["one"]["chip"]
    with pytest.raises(InputError, match="needs tensor parallelism"):
        launcher.start("four", EngineSpec("m", single("2xA10", 2, 2), "here"))


def test_gpu_engines_refuse_a_pipeline(launcher: LocalLauncher) -> None:
    stages = tuple(Stage(layers, (StageNode(node, 1),)) for layers, node in ((3, "1xA10"), (5, "1xL4")))
    with pytest.raises(InputError, match="needs pipelines, which the embedded engine does not do"):
        launcher.start("one", EngineSpec("m", Layout(stages), "here"))


@dataclass(frozen=True)
class EnginesWithWorkers(EngineCommands):
    """Engines with a child process in a session of its own, as vLLM's workers are."""

    def command(self, engine_spec: EngineSpec, port: int, kv_port: int) -> list[str]:
        worker = "[sys.executable, '-c', 'import time; time.sleep(60)']"
        start = f"subprocess.Popen({worker}, start_new_session=True)"
        return [sys.executable, "-c", f"import subprocess, sys, time; {start}; time.sleep(60)"]


def test_child_processes_live_and_end_with_their_engine(tmp_path: Path) -> None:
    """They are not taken for engines that are missing in the state; if their engine is killed they are."""
    owner = str(tmp_path / "state.db")
    launcher = LocalLauncher(
        EnginesWithWorkers("gpu", chips=(("1xL4", "GPU-a"), ("1xA10", "GPU-b"))),
        tmp_path,
        owner,
        free=lambda: None,
    )
    engine_spec = EngineSpec("m", single("1xL4", 1, 8), "here")
    places = {"one": launcher.start("one", engine_spec)}
    until_s = time.monotonic() + 60.0
    try:
        while len(both := [pid for pid, _ in marked(OWNER_MARK, owner)]) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        for _ in range(3):
            launcher.look(places)
        assert all(alive(pid) for pid in both)
        assert [pid.number for pid in engines_of(owner)] == [places["one"]["pid"]]
        os.kill(int(str(places["one"]["pid"])), 9)
        while any(alive(pid) for pid in both):
            launcher.look(places)
            assert time.monotonic() < until_s
            time.sleep(0.05)
    finally:
        for pid, _ in marked(OWNER_MARK, owner):
            end(pid, insist=True)


def test_weights_are_read_from_the_folder_of_the_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    spec = tmp_path / "spec.yaml"

    def problem(place: str = "directory") -> str:
        text = spec_text(shipped_model(), "words", Counter({"L4": 1}), 1.0)
        weights = f"  weights: {{place: {place}, path: store, gb_per_s: 0.001}}\n  slo:"
        spec.write_text(text.replace("  slo:", weights, 1))
        with pytest.raises(InputError, match="models: words: weights: path: ") as error:
            maker_of(load_spec(spec), (_local_gpu("L4", "a"),))
        return str(error.value)

    assert "store is no directory that is there" in problem()
    assert "is it mounted?" in problem("store")
    store.mkdir()
    assert "has no config.json, nor a directory words" in problem()
    (store / "words").mkdir()
    shutil.copy(shipped_model() / "config.json", store / "words")
    assert "has no weights (*.safetensors)" in problem()
    (store / "words" / "model.safetensors").touch()
    engine_commands = maker_of(load_spec(spec), (_local_gpu("L4", "a"),))
    assert engine_commands.files == (("words", store / "words"),)
    command = engine_commands.command(EngineSpec("words", single("1xL4", 1, 6), "here"), 1, 2)
    assert command[command.index("--model") + 1] == str(store / "words")
    inputs = SimulationInputs(load_spec(spec), load_problem(load_spec(spec), 0.8, None, (), 0.0), PLAN)
    slow = start_s(GpuSetup(spec, PreparedPlan(inputs), engine_commands, ()))
    assert slow > 3 * weight_bytes(inputs.spec.models[0].model) / 1e6, "read at a megabyte a second"
    assert start_share(inputs.problem, startups=startups_of(inputs.spec)) > start_share(inputs.problem)


def test_vllm_gets_the_planned_context_and_memory_share(large_model: Path, tmp_path: Path) -> None:
    path, config = tmp_path / "spec.yaml", large_model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 131072}))
    path.write_text(spec_text(large_model, "large", Counter({"L4": 1}), 1.0))
    spec, engine_spec = load_spec(path), EngineSpec("large", single("1xL4", 1, 32), "here")
    words = vllm_flags(spec, PLAN, False)(engine_spec)
    longest, share = int(words[1]), float(words[3])
    assert words[::2] == ("--max-model-len", "--gpu-memory-utilization")
    wanted, context = longest_tokens(spec.models[0].traffic.lengths, "mixed"), 131072
    assert (wanted < longest < context, longest) == (True, 4096)
    assert 0.9 < share < 1.0
    assert vllm_flags(spec, PLAN, True)(engine_spec)[3] == "--kv-cache-memory-bytes", (
        "it would take most of the machine"
    )
    engine_commands = EngineCommands(
        "vllm", flags=vllm_flags(spec, PLAN, False), more=("--gpu-memory-utilization=0.5",)
    )
    assert engine_commands.command(engine_spec, 1, 2)[-5:] == [*words, "--gpu-memory-utilization=0.5"], (
        "what the user said is last"
    )


def test_mock_engine_has_as_many_kv_blocks_as_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(HYBRID, "utf-8")
    spec, engine_spec = load_spec(tmp_path / "spec.yaml"), EngineSpec("m", single("8xH20", 8, 57), "near")
    about = spec.models[0].model, engine_spec.layout, {"8xH20": spec.node_types[0]}
    command, long = EngineCommands("mock", flags=mock_flags(spec, PLAN)), total_blocks(*about, 28_000.0)
    assert command.command(engine_spec, 1, 2)[-2:] == ["--kv-blocks", str(long)]
    assert long > 2 * total_blocks(*about, 1_024.0), "states of short requests weigh more"


def test_gpu_that_cannot_be_measured_is_reported_and_other_profiles_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(shipped_model(), "words", Counter({"L4": 1, "A10": 1}), 1.0))
    begun = []

    def measuring(
        model: Path, name: str, gpu: str, out: Path, device: str, variables: dict[str, dict[str, str]]
    ) -> subprocess.Popen[str]:
        begun.extend((gpu, each["CUDA_VISIBLE_DEVICES"]) for each in variables.values())
        code = f"import pathlib, sys; p = pathlib.Path({str(out)!r})\n"
        code += "p.write_text('{}')" if gpu == "L4" else "print('out of memory'); sys.exit(2)"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(up_gpus, "_measuring", measuring)
    chips = (LocalGpu(0, "GPU-a", "NVIDIA L4", 24 * GB), LocalGpu(1, "GPU-b", "NVIDIA A10", 24 * GB))
    local_gpus = LocalGpus("cpu")
    arguments = (
        load_spec(path),
        shipped_model(),
        chips,
        tmp_path / "profiles",
        local_gpus,
        lambda line: None,
    )
    result, notes = measured_briefly(*arguments)
    assert [item.name for item in result] == ["L4-words.json"]
    assert "A10 could not be measured (out of memory)" in notes[0]
    measured_briefly(*arguments)
    assert begun == [("L4", "GPU-a"), ("A10", "GPU-b"), ("A10", "GPU-b")]


def test_spec_with_other_gpus_than_the_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(shipped_model(), "words", Counter({"H200": 1}), 1.0))
    with pytest.raises(InputError, match="the spec has 1xH200, this machine has 1xL4"):
        maker_of(load_spec(path), (LocalGpu(0, "GPU-a", "NVIDIA L4", 24 * GB),))


H200 = LocalGpu(0, "GPU-a", "NVIDIA H200", 143 * GB)


def test_gpu_shares_are_planned_as_separate_gpus(tmp_path: Path) -> None:
    chips = shared_out((H200,), "50,25,12")
    names = ["H200-50pct", "H200-25pct", "H200-12pct"]
    assert [gpu_of(gpu) for gpu in chips] == names
    assert sum(gpu.memory_bytes for gpu in chips) <= H200.memory_bytes
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(shipped_model(), "words", Counter(names), 1.0, parts=chips))
    nodes = {node.name: node for node in load_spec(path).node_types}
    whole, half = gpus.gpu("H200"), nodes["1xH200-50pct"].gpu
    assert half.fp16_tflops == pytest.approx(whole.fp16_tflops / 2)
    assert half.memory_bytes == pytest.approx(chips[0].memory_bytes)
    prices = {offer.node: offer.price_usd_per_h for offer in load_spec(path).regions[0].offers}
    assert prices["1xH200-50pct"] == pytest.approx(2 * prices["1xH200-25pct"], rel=1e-3)
    started = LocalGpus(daemon={"CUDA_MPS_PIPE_DIRECTORY": "/p"}).variables(chips)
    assert list(started.values())[1] == {
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "CUDA_MPS_PIPE_DIRECTORY": "/p",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert len(set(started)) == 3
    for text in ("", "50,x", "60,50", "0,50", "50,,25"):
        with pytest.raises(InputError, match="--shares: must be per cents"):
            shared_out((H200,), text)
    with pytest.raises(InputError, match="cuts one GPU, 2 are here"):
        shared_out((H200, H200), "50,25")


MPS = """#!/bin/sh
on=$CUDA_MPS_PIPE_DIRECTORY/on
if [ "$1" = -d ]; then touch $on; exit; fi
read -r asked
if [ "$asked" = quit ]; then rm $on; else [ -e $on ]; fi
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "found"), [((), "1 x L4"), (("--shares", "50,25"), "1 x L4-50pct + 1 x L4-25pct")]
)
def test_service_on_detected_gpus_answers(
    shares: tuple[str, ...],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but the GPU: the engine computes on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _driver(tmp_path, monkeypatch, "0, GPU-a, NVIDIA L4, 23034\n")
    model = tmp_path / "tiny"
    shutil.copytree(shipped_model(), model)
    arguments = ["up", "--model", str(model), "--device", "cpu", "--no-measure", "--averages", "--check"]
    arguments += ["--json", "--port", "0", "--state", str(tmp_path / "state"), "--within", "200"]
    (tmp_path / "bin" / "nvidia-cuda-mps-control").write_text(MPS)
    (tmp_path / "bin" / "nvidia-cuda-mps-control").chmod(0o755)
    command = [sys.executable, "-m", "potluck.cli.main", *arguments, *shares]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pipes = tmp_path / "state" / "mps" / "pipes"
    assert pipes.is_dir() == bool(shares)
    assert not (pipes / "on").exists(), "its daemon ends with it"
    body = json.loads(done.stdout)
    assert body["models"] == ["tiny"]
    assert body["answers"][0]["text"]
    assert f"found {found}" in done.stderr
    _driver(tmp_path, monkeypatch, "")
    assert run([*arguments[:-3], str(tmp_path / "other")]) == 2
    assert "no GPU was found" in capsys.readouterr().err
