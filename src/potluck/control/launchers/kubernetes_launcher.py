"""A launcher over a cluster's API server: each engine is a pod of its own.

Not a Deployment, StatefulSet or LeaderWorkerSet: those choose for themselves which pod goes when there are to be
fewer, and start again what died where it was. Here the Brain says which replica is emptied.

An engine that was ready and has not answered for LOST_S is dead. A vLLM pipeline over several machines has a pod on
each: the first machine's pod is the engine's own; the others are created once it has an address, and all of them end
when one ends.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.control.control_values import EngineSighting, EngineSpec, NodeNews, Place
from potluck.control.launchers import cluster_launcher
from potluck.control.launchers.engine_command import with_node
from potluck.control.launchers.kube_api import ApiRefused, ApiUnreachable, KubeApi, ObjectCache
from potluck.control.launchers.kubernetes_pods import (
    GRACE_S,
    STAGE_PORT,
    Manifest,
    ManifestOptions,
    cluster_nodes,
    elsewhere_than,
    engine_container,
    is_cordoned,
    is_ready,
    pod_template,
    spelled_there,
    workers_of,
)
from potluck.control.launchers.process import healthy
from potluck.control.market import ClusterNode
from potluck.core.errors import CapacityError, PotluckError

PORT, KV_PORT = 8100, 9100
LOST_S = 5.0  # Without an answer for so long, an engine that was ready is dead.
BAN_S = 60.0  # For so long a node whose engine fell silent gets nothing; Kubernetes has decided by then.
PLACE_S = 120.0  # In which a node must be found, and its image.
FRESH_S = 10.0  # In which a pod that was made must be seen.
HTTP_THREADS = 8
FIRST_NODE = "%first%"  # In commands of a vLLM's other machines, until the first has an address.
OF_A_SERVER = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
OWNER = "potluck/owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(cluster_launcher.ClusterOptions):
    cluster: ManifestOptions


class KubernetesLauncher(cluster_launcher.ClusterLauncher):
    def __init__(
        self,
        api: KubeApi,
        options: KubernetesOptions,
        folder: Path,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        lost_s: float = LOST_S,
    ) -> None:
        super().__init__(options, folder, owner, clock)
        self._api, self._lost_s = api, lost_s
        self._cluster = replace(options.cluster, secret=f"potluck-{self._mark}")
        self._path = f"/api/v1/namespaces/{options.cluster.namespace}"
        self._pods = ObjectCache(api, f"{self._path}/pods", f"{OWNER}={self._mark}")
        self._nodes = ObjectCache(api, "/api/v1/nodes")
        self._heard_s: dict[str, float] = {}
        self._made_s: dict[str, float] = {}
        self._ending: set[str] = set()
        self._known: dict[str, bool] = {}  # Nodes, and whether they were cordoned, at the last look.
        self._askers = ThreadPoolExecutor(HTTP_THREADS, thread_name_prefix="potluck-ask")
        if not (self._pods.wait(30.0) and self._nodes.wait(30.0)):
            problem = self._pods.problem or self._nodes.problem or "it does not answer"
            raise CapacityError(f"--on: kubernetes: {problem}")

    def there(self) -> tuple[ClusterNode, ...]:
        labels = (self._cluster.gpu_label, self._cluster.region_label)
        return cluster_nodes(self._nodes.now().values(), *labels, silent=self._silent)

    # Starting.

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
        nodes, there = engine_spec.nodes, self.there()
        gpus = [spelled_there(self._spelling(node), there) for node in nodes]
        region = engine_spec.region if any(node.region for node in there) else ""
        engine_commands = replace(self._maker, host="$(POD_IP)")
        # The image has its own Python; what comes behind it is the same everywhere.
        words = ["potluck", *engine_commands.command(engine_spec, PORT, KV_PORT)[3:]]
        at = words.index("--json") + 1
        words[at:at] = ["--api-key-file", "/etc/potluck/engine.key"]
        place: Place = {"pod": pod_name_of(name), "namespace": self._cluster.namespace}
        if (
            len(nodes) > 1 and engine_commands.style == "vllm"
        ):  # other styles are one process for the whole replica
            return self._start_nodes(place, words, engine_spec, [(gpu, region) for gpu in gpus])
        engine = engine_container(words, (PORT, KV_PORT), nodes[0].tp, self._cluster)
        self._create([self._pod(str(place["pod"]), "engine", (gpus[0], region), engine)])
        return place

    def _start_nodes(
        self, place: Place, words: list[str], engine_spec: EngineSpec, on: list[tuple[str, str]]
    ) -> Place:
        """The first machine of a vLLM that is on several; the others are kept until it has an address."""
        names = [str(place["pod"]), *(f"{place['pod']}-n{rank}" for rank in range(1, len(engine_spec.nodes)))]
        pods = []
        for rank, (name, node) in enumerate(zip(names, engine_spec.nodes, strict=True)):
            command = with_node(words, engine_spec, rank, FIRST_NODE if rank else f"$(POD_IP):{STAGE_PORT}")
            container = engine_container(command, (PORT, KV_PORT), node.tp, self._cluster)
            if rank:  # it serves nothing
                container = {key: container[key] for key in container if key not in OF_A_SERVER}
            pods.append(self._pod(name, "worker" if rank else "engine", on[rank], container))
        self._create(pods[:1])
        return {**place, "workers": names[1:], "nodes": pods[1:]}

    def _create(self, pods: list[Manifest]) -> None:
        """All of them, or none."""
        done: list[str] = []
        try:
            self._keep_secret()
            for pod in pods:
                self._pods.put(self._api.ask("POST", f"{self._path}/pods", pod))
                done.append(pod["metadata"]["name"])
        except (ApiRefused, ApiUnreachable) as error:
            for name in done:
                self._delete(name, insist=True)
            raise CapacityError(str(error)) from error
        self._made_s |= dict.fromkeys(done, self._clock())

    def _pod(self, name: str, part: str, on: tuple[str, str], container: Manifest) -> Manifest:
        """`on` are the GPUs and the region of its node, as their labels have them."""
        labels = {"app": "potluck", "potluck/part": part, "potluck/engine": name, OWNER: self._mark}
        template = pod_template(labels, *on, [container], self._cluster)
        spec = {**template["spec"], "restartPolicy": "Never", **elsewhere_than(self._silent)}
        metadata = {"name": name, "namespace": self._cluster.namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _begin_nodes(self, place: Place, pods: Mapping[str, Manifest]) -> None:
        first = pods.get(str(place["pod"]), {})
        address, nodes = first.get("status", {}).get("podIP"), place["nodes"]
        if (
            not address
            or self._begun(place, pods)
            or place["pod"] in self._ending
            or not isinstance(nodes, list)
        ):
            return
        with suppress(CapacityError):  # it is tried again at the next look
            self._create([_with_first(pod, f"{address}:{STAGE_PORT}") for pod in nodes])

    def _begun(self, place: Place, pods: Mapping[str, Manifest]) -> bool:
        """Whether the other machines of a vLLM were asked for: all at once, so one tells of all."""
        return any(name in pods or name in self._made_s for name in workers_of(place))

    def _keep_secret(self) -> None:
        """Create the Secret with the engines' API key, mounted in each pod."""
        data = {"engine.key": base64.b64encode(self._key.encode()).decode()}
        metadata = {"name": self._cluster.secret, "labels": {OWNER: self._mark}}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        try:
            self._api.ask("POST", f"{self._path}/secrets", body)
        except ApiRefused as error:
            if error.status != 409:  # it is there already
                raise

    # Looking.

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        if self._pods.problem:
            return ()  # state unknown; nothing changes
        now_s = self._clock()
        pods = self._pods.now()
        for place in places.values():
            if "nodes" in place:
                self._begin_nodes(place, pods)
        self._ask_engines(pods, now_s)
        self._look_at_nodes(pods, places, now_s)
        engine_sightings = tuple(self._seen(name, place, pods, now_s) for name, place in places.items())
        known = {pod for place in places.values() for pod in pods_of(place)}
        for name in pods.keys() - known:
            # Started, but not recorded, as the controller was killed in between.
            self._delete(name)
        return engine_sightings

    def _ask_engines(self, pods: Mapping[str, Manifest], now_s: float) -> None:
        engines = {name: pod for name, pod in pods.items() if part_of(pod) == "engine"}
        ready = [name for name, pod in engines.items() if is_ready(pod) or name in self._heard_s]
        answers = self._askers.map(lambda each: healthy(url_of(pods[each])), ready)
        for name, well in zip(ready, answers, strict=True):
            if well:
                self._heard_s[name] = now_s
                self._silent.pop(node_of(pods[name]), None)
            else:
                self._heard_s.setdefault(name, now_s)

    def _seen(self, name: str, place: Place, pods: Mapping[str, Manifest], now_s: float) -> EngineSighting:
        pod_name = str(place.get("pod", ""))
        pod = pods.get(pod_name)
        waits = "nodes" in place and (pod_name in self._ending or not self._begun(place, pods))
        lame = "" if waits else self._lame(place, pods, now_s)
        if lame:
            for worker in pods_of(place):
                self._delete(worker, insist=True)
            return EngineSighting(name, "dead", problem=lame)
        if pod is None:
            asked = pod_name in self._ending
            if not asked and now_s - self._made_s.get(pod_name, -FRESH_S) < FRESH_S:
                return EngineSighting(name, "starting")
            self._forget(pod_name)
            return EngineSighting(name, "dead", problem="was asked to end" if asked else "its pod is gone")
        problem = self._problem(pod, now_s)
        if problem:
            self._keep_last_words(name, pod_name)
            self._delete(pod_name, insist=True)
            return EngineSighting(name, "dead", problem=problem)
        return EngineSighting(name, "up", url_of(pod)) if is_ready(pod) else EngineSighting(name, "starting")

    def _lame(self, place: Place, pods: Mapping[str, Manifest], now_s: float) -> str:
        """Which of its workers an engine has lost for good; they are gone together."""
        for name in workers_of(place):
            pod = pods.get(name)
            if pod is None and now_s - self._made_s.get(name, -FRESH_S) >= FRESH_S:
                return f"its worker {name} is gone"
            problem = self._problem(pod, now_s) if pod is not None else ""
            if problem:
                return f"its worker {name}: {problem}"
        return ""

    def _problem(self, pod: Manifest, now_s: float) -> str:
        """Why a pod's engine is dead; empty where it is not."""
        name, status = pod["metadata"]["name"], pod.get("status", {})
        if status.get("phase") in ("Failed", "Succeeded"):
            return "was asked to end" if name in self._ending else last_state(status)
        heard_s = self._heard_s.get(name)
        if heard_s is not None and now_s - heard_s > self._lost_s:
            node = node_of(pod)
            quiet = f"has not answered for {now_s - heard_s:.1f} s"
            self._silence(node, node, f"its engine {name} {quiet}", now_s)
            return f"{quiet}, on {node}"
        if heard_s is None and now_s - self._made_s.setdefault(name, now_s) > PLACE_S and not node_of(pod):
            return f"no node was found within {PLACE_S:g} s: {unplaced(status)}"
        return ""

    def _look_at_nodes(self, pods: Mapping[str, Manifest], places: dict[str, Place], now_s: float) -> None:
        self._silent = {node: at_s for node, at_s in self._silent.items() if now_s - at_s < BAN_S}
        nodes = self._nodes.now()
        engines = {pod: name for name, place in places.items() for pod in pods_of(place)}
        for name, node in nodes.items():
            if is_cordoned(node) and not self._known.get(name):
                here = [engines[pod] for pod, one in pods.items() if node_of(one) == name and pod in engines]
                why = "it is cordoned; its engines are emptied"
                self._news.append(NodeNews("notice", name, why, float(GRACE_S), tuple(here)))
        if self._known:
            left, joined = "it left the cluster", "it joined the cluster"
            self._news += cluster_launcher.node_changes(self._known, nodes.keys(), left, joined)
        self._known = {name: is_cordoned(node) for name, node in nodes.items()}

    def _keep_last_words(self, name: str, pod: str) -> None:
        with suppress(PotluckError, OSError):
            message = self._api.text(f"{self._path}/pods/{pod}/log", tailLines=200)
            self._keep_log(name, message.encode(), anew=True)

    # Ending.

    def stop(self, name: str, place: Place) -> None:
        pod = str(place.get("pod", ""))
        if pod and pod not in self._ending:
            self._ending.add(pod)
            self._delete(pod)

    def kill(self, name: str, place: Place) -> None:
        if place.get("pod"):
            self._delete(str(place["pod"]), insist=True)

    def _delete(self, pod: str, insist: bool = False) -> None:
        """Kubernetes lets it drain, or with insistence forgets it at once; what fails is tried at the next look."""
        grace = 0 if insist else GRACE_S
        with suppress(ApiRefused, ApiUnreachable):
            self._api.ask("DELETE", f"{self._path}/pods/{pod}", None, gracePeriodSeconds=grace)

    def _forget(self, pod: str) -> None:
        self._ending.discard(pod)
        self._heard_s.pop(pod, None)
        self._made_s.pop(pod, None)

    def close(self) -> None:
        for mirror in (self._pods, self._nodes):
            mirror.close()
        self._askers.shutdown(wait=False)


