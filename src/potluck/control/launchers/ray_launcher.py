"""A launcher on the nodes of a Ray cluster.

An engine is a process that an actor supervises, not a thing inside of the actor: so it is the same program as
anywhere else, with its own signals, its own Python where it needs one, and memory that Ray's own threads do not
share. It ends with its actor, so that no GPU is held by what nobody knows.

Ray notices a dead node after 12 to 15 s. Here every actor is asked at every look, and an engine whose actor has not
answered for LOST_S, and that does not answer itself, is dead: its node gets nothing more until it is heard again.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.launcher import EngineSighting, NodeNews, Place
from potluck.control.launchers.local_launcher import GRACE_S
from potluck.control.launchers.process import healthy
from potluck.control.launchers.ray_actors import (
    HOST,
    KV_PORT,
    PORT,
    PYTHON,
    SECRET_FILE,
    EngineActor,
    EngineActors,
    Errand,
    Report,
)
from potluck.control.market import ClusterNode, NodeTypeLabels, Spellings
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


LOST_S = 3.0
"""Without a word from an actor for so long, its engine is asked directly."""
BAN_S = 20.0
"""For so long a node that was not heard gets nothing; Ray knows by then whether it is dead."""
PLACE_S = 90.0
"""In which Ray must find a node."""
WAIT_S = 0.25
"""For answers, in one look."""
NODES_S = 1.0
SWEEP_S = 5.0
"""Between two looks at all nodes; for actors that nobody knows."""
KEY_VARIABLE = "POTLUCK_API_KEY"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What engines of a cluster are started with."""

    maker: EngineCommands
    spellings: Spellings
    regions: tuple[str, ...]
    key: str = ""
    """What engines ask of whoever wants something of them."""
    python: str = ""
    """Of the environment that engines run in, on every node; empty: Ray's own."""


