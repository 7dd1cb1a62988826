"""A plan as Kubernetes manifests: plain files, and a Kustomize base over them.

Engines that are alike (the same replica of a template in the same region) are one StatefulSet, since the gateway must
know each by a name of its own. A replica over several machines has a StatefulSet for each, all of one headless
Service: the pods with one number are one replica, and find each other by name. Nothing here is a secret: `potluck` is
a Secret that the operator created (`secret_files` lists its files).
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from potluck.control.launchers.kubernetes_pods import (
    GRACE_S,
    Manifest,
    ManifestOptions,
    engine_container,
    mounts,
    pod_template,
    volumes,
)
from potluck.core.errors import InputError
from potluck.export.placement import (
    DONE,
    EVERYWHERE,
    CommandOptions,
    EnginePlacement,
    ExportedProcess,
    PlacedPlan,
    RentedMachine,
    WeightsSource,
    disk_bytes,
    label,
    pull_words,
    roster,
    yaml_text,
)

CONFIG = "potluck-plan"
MAX_CONFIG_MAP_BYTES = 900_000  # Kubernetes takes 1 MiB in a ConfigMap.
GIB = 1 << 30
HOST_GIB = 12
"""Of a host's memory beside the weights: the engine's processes, and KV under way to others (4 GiB at most)."""
CPUS, CPUS_PER_GPU = 2, 2
USER = 10001  # Whom the gateway runs as.
INDEX = "POD_INDEX"
INDEX_LABEL = "metadata.labels['apps.kubernetes.io/pod-index']"
HUB_SECRET = "potluck-hub"
PLAIN, SERVED = "plain", "config"  # Folders of the plain manifests, and of what the gateway reads.


@dataclass(frozen=True, slots=True)
class GpuLabel:
    """By which label of a node a GPU is found there, and as what pods ask for it."""

    key: str
    value: str
    resource: str


@dataclass(frozen=True, slots=True)
class KubernetesExport:
    cluster: ManifestOptions  # `image` is that of engines.
    image: str  # Of the gateway and of weight downloads.
    gpus: Mapping[str, GpuLabel] = field(default_factory=dict)
    weights: Mapping[str, WeightsSource] = field(default_factory=dict)

    def on(self, machine: RentedMachine) -> tuple[ManifestOptions, str]:
        """The cluster as pods with this machine's GPUs see it, and what the label of such a node says."""
        name = machine.node.gpu.name
        known = self.gpus.get(name)
        if known is None:
            return self.cluster, name
        return replace(self.cluster, gpu_label=known.key, gpu_resource=known.resource), known.value


def files(
    placed_plan: PlacedPlan,
    command_options: CommandOptions,
    kubernetes_export: KubernetesExport,
    served: Mapping[str, str],
) -> dict[str, str]:
    """File name to text; `served` is what the gateway reads, by path."""
    manifest_options = kubernetes_export.cluster
    groups: dict[str, list[EnginePlacement]] = {}
    for placement in placed_plan.placements:
        groups.setdefault(_group(placement), []).append(placement)
    engines: list[Manifest] = []
    for name, placements in groups.items():
        engines += _alike(name, placements, command_options, kubernetes_export)
    listed = roster(
        placed_plan, lambda one: f"http://{_host(one, manifest_options)}:{one.port}", command_options.key_file
    )
    given = {**served, "engines.yaml": listed}
    size = sum(len(text.encode()) for text in given.values())
    if size > MAX_CONFIG_MAP_BYTES:
        problem = f"has {size} bytes with its spec and traces; a ConfigMap holds {MAX_CONFIG_MAP_BYTES}"
        raise InputError("plan", f"{problem}: write lengths into the spec instead of traces")
    config = _named("v1", "ConfigMap", CONFIG, manifest_options) | {
        "data": {_key(path): _readable(text) for path, text in given.items()}
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": manifest_options.namespace}}
    models = _models(placed_plan, command_options, kubernetes_export)
    texts = {
        "00-namespace.yaml": _text([namespace]),
        **({"05-models.yaml": _text(models)} if models else {}),
        "10-plan.yaml": _text([config]),
        "20-engines.yaml": _text(engines),
        "30-gateway.yaml": _text(_gateway(command_options, kubernetes_export, given)),
        "40-network.yaml": _text(_network(manifest_options)),
    }
    plain = {f"{PLAIN}/{name}": text for name, text in texts.items()}
    config_files = {f"{SERVED}/{path}": text for path, text in given.items()}
    return {**plain, **config_files, "kustomization.yaml": _kustomization(texts, given, manifest_options)}


def _kustomization(
    texts: Mapping[str, str], given: Mapping[str, str], manifest_options: ManifestOptions
) -> str:
    """A base: the plain files, but the plan from its own files, under a name that changes with it."""
    generated = {"name": CONFIG, "files": [f"{_key(path)}={SERVED}/{path}" for path in given]}
    data = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": manifest_options.namespace,
        "resources": [f"{PLAIN}/{name}" for name in texts if name != "10-plan.yaml"],
        "configMapGenerator": [generated],
    }
    return yaml_text(data)


