"""A pipeline over several machines as pods: workers first, then the engine; all of it stands or falls together."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_server import Kube
from test_kubernetes_launcher import ENGINE, SPELLINGS, wait_for_state

from potluck.cli.engine.engine import serve, vllm
from potluck.control.control_values import EngineSpec, Place
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.kube_api import connect
from potluck.control.launchers.kubernetes_launcher import KubernetesLauncher, KubernetesOptions
from potluck.control.launchers.kubernetes_pods import ManifestOptions
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.engine.pipeline.launch import parse_stages

LAYOUT = Layout((Stage(2, (StageNode("1xA10", 1),)), Stage(4, (StageNode("1xL4", 1),) * 2)))
MAKE = EngineSpec("m", LAYOUT, "east")
NAMES = ["p-1-w0", "p-1-w1", "p-1-w2"]
WORKER = "import socket,sys,time;s=socket.create_server((sys.argv[1],7100));print(sys.stdin.read());time.sleep(999)"


def script(words: list[str]) -> list[str]:
    """Engines and workers are a few lines of Python, which listen where real ones would."""
    if "--node-rank" in words and words[words.index("--node-rank") + 1] != "0":
        return [sys.executable, "-S", "-c", "import time; time.sleep(999)"]
    if words[0] != "sh":
        return [sys.executable, "-S", "-c", ENGINE, words[words.index("--host") + 1]]
    secret = words[2].split(" < ")[1]
    return ["sh", "-c", f"exec {sys.executable} -S -c '{WORKER}' $POD_IP < {secret}"]


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    (tmp_path / "pods").mkdir()
    result = Kube(tmp_path / "pods", script, first_ip="127.81.0.")
    result.add_node("node-a", "NVIDIA-A10", 1, "east")
    for name in ("node-b", "node-c", "node-d"):
        result.add_node(name, "NVIDIA-L4", 1, "east")
    yield result
    result.close()


@pytest.fixture(params=["gpu"])
def launcher(kube: Kube, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KubernetesLauncher]:
    terms = KubernetesOptions(
        maker=EngineCommands(request.param, (("m", Path("/models/m")),)),
        spellings=SPELLINGS,
        cluster=ManifestOptions("registry/potluck:1"),
        key="the key",
    )
    made = KubernetesLauncher(connect(kube.url), terms, tmp_path, str(tmp_path))
    yield made
    made.close()


def until_gone(launcher: KubernetesLauncher, kube: Kube, places: dict[str, Place]) -> None:
    until_s = time.monotonic() + 60.0
    while kube.objects["pods"]:
        launcher.look(places)
        assert time.monotonic() < until_s, kube.objects["pods"]
        time.sleep(0.02)


def test_pipeline_workers_start_first_and_the_engine_gets_their_addresses(
    kube: Kube, launcher: KubernetesLauncher
) -> None:
    places = {"p-1": launcher.start("p-1", MAKE)}
    assert sorted(kube.objects["pods"]) == NAMES
    assert wait_for_state(launcher, places, "up").url.startswith("http://127.81.0.")
    pods = kube.objects["pods"]
    assert [pods[name]["spec"]["nodeSelector"]["nvidia.com/gpu.product"] for name in NAMES] == [
        "NVIDIA-A10",
        "NVIDIA-L4",
        "NVIDIA-L4",
    ]
    assert len({pods[name]["spec"]["nodeName"] for name in NAMES}) == 3
    words = pods["p-1"]["spec"]["containers"][0]["command"]
    one, two = parse_stages(words[words.index("--stages") + 1])
    at = [(pods[name]["status"]["podIP"], 7100) for name in NAMES]
    assert [place.address for place in (*one.places, *two.places)] == at
    assert (one.layers, two.layers) == (2, 4)
    with serve.make_context("serve", list(words[3:])) as result:
        assert str(result.params["secret_file"]) == "/etc/potluck/pipeline.secret"
    secret = next(iter(kube.objects["secrets"].values()))["data"]["pipeline.secret"]
    assert secret.encode() not in (kube.folder / "p-1-w0.log").read_bytes()
    launcher.stop("p-1", places["p-1"])
    assert wait_for_state(launcher, places, "dead").problem == "was asked to end"
    until_gone(launcher, kube, {})


def test_ended_pipeline_worker_is_restarted_and_the_engine_stays(
    kube: Kube, launcher: KubernetesLauncher
) -> None:
    places = {"p-1": launcher.start("p-1", MAKE)}
    wait_for_state(launcher, places, "up")
    before = kube.processes["p-1-w1"]
    before.kill()
    until_s = time.monotonic() + 60.0
    while kube.processes.get("p-1-w1") in (before, None):
        assert launcher.look(places)[0].state == "up"
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert kube.objects["pods"]["p-1-w1"]["spec"]["restartPolicy"] == "Always"


def test_deleted_worker_pod_ends_the_whole_pipeline(kube: Kube, launcher: KubernetesLauncher) -> None:
    places = {"p-1": launcher.start("p-1", MAKE)}
    wait_for_state(launcher, places, "up")
    kube.cordon("node-b")
    on_b = next(name for name, pod in kube.objects["pods"].items() if pod["spec"]["nodeName"] == "node-b")
    until_s = time.monotonic() + 60.0
    notices: list[tuple[str, ...]] = []
    while not notices:
        launcher.look(places)
        notices = [item.engines for item in launcher.news() if item.kind == "notice"]
        assert time.monotonic() < until_s
    assert notices == [("p-1",)], "an engine is on every machine that it has a worker on"
    kube.delete("pods", on_b, 0)
    launcher._made_s[on_b] -= 60.0  # it was made a while ago
    assert wait_for_state(launcher, places, "dead").problem == f"its worker {on_b} is gone"
    until_gone(launcher, kube, places)


NODES = EngineSpec(
    "m", Layout((Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("1xL4", 1),)))), "east"
)


@pytest.mark.parametrize("launcher", ["vllm"], indirect=True)
def test_vllm_nodes_start_after_the_first_and_end_together(kube: Kube, launcher: KubernetesLauncher) -> None:
    for name in ("p-1", "p-2"):  # and again
        other = f"{name}-n1"
        places = {name: launcher.start(name, NODES)}
        assert sorted(kube.objects["pods"]) == [name], "the others must know where it is"
        wait_for_state(launcher, places, "up")
        until_s = time.monotonic() + 60.0
        while other not in kube.processes:
            launcher.look(places)
            assert time.monotonic() < until_s
        pods = kube.objects["pods"]
        assert pods[name]["spec"]["nodeName"] == "node-a"
        words = [pods[item]["spec"]["containers"][0]["command"] for item in (name, other)]
        for rank, (command, at) in enumerate(
            zip(words, ("$(POD_IP)", pods[name]["status"]["podIP"]), strict=True)
        ):
            with vllm.make_context("vllm", list(command[3:])) as result:
                told = [result.params[key] for key in ("nodes", "node_rank", "master", "stages")]
                assert told == [2, rank, f"{at}:7100", "20,12"]
        assert "readinessProbe" not in pods[other]["spec"]["containers"][0]
        kube.processes[other].kill()
        assert f"its worker {other}" in wait_for_state(launcher, places, "dead").problem
        until_gone(launcher, kube, places)
        launcher.look({})
    places = {"p-3": launcher.start("p-3", NODES)}
    wait_for_state(launcher, places, "up")
    launcher.stop("p-3", places["p-3"])
    assert wait_for_state(launcher, places, "dead").problem == "was asked to end"
    until_gone(launcher, kube, {})
