"""Engines as pods: valid objects, watches, replacement of lost pods, cordoned nodes."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kube_server import Kube

from potluck.cli.up.up import up
from potluck.control.control_values import EngineSighting, EngineSpec, Place
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.kube_api import ApiRefused, KubeApi, connect
from potluck.control.launchers.kubernetes_launcher import KubernetesLauncher, KubernetesOptions
from potluck.control.launchers.kubernetes_pods import ManifestOptions, spelled_out
from potluck.control.market import NodeTypeLabels
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single

SPELLINGS = {f"1x{name}": spelled_out(NodeTypeLabels(1, (name,))) for name in ("L4", "A10", "T4")}
MAKE = EngineSpec("m", single("1xL4", 1, 2), "east")
ENGINE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *a): pass
print("listens", flush=True)
http.server.HTTPServer((sys.argv[1], 8100), Handler).serve_forever()
"""


def script(words: list[str]) -> list[str]:
    """Engines are a few lines of Python, at the address that they are told."""
    return [sys.executable, "-S", "-c", ENGINE, words[words.index("--host") + 1]]


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    (tmp_path / "pods").mkdir()
    result = Kube(tmp_path / "pods", script)
    result.add_node("node-a", "NVIDIA-L4", 1, "east")
    result.add_node("node-b", "NVIDIA-L4", 1, "east")
    result.add_node("node-c", "NVIDIA-A10", 2, "west")
    yield result
    result.close()


Made = Callable[..., KubernetesLauncher]


@pytest.fixture
def make_launcher(kube: Kube, tmp_path: Path) -> Iterator[Made]:
    launchers = []

    def make(**more: Any) -> KubernetesLauncher:
        terms = KubernetesOptions(
            maker=EngineCommands("mock"),
            spellings=SPELLINGS,
            cluster=ManifestOptions("registry/potluck:1"),
            key="the key",
        )
        launchers.append(KubernetesLauncher(connect(kube.url), terms, tmp_path, str(tmp_path), **more))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close()


def wait_for_state(launcher: KubernetesLauncher, places: dict[str, Place], state: str) -> EngineSighting:
    until_s = time.monotonic() + 60.0
    while True:
        seen = launcher.look(places)
        if seen and seen[0].state == state:
            return seen[0]
        assert time.monotonic() < until_s, seen
        time.sleep(0.02)


