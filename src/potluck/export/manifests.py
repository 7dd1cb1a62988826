"""A plan as Kubernetes manifests.

Engines that are alike (the same replica of a template in the same region) are one StatefulSet, since the gateway must
know each by a name of its own. A replica over several machines is a LeaderWorkerSet: worker 0, the leader, has the
engine beside it. Nothing here is a secret: `potluck` is a Secret that somebody made with `engine.key`, `admin.key`,
`keys.jsonl` and, for pipelines, `pipeline.secret`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from potluck.control.launchers.kubernetes_pods import (
    GRACE_S,
    Manifest,
    ManifestOptions,
    engine_container,
    mounts,
    pod_template,
    volumes,
    worker_container,
)
from potluck.core.errors import InputError
from potluck.export.placement import (
    EVERYWHERE,
    CommandOptions,
    EnginePlacement,
    PlacedPlan,
    RentedMachine,
    roster,
    stage_port,
)

CONFIG = "potluck-plan"
MOST_CONFIG_BYTES = 900_000
"""Kubernetes takes 1 MiB in a ConfigMap."""


def files(
    fleet: PlacedPlan, wording: CommandOptions, cluster: ManifestOptions, served: Mapping[str, str]
) -> dict[str, str]:
    """File name to text, in the order to apply them in; `served` is what the gateway reads, by path."""
    groups: dict[str, list[EnginePlacement]] = {}
    for placement in fleet.placements:
        groups.setdefault(_group(placement), []).append(placement)
    engines: list[Manifest] = []
    for name, placements in groups.items():
        engines += _alike(name, placements, wording, cluster)
    listed = roster(fleet, lambda one: f"http://{_host(one, cluster)}:{one.port}", wording.key_file)
    given = {**served, "engines.yaml": listed}
    size = sum(len(text.encode()) for text in given.values())
    if size > MOST_CONFIG_BYTES:
        problem = f"has {size} bytes with its spec and traces; a ConfigMap holds {MOST_CONFIG_BYTES}"
        raise InputError("plan", f"{problem}: write lengths into the spec instead of traces")
    config = {"data": {_key(path): text for path, text in given.items()}}
    config = _named("v1", "ConfigMap", CONFIG, cluster) | config
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
    return {
        "00-namespace.yaml": _text([namespace]),
        "10-plan.yaml": _text([config]),
        "20-engines.yaml": _text(engines),
        "30-gateway.yaml": _text(_gateway(wording, cluster, given)),
        "40-network.yaml": _text(_network(cluster)),
    }


def _key(path: str) -> str:
    return path.replace("/", "__")


def _group(placement: EnginePlacement) -> str:
    """Without the number of its copy."""
    stem, _, index = placement.name.rpartition("-")
    return f"{stem.rpartition('-')[0]}-{index}"


def _host(placement: EnginePlacement, cluster: ManifestOptions) -> str:
    name = _group(placement)
    return f"{name}-{placement.copy}.{name}.{cluster.namespace}.svc"


def _alike(
    name: str, placements: Sequence[EnginePlacement], wording: CommandOptions, cluster: ManifestOptions
) -> list[Manifest]:
    first = placements[0]
    labels = {"app": "potluck", "potluck/engine": name, "potluck/part": "engine"}
    service = _named("v1", "Service", name, cluster) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "http", "port": first.port}, {"name": "kv", "port": first.kv_port}],
        }
    }
    budget = _named("policy/v1", "PodDisruptionBudget", name, cluster) | {
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    }
    make = _stateful if first.alone else _group_of_pods
    return [service, make(name, placements, labels, wording, cluster), budget]


def _stateful(
    name: str,
    placements: Sequence[EnginePlacement],
    labels: dict[str, str],
    wording: CommandOptions,
    cluster: ManifestOptions,
) -> Manifest:
    first = placements[0]
    command = wording.engine(first, "$(POD_IP)", lambda box: box.name)
    gpus = sum(len(footing.gpus) for footing in first.footings)
    engine = engine_container(command, (first.port, first.kv_port), gpus, cluster)
    return _named("apps/v1", "StatefulSet", name, cluster) | {
        "spec": {
            "serviceName": name,
            "replicas": len(placements),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": labels},
            "template": _pod(labels, first.box, [engine], cluster),
        }
    }


def _group_of_pods(
    name: str,
    placements: Sequence[EnginePlacement],
    labels: dict[str, str],
    wording: CommandOptions,
    cluster: ManifestOptions,
) -> Manifest:
    """One machine a pod; all machines alike, since a LeaderWorkerSet has one template for all but its leader."""
    first = placements[0]
    kinds = {footing.box.node.name for footing in first.footings[1:]}
    if len(kinds) > 1 or len({footing.box for footing in first.footings}) < len(first.footings):
        raise InputError(
            f"template {first.template}",
            "has workers on unlike machines, or several on one: a LeaderWorkerSet cannot say that; export commands",
        )
    numbers = {footing.box.name: number for number, footing in enumerate(first.footings)}

    def host_of(box: RentedMachine) -> str:
        number = numbers[box.name]
        pod = "$(LWS_LEADER_ADDRESS)" if not number else f"{name}-$(LWS_GROUP_INDEX)-{number}.{name}"
        return pod if not number else f"{pod}.{cluster.namespace}"

    command = wording.engine(first, "$(POD_IP)", host_of)
    engine = engine_container(command, (first.port, first.kv_port), 0, cluster)
    group = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
    engine["env"].append({"name": "LWS_GROUP_INDEX", "valueFrom": group})
    leads, follows = (
        worker_container(stage_port(first), len(footing.gpus), cluster) for footing in first.footings[:2]
    )
    last = first.footings[-1].box
    return _named("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, cluster) | {
        "spec": {
            "replicas": len(placements),
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": len(first.footings),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod(labels, first.box, [engine, leads], cluster),
                "workerTemplate": _pod(labels | {"potluck/part": "worker"}, last, [follows], cluster),
            },
        }
    }


def _pod(
    labels: dict[str, str], box: RentedMachine, containers: list[Manifest], cluster: ManifestOptions
) -> Manifest:
    names = cluster.gpu_names or {}
    gpu = box.node.gpu.name
    return pod_template(labels, names.get(gpu, gpu), box.region, containers, cluster)


def _gateway(wording: CommandOptions, cluster: ManifestOptions, given: Mapping[str, str]) -> list[Manifest]:
    labels = {"app": "potluck", "potluck/part": "gateway"}
    admin = ("--admin-host", EVERYWHERE, "--admin-port", "8001", "--admin-key-file", "/etc/potluck/admin.key")
    command = [*wording.gateway("/srv/", "/etc/potluck/keys.jsonl"), *admin]
    items = [{"key": _key(path), "path": path} for path in given]
    health = {"httpGet": {"path": "/health", "port": "clients"}}
    container = {
        "name": "gateway",
        "image": cluster.image,
        "command": command,
        "ports": [{"name": "clients", "containerPort": 8000}, {"name": "operators", "containerPort": 8001}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [{"name": "plan", "mountPath": "/srv", "readOnly": True}, *mounts()],
        "startupProbe": health | {"periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": health | {"periodSeconds": 5},
        "livenessProbe": health | {"periodSeconds": 10, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod = {
        "metadata": {"labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "plan", "configMap": {"name": CONFIG, "items": items}}, *volumes(cluster)],
        },
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": pod,
    }
    ports = [{"name": "clients", "port": 80, "targetPort": "clients"}]
    return [
        _named("apps/v1", "Deployment", "gateway", cluster) | {"spec": spec},
        _named("v1", "Service", "gateway", cluster) | {"spec": {"selector": labels, "ports": ports}},
        _named("v1", "Service", "operators", cluster)
        | {"spec": {"selector": labels, "ports": [{"port": 8001, "targetPort": "operators"}]}},
    ]


def _network(cluster: ManifestOptions) -> list[Manifest]:
    """Engines hear the gateway and each other, and nobody else; operators' side only from within the namespace."""
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
        _named("networking.k8s.io/v1", "NetworkPolicy", "engines", cluster) | {"spec": engines},
        _named("networking.k8s.io/v1", "NetworkPolicy", "gateway", cluster) | {"spec": gateway},
    ]


def _named(version: str, kind: str, name: str, cluster: ManifestOptions) -> Manifest:
    metadata = {"name": name, "namespace": cluster.namespace, "labels": {"app": "potluck"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


class _ManifestDumper(yaml.SafeDumper):
    """Without anchors: a file that people read says things twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(manifests: list[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_ManifestDumper, sort_keys=False, width=120, explicit_start=True)
