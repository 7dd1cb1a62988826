"""Nodes of a Kubernetes cluster as values, and which of them a pod may be on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from potluck.control.cluster import ClusterNode, NodeTypeLabels
from potluck.control.launchers.kubernetes.kube_api import KubeApi
from potluck.control.launchers.kubernetes.pods import GPU_LABEL, REGION_LABEL
from potluck.core.errors import CapacityError, InputError, PotluckError

GPUS = "nvidia.com/gpu"
HOSTNAME = "kubernetes.io/hostname"
PREFIXES = ("", "NVIDIA-", "Tesla-")
"""What NVIDIA's feature discovery puts before a GPU's name."""


def cluster_nodes(
    nodes: Iterable[Mapping[str, Any]], gpu_label: str, region_label: str, silent: Collection[str] = ()
) -> tuple[ClusterNode, ...]:
    """What the API server says; those that are cordoned, not ready or `silent` are not well."""
    found = []
    for node in nodes:
        name, labels = str(node["metadata"]["name"]), node["metadata"].get("labels", {})
        count = int(node.get("status", {}).get("allocatable", {}).get(GPUS, 0))
        gpus = ((labels[gpu_label], count),) if gpu_label in labels and count else ()
        well = is_ready(node) and not is_cordoned(node) and name not in silent
        found.append(ClusterNode(name, labels.get(region_label, ""), gpus, well))
    return tuple(found)


def there_now(api: KubeApi, regions: Collection[str]) -> tuple[ClusterNode, ...]:
    """The cluster's nodes, asked once; a plan for several regions needs nodes that say in which they are."""
    try:
        nodes = api.ask("GET", "/api/v1/nodes").get("items", ())
    except PotluckError as error:
        raise CapacityError(f"--on: kubernetes: {error}") from error
    found = cluster_nodes(nodes, GPU_LABEL, REGION_LABEL)
    if len(regions) > 1 and not any(node.region for node in found):
        raise InputError(
            "--on", f"kubernetes: no node has the label {REGION_LABEL}, and the spec has several regions"
        )
    return found


def is_ready(each: Mapping[str, Any]) -> bool:
    """Of a node or a pod, by its own conditions."""
    conditions = each.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_cordoned(node: Mapping[str, Any]) -> bool:
    return bool(node.get("spec", {}).get("unschedulable"))


def spelled_there(spelling: NodeTypeLabels, nodes: Sequence[ClusterNode]) -> str:
    """What the cluster calls a GPU; CapacityError where it has none."""
    has = {name for node in nodes for name, _ in node.gpus}
    for name in spelled_out(spelling).names:
        if name in has:
            return name
    raise CapacityError(
        f"no node of the cluster has {spelling.names[0]}; it has {', '.join(sorted(has)) or 'no GPUs'} "
        f"(say --gpu-label {spelling.names[0]}=NAME)"
    )


def spelled_out(spelling: NodeTypeLabels) -> NodeTypeLabels:
    """With what feature discovery puts before names."""
    return NodeTypeLabels(
        spelling.gpus, tuple(dict.fromkeys(p + name for name in spelling.names for p in PREFIXES))
    )


def elsewhere_than(silent: Collection[str]) -> dict[str, Any]:
    """The affinity of a pod that must not be on these nodes; nothing where there are none."""
    if not silent:
        return {}
    rule = {"key": HOSTNAME, "operator": "NotIn", "values": sorted(silent)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