def secret_files(command_options: CommandOptions) -> tuple[str, ...]:
    """What the Secret must have."""
    salt = ("gateway.secret",) if command_options.gateways > 1 else ()
    return ("engine.key", "admin.key", "keys.jsonl", *salt)


def _key(path: str) -> str:
    """A key of the ConfigMap for a served file: of letters, digits, `-`, `_` and `.` only, and one per path."""
    plain = path.replace("/", "__")
    if re.fullmatch(r"[-._a-zA-Z0-9]{1,200}", plain) and "__" not in path and not plain.startswith(".."):
        return plain
    safe = re.sub(r"[^-_a-zA-Z0-9]", "-", plain)[:200]
    return f"{safe}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def _group(placement: EnginePlacement) -> str:
    """Without the number of its copy."""
    stem, _, index = placement.name.rpartition("-")
    return f"{stem.rpartition('-')[0]}-{index}"


def _host(placement: EnginePlacement, manifest_options: ManifestOptions) -> str:
    name = _group(placement)
    return f"{name}-{placement.copy}.{name}.{manifest_options.namespace}.svc"


def _alike(
    name: str,
    placements: Sequence[EnginePlacement],
    command_options: CommandOptions,
    kubernetes_export: KubernetesExport,
) -> list[Manifest]:
    first, manifest_options = placements[0], kubernetes_export.cluster
    labels = {"app": "potluck", "potluck/engine": name}
    service = _named("v1", "Service", name, manifest_options) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "http", "port": first.port}, {"name": "kv", "port": first.kv_port}],
        }
    }
    engines = labels | {"potluck/part": "engine"}
    budget = _named("policy/v1", "PodDisruptionBudget", name, manifest_options) | {
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": engines}}
    }
    boxes = list(dict.fromkeys(machine_share.box for machine_share in first.footings))
    sets = {machine: name if not rank else f"{name}-r{rank}" for rank, machine in enumerate(boxes)}

    def host_of(machine: RentedMachine) -> str:
        return f"{sets[machine]}-$({INDEX}).{name}.{manifest_options.namespace}.svc"

    processes = command_options.processes(first, lambda _: "$(POD_IP)", host_of)
    made = []
    for machine, set_name in sets.items():
        here = [process for process in processes if process.box == machine]
        own = labels | {"potluck/part": "engine" if machine == first.box else "worker"}
        own |= {} if machine == first.box else {"potluck/rank": set_name}
        containers = [_container(process, command_options, kubernetes_export) for process in here]
        pod = _pod(own, here[0], containers, kubernetes_export)
        made.append(
            _stateful(
                _named("apps/v1", "StatefulSet", set_name, manifest_options), name, len(placements), pod
            )
        )
    return [service, *made, budget]


def _stateful(named: Manifest, service: str, copies: int, pod: Manifest) -> Manifest:
    return named | {
        "spec": {
            "serviceName": service,
            "replicas": copies,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": pod["metadata"]["labels"]},
            "template": pod,
        }
    }


