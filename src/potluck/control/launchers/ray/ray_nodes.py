"""Nodes of a Ray cluster as values, and from a plan's node to what is asked of Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.control.cluster import ClusterNode, NodeTypeLabels
from potluck.core.errors import CapacityError, InputError

TYPE = "accelerator_type:"
"""What Ray calls the resource that names a node's GPUs."""
TYPE_LABEL, NODE_LABEL = "ray.io/accelerator-type", "ray.io/node-id"
REGION_LABELS = ("ray.io/availability-region", "region")
MACHINE_LABEL = "machine"
"""Of a pool whose machines have names."""
LITTLE = 0.001
"""Of a resource that only says what a node is."""
ODD = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What Ray must find on one node."""

    gpus: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def bundle(self) -> dict[str, float]:
        """Of a placement group; Ray refuses one that asks for nothing."""
        return {**({"GPU": self.gpus} if self.gpus else {}), **self.resources}


def cluster_nodes(
    nodes: Iterable[Mapping[str, Any]], silent: Collection[str] = ()
) -> tuple[ClusterNode, ...]:
    """What `ray.nodes()` says; those that are `silent` are not well, whatever Ray thinks."""
    found = []
    for node in nodes:
        resources, labels = node.get("Resources", {}), node.get("Labels", {})
        region = next((labels[each] for each in REGION_LABELS if each in labels), "")
        name = str(node["NodeID"])
        well = bool(node.get("Alive")) and name not in silent
        found.append(ClusterNode(name, region, tuple(_gpus(resources, labels).items()), well))
    return tuple(found)


def _gpus(resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, int]:
    whole = int(resources.get("GPU", 0))
    names = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    if TYPE_LABEL in labels:
        names.append(labels[TYPE_LABEL])
    own = {
        name: int(count)
        for name, count in resources.items()
        if name not in ODD and ":" not in name and count >= 1
    }
    return {**own, **{name: whole for name in names if whole}}


def ask_of(
    kind: NodeTypeLabels,
    gpus: int,
    region: str,
    nodes: Sequence[Mapping[str, Any]],
    silent: Collection[str] = (),
    machine: str = "",
) -> NodeRequest:
    """What to ask for `gpus` GPUs of a kind: by Ray's own type, by a resource of that name, or by a label."""
    there = [node for node in nodes if node.get("Alive")]
    labels: dict[str, str] = {}
    key = next(
        (each for each in REGION_LABELS if any(each in node.get("Labels", {}) for node in there)), None
    )
    if key is not None:
        labels[key] = region
    if machine:
        labels[MACHINE_LABEL] = machine
    known = sorted(each for each in silent if any(node["NodeID"] == each for node in there))
    if known:
        labels[NODE_LABEL] = f"!in({','.join(known)})"
    for name in kind.names:
        if any(f"{TYPE}{name}" in node["Resources"] for node in there):
            return NodeRequest(gpus, {f"{TYPE}{name}": LITTLE}, labels)
        if any(name in node["Resources"] for node in there):
            return NodeRequest(0, {name: float(gpus)}, labels)
        if any(node.get("Labels", {}).get(TYPE_LABEL) == name for node in there):
            return NodeRequest(gpus, {}, {**labels, TYPE_LABEL: name})
    has = sorted({name for host in cluster_nodes(there) for name, _ in host.gpus})
    raise CapacityError(
        f"no node of the Ray cluster has {kind.names[0]}; it has {', '.join(has) or 'no GPUs'} "
        f"(start nodes with --resources '{{\"{kind.names[0]}\": 1}}', or say --gpu-label {kind.names[0]}=NAME)"
    )


def must_name_regions(nodes: Iterable[Mapping[str, Any]], regions: Collection[str]) -> None:
    """A plan for several regions needs nodes that say in which they are."""
    named = {host.region for host in cluster_nodes(nodes) if host.region}
    if len(regions) > 1 and not named:
        raise InputError(
            "--on",
            f"ray: no node says in which of {', '.join(sorted(regions))} it is: start them with "
            f"`ray start --labels={REGION_LABELS[1]}=NAME`",
        )