def test_engine_pod_is_found_by_a_successor_and_deleted(kube: Kube, make_launcher: Made) -> None:
    launcher = make_launcher()
    places = {"M.odd_name-1a2b": launcher.start("M.odd_name-1a2b", MAKE)}
    url = wait_for_state(launcher, places, "up").url
    (pod,) = kube.objects["pods"].values()
    assert pod["metadata"]["name"] == "m-odd-name-1a2b"
    assert url == f"http://{pod['status']['podIP']}:8100"
    assert pod["spec"]["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-L4"
    assert pod["spec"]["restartPolicy"] == "Never"
    (secret,) = kube.objects["secrets"].values()
    assert base64.b64decode(secret["data"]["engine.key"]) == b"the key"
    successor = make_launcher()
    assert wait_for_state(successor, places, "up").url == url
    successor.stop("M.odd_name-1a2b", places["M.odd_name-1a2b"])
    assert wait_for_state(successor, places, "dead").problem == "was asked to end"
    assert kube.objects["pods"] == {}
    # One that was started and never written down is nobody's.
    launcher.start("lost-1", MAKE)
    until_s = time.monotonic() + 60.0
    while kube.objects["pods"]:
        successor.look({})
        assert time.monotonic() < until_s
    lists = [path for method, path in kube.asked if method == "GET" and path.endswith("pods")]
    assert len(lists) == 2, "each of two launchers lists once, and watches from then on"


def test_mock_engine_is_one_pod_for_any_layout(kube: Kube, make_launcher: Made) -> None:
    pipeline = Layout((Stage(1, (StageNode("1xL4", 1),)), Stage(1, (StageNode("1xA10", 1),))))
    place = make_launcher().start("p-1", EngineSpec("m", pipeline, "east"))
    assert set(place) == {"pod", "namespace"}, "no workers of its own"
    (pod,) = kube.objects["pods"].values()
    words = pod["spec"]["containers"][0]["command"]
    assert '"stages"' in words[words.index("--emulate") + 1]


def test_impossible_kubernetes_request_is_refused_in_one_line(kube: Kube, make_launcher: Made) -> None:
    launcher = make_launcher()
    with pytest.raises(CapacityError, match="no node of the cluster has T4; it has NVIDIA-A10, NVIDIA-L4"):
        launcher.start("t-1", EngineSpec("m", single("1xT4", 1, 2), "east"))
    with pytest.raises(ApiRefused, match="refuses POST /api/v1/namespaces/potluck/pods: .*"):
        KubeApi(kube.url).ask(
            "POST", "/api/v1/namespaces/potluck/pods", {"apiVersion": "v1", "kind": "Pod", "odd": 1}
        )
    with pytest.raises(InputError, match="name a kubeconfig"):
        connect("/no/such/file")


def test_ended_pod_is_dead_with_its_last_log_line_and_is_deleted(
    kube: Kube, make_launcher: Made, tmp_path: Path
) -> None:
    launcher = make_launcher()
    places = {"m-1": launcher.start("m-1", MAKE)}
    wait_for_state(launcher, places, "up")
    kube.processes["m-1"].kill()
    assert wait_for_state(launcher, places, "dead").problem == "ended with -9: Error"
    assert launcher.log_of("m-1").read_text() == "listens\n"
    assert kube.objects["pods"] == {}


def test_silent_node_is_detected_and_avoided(kube: Kube, make_launcher: Made) -> None:
    launcher = make_launcher(lost_s=1.0)
    places = {"m-1": launcher.start("m-1", MAKE)}
    wait_for_state(launcher, places, "up")
    node = kube.objects["pods"]["m-1"]["spec"]["nodeName"]
    launcher.news()
    kube.lose(node)
    assert "has not answered for" in wait_for_state(launcher, places, "dead").problem
    assert [(item.kind, item.node) for item in launcher.news()] == [("gone", node)]
    assert [item.id for item in launcher.there() if not item.well] == [node], (
        "Kubernetes still holds it for ready"
    )
    places = {"m-2": launcher.start("m-2", MAKE)}
    wait_for_state(launcher, places, "up")
    assert {node, kube.objects["pods"]["m-2"]["spec"]["nodeName"]} == {"node-a", "node-b"}


def test_cordoned_node_gives_a_notice_and_an_expired_watch_restarts(kube: Kube, make_launcher: Made) -> None:
    launcher = make_launcher()
    places = {"m-1": launcher.start("m-1", MAKE)}
    wait_for_state(launcher, places, "up")
    kube.forget_history()
    kube.cordon("node-a")
    kube.add_node("node-d", "NVIDIA-L4", 4, "east")
    message: dict[str, Any] = {}
    until_s = time.monotonic() + 60.0
    while message.keys() != {"notice", "came"}:
        launcher.look(places)
        message |= {item.kind: item for item in launcher.news()}
        assert time.monotonic() < until_s, message
        time.sleep(0.02)
    assert (message["notice"].node, message["notice"].engines) == ("node-a", ("m-1",))
    assert message["came"].node == "node-d"
    assert {item.id: item.well for item in launcher.there()}["node-a"] is False


def test_kubernetes_example_is_valid_and_its_command_is_known() -> None:
    text = (Path(__file__).parents[2] / "examples" / "kubernetes" / "up.yaml").read_text("utf-8")
    manifests = list(yaml.safe_load_all(text))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    (deployed,) = [item for item in manifests if item["kind"] == "Deployment"]
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["potluck", "up"]
    with up.make_context("up", list(container["command"][2:])) as result:
        assert (result.params["on"], result.params["host"]) == ("kubernetes", "0.0.0.0")