def connect(address: str) -> Any:
    """Ray, joined to a cluster that runs."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InputError("--on", "ray: needs Ray; install potluck[ray]") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = " ".join(str(error).split())[:160]
            problem = f"ray: no cluster answers at {address!r} ({said}); `ray start --head` on one machine"
            raise CapacityError(f"--on: {problem}") from error
    return ray


class RayLauncher:
    """`owner` is the controller's mark, the same after a restart. Used from one thread."""

    def __init__(
        self,
        ray: Any,
        terms: RayOptions,
        folder: Path,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        lost_s: float = LOST_S,
    ) -> None:
        self._ray, self._terms, self._folder, self._clock = ray, terms, folder, clock
        self._lost_s = lost_s
        self._authority = "" if terms.maker.tls is None else terms.maker.tls[2]
        self._space = f"potluck-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        self._crews: dict[str, EngineActors] = {}
        self._silent: dict[str, float] = {}
        """Nodes that we hold for dead, and since when."""
        self._news: list[NodeNews] = []
        self._nodes: list[Mapping[str, Any]] = list(ray.nodes())
        self._nodes_s = self._swept_s = clock()
        must_name_regions(self._nodes, terms.regions)

    def log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def there(self) -> tuple[ClusterNode, ...]:
        """The cluster as it is now."""
        return cluster_nodes(self._nodes, self._silent)

    # Starting.

    def start(self, name: str, make: EngineSpec) -> Place:
        asks = self._asks(make)
        words, worker = self._words(make, len(asks))
        errand: Errand = "worker" if worker else "stand"
        crew = EngineActors(self._ray, self._space, name, len(asks) if len(asks) > 1 else 0, self._clock())
        environment = {KEY_VARIABLE: self._terms.key} if self._terms.key else {}
        crew.create(asks, errand, environment, secrets.token_urlsafe(24), self._terms.python, self._authority)
        self._crews[name] = crew
        place: Place = {
            "ray": self._space,
            "workers": len(crew.workers),
            "words": words,
            "worker": worker,
            "kv_ports": self._terms.maker.workers(make),
        }
        self._begin(crew, place)
        return place

    def _asks(self, make: EngineSpec) -> list[NodeRequest]:
        """One for each node of the layout."""
        found = []
        for stage in make.layout.stages:
            for node in stage.nodes:
                if node.node not in self._terms.spellings:
                    raise CapacityError(f"{node.node} is not in the spec that this service was started with")
                kind = self._terms.spellings[node.node]
                found.append(
                    ask_of(kind, node.tp, make.region, self._nodes, self._silent, machine=node.machine)
                )
        return found

    def _words(self, make: EngineSpec, nodes: int) -> tuple[list[str], list[str]]:
        """The command of an engine, and of each of its workers where it has some; what nodes fill in is left open."""
        maker = replace(self._terms.maker, host=HOST)
        if nodes > 1 and maker.style == "vllm":
            raise InputError(
                "layout", "pipelines over several nodes run with --engine gpu, or plan without them"
            )
        words = [PYTHON if word == sys.executable else word for word in maker.command(make, PORT, KV_PORT)]
        if nodes == 1 or maker.style != "gpu":
            return words, []
        at = words.index("--stages") + 1
        numbers = iter(range(nodes))
        parts = [
            f"{stage.layers}@{'+'.join(f'%{next(numbers)}%' for _ in stage.nodes)}"
            for stage in make.layout.stages
        ]
        words[at] = ",".join(parts)
        words += ["--secret-file", SECRET_FILE]
        tls = () if maker.tls is None else ("--tls", *maker.tls)
        return words, [PYTHON, "-m", "potluck.engine.pipeline", "--listen", f"{HOST}:0", "--stay", *tls]

    def _begin(self, crew: EngineActors, place: Place) -> None:
        """Start what can be started: workers at once, the engine when all of them listen."""
        words, worker = _listed(place.get("words")), _listed(place.get("worker"))
        for member in crew.workers if worker else ():
            if not crew.began and member.said["state"] == "starting":
                crew.tell(member, "begin", worker)
        if crew.began or any(member.said["state"] != "up" for member in crew.workers):
            return
        for number, member in enumerate(crew.workers):
            words = [word.replace(f"%{number}%", str(member.said["address"])) for word in words]
        crew.tell(crew.lead, "begin", words, int(str(place.get("kv_ports", 1))))
        crew.began = True

    # Looking.

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        now_s = self._clock()
        for name, place in places.items():
            self._crew(name, place)
        self._hear(places, now_s)
        self._look_at_nodes(now_s)
        found = tuple(self._seen(name, place, now_s) for name, place in places.items())
        self._sweep(places, now_s)
        return found

    def _crew(self, name: str, place: Place) -> EngineActors | None:
        """An engine's actors, also where another controller started them."""
        if name not in self._crews and place.get("ray") == self._space:
            count = int(str(place.get("workers", 0)))
            self._crews[name] = EngineActors(self._ray, self._space, name, count, self._clock())
        return self._crews.get(name)

    def _hear(self, places: Mapping[str, Place], now_s: float) -> None:
        crews = [crew for name, crew in self._crews.items() if name in places]
        awaited = [each for crew in crews for each in crew.ask()]
        ready: set[Any] = set()
        if awaited:
            done, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=WAIT_S)
            ready = set(done)
        for crew in crews:
            written = crew.hear(ready, now_s)
            if written:
                self.log_of(crew.name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError), self.log_of(crew.name).open("ab") as file:
                    file.write(written)
            for member in crew.members:
                if member.heard_s == now_s:
                    self._silent.pop(member.said["node"], None)

    def _seen(self, name: str, place: Place, now_s: float) -> EngineSighting:
        crew = self._crews.get(name)
        if crew is None:
            return EngineSighting(name, "dead", problem="was never started")
        self._begin(crew, place)
        problem = self._problem(crew, now_s)
        if problem:
            crew.end()
            del self._crews[name]
            asked = crew.stopped_s is not None
            return EngineSighting(name, "dead", problem="was asked to end" if asked else problem)
        if crew.stopped_s is not None and now_s - crew.stopped_s > GRACE_S:
            crew.tell(crew.lead, "stop", True)
        said = crew.lead.said
        return (
            EngineSighting(name, "up", self._url(said))
            if said["state"] == "up"
            else EngineSighting(name, "starting")
        )

    def _problem(self, crew: EngineActors, now_s: float) -> str:
        """Why an engine is dead; empty where it is not."""
        if crew.stopped_s is not None and crew.lead.heard_s is None and now_s - crew.stopped_s > self._lost_s:
            return "was asked to end before it began"
        for member in crew.members:
            if member.gone:
                return member.gone
            if member.said["state"] == "dead":
                return str(member.said["problem"])
            if member.heard_s is None:
                if now_s - crew.since_s > PLACE_S:
                    return f"Ray found no node for it within {PLACE_S:g} s"
            elif (member.cut_off or now_s - member.heard_s > self._lost_s) and not self._answers(
                crew, member
            ):
                node = member.said["node"]
                heard = f"was last heard {now_s - member.heard_s:.1f} s ago"
                why = f"node {node[:12]} {'cannot be reached, ' if member.cut_off else ''}{heard}"
                if node not in self._silent:
                    self._silent[node] = now_s
                    self._news.append(NodeNews("gone", node[:12], why))
                return why
        return ""

    def _answers(self, crew: EngineActors, member: EngineActor) -> bool:
        """Whether the engine is well though the actor beside it is not heard: it is busy, or Ray is."""
        return member is crew.lead and healthy(self._url(member.said), authority=self._authority)

    def _url(self, said: Report) -> str:
        return f"{'https' if self._authority else 'http'}://{said['address']}"

    def _look_at_nodes(self, now_s: float) -> None:
        if now_s - self._nodes_s < NODES_S:
            return
        before = {node["NodeID"] for node in self._nodes if node.get("Alive")}
        self._nodes, self._nodes_s = list(self._ray.nodes()), now_s
        now = {node["NodeID"] for node in self._nodes if node.get("Alive")}
        for node in sorted(before - now - self._silent.keys()):
            self._news.append(NodeNews("gone", node[:12], "Ray says that it is dead"))
        for node in sorted(now - before):
            self._news.append(NodeNews("came", node[:12], "it joined the Ray cluster"))
        # One that Ray still holds for alive, after the time in which it finds out, is: only our actor was gone.
        self._silent = {
            node: since_s for node, since_s in self._silent.items() if node in now and now_s - since_s < BAN_S
        }

    def _sweep(self, places: Collection[str], now_s: float) -> None:
        """Actors that were started and never written down: nobody counts on them."""
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for each in self._ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == self._space and each["name"].partition("/")[0] not in places:
                with suppress(ValueError, self._ray.exceptions.RayError):
                    self._ray.kill(self._ray.get_actor(each["name"], self._space))

    # Ending.

    def stop(self, name: str, place: Place) -> None:
        crew = self._crew(name, place)
        if crew is not None and crew.stopped_s is None:
            crew.stopped_s = self._clock()
            crew.tell(crew.lead, "stop")

    def kill(self, name: str, place: Place) -> None:
        crew = self._crew(name, place)
        if crew is not None:
            crew.tell(crew.lead, "stop", True)

    def news(self) -> tuple[NodeNews, ...]:
        found, self._news = tuple(self._news), []
        return found


def _listed(value: object) -> Sequence[str]:
    return [str(each) for each in value] if isinstance(value, list) else []
