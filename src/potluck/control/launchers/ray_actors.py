"""An engine on a Ray cluster: what is asked of its nodes, the actor beside its process, and all actors of one engine.

Actors are detached, so they outlive the controller, and have names, so a successor finds them. An engine that stands
in for a pipeline over several nodes reserves each of them by an actor, in one placement group: all nodes or none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from potluck.control.launchers.process import Ports, ProcessId, alive, end, healthy, last_words, rotate, spawn
from potluck.control.market import ClusterNode, NodeTypeLabels
from potluck.core.errors import CapacityError, InputError, PotluckError

TYPE = "accelerator_type:"  # What Ray calls the resource that names a node's GPUs.
TYPE_LABEL, NODE_LABEL = "ray.io/accelerator-type", "ray.io/node-id"
REGION_LABELS = ("ray.io/availability-region", "region")
MACHINE_LABEL = "machine"
LITTLE = 0.001  # Of a resource that only says what a node is.
ODD = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class NodeRequest:
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
    result = []
    for node in nodes:
        resources, labels = node.get("Resources", {}), node.get("Labels", {})
        region = next((labels[region_label] for region_label in REGION_LABELS if region_label in labels), "")
        name = str(node["NodeID"])
        well = bool(node.get("Alive")) and name not in silent
        result.append(ClusterNode(name, region, tuple(_gpus(resources, labels).items()), well))
    return tuple(result)


def _gpus(resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, int]:
    whole = int(resources.get("GPU", 0))
    names = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    if TYPE_LABEL in labels:
        names.append(labels[TYPE_LABEL])
    others = {name: count for name, count in resources.items() if name not in ODD and ":" not in name}
    own = {name: int(count) for name, count in others.items() if count >= 1}
    return {**own, **{name: whole for name in names if whole}}


def ask_of(
    node_labels: NodeTypeLabels,
    gpus: int,
    region: str,
    nodes: Sequence[Mapping[str, Any]],
    silent: Collection[str] = (),
    machine: str = "",
) -> NodeRequest:
    """What to ask for `gpus` GPUs of a kind: by Ray's own type, by a resource of that name, or by a label."""
    there = [node for node in nodes if node.get("Alive")]
    used = {name for node in there for name in node.get("Labels", {})}
    labels = dict.fromkeys([name for name in REGION_LABELS if name in used][:1], region)
    if machine:
        labels[MACHINE_LABEL] = machine
    known = sorted(item for item in silent if any(node["NodeID"] == item for node in there))
    if known:
        labels[NODE_LABEL] = f"!in({','.join(known)})"
    for name in node_labels.names:
        if any(f"{TYPE}{name}" in node["Resources"] for node in there):
            return NodeRequest(gpus, {f"{TYPE}{name}": LITTLE}, labels)
        if any(name in node["Resources"] for node in there):
            return NodeRequest(0, {name: float(gpus)}, labels)
        if any(node.get("Labels", {}).get(TYPE_LABEL) == name for node in there):
            return NodeRequest(gpus, {}, {**labels, TYPE_LABEL: name})
    has = sorted({name for host in cluster_nodes(there) for name, _ in host.gpus})
    name = node_labels.names[0]
    raise CapacityError(
        f"no node of the Ray cluster has {name}; it has {', '.join(has) or 'no GPUs'} "
        f"(start nodes with --resources '{{\"{name}\": 1}}', or say --gpu-label {name}=NAME)"
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


HOST, PORT, KV_PORT, PYTHON = "%host%", "%port%", "%kv_port%", "%python%"
MAX_LOG_BYTES = 65_536
ActorTask = Literal["engine", "reserve"]
"""An engine answers at its port; `reserve` only holds a node."""
Report = dict[str, Any]


class ProcessActor:
    """Used from one thread. `here` says the node's address and its name."""

    def __init__(
        self,
        name: str,
        task: ActorTask,
        environment: Mapping[str, str],
        python: str = "",
        here: Callable[[], tuple[str, str]] | None = None,
        authority: str = "",
    ) -> None:
        """`authority`: of certificates, where an engine answers over TLS."""
        self._host, self._node = (_here if here is None else here)()
        self._name, self._task, self._environment = name, task, dict(environment)
        self._python = python or sys.executable
        self._scheme, self._authority = "https" if authority else "http", authority
        folder = Path(tempfile.gettempdir()) / f"potluck-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._log = folder / f"{name.replace('/', '-')}.log"
        self._log.unlink(missing_ok=True)  # of one by this name that was killed
        self._pid: ProcessId | None = None
        self._port = 0
        self._problem = ""
        self._asked = False

    def begin(self, words: Sequence[str], kv_ports: int = 1) -> None:
        """Start the process; once, however often it is asked for."""
        if self._pid is not None or self._problem or not words:
            return
        try:
            ports = Ports(self._host)
            self._port = ports.free() if PORT in words else 0
            filled = self._filled(words, ports.free(kv_ports) if KV_PORT in words else 0)
            self._pid = spawn(filled, self._environment, self._log, with_us=True)
        except (PotluckError, OSError) as error:
            self._problem = " ".join(str(error).split())[:300]

    def _filled(self, words: Sequence[str], kv_port: int) -> list[str]:
        values = {HOST: self._host, PORT: str(self._port), KV_PORT: str(kv_port), PYTHON: self._python}
        filled = []
        for word in words:
            for token, value in values.items():
                word = word.replace(token, value)
            filled.append(word)
        return filled

    def report(self, after: int = 0) -> Report:
        rotate(self._log)
        written, at = self._written(after)
        state, address = self._state()
        problem = self._problem
        if state == "dead" and not problem:
            words = last_words(self._log) or "ended and printed nothing"
            problem = "was asked to end" if self._asked else words
        status = {"state": state, "address": address, "problem": problem}
        return {**status, "node": self._node, "log": written, "log_at": at}

    def _state(self) -> tuple[str, str]:
        if self._problem or (self._pid is not None and not alive(self._pid)):
            return "dead", ""
        if self._task == "reserve":
            return "up", self._host
        if self._pid is None:
            return "starting", ""
        address = f"{self._host}:{self._port}"
        well = healthy(f"{self._scheme}://{address}", authority=self._authority)
        return ("up", address) if well else ("starting", address)

    def _written(self, after: int) -> tuple[bytes, int]:
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = after if after <= size else 0  # it was rotated
                file.seek(max(begin, size - MAX_LOG_BYTES))
                return file.read(), size
        except OSError:
            return b"", after

    def stop(self, insist: bool = False) -> None:
        self._asked = True
        if self._pid is None:
            self._problem = "was asked to end"
        else:
            end(self._pid, insist=insist)

    def forget(self) -> None:
        self.stop(insist=True)
        self._log.unlink(missing_ok=True)


def _here() -> tuple[str, str]:
    import ray
    from ray.util import get_node_ip_address

    return str(get_node_ip_address()), str(ray.get_runtime_context().get_node_id())


START_REPORT: Report = {"state": "starting", "log": b"", "log_at": 0}
START_REPORT |= dict.fromkeys(("address", "problem", "node"), "")


@dataclass(slots=True)
class EngineActor:
    """One actor as it was last heard; `EngineActors.hear` is its one mutator."""

    name: str
    handle: Any = None
    asked: Any = None
    heard_s: float | None = None
    said: Report = field(default_factory=lambda: dict(START_REPORT))
    cut_off: bool = False  # Whether it could not be reached when it was last asked.
    gone: str = ""


class EngineActors:
    """All that is known of one engine's actors. `names` has the workers first, the engine's own last."""

    def __init__(self, ray: Any, space: str, name: str, count: int, now_s: float) -> None:
        self._ray, self._space, self.name = ray, space, name
        workers = [f"{name}/{number}" for number in range(count)]
        self.members = [EngineActor(worker) for worker in (*workers, name)]
        self.began = False
        self.since_s = now_s
        self.stopped_s: float | None = None

    @property
    def workers(self) -> list[EngineActor]:
        return self.members[:-1]

    @property
    def lead(self) -> EngineActor:
        return self.members[-1]

    def create(
        self,
        asks: Sequence[NodeRequest],
        environment: Mapping[str, str],
        python: str,
        authority: str = "",
    ) -> None:
        """Ask Ray for them; it places them when it can."""
        actor = self._ray.remote(ProcessActor)
        common = {"namespace": self._space, "lifetime": "detached", "max_restarts": 0, "num_cpus": 0}
        engine = self.name, "engine", environment, python, None, authority
        if len(asks) == 1:
            gpus, resources, labels = asks[0].gpus, dict(asks[0].resources), dict(asks[0].labels)
            self.lead.handle = actor.options(
                name=self.name, num_gpus=gpus, resources=resources, label_selector=labels, **common
            ).remote(*engine)
            return
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            # The engine itself needs a sliver of the first one's bundle, else Ray may put it anywhere.
            [{**ask.bundle, "CPU": LITTLE} for ask in asks],
            strategy="PACK",
            name=self._group,
            lifetime="detached",
            bundle_label_selector=[dict(ask.labels) for ask in asks],
        )

        def at(place: int) -> Any:
            return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)

        for place, (ask, engine_actor) in enumerate(zip(asks, self.workers, strict=True)):
            engine_actor.handle = actor.options(
                name=engine_actor.name,
                num_gpus=ask.gpus,
                resources=dict(ask.resources),
                scheduling_strategy=at(place),
                **common,
            ).remote(engine_actor.name, "reserve", environment, python)
        common["num_cpus"] = LITTLE
        lead = actor.options(name=self.name, scheduling_strategy=at(0), **common)
        self.lead.handle = lead.remote(*engine)

    @property
    def _group(self) -> str:
        return f"{self._space}-{self.name}"

    def ask(self) -> list[Any]:
        for actor in self.members:
            if actor.asked is None and self._found(actor):
                actor.asked = actor.handle.report.remote(actor.said["log_at"])
        return [actor.asked for actor in self.members if actor.asked is not None]

    def _found(self, actor: EngineActor) -> bool:
        """Whether it can be asked: one that another controller started is looked up by its name."""
        if actor.handle is None and not actor.gone:
            try:
                actor.handle = self._ray.get_actor(actor.name, self._space)
            except ValueError:
                actor.gone = "is not there any more"
        return not actor.gone

    def hear(self, ready: set[Any], now_s: float) -> bytes:
        """Take the answers that have come; what was written since the last."""
        written = b""
        for actor in self.members:
            if actor.asked is None or actor.asked not in ready:
                continue
            try:
                actor.said = self._ray.get(actor.asked)
                actor.heard_s, actor.cut_off = now_s, False
                written += actor.said["log"]
            except self._ray.exceptions.ActorUnavailableError:
                actor.cut_off = True
            except self._ray.exceptions.RayError as error:
                actor.gone = _line(error)
            actor.asked = None
        return written

    def tell(self, actor: EngineActor, method: str, *values: object) -> None:
        if self._found(actor):
            getattr(actor.handle, method).remote(*values)

    def end(self) -> None:
        for actor in self.members:
            with suppress(ValueError, self._ray.exceptions.RayError):
                handle = actor.handle or self._ray.get_actor(actor.name, self._space)
                if actor.heard_s is not None and actor.asked is None and not actor.gone:
                    handle.forget.remote()
                    handle.__ray_terminate__.remote()
                else:
                    self._ray.kill(handle)
        if self.workers:
            from ray.util import get_placement_group, remove_placement_group

            with suppress(ValueError, self._ray.exceptions.RayError):
                remove_placement_group(get_placement_group(self._group))


def _line(error: BaseException) -> str:
    """The one line of what Ray says that tells why."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "died because" in line or "node" in line.lower()]
    return (telling or lines or [type(error).__name__])[0][:200]