def _pod(
    labels: dict[str, str],
    process: ExportedProcess,
    containers: list[Manifest],
    kubernetes_export: KubernetesExport,
) -> Manifest:
    manifest_options, gpu = kubernetes_export.on(process.box)
    pod = pod_template(labels, gpu, process.box.region, containers, manifest_options)
    return _after_pull(pod, [process.placement.model], kubernetes_export)


def _container(
    process: ExportedProcess, command_options: CommandOptions, kubernetes_export: KubernetesExport
) -> Manifest:
    placement, gpus, (manifest_options, _) = (
        process.placement,
        len(process.gpus),
        kubernetes_export.on(process.box),
    )
    requests = _requests(process, command_options)
    index = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": INDEX_LABEL}}}
    ports = placement.port, process.footing.kv_port
    container = engine_container(list(process.words), ports, gpus, manifest_options, requests)
    if not placement.alone:
        container["env"] = [*container["env"], index]
    if process.part == "rank":  # it serves no HTTP: no health check, no drain
        for probe in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
            del container[probe]
        container["name"] = f"rank{placement.footings.index(process.footing)}"
        container["ports"] = [{"name": "kv", "containerPort": ports[1]}]
    return container


def _requests(process: ExportedProcess, command_options: CommandOptions) -> dict[str, str]:
    """Of the host, for a process with so many GPUs and such weights; one without either needs little."""
    limits = command_options.limits_of(process.placement)
    if not process.gpus:
        return {"cpu": "1", "memory": "4Gi"}
    stages = (
        range(len(process.placement.layout.stages)) if process.placement.alone else (process.footing.stage,)
    )
    weights = sum(limits.weight_bytes[stage] for stage in stages) if limits is not None else 0.0
    memory = HOST_GIB + ceil(weights / GIB)
    return {"cpu": str(CPUS + CPUS_PER_GPU * len(process.gpus)), "memory": f"{memory}Gi"}


def _models(
    placed_plan: PlacedPlan, command_options: CommandOptions, kubernetes_export: KubernetesExport
) -> list[Manifest]:
    """A claim for models that are pulled, and for each the job that does it."""
    if not kubernetes_export.weights:
        return []
    manifest_options = kubernetes_export.cluster
    known = {
        one.model: limits
        for one in placed_plan.placements
        if (limits := command_options.limits_of(one)) is not None
    }
    room = ceil(disk_bytes([sum(limits.weight_bytes) for limits in known.values()]) / GIB) + 10
    claim = _named("v1", "PersistentVolumeClaim", manifest_options.models_claim, manifest_options) | {
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{room}Gi"}}}
    }
    return [
        claim,
        *(
            _pull(model, item, command_options.folders[model], kubernetes_export)
            for model, item in kubernetes_export.weights.items()
        ),
    ]


def _pull(model: str, weights: WeightsSource, folder: str, kubernetes_export: KubernetesExport) -> Manifest:
    manifest_options, words = kubernetes_export.cluster, pull_words(weights, folder)
    key = {"name": HUB_SECRET, "key": "token", "optional": True}
    container = {
        "name": "pull",
        "image": kubernetes_export.image,
        "command": ["sh", "-c", f"{shlex.join(words)} && touch {shlex.quote(f'{folder}/{DONE}')}"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}}, {"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
        "volumeMounts": [{"name": "models", "mountPath": manifest_options.models_folder}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    claim = {"persistentVolumeClaim": {"claimName": manifest_options.models_claim}}
    pod = {
        "metadata": {"labels": {"app": "potluck", "potluck/part": "pull"}},
        "spec": {
            "restartPolicy": "OnFailure",
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "models", **claim}],
        },
    }
    return _named("batch/v1", "Job", f"pull-{label(model)}", manifest_options) | {
        "spec": {"backoffLimit": 6, "template": pod}
    }


