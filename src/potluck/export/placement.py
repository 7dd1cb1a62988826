"""From a plan to the machines that it rents, the engines on them, and the processes of each engine.

A *box* is one rented machine. What one copy rents is shared by its own replicas alone, as it was planned. An engine
on one box is one process. A vLLM pipeline over several boxes is a process for each stage, of which the first (rank 0)
serves HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import yaml

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import (
    WeightFormats,
    as_stored,
    only_gpu_of,
    parallel_of,
    vllm_formats,
)
from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.layout import Layout, StageNode
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import NodeType, Region, Role

PORT, KV_PORT, STAGE_PORT = 8100, 9100, 7100  # Of the first engine of a box; the others have the next ones.
PORTS_APART = 16  # Room for an engine's workers, each of which has a port of its own for KV.
LABEL = 42  # Letters of a name, to which copy, replica and rank are added: a StatefulSet's may have 52.


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
    slot: int = 0  # Which of the box's processes it is; its ports follow from that.

    @property
    def kv_port(self) -> int:
        return KV_PORT + PORTS_APART * self.slot

    @property
    def stage_port(self) -> int:
        return STAGE_PORT + self.slot


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

    @property
    def port(self) -> int:
        return PORT + self.footings[0].slot

    @property
    def kv_port(self) -> int:
        return self.footings[0].kv_port

    @property
    def box(self) -> RentedMachine:
        return self.footings[0].box

    @property
    def alone(self) -> bool:
        """Whether all of it is on one box."""
        return all(machine_share.box == self.box for machine_share in self.footings)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """All that a plan asks to be started."""

    boxes: tuple[RentedMachine, ...]
    placements: tuple[EnginePlacement, ...]


def placed_plan_of(plan: Plan, nodes: Sequence[NodeType], regions: Sequence[Region]) -> PlacedPlan:
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
    """As a name in DNS: at most LABEL letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-LABEL:].strip("-")


@dataclass(slots=True)
class _Ground:
    """What was given out so far."""

    types: Mapping[str, NodeType]
    regions: Mapping[str, Region]
    free: dict[RentedMachine, list[int]] = field(default_factory=dict)
    slots: dict[RentedMachine, int] = field(default_factory=dict)
    placements: list[EnginePlacement] = field(default_factory=list)

    def copy(self, template: Template, region: str, stem: str, copy: int) -> None:
        boxes = self._boxes(template, region, f"{stem}-{copy}")
        for machine in boxes:
            self.free.setdefault(machine, list(range(machine.node.gpus)))
        for index, replica in enumerate(template.replicas):
            footings = [
                self._footing(template, boxes, node, number)
                for number, stage in enumerate(replica.layout.stages)
                for node in stage.nodes
            ]
            name = f"{stem}-{copy}-{index}"
            about = (template.name, index, copy, template.model, replica.role, region, replica.layout)
            self.placements.append(EnginePlacement(name, *about, self._with_slots(footings)))

    def _with_slots(self, footings: list[MachineShare]) -> tuple[MachineShare, ...]:
        """An engine on one box takes one of its slots, a pipeline over several one for each stage."""
        alone = len({machine_share.box for machine_share in footings}) == 1
        result: list[MachineShare] = []
        for machine_share in footings:
            taken = self.slots.get(machine_share.box, 0)
            if result and alone:
                taken -= 1
            self.slots[machine_share.box] = taken + 1
            result.append(replace(machine_share, slot=taken))
        return tuple(result)

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
        for machine in boxes:
            named = not node.machine or label(node.machine) == machine.name
            if named and machine.node.name == node.node and len(self.free[machine]) >= node.tp:
                taken, self.free[machine] = self.free[machine][: node.tp], self.free[machine][node.tp :]
                return MachineShare(machine, tuple(taken), stage)
        where = f"template {template.name}"
        raise InputError(where, f"rents too few GPUs of {node.node} for what it lays out on them")


