"""A launcher on the nodes of a Ray cluster.

An engine is a process that an actor supervises, not a thing inside of the actor: it is the same program as anywhere
else, with its own signals and Python. It ends with its actor, so that no unknown process holds a GPU.

Ray notices a dead node after 12 to 15 s. Here an engine whose actor has not answered for LOST_S, and that does not
answer itself, is dead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.control.control_values import EngineSighting, EngineSpec, Place
from potluck.control.launchers import cluster_launcher
from potluck.control.launchers.local_launcher import GRACE_S
from potluck.control.launchers.process import healthy
from potluck.control.launchers.ray_actors import (
    HOST,
    KV_PORT,
    PORT,
    PYTHON,
    EngineActor,
    EngineActors,
    NodeRequest,
    Report,
    ask_of,
    cluster_nodes,
    must_name_regions,
)
from potluck.control.market import ClusterNode
from potluck.core.errors import CapacityError, InputError

LOST_S = 3.0  # Without a word from an actor for so long, its engine is asked directly.
BAN_S = 20.0  # For so long a node that was not heard gets nothing; Ray knows by then whether it is dead.
PLACE_S = 90.0
WAIT_S = 0.25
NODES_S = 1.0
SWEEP_S = 5.0  # Between two sweeps of all nodes for unknown actors.
KEY_VARIABLE = "POTLUCK_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(cluster_launcher.ClusterOptions):
    regions: tuple[str, ...]
    python: str = ""  # Of the environment that engines run in, on every node; empty: Ray's own.


def connect(address: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InputError("--on", "ray: needs Ray; install potluck[ray]") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())[:160]
            problem = f"ray: no cluster answers at {address!r} ({text}); `ray start --head` on one machine"
            raise CapacityError(f"--on: {problem}") from error
    return ray


class RayLauncher(cluster_launcher.ClusterLauncher):
    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        folder: Path,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        lost_s: float = LOST_S,
    ) -> None:
        super().__init__(options, folder, owner, clock)
        self._ray, self._lost_s, self._python = ray, lost_s, options.python
        self._authority = "" if options.maker.tls is None else options.maker.tls[2]
        self._space = f"potluck-{self._mark}"
        self._engines: dict[str, EngineActors] = {}
        self._nodes: list[Mapping[str, Any]] = list(ray.nodes())
        self._nodes_s = self._swept_s = clock()
        must_name_regions(self._nodes, options.regions)

    def there(self) -> tuple[ClusterNode, ...]:
        return cluster_nodes(self._nodes, self._silent)

    # Starting.

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
        asks = self._asks(engine_spec)
        words = self._words(engine_spec)
        actors = EngineActors(self._ray, self._space, name, len(asks) if len(asks) > 1 else 0, self._clock())
        environment = {KEY_VARIABLE: self._key} if self._key else {}
        actors.create(asks, environment, self._python, self._authority)
        self._engines[name] = actors
        place: Place = {
            "ray": self._space,
            "workers": len(actors.workers),
            "words": words,
            "kv_ports": self._maker.workers(engine_spec),
        }
        self._begin(actors, place)
        return place

    def _asks(self, engine_spec: EngineSpec) -> list[NodeRequest]:
        there = self._nodes, self._silent
        return [
            ask_of(self._spelling(node), node.tp, engine_spec.region, *there, machine=node.machine)
            for node in engine_spec.nodes
        ]

    def _words(self, engine_spec: EngineSpec) -> list[str]:
        """The command of an engine, with placeholders for what its node fills in."""
        engine_commands = replace(self._maker, host=HOST)
        if len(engine_spec.nodes) > 1 and engine_commands.style == "vllm":
            line = "vLLM over several machines is not started on Ray; plan with `limits: {max_stages: 1}`"
            raise InputError("layout", line)
        return [
            PYTHON if word == sys.executable else word
            for word in engine_commands.command(engine_spec, PORT, KV_PORT)
        ]

    def _begin(self, actors: EngineActors, place: Place) -> None:
        """Start the engine's process once all of its nodes are reserved."""
        words = _listed(place.get("words"))
        if actors.began or any(actor.said["state"] != "up" for actor in actors.workers):
            return
        actors.tell(actors.lead, "begin", words, int(str(place.get("kv_ports", 1))))
        actors.began = True

    # Looking.

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        now_s = self._clock()
        for name, place in places.items():
            self._actors(name, place)
        self._hear(places, now_s)
        self._look_at_nodes(now_s)
        engine_sightings = tuple(self._seen(name, place, now_s) for name, place in places.items())
        self._sweep(places, now_s)
        return engine_sightings

    def _actors(self, name: str, place: Place) -> EngineActors | None:
        """An engine's actors, also where another controller started them."""
        if name not in self._engines and place.get("ray") == self._space:
            count = int(str(place.get("workers", 0)))
            self._engines[name] = EngineActors(self._ray, self._space, name, count, self._clock())
        return self._engines.get(name)

    def _hear(self, places: Mapping[str, Place], now_s: float) -> None:
        engines = [actors for name, actors in self._engines.items() if name in places]
        awaited = [item for actors in engines for item in actors.ask()]
        ready: set[Any] = set()
        if awaited:
            done, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=WAIT_S)
            ready = set(done)
        for actors in engines:
            written = actors.hear(ready, now_s)
            if written:
                with suppress(OSError):
                    self._keep_log(actors.name, written)
            for actor in actors.members:
                if actor.heard_s == now_s:
                    self._silent.pop(actor.said["node"], None)

    def _seen(self, name: str, place: Place, now_s: float) -> EngineSighting:
        actors = self._engines.get(name)
        if actors is None:
            return EngineSighting(name, "dead", problem="was never started")
        self._begin(actors, place)
        problem = self._problem(actors, now_s)
        if problem:
            actors.end()
            del self._engines[name]
            asked = actors.stopped_s is not None
            return EngineSighting(name, "dead", problem="was asked to end" if asked else problem)
        if actors.stopped_s is not None and now_s - actors.stopped_s > GRACE_S:
            actors.tell(actors.lead, "stop", True)
        text = actors.lead.said
        if text["state"] != "up":
            return EngineSighting(name, "starting")
        return EngineSighting(name, "up", self._url(text))

    def _problem(self, actors: EngineActors, now_s: float) -> str:
        """Why an engine is dead; empty where it is not."""
        stopped_s = actors.stopped_s
        if stopped_s is not None and actors.lead.heard_s is None and now_s - stopped_s > self._lost_s:
            return "was asked to end before it began"
        for actor in actors.members:
            if actor.gone:
                return actor.gone
            if actor.said["state"] == "dead":
                return str(actor.said["problem"])
            if actor.heard_s is None:
                if now_s - actors.since_s > PLACE_S:
                    return f"Ray found no node for it within {PLACE_S:g} s"
                continue
            quiet_s, node = now_s - actor.heard_s, actor.said["node"]
            if (actor.cut_off or quiet_s > self._lost_s) and not self._answers(actors, actor):
                unreached = "cannot be reached, " if actor.cut_off else ""
                why = f"node {node[:12]} {unreached}was last heard {quiet_s:.1f} s ago"
                self._silence(node, node[:12], why, now_s)
                return why
        return ""

    def _answers(self, actors: EngineActors, actor: EngineActor) -> bool:
        """Whether the engine is well though the actor beside it is not heard: it is busy, or Ray is."""
        return actor is actors.lead and healthy(self._url(actor.said), authority=self._authority)

    def _url(self, said: Report) -> str:
        return f"{'https' if self._authority else 'http'}://{said['address']}"

    def _look_at_nodes(self, now_s: float) -> None:
        if now_s - self._nodes_s < NODES_S:
            return
        before = {node["NodeID"] for node in self._nodes if node.get("Alive")}
        self._nodes, self._nodes_s = list(self._ray.nodes()), now_s
        now = {node["NodeID"] for node in self._nodes if node.get("Alive")}
        known = before - (self._silent.keys() - now)
        dead, joined = "Ray says that it is dead", "it joined the Ray cluster"
        self._news += cluster_launcher.node_changes(known, now, dead, joined, short=12)
        # One that Ray still holds for alive, after the time in which it finds out, is: only our actor was gone.
        silent = self._silent.items()
        self._silent = {node: at_s for node, at_s in silent if node in now and now_s - at_s < BAN_S}

    def _sweep(self, places: Collection[str], now_s: float) -> None:
        """Actors that were started but not recorded."""
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for actor in self._ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] == self._space and name.partition("/")[0] not in places:
                with suppress(ValueError, self._ray.exceptions.RayError):
                    self._ray.kill(self._ray.get_actor(name, self._space))

    # Ending.

    def stop(self, name: str, place: Place) -> None:
        actors = self._actors(name, place)
        if actors is not None and actors.stopped_s is None:
            actors.stopped_s = self._clock()
            actors.tell(actors.lead, "stop")

    def kill(self, name: str, place: Place) -> None:
        actors = self._actors(name, place)
        if actors is not None:
            actors.tell(actors.lead, "stop", True)


def _listed(value: object) -> Sequence[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
