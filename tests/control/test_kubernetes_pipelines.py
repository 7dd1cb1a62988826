"""A vLLM pipeline over several machines as pods: the first machine, then the others; all of them end with one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_server import Kube
from test_kubernetes_launcher import ENGINE, SPELLINGS, wait_for_state

from potluck.cli.engine.engine import vllm
from potluck.control.control_values import EngineSpec, Place
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.kube_api import connect
from potluck.control.launchers.kubernetes_launcher import KubernetesLauncher, KubernetesOptions
from potluck.control.launchers.kubernetes_pods import ManifestOptions
from potluck.core.values.layout import Layout, Stage, StageNode


def script(words: list[str]) -> list[str]:
    """Engines are a few lines of Python, which listen where real ones would."""
    if "--node-rank" in words and words[words.index("--node-rank") + 1] != "0":
        return [sys.executable, "-S", "-c", "import time; time.sleep(999)"]
    return [sys.executable, "-S", "-c", ENGINE, words[words.index("--host") + 1]]


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    (tmp_path / "pods").mkdir()
    result = Kube(tmp_path / "pods", script, first_ip="127.81.0.")
    result.add_node("node-a", "NVIDIA-A10", 1, "east")
    for name in ("node-b", "node-c", "node-d"):
        result.add_node(name, "NVIDIA-L4", 1, "east")
    yield result
    result.close()


@pytest.fixture
def launcher(kube: Kube, tmp_path: Path) -> Iterator[KubernetesLauncher]:
    terms = KubernetesOptions(
        maker=EngineCommands("vllm", (("m", Path("/models/m")),)),
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


NODES = EngineSpec(
    "m", Layout((Stage(20, (StageNode("1xA10", 1),)), Stage(12, (StageNode("1xL4", 1),)))), "east"
)


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
