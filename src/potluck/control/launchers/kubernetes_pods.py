"""Pods of engines: the same whether they are exported or started by a controller."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.control.launchers.kube_api import KubeApi
from potluck.control.market import ClusterNode, NodeTypeLabels
from potluck.core.errors import CapacityError, InputError, PotluckError

Manifest = dict[str, Any]
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
GPU_LABEL, REGION_LABEL = "nvidia.com/gpu.product", "topology.kubernetes.io/region"
GPUS = "nvidia.com/gpu"
SHARED_MEMORY = "8Gi"
"""Of a pod at most: workers of one engine speak through it, and engines of one pod hand KV over."""
GRACE_S = 300  # In which what is under way may end.


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    image: str
    namespace: str = "potluck"
    models_claim: str = "potluck-models"
    gpu_label: str = GPU_LABEL  # Which label of a node names its GPUs.
    gpu_resource: str = GPUS  # As what pods ask for them.
    region_label: str = REGION_LABEL
    secret: str = "potluck"  # Its files are in /etc/potluck of every pod.
    models_folder: str = "/models"  # Where pods have the volume of the models.
    models_path: str = ""  # A folder of each node with the models, in place of the claim.


def resources(gpus: int, manifest_options: ManifestOptions, requests: Mapping[str, str] | None) -> Manifest:
    """What a container asks for: GPUs, and of the host what is known."""
    limits = {"limits": {manifest_options.gpu_resource: gpus}} if gpus else {}
    asked = {**({"requests": dict(requests)} if requests else {}), **limits}
    return {"resources": asked} if asked else {}


def engine_container(
    command: list[str],
    ports: tuple[int, int],
    gpus: int,
    manifest_options: ManifestOptions,
    requests: Mapping[str, str] | None = None,
) -> Manifest:
    """An engine that listens at these ports, for HTTP and for KV, and is emptied before it ends."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    drain = (
        "import os,time,urllib.request as r;"
        f"u='http://%s:{ports[0]}'%os.environ['POD_IP'];"
        "h={'Authorization':'Bearer '+open('/etc/potluck/engine.key').read().strip()};"
        "r.urlopen(r.Request(u+'/drain',method='POST',headers=h),timeout=5);time.sleep(5)"
    )
    return {
        "name": "engine",
        "image": manifest_options.image,
        "command": command,
        "env": [POD_IP],
        "ports": [{"name": "http", "containerPort": ports[0]}, {"name": "kv", "containerPort": ports[1]}],
        **resources(gpus, manifest_options, requests),
        "volumeMounts": [*mounts(manifest_options), {"name": "shm", "mountPath": "/dev/shm"}],
        # Weights may take long to load; a pod that does not answer is restarted after half an hour.
        "startupProbe": health | {"periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": health | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", drain]}}},
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def mounts(manifest_options: ManifestOptions) -> list[Manifest]:
    return [
        {"name": "models", "mountPath": manifest_options.models_folder, "readOnly": True},
        {"name": "secret", "mountPath": "/etc/potluck", "readOnly": True},
    ]


def volumes(manifest_options: ManifestOptions) -> list[Manifest]:
    """What `mounts` names."""
    models: Manifest = {
        "persistentVolumeClaim": {"claimName": manifest_options.models_claim, "readOnly": True}
    }
    if manifest_options.models_path:
        models = {"hostPath": {"path": manifest_options.models_path, "type": "Directory"}}
    return [
        {"name": "models", **models},
        {"name": "secret", "secret": {"secretName": manifest_options.secret, "defaultMode": 0o440}},
    ]


def pod_template(
    labels: dict[str, str],
    gpu: str,
    region: str,
    containers: list[Manifest],
    manifest_options: ManifestOptions,
) -> Manifest:
    """Containers on a node with such GPUs, as its label names them, in a region; any where it has no name."""
    selector = {
        manifest_options.gpu_label: gpu,
        **({manifest_options.region_label: region} if region else {}),
    }
    spec: Manifest = {
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "nodeSelector": selector,
        "tolerations": [{"key": manifest_options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": containers,
        "volumes": [
            *volumes(manifest_options),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        ],
    }
    return {"metadata": {"labels": labels}, "spec": spec}


STAGE_PORT = 7100
"""Where the vLLM processes of one replica meet."""


def workers_of(place: Mapping[str, object]) -> list[str]:
    result: Any = place.get("workers")
    return [str(item) for item in result] if isinstance(result, list) else []


HOSTNAME = "kubernetes.io/hostname"
PREFIXES = ("", "NVIDIA-", "Tesla-")  # What NVIDIA's feature discovery puts before a GPU's name.


def cluster_nodes(
    nodes: Iterable[Mapping[str, Any]], gpu_label: str, region_label: str, silent: Collection[str] = ()
) -> tuple[ClusterNode, ...]:
    """What the API server says; those that are cordoned, not ready or `silent` are not well."""
    result = []
    for node in nodes:
        name, labels = str(node["metadata"]["name"]), node["metadata"].get("labels", {})
        count = int(node.get("status", {}).get("allocatable", {}).get(GPUS, 0))
        gpus = ((labels[gpu_label], count),) if gpu_label in labels and count else ()
        well = is_ready(node) and not is_cordoned(node) and name not in silent
        result.append(ClusterNode(name, labels.get(region_label, ""), gpus, well))
    return tuple(result)


def there_now(api: KubeApi, regions: Collection[str]) -> tuple[ClusterNode, ...]:
    """The cluster's nodes, asked once; a plan for several regions needs nodes that say in which they are."""
    try:
        nodes = api.ask("GET", "/api/v1/nodes").get("items", ())
    except PotluckError as error:
        raise CapacityError(f"--on: kubernetes: {error}") from error
    result = cluster_nodes(nodes, GPU_LABEL, REGION_LABEL)
    if len(regions) > 1 and not any(node.region for node in result):
        line = f"kubernetes: no node has the label {REGION_LABEL}, and the spec has several regions"
        raise InputError("--on", line)
    return result


def is_ready(each: Mapping[str, Any]) -> bool:
    conditions = each.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_cordoned(node: Mapping[str, Any]) -> bool:
    return bool(node.get("spec", {}).get("unschedulable"))


def spelled_there(labels: NodeTypeLabels, nodes: Sequence[ClusterNode]) -> str:
    """What the cluster calls a GPU; CapacityError where it has none."""
    has = {name for node in nodes for name, _ in node.gpus}
    for name in spelled_out(labels).names:
        if name in has:
            return name
    raise CapacityError(
        f"no node of the cluster has {labels.names[0]}; it has {', '.join(sorted(has)) or 'no GPUs'} "
        f"(say --gpu-label {labels.names[0]}=NAME)"
    )


def spelled_out(labels: NodeTypeLabels) -> NodeTypeLabels:
    """With what feature discovery puts before names."""
    names = dict.fromkeys(prefix + name for name in labels.names for prefix in PREFIXES)
    return NodeTypeLabels(labels.gpus, tuple(names))


def elsewhere_than(silent: Collection[str]) -> dict[str, Any]:
    """The affinity of a pod that must not be on these nodes; nothing where there are none."""
    if not silent:
        return {}
    rule = {"key": HOSTNAME, "operator": "NotIn", "values": sorted(silent)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