Style = Literal["vllm", "embedded"]
EVERYWHERE = "0.0.0.0"
"""The address of a gateway for clients, and of an engine whose address is not known beforehand."""
KEY_FILE = "/etc/potluck/engine.key"
SALT_FILE = "/etc/potluck/gateway.secret"
HostOf = Callable[[RentedMachine], str]  # Under which name or address a box is reached.


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine is started with so that it has what was planned with."""

    max_tokens: int  # Of its longest request.
    memory_share: float  # Of each GPU.
    kv_tokens: int
    weight_bytes: tuple[float, ...]  # Of each stage, on the GPUs of one of its nodes together.
    step_tokens: int = 0  # New tokens in a step; 0: the engine's choice.


@dataclass(frozen=True, slots=True)
class ExportedProcess:
    """One process to start: on which box, with which of its GPUs, and how."""

    name: str
    placement: EnginePlacement
    box: RentedMachine
    gpus: tuple[int, ...]
    words: tuple[str, ...]
    part: Literal["engine", "rank"]
    """The process that serves HTTP; a further rank of a vLLM pipeline."""
    footing: MachineShare


@dataclass(frozen=True, slots=True)
class CommandOptions:
    style: Style
    folders: Mapping[str, str]
    """Model to its directory on every machine."""
    key_file: str = KEY_FILE
    """File of the engines' API key; empty: it is in $POTLUCK_API_KEY."""
    weights: Mapping[str, WeightFormats] = field(default_factory=dict)
    """Model to the format that the plan has its weights in, where it says so."""
    limits: Mapping[tuple[str, int], EngineLimits] = field(default_factory=dict)
    """Template and replica to what its engine is told of lengths and memory; nothing where it has none here."""
    gateways: int = 1
    fixed_fleet: bool = False
    """Whether the gateway's scaling is turned off: it belongs to one gateway alone."""

    def limits_of(self, placement: EnginePlacement) -> EngineLimits | None:
        return self.limits.get((placement.template, placement.index))

    def processes(self, placement: EnginePlacement, listen: HostOf, host_of: HostOf) -> list[ExportedProcess]:
        """All of an engine's; `listen` is what a box's processes bind to, `host_of` how others reach it."""
        footings, name = placement.footings, placement.name
        if placement.alone:
            gpus = tuple(gpu for machine_share in footings for gpu in machine_share.gpus)
            words = self._alone(placement, listen(placement.box))
            return [ExportedProcess(name, placement, placement.box, gpus, words, "engine", footings[0])]
        return [
            ExportedProcess(
                name if not rank else f"{name}-rank{rank}",
                placement,
                machine_share.box,
                machine_share.gpus,
                self._rank(placement, rank, listen(machine_share.box), host_of),
                "engine" if not rank else "rank",
                machine_share,
            )
            for rank, machine_share in enumerate(footings)
        ]

    def on(
        self, machine: RentedMachine, placements: Sequence[EnginePlacement], listen: HostOf, host_of: HostOf
    ) -> list[ExportedProcess]:
        """The processes of one box."""
        processes = (process for one in placements for process in self.processes(one, listen, host_of))
        return [process for process in processes if process.box == machine]

    def gateway(self, folder: str, keys: str, salt_file: str = SALT_FILE) -> list[str]:
        """Of the gateway, whose files lie in `folder`; it reads the models' tokenizers."""
        files = [f"--files={name}={path}" for name, path in self.folders.items()]
        listed = [f"{folder}{name}" for name in ("plan.json", "potluck.yaml", "engines.yaml")]
        words = ["potluck", "serve", listed[0], listed[1], "--engines", listed[2], *files]
        words += ["--host", EVERYWHERE, "--keys", keys]
        if self.gateways > 1:
            words += ["--gateways", str(self.gateways), "--secret-file", salt_file]
        return [*words, *(("--policy", "scaling=none") if self.fixed_fleet else ())]

    def _alone(self, placement: EnginePlacement, listen: str) -> tuple[str, ...]:
        engine_spec = _make(placement)
        if self.style == "vllm":
            return (*self._head(placement, listen), *parallel_of(engine_spec), *self._vllms_own(placement))
        only_gpu_of(engine_spec)
        return (*self._head(placement, listen), "--device", "cuda", *self._blocks(placement))

    def _rank(self, placement: EnginePlacement, rank: int, listen: str, host_of: HostOf) -> tuple[str, ...]:
        """One of the processes of a vLLM over several machines: all but the first serve no HTTP."""
        first = placement.footings[0]
        group = ("--nodes", str(len(placement.footings)), "--node-rank", str(rank))
        own = not rank and listen != EVERYWHERE  # its own name may not lead to it yet
        master = ("--master", f"{listen if own else host_of(first.box)}:{first.stage_port}")
        words = (*self._head(placement, listen, rank), *parallel_of(_make(placement)), *group, *master)
        return (*words, *self._vllms_own(placement))

    def _head(self, placement: EnginePlacement, listen: str, rank: int = 0) -> tuple[str, ...]:
        """What all engines are told, first rank or only one: what to serve, and where."""
        kind, limits = "vllm" if self.style == "vllm" else "serve", self.limits_of(placement)
        http = () if rank else ("--port", str(placement.port))
        return (
            *("potluck", "engine", kind, "--model", self.folders[placement.model], "--name", placement.model),
            *("--host", listen, *http, "--kv-port", str(placement.footings[rank].kv_port)),
            *(("--api-key-file", self.key_file) if self.key_file else ()),
            *("--role", placement.role),
            *(() if limits is None else ("--max-tokens", str(limits.max_tokens))),
            *(("--token-budget", str(limits.step_tokens)) if limits and limits.step_tokens else ()),
        )

    def _vllms_own(self, placement: EnginePlacement) -> tuple[str, ...]:
        limits, own = (
            self.limits_of(placement),
            vllm_formats(placement.model, self.weights.get(placement.model)),
        )
        if limits is not None:
            own = ("--gpu-memory-utilization", f"{limits.memory_share:g}", *own)
        return ("--", *own) if own else ()

    def _blocks(self, placement: EnginePlacement) -> tuple[str, ...]:
        as_stored(placement.model, self.weights.get(placement.model))
        limits = self.limits_of(placement)
        return () if limits is None else ("--kv-blocks", str(max(1, limits.kv_tokens // BLOCK_TOKENS)))


def _make(placement: EnginePlacement) -> EngineSpec:
    return EngineSpec(placement.model, placement.layout, placement.region)


def roster(placed_plan: PlacedPlan, url_of: Callable[[EnginePlacement], str], key_file: str) -> str:
    engines = [
        {
            "url": url_of(one),
            "template": one.template,
            "index": one.index,
            "region": one.region,
            "key_file": key_file,
        }
        for one in placed_plan.placements
    ]
    return yaml_text({"engines": engines})


class BlockDumper(yaml.SafeDumper):
    """Texts of several lines as blocks of lines; nothing by reference: a file that people read says things twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def yaml_text(*documents: object) -> str:
    """One document, or several in one file."""
    several = len(documents) > 1
    return str(
        yaml.dump_all(
            documents,
            Dumper=BlockDumper,
            sort_keys=False,
            width=120,
            allow_unicode=True,
            explicit_start=several,
        )
    )


HUB = "hf://"
STORES = ("s3://", "gs://", "r2://", "oci://", "https://")
"""What SkyPilot mounts beside folders of the machine that launches."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?\Z")
DONE = ".complete"  # A file beside the weights once all of them are there.


@dataclass(frozen=True, slots=True)
class WeightsSource:
    source: str

    @property
    def hub(self) -> str:
        """ORG/NAME on the hub; empty: they lie elsewhere."""
        return self.source.removeprefix(HUB).partition("@")[0] if self.source.startswith(HUB) else ""

    @property
    def revision(self) -> str:
        return self.source.partition("@")[2] if self.hub else ""


def weights_from(given: Mapping[str, str], mounts: bool) -> dict[str, WeightsSource]:
    """Model to where its weights come from; `mounts`: also stores and folders, which SkyPilot can mount."""
    result = {}
    for model, source in given.items():
        if source.startswith(HUB):
            if not _HUB_NAME.match(source.removeprefix(HUB)):
                raise InputError(
                    "--weights", f"{source!r} is not like hf://ORG/NAME or hf://ORG/NAME@REVISION"
                )
        elif not mounts:
            where = "lie on each machine or in a volume (--models, --volume)"
            raise InputError("--weights", f"{source!r}: only hf://ORG/NAME is pulled; other weights {where}")
        elif "://" in source and not source.startswith(STORES):
            raise InputError(
                "--weights", f"{source!r} must begin with hf://, {', '.join(STORES)} or be a folder"
            )
        result[model] = WeightsSource(source)
    return result


def pull_words(weights: WeightsSource, folder: str, tokenizer: bool = False) -> list[str]:
    """The hub's own command, for all of a model or for what a gateway reads of it: tokenizer and chat template.

    What is there already is not fetched again; $HF_TOKEN opens what is closed.
    """
    revision = ("--revision", weights.revision) if weights.revision else ()
    texts = ("--include", "*.j*") if tokenizer else ()
    return ["hf", "download", weights.hub, *revision, *texts, "--local-dir", folder]


def tokenizers_of(weights: Mapping[str, WeightsSource], folders: Mapping[str, str]) -> list[list[str]]:
    """How the gateway's machine gets what it reads of models that are pulled."""
    return [pull_words(item, folders[model], tokenizer=True) for model, item in weights.items() if item.hub]


def disk_bytes(weight_bytes: Sequence[float]) -> float:
    """Room for models with such weights, and half as much again for what lies beside them."""
    return 1.5 * sum(weight_bytes)
