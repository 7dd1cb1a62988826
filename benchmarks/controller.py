"""One step of the controller with 1,000 nodes and 300 replicas: `python benchmarks/controller.py`.

The replicas are pipelines of 3 or 4 nodes, of 30 templates in 10 regions. A Brain wants them; the controller reads
that and tells what is there in JSON, as over the gateway's port, and keeps it in its state file; nodes are made up.

    adopt      the Brain hears of the plan, and asks for all of it
    start      the controller's turn that starts all 300
    settled    a turn in which nothing is to be done
    lost       a turn after 100 nodes died, with 30 replicas on them
    tick       the Brain's own step, with all replicas reporting
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parts.common import run
from potluck.control.control_values import EngineSpec
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayClient
from potluck.control.launchers.launcher import EngineSighting, NodeNews, Place
from potluck.control.state_store import Lease, StateStore
from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, StartReplica
from potluck.core.state.events import (
    PlanReceived,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    ReplicaStatus,
    Tick,
)
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    ReplicaSpec,
    Template,
    plan_mark,
)

TEMPLATES, COPIES, REGIONS = 30, 10, 10
LOST = 30


def template_of(place: int) -> Template:
    """A third of them have four nodes, the others three: 1,000 in all."""
    names = [f"1xGPU{place % 7}", f"2xGPU{place % 5}", "1xGPU0"] + (["8xGPU9"] if place % 3 == 0 else [])
    nodes = [StageNode(name, int(name[0])) for name in names]
    stages = (
        *(Stage(8, (node,)) for node in nodes[:-2]),
        Stage(32 - 8 * (len(nodes) - 2), tuple(nodes[-2:])),
    )
    counts = tuple(NodeCount(name, names.count(name)) for name in dict.fromkeys(names))
    capacity = (BucketCapacity(0, 0.0, 0.0, 4.0, 0.2, 0.03),)
    return Template(
        f"t{place}",
        "homogeneous",
        "m",
        counts,
        (PlannedReplica("mixed", Layout(stages)),),
        capacity,
        "measured",
    )


def plan_of() -> Plan:
    templates = tuple(map(template_of, range(TEMPLATES)))
    shares = tuple(
        PlannedShare(template.name, f"r{p % REGIONS}", 0, "closed", 4.0 * COPIES)
        for p, template in enumerate(templates)
    )
    deployments = tuple(
        Deployment(template.name, f"r{p % REGIONS}", COPIES) for p, template in enumerate(templates)
    )
    rate_per_s = 4.0 * COPIES * TEMPLATES
    return Plan(
        "auto",
        templates,
        deployments,
        (LengthBucket("m", 0, 100_000, rate_per_s),),
        shares,
        (),
        (),
        1000.0,
        0.0,
    )


class Machines:
    """A launcher whose engines are up at the second look."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}

    def start(self, name: str, make: EngineSpec) -> Place:
        self.running[name] = "starting"
        return {"pid": name}

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        result = []
        for name in places:
            state = self.running.get(name)
            if state is None:
                result.append(EngineSighting(name, "dead", problem="its node is gone"))
            else:
                self.running[name] = "up"
                url = f"http://{name}:8100" if state == "up" else ""
                result.append(EngineSighting(name, "up" if state == "up" else "starting", url))
        return tuple(result)

    def stop(self, name: str, place: Place) -> None:
        self.running.pop(name, None)

    kill = stop

    def news(self) -> tuple[NodeNews, ...]:
        return ()