def _with_first(pod: Manifest, address: str) -> Manifest:
    """A pod whose command names where the first machine is found."""
    (container,) = pod["spec"]["containers"]
    command = [address if word == FIRST_NODE else word for word in container["command"]]
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "command": command}]}}


def pod_name_of(name: str) -> str:
    """As a name in DNS; the end of an engine's name tells it from all others."""
    plain = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower())
    return plain[-50:].strip("-")


def pods_of(place: Place) -> list[str]:
    return [str(place.get("pod", "")), *workers_of(place)]


def url_of(pod: Manifest) -> str:
    return f"http://{pod.get('status', {}).get('podIP', '')}:{PORT}"


def part_of(pod: Manifest) -> str:
    return str(pod["metadata"].get("labels", {}).get("potluck/part"))


def node_of(pod: Mapping[str, Any]) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def last_state(status: Mapping[str, Any]) -> str:
    for item in status.get("containerStatuses", ()):
        ended = item.get("state", {}).get("terminated")
        if ended:
            text = " ".join(str(ended.get("message") or ended.get("reason") or "").split())[-300:]
            return f"ended with {ended.get('exitCode')}: {text or 'it printed nothing'}"
    return str(status.get("message") or status.get("reason") or "ended and printed nothing")


def unplaced(status: Mapping[str, Any]) -> str:
    for item in status.get("conditions", ()):
        if item.get("type") == "PodScheduled" and item.get("status") != "True":
            return str(item.get("message") or item.get("reason") or "no reason was given")
    return "no reason was given"
