"""Engines as supervised processes on Ray nodes: placement, health, recovery and end."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from potluck.control.control_values import EngineSighting, EngineSpec, Place
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.ray_launcher import RayLauncher, RayOptions, connect
from potluck.control.market import NodeTypeLabels
from potluck.core.errors import CapacityError
from potluck.core.values.layout import Layout, Stage, StageNode, single

WITHIN_S = 300.0
SPELLINGS = {f"1x{name}": NodeTypeLabels(1, (name,)) for name in ("L4", "A10", "L40S", "H100-SXM")}
ENGINE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *a): pass
print("listens", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class ScriptEngines(EngineCommands):
    def command(self, engine_spec: EngineSpec, port: int | str, kv_port: int | str) -> list[str]:
        return [sys.executable, "-S", "-c", ENGINE, self.host, str(port)]


Made = Callable[..., RayLauncher]


@pytest.fixture
def make_launcher(cluster: tuple[Any, dict[str, Any]], tmp_path: Path) -> Iterator[Made]:
    ray = connect(cluster[0].address)

    def make(engine_commands: EngineCommands = ScriptEngines("mock"), **more: Any) -> RayLauncher:  # noqa: B008
        terms = RayOptions(
            maker=engine_commands,
            spellings=SPELLINGS,
            regions=("east", "west"),
            python=os.environ.get("POTLUCK_PYTHON", ""),
        )
        return RayLauncher(ray, terms, tmp_path, str(tmp_path), **more)

    yield make
    for named_actor in ray.util.list_named_actors(all_namespaces=True):
        with suppress(ValueError):  # It has ended meanwhile.
            ray.kill(ray.get_actor(named_actor["name"], named_actor["namespace"]))
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    for group in ray.util.placement_group_table().values():  # What a pipeline had is free for the next test.
        with suppress(ValueError):  # It has been removed meanwhile.
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
    ray.shutdown()


def wait_until(what: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    end_s = time.monotonic() + within_s
    while not (result := what()):
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.05)
    return result


def wait_for_state(launcher: RayLauncher, places: dict[str, Place], state: str) -> EngineSighting:
    def there() -> EngineSighting | None:
        (seen,) = launcher.look(places)
        assert seen.state == state or seen.state != "dead", seen
        return seen if seen.state == state else None

    engine_sighting: EngineSighting = wait_until(there)
    return engine_sighting


def node_of(launcher: RayLauncher, name: str, worker: int | None = None) -> str:
    crew = launcher._engines[name]
    actor = crew.lead if worker is None else crew.workers[worker]
    return str(actor.said["node"])


def test_ray_engine_is_on_the_node_with_its_gpu_and_is_found_again(
    cluster: tuple[Any, dict[str, Any]], make_launcher: Made, tmp_path: Path
) -> None:
    nodes, launcher = cluster[1], make_launcher()
    places = {
        name: launcher.start(name, EngineSpec("m", single(f"1x{name}", 1, 2), region))
        for name, region in (("L4", "east"), ("A10", "east"), ("L40S", "west"))
    }
    wait_until(lambda: {item.state for item in launcher.look(places)} == {"up"})
    for name in places:
        assert node_of(launcher, name) == nodes[name].node_id
    assert launcher.log_of("L4").read_text() == "listens\n", "its words are brought here"
    with pytest.raises(CapacityError, match="no node of the Ray cluster has H100-SXM; it has A10, L4, L40S"):
        launcher.start("no", EngineSpec("m", single("1xH100-SXM", 1, 2), "east"))
    # Another controller on the same state finds them; what it does not know of, it ends.
    successor = make_launcher()
    del places["A10"]
    wait_until(lambda: {item.state for item in successor.look(places)} == {"up"})
    ray = connect("")

    def names() -> set[str]:
        successor.look(places)
        return {named_actor["name"] for named_actor in ray.util.list_named_actors(all_namespaces=True)}

    wait_until(lambda: names() == {"L4", "L40S"})
    url = next(item.url for item in successor.look(places) if item.name == "L4")
    successor.stop("L4", places["L4"])
    assert wait_for_state(successor, {"L4": places["L4"]}, "dead").problem == "was asked to end"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=5)
    # So does whoever only came to end them.
    third = make_launcher()
    third.stop("L40S", places["L40S"])
    assert wait_for_state(third, {"L40S": places["L40S"]}, "dead").problem == "was asked to end"


def test_ray_pipeline_uses_all_its_nodes_and_ends_when_one_is_silent(
    cluster: tuple[Any, dict[str, Any]], make_launcher: Made
) -> None:
    nodes, launcher = cluster[1], make_launcher(lost_s=2.0)
    layout = Layout((Stage(1, (StageNode("1xL4", 1),)), Stage(1, (StageNode("1xA10", 1),))))
    places = {"p": launcher.start("p", EngineSpec("m", layout, "east"))}
    wait_for_state(launcher, places, "up")
    result = [node_of(launcher, "p"), node_of(launcher, "p", 0), node_of(launcher, "p", 1)]
    assert result == [nodes["L4"].node_id, nodes["L4"].node_id, nodes["A10"].node_id]
    ray = connect("")
    pid = ray.get(launcher._engines["p"].workers[1].handle.__ray_call__.remote(lambda self: os.getpid()))
    launcher.news()
    os.kill(pid, signal.SIGSTOP)  # as a machine that nobody hears any more
    try:
        assert "was last heard" in wait_for_state(launcher, places, "dead").problem
        assert [item.kind for item in launcher.news()] == ["gone"]
        well = {host.id: host.well for host in launcher.there()}
        assert not well[nodes["A10"].node_id]
        assert well[nodes["L4"].node_id]
        assert next(node["Alive"] for node in ray.nodes() if node["NodeID"] == nodes["A10"].node_id)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(
    "POTLUCK_PYTHON" not in os.environ, reason="needs torch: POTLUCK_PYTHON, as make test-ray sets it"
)
def test_embedded_engine_computes_on_a_ray_node(make_launcher: Made) -> None:
    from potluck.engine import shipped_model

    launcher = make_launcher(EngineCommands("gpu", (("words", shipped_model()),), device="cpu"))
    layout = single("1xL4", 1, 6)
    url = wait_for_state(launcher, {"w": launcher.start("w", EngineSpec("words", layout, "east"))}, "up").url
    body = b'{"model": "words", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}'
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
        assert b'"completion_tokens": 4' in answer.read().replace(b'":4', b'": 4')
