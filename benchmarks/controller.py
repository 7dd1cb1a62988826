"""One step of the controller with 1,000 nodes and 300 replicas, pipelines of 3 or 4 nodes in 10 regions.

A Brain wants them; the controller reads that and tells what is there in JSON, as over the gateway's port, and keeps
it in its state file; nodes are made up.

    adopt      the Brain hears of the plan, and asks for all of it
    start      the controller's turn that starts all 300
    settled    a turn in which nothing is to be done
    lost       a turn after 100 nodes died, with 30 replicas on them
    tick       the Brain's own step, with all replicas reporting
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from parts.common import peak_bytes, run
from potluck.control.control_values import EngineSighting, EngineSpec, NodeNews, Place
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayClient
from potluck.control.state_store import Lease, StateStore
from potluck.core.brain.brain import Brain
from potluck.core.state import events
from potluck.core.state.actions import Action, StartReplica
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values import plan as plans
from potluck.core.values.layout import Layout, Stage, StageNode

TEMPLATES, COPIES, REGIONS = 30, 10, 10
LOST = 30


def template_of(place: int) -> plans.Template:
    """A third of them have four nodes, the others three: 1,000 in all."""
    names = [f"1xGPU{place % 7}", f"2xGPU{place % 5}", "1xGPU0"] + (["8xGPU9"] if place % 3 == 0 else [])
    nodes = [StageNode(name, int(name[0])) for name in names]
    last = Stage(32 - 8 * (len(nodes) - 2), tuple(nodes[-2:]))
    layout = Layout((*(Stage(8, (node,)) for node in nodes[:-2]), last))
    counts = tuple(plans.NodeCount(name, names.count(name)) for name in dict.fromkeys(names))
    capacity = (plans.BucketCapacity(0, 0.0, 0.0, 4.0, 0.2, 0.03),)
    replicas = (plans.PlannedReplica("mixed", layout),)
    return plans.Template(f"t{place}", "homogeneous", "m", counts, replicas, capacity, "measured")


def plan_of() -> plans.Plan:
    templates = tuple(map(template_of, range(TEMPLATES)))
    shares = tuple(
        plans.PlannedShare(template.name, f"r{p % REGIONS}", 0, "closed", 4.0 * COPIES)
        for p, template in enumerate(templates)
    )
    deployments = tuple(plans.Deployment(share.template, share.region, COPIES) for share in shares)
    buckets = (plans.LengthBucket("m", 0, 100_000, 4.0 * COPIES * TEMPLATES),)
    return plans.Plan("auto", templates, deployments, buckets, shares, (), (), 1000.0, 0.0)


class Machines:
    """A launcher whose engines are up at the second look."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
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

    def __init__(self, brain: Brain, plan: plans.Plan) -> None:
        super().__init__("http://127.0.0.1:1")
        self._brain, self._mark, self.now_s = brain, plans.plan_mark(plan), 0.0
        self.wanted_members: dict[str, plans.ReplicaSpec] = {}
        self.urls: dict[str, str] = {}

    def hear(self, event: Any) -> None:
        self.act(self._brain.on(self.now_s, event))

    def act(self, actions: list[Action]) -> None:
        self.wanted_members |= {one.member.id: one.member for one in actions if isinstance(one, StartReplica)}

    def _said(self, method: str, path: str, body: object = None) -> bytes:
        if path == "/fleet":
            fleet = json.loads(json.dumps(body))["engines"]
            for item in fleet:
                if item["replica"] in self.wanted_members and item["replica"] not in self.urls:
                    self.urls[item["replica"]] = item["url"]
                    self.hear(events.ReplicaReady(item["replica"]))
            return b"{}"
        if path.startswith("/decisions"):
            return b'{"epoch": "e", "decisions": [], "thinks": "", "ended": {}}'
        fields = ("id", "template", "index", "model", "region", "role", "unit")
        rows = [
            {name: getattr(replica_spec, name) for name in fields}
            | {"draining": False, "url": self.urls.get(replica_spec.id, ""), "step_tokens": 2048}
            for replica_spec in self.wanted_members.values()
        ]
        return json.dumps({"replicas": rows, "replan": None, "kill": [], "plan_mark": self._mark}).encode()


def measure(quick: bool) -> dict[str, float]:
    plan = plan_of()
    facts = ReplicaFacts(1e-4, 1e-3, 0.02, 64, 20_000, 100_000)
    known = FleetFacts({"m": ModelFacts(1e5)}, {(item.name, 0): facts for item in plan.templates})
    gateway, machines = Gateway(Brain(known, Policy()), plan), Machines()
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
        timed("adopt", lambda: gateway.hear(events.PlanReceived(plan)))
        figures["replicas"] = len(gateway.wanted_members)
        used = [
            plan.template(replica_spec.template).nodes for replica_spec in gateway.wanted_members.values()
        ]
        figures["nodes"] = sum(node.count for counts in used for node in counts)
        timed("start", controller.turn)
        for _ in range(3):
            result = controller.turn()
        assert result.settled, result
        timed("settled", controller.turn, 3 if quick else 20)
        timed("tick", lambda: reports(gateway), 3 if quick else 20)
        for name in list(gateway.urls)[:LOST]:
            machines.running.pop(gateway.urls.pop(name).removeprefix("http://").rpartition(":")[0])
            del gateway.wanted_members[name]
            gateway.hear(events.ReplicaLost(name, "its node is gone"))
        gateway.hear(events.Tick())
        timed("lost", controller.turn)
        for _ in range(4):
            result = controller.turn()
        assert result.settled, result
        assert len(gateway.urls) == figures["replicas"]
        controller.close()
        store.close()
    figures["memory_mb"] = peak_bytes() / 1e6
    return figures


def reports(gateway: Gateway) -> None:
    gateway.now_s += 0.5
    for name in gateway.urls:
        gateway.hear(events.ReplicaReported(name, events.ReplicaStatus(0, 3, 0, 900, 1000, 1200, 0.02)))
    gateway.hear(events.Tick())


if __name__ == "__main__":
    targets = {f"{name}_cpu_s": ("<=", 1.0) for name in ("adopt", "start", "settled", "lost", "tick")}
    run("controller", measure, targets | {"memory_mb": ("<=", 500.0)})