class Gateway(GatewayClient):
    """A Brain behind JSON, without the sockets between."""

    def __init__(self, brain: Brain, plan: Plan) -> None:
        super().__init__("http://127.0.0.1:1")
        self._brain, self._mark, self.now_s = brain, plan_mark(plan), 0.0
        self.wanted_members: dict[str, ReplicaSpec] = {}
        self.urls: dict[str, str] = {}

    def hear(self, event: Any) -> None:
        self.act(self._brain.on(self.now_s, event))

    def act(self, actions: list[Action]) -> None:
        self.wanted_members |= {
            action.member.id: action.member for action in actions if isinstance(action, StartReplica)
        }

    def _said(self, method: str, path: str, body: object = None) -> bytes:
        if path == "/fleet":
            fleet = json.loads(json.dumps(body))["engines"]
            for item in fleet:
                if item["replica"] in self.wanted_members and item["replica"] not in self.urls:
                    self.urls[item["replica"]] = item["url"]
                    self.hear(ReplicaReady(item["replica"]))
            return b"{}"
        if path.startswith("/decisions"):
            return b'{"epoch": "e", "decisions": [], "thinks": "", "ended": {}}'
        rows = [
            {
                "id": wanted_member.id,
                "template": wanted_member.template,
                "index": wanted_member.index,
                "model": wanted_member.model,
                "region": wanted_member.region,
                "role": wanted_member.role,
                "unit": wanted_member.unit,
                "draining": False,
                "url": self.urls.get(wanted_member.id, ""),
                "step_tokens": 2048,
            }
            for wanted_member in self.wanted_members.values()
        ]
        return json.dumps({"replicas": rows, "replan": None, "kill": [], "plan_mark": self._mark}).encode()


def measure(quick: bool) -> dict[str, float]:
    plan = plan_of()
    facts = FleetFacts(
        {"m": ModelFacts(1e5)},
        {(item.name, 0): ReplicaFacts(1e-4, 1e-3, 0.02, 64, 20_000, 100_000) for item in plan.templates},
        {},
        {},
    )
    brain = Brain(facts, Policy())
    gateway, machines = Gateway(brain, plan), Machines()
    figures: dict[str, float] = {}

    def timed(name: str, work: Any, repeats: int = 1) -> None:
        before_s = time.process_time()
        for _ in range(repeats):
            work()
        figures[f"{name}_cpu_s"] = (time.process_time() - before_s) / repeats

    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(Path(folder) / "state.db")
        store.add_plan(plan, 0.0, "benchmark")
        controller = Controller(store, Lease(store), machines, gateway)
        timed("adopt", lambda: gateway.hear(PlanReceived(plan)))
        figures["replicas"] = len(gateway.wanted_members)
        figures["nodes"] = sum(
            sum(plan.template(wanted_member.template).replicas[0].layout.node_counts.values())
            for wanted_member in gateway.wanted_members.values()
        )
        timed("start", controller.turn)
        for _ in range(3):
            result = controller.turn()
        assert result.settled, result
        timed("settled", controller.turn, 3 if quick else 20)
        timed("tick", lambda: reports(gateway), 3 if quick else 20)
        for name in list(gateway.urls)[:LOST]:
            machines.running.pop(gateway.urls.pop(name).removeprefix("http://").rpartition(":")[0])
            del gateway.wanted_members[name]
            gateway.hear(ReplicaLost(name, "its node is gone"))
        gateway.hear(Tick())
        timed("lost", controller.turn)
        for _ in range(4):
            result = controller.turn()
        assert result.settled, result
        assert len(gateway.urls) == figures["replicas"]
        controller.close()
        store.close()
    scale = 1024 if sys.platform.startswith("linux") else 1
    figures["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6
    return figures


def reports(gateway: Gateway) -> None:
    gateway.now_s += 0.5
    for name in gateway.urls:
        gateway.hear(ReplicaReported(name, ReplicaStatus(0, 3, 0, 900, 1000, 1200, 0.02)))
    gateway.hear(Tick())


def main() -> int:
    names = ("adopt", "start", "settled", "lost", "tick")
    return run(
        "controller", measure, {f"{name}_cpu_s": ("<=", 1.0) for name in names} | {"memory_mb": ("<=", 500.0)}
    )


if __name__ == "__main__":
    sys.exit(main())
