"""From a plan to the machines that it rents and the engines on them.

A *box* is one rented machine. A *seat* is one engine: a replica of a copy, with the boxes that it stands on. What one
copy rents is shared by its own replicas alone, as it was planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import yaml

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import (
    WeightFormats,
    as_stored,
    parallel_of,
    stages_of,
    vllm_formats,
)
from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, StageNode
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import NodeType, Region, Role

PORT, KV_PORT, STAGE_PORT = 8100, 9100, 7100
"""Of the first engine of a box; the others have the next ones."""
PORTS_APART = 16
"""Room for an engine's workers, each of which has a port of its own for KV."""


@dataclass(frozen=True, slots=True)
class RentedMachine:
    name: str
    region: str
    node: NodeType
    spot: bool = False


@dataclass(frozen=True, slots=True)
class MachineShare:
    """What an engine has of one box: GPUs by their numbers there, and as which worker of which stage."""

    box: RentedMachine
    gpus: tuple[int, ...]
    stage: int


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    name: str
    template: str
    index: int
    copy: int
    model: str
    role: Role
    region: str
    layout: Layout
    footings: tuple[MachineShare, ...]
    """One for each worker, stage by stage; the engine itself is on the first."""
    port: int
    kv_port: int

    @property
    def box(self) -> RentedMachine:
        return self.footings[0].box

    @property
    def alone(self) -> bool:
        """Whether all of it is on one box."""
        return all(footing.box == self.box for footing in self.footings)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """All that a plan asks to be started."""

    boxes: tuple[RentedMachine, ...]
    placements: tuple[EnginePlacement, ...]

    def on(self, box: RentedMachine) -> tuple[EnginePlacement, ...]:
        """Engines whose HTTP side is on this box."""
        return tuple(placement for placement in self.placements if placement.box == box)


def roomed(plan: Plan, nodes: Sequence[NodeType], regions: Sequence[Region]) -> PlacedPlan:
    """Boxes and seats; InputError where the plan names what the spec does not have."""
    ground = _Ground({node.name: node for node in nodes}, {region.name: region for region in regions})
    for number, template in enumerate(plan.templates):
        for deployment in plan.deployments:
            if deployment.template == template.name:
                stem = label(f"{template.model}-{number}-{deployment.region}")
                for copy in range(deployment.count):
                    ground.copy(template, deployment.region, stem, copy)
    return PlacedPlan(tuple(ground.free), tuple(ground.placements))