def _after_pull(pod: Manifest, models: Sequence[str], kubernetes_export: KubernetesExport) -> Manifest:
    """The pod, which waits for the weights of these models where they are pulled."""
    folder = kubernetes_export.cluster.models_folder.rstrip("/")
    awaited = [
        shlex.quote(f"{folder}/{model}/{DONE}") for model in models if model in kubernetes_export.weights
    ]
    if awaited:
        line = "; ".join(f"until test -e {file}; do sleep 5; done" for file in awaited)
        waiting = {
            "name": "weights",
            "image": kubernetes_export.image,
            "command": ["sh", "-c", line],
            "volumeMounts": [
                {"name": "models", "mountPath": kubernetes_export.cluster.models_folder, "readOnly": True}
            ],
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        pod["spec"] = {"initContainers": [waiting], **pod["spec"]}
    return pod


def _gateway(
    command_options: CommandOptions, kubernetes_export: KubernetesExport, given: Mapping[str, str]
) -> list[Manifest]:
    manifest_options = kubernetes_export.cluster
    labels = {"app": "potluck", "potluck/part": "gateway"}
    admin = ("--admin-host", EVERYWHERE, "--admin-port", "8001", "--admin-key-file", "/etc/potluck/admin.key")
    health = {"httpGet": {"path": "/health", "port": "clients"}}
    ready = {"httpGet": {"path": "/ready", "port": "clients"}}
    container = {
        "name": "gateway",
        "image": kubernetes_export.image,
        "command": [*command_options.gateway("/srv/", "/etc/potluck/keys.jsonl"), *admin],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "clients", "containerPort": 8000}, {"name": "operators", "containerPort": 8001}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [{"name": "plan", "mountPath": "/srv", "readOnly": True}, *mounts(manifest_options)],
        "startupProbe": health | {"periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": ready | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    items = [{"key": _key(path), "path": path} for path in given]
    pod = {
        "metadata": {"labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "runAsNonRoot": True},
            "topologySpreadConstraints": [spread],
            "containers": [container],
            "volumes": [
                {"name": "plan", "configMap": {"name": CONFIG, "items": items}},
                *volumes(manifest_options),
            ],
        },
    }
    one = {"type": "Recreate"}  # scaling and flips belong to one gateway at a time
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    spec = {
        "replicas": command_options.gateways,
        "strategy": rolling if command_options.gateways > 1 else one,
        "selector": {"matchLabels": labels},
        "template": _after_pull(pod, list(command_options.folders), kubernetes_export),
    }
    budget = _named("policy/v1", "PodDisruptionBudget", "gateway", manifest_options) | {
        "spec": {"minAvailable": command_options.gateways - 1, "selector": {"matchLabels": labels}}
    }
    ports = [{"name": "clients", "port": 80, "targetPort": "clients"}]
    return [
        _named("apps/v1", "Deployment", "gateway", manifest_options) | {"spec": spec},
        *([budget] if command_options.gateways > 1 else []),
        _named("v1", "Service", "gateway", manifest_options) | {"spec": {"selector": labels, "ports": ports}},
        _named("v1", "Service", "operators", manifest_options)
        | {"spec": {"selector": labels, "ports": [{"port": 8001, "targetPort": "operators"}]}},
    ]


def _network(manifest_options: ManifestOptions) -> list[Manifest]:
    """Engines accept connections from the gateway and each other only; operator ports only from the namespace."""
    ours = {"podSelector": {"matchLabels": {"app": "potluck"}}}
    engines = {
        "podSelector": {
            "matchExpressions": [{"key": "potluck/part", "operator": "In", "values": ["engine", "worker"]}]
        },
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [ours]}],
    }
    gateway = {
        "podSelector": {"matchLabels": {"potluck/part": "gateway"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": 8000}]}, {"from": [{"podSelector": {}}], "ports": [{"port": 8001}]}],
    }
    return [
        _named("networking.k8s.io/v1", "NetworkPolicy", "engines", manifest_options) | {"spec": engines},
        _named("networking.k8s.io/v1", "NetworkPolicy", "gateway", manifest_options) | {"spec": gateway},
    ]


def _named(version: str, kind: str, name: str, manifest_options: ManifestOptions) -> Manifest:
    metadata = {"name": name, "namespace": manifest_options.namespace, "labels": {"app": "potluck"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _text(manifests: Sequence[Manifest]) -> str:
    return "---\n" + yaml_text(*manifests).removeprefix("---\n")


def _readable(text: str) -> str:
    """Lines without blanks at their ends: YAML would write the whole as one line."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