def label(text: str) -> str:
    """As a name in DNS: at most 50 letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-50:].strip("-")


@dataclass(slots=True)
class _Ground:
    """What was given out so far."""

    types: Mapping[str, NodeType]
    regions: Mapping[str, Region]
    free: dict[RentedMachine, list[int]] = field(default_factory=dict)
    engines: dict[RentedMachine, int] = field(default_factory=dict)
    placements: list[EnginePlacement] = field(default_factory=list)

    def copy(self, template: Template, region: str, stem: str, copy: int) -> None:
        boxes = self._boxes(template, region, f"{stem}-{copy}")
        for box in boxes:
            self.free.setdefault(box, list(range(box.node.gpus)))
        for index, replica in enumerate(template.replicas):
            footings = tuple(
                self._footing(template, boxes, node, number)
                for number, stage in enumerate(replica.layout.stages)
                for node in stage.nodes
            )
            first = footings[0].box
            before = self.engines.get(first, 0)
            self.engines[first] = before + 1
            name = f"{stem}-{copy}-{index}"
            ports = PORT + before, KV_PORT + PORTS_APART * before
            about = (template.name, index, copy, template.model, replica.role, region, replica.layout)
            self.placements.append(EnginePlacement(name, *about, footings, *ports))

    def _boxes(self, template: Template, region: str, stem: str) -> list[RentedMachine]:
        if region not in self.regions:
            raise InputError(f"plan: region {region}", "is not in the spec; give the plan's own spec")
        if template.machines:
            stages = [stage for replica in template.replicas for stage in replica.layout.stages]
            kinds = {node.machine: node.node for stage in stages for node in stage.nodes}
            return [RentedMachine(label(name), region, self._type(kind)) for name, kind in kinds.items()]
        machines: list[RentedMachine] = []
        for wanted in template.nodes:
            offer, kind = self.regions[region].offer(wanted.node), self._type(wanted.node)
            spot = offer is not None and offer.spot
            for _ in range(wanted.count):
                machines.append(RentedMachine(f"{stem}-box{len(machines)}", region, kind, spot))
        return machines

    def _type(self, name: str) -> NodeType:
        if name not in self.types:
            raise InputError(f"plan: node {name}", "is not in the spec; give the plan's own spec")
        return self.types[name]

    def _footing(
        self, template: Template, boxes: Sequence[RentedMachine], node: StageNode, stage: int
    ) -> MachineShare:
        """The first that has room: what was planned to share a box is next to each other in the template."""
        for box in boxes:
            named = not node.machine or label(node.machine) == box.name
            if named and box.node.name == node.node and len(self.free[box]) >= node.tp:
                taken, self.free[box] = self.free[box][: node.tp], self.free[box][node.tp :]
                return MachineShare(box, tuple(taken), stage)
        where = f"template {template.name}"
        raise InputError(where, f"rents too few GPUs of {node.node} for what it lays out on them")


Style = Literal["vllm", "embedded"]
EVERYWHERE = "0.0.0.0"
"""What clients reach a gateway by, and the gateway an engine whose address nobody knows beforehand."""
KEY_FILE = "/etc/potluck/engine.key"
HostOf = Callable[[RentedMachine], str]
"""Under which name or address a box is reached."""


@dataclass(frozen=True, slots=True)
class CommandOptions:
    style: Style
    folders: Mapping[str, str]
    """Model to its directory on every machine."""
    key_file: str = KEY_FILE
    """What engines ask of whoever wants something of them; empty: it is in $POTLUCK_API_KEY."""
    secret_file: str = "/etc/potluck/pipeline.secret"
    """Of pipelines over several machines."""
    weights: Mapping[str, WeightFormats] = field(default_factory=dict)
    """Model to the format that the plan has its weights in, where it says so."""

    def engine(self, placement: EnginePlacement, listen: str, host_of: HostOf) -> list[str]:
        """Of one engine, on its first box; `listen` is the address by which others reach it."""
        make = EngineSpec(placement.model, placement.layout, placement.region)
        kind = "vllm" if self.style == "vllm" else "serve"
        port, kv_port = str(placement.port), str(placement.kv_port)
        words = [
            *("potluck", "engine", kind, "--model", self.folders[placement.model], "--name", placement.model),
            *("--host", listen, "--port", port, "--kv-port", kv_port, "--role", placement.role),
            *(("--api-key-file", self.key_file) if self.key_file else ()),
        ]
        if self.style == "vllm":
            if not placement.alone:
                raise InputError(
                    f"template {placement.template}",
                    "is a pipeline over several machines: those run with --engine embedded, or plan without them",
                )
            own = vllm_formats(placement.model, self.weights.get(placement.model))
            return [*words, *parallel_of(make), *(("--", *own) if own else ())]
        as_stored(placement.model, self.weights.get(placement.model))
        words += ["--device", "cuda"]
        if placement.alone:
            return [*words, *stages_of(make)]
        stages_of(make)  # refuses what the engine cannot do
        return [*words, "--stages", self.elsewhere(placement, host_of), "--secret-file", self.secret_file]

    def gateway(self, folder: str, keys: str) -> list[str]:
        """Of the gateway, whose files lie in `folder`; it reads the models' tokenizers."""
        files = [f"--files={name}={path}" for name, path in self.folders.items()]
        listed = [f"{folder}{name}" for name in ("plan.json", "potluck.yaml", "engines.yaml")]
        words = ["potluck", "serve", listed[0], listed[1], "--engines", listed[2], *files]
        return [*words, "--host", EVERYWHERE, "--keys", keys]

    def elsewhere(self, placement: EnginePlacement, host_of: HostOf) -> str:
        """`--stages` of a pipeline whose workers run on their own: all of them, the engine's machine's too."""
        parts = []
        for number, stage in enumerate(placement.layout.stages):
            workers = [footing for footing in placement.footings if footing.stage == number]
            at = "+".join(f"{host_of(worker.box)}:{stage_port(placement)}" for worker in workers)
            parts.append(f"{stage.layers}@{at}")
        return ",".join(parts)

    def worker(self, placement: EnginePlacement, listen: str) -> list[str]:
        """Of a stage's worker, which reads the secret from its standard input."""
        at = f"{listen}:{stage_port(placement)}"
        return ["python3", "-m", "potluck.engine.pipeline", "--listen", at, "--stay"]


def stage_port(placement: EnginePlacement) -> int:
    return STAGE_PORT + placement.port % 100


def roster(fleet: PlacedPlan, url_of: Callable[[EnginePlacement], str], key_file: str) -> str:
    engines = [
        {
            "url": url_of(one),
            "template": one.template,
            "index": one.index,
            "region": one.region,
            "key_file": key_file,
        }
        for one in fleet.placements
    ]
    return yaml.safe_dump({"engines": engines}, sort_keys=False, width=120)


def visible(placement: EnginePlacement, box: RentedMachine) -> str:
    """CUDA_VISIBLE_DEVICES of what runs on a box for an engine."""
    return ",".join(str(gpu) for footing in placement.footings if footing.box == box for gpu in footing.gpus)
