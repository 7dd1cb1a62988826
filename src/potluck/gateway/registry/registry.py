"""The registry: what the Brain wants of the fleet beside what is there, and the news of both. Its only writer.

The Brain's `StartReplica` makes a replica *wanted*. Once a listed engine answers that may be this replica, it is
bound to it: told its role and its peers, and then the Brain hears `ReplicaReady`. An engine that is gone, or was
restarted, is `ReplicaLost`; what comes up in its place becomes another replica. A controller reads what is wanted,
starts and stops engines, and tells which there are. Without one the fleet stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from potluck.core.errors import PotluckError
from potluck.core.state import actions, events
from potluck.core.state.actions import Action
from potluck.core.state.events import Event
from potluck.core.values.kv import LEAST_CONNECTIONS
from potluck.core.values.plan import ReplicaSpec
from potluck.core.values.types import Role
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.registry.engine_client import EngineClient, EngineNoAnswer, EngineRecord, Wire
from potluck.gateway.registry.engine_list import EngineEntry, matched
from potluck.gateway.registry.server_probe import ServerUnusable, listed_text, served_name, with_model
from potluck.gateway.values import Endpoint

PLAIN: Wire = ("raw", LEAST_CONNECTIONS)
NO_REPLICA = "answers, but the plan has no replica for it"
PEERS_WAIT_S = 2.0  # So long a new replica waits for others to hear of it, who may be in trouble themselves.


class ReplicaDirectory:
    def __init__(self, wire: Callable[[str, str, str], Wire]) -> None:  # By model and regions.
        self._endpoints: dict[str, Endpoint] = {}
        self.find: Callable[[str], Endpoint | None] = self._endpoints.get
        self._wire = wire
        self._by_segments: frozenset[str] = frozenset()
        self._own: frozenset[str] = frozenset()
        self._adapters: dict[str, str] = {}

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(self._endpoints.values())

    def region_of(self, replica: str) -> str:
        endpoint = self._endpoints.get(replica)
        return "" if endpoint is None else endpoint.region

    def refresh(self) -> None:
        self._by_segments = frozenset(
            endpoint.model for endpoint in self._endpoints.values() if endpoint.kind == "segments"
        )
        self._own, self._adapters = abilities_of(self._endpoints.values())

    def segments(self, model: str) -> bool:
        """Whether engines can be reached that run segments of this model's requests, and so need their tokens."""
        return model in self._by_segments

    def owns(self, model: str) -> bool:
        """Whether all of its engines take clients' own requests (`Endpoint.own`)."""
        return model in self._own

    def adapters(self) -> Mapping[str, str]:
        """Adapters (LoRA) that all engines of a model have loaded, and the model of each."""
        return self._adapters

    def codec(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> str:
        if source_endpoint.unit and source_endpoint.unit == target_endpoint.unit:
            return source_endpoint.codec
        return self._wire(source_endpoint.model, source_endpoint.region, target_endpoint.region)[0]

    def connections(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> int:
        return self._wire(source_endpoint.model, source_endpoint.region, target_endpoint.region)[1]


def abilities_of(endpoints: Iterable[Endpoint]) -> tuple[frozenset[str], dict[str, str]]:
    """Models all of whose engines take clients' own requests; adapters that all engines of a model have."""
    by_model: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_model.setdefault(endpoint.model, []).append(endpoint)
    own = frozenset(model for model, result in by_model.items() if all(item.own for item in result))
    adapters = {
        name: model
        for model, result in by_model.items()
        for name in frozenset.intersection(*(frozenset(item.adapters) for item in result))
        if name not in by_model
    }
    return own, adapters


Tell = Callable[[Event], None]
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReplicaSlot:
    member: ReplicaSpec
    role: Role
    draining: bool = False
    engine: EngineRecord | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True)
class WantedFleet:
    replicas: tuple[tuple[ReplicaSpec, Role, bool, str], ...]
    """(which, its role, whether it is being emptied, the engine's URL or nothing)"""
    stop: tuple[str, ...]
    replan: actions.Replan | None
    version: int


class ReplicaRegistry(ReplicaDirectory):
    """Used in one event loop. `tell` is the Brain's; `busy` says how many requests the Brain has at a replica."""

    def __init__(
        self,
        tell: Tell,
        connection_pool: ConnectionPool,
        busy: Callable[[str], int],
        *,
        wire: Callable[[str, str, str], Wire] = lambda model, source, target: PLAIN,
        codec_inside: Callable[[str], str] = lambda template: "raw",
    ) -> None:
        """How KV crosses between regions, and between the replicas of a template's copy."""
        super().__init__(wire)
        self._tell, self._busy, self._codec_inside = tell, busy, codec_inside
        self.caller = EngineClient(connection_pool)
        self._slots: dict[str, ReplicaSlot] = {}
        self._engines: dict[str, EngineRecord] = {}
        self._replan: actions.Replan | None = None
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._binding = False
        self.on_endpoints: list[Callable[[], None]] = []  # Told when who can be reached has changed.
        self.on_gone: list[Callable[[str], None]] = []
        """Told which replica is gone or silent: what runs there has failed."""

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        return tuple(self._engines.values())

    def wanted(self) -> WantedFleet:
        replicas = tuple(
            (slot.member, slot.role, slot.draining, slot.engine.entry.url if slot.engine else "")
            for slot in self._slots.values()
        )
        idle = tuple(engine.entry.url for engine in self.engines if engine.up and not engine.replica)
        return WantedFleet(replicas, idle, self._replan, self._version)

    def enlist(self, entries: Iterable[EngineEntry]) -> None:
        """The whole list in place of the one before; engines that stay are not disturbed."""
        listed = {entry.name: entry for entry in entries}
        for name in [name for name in self._engines if name not in listed]:
            gone = self._engines.pop(name)
            if gone.watching is not None:
                gone.watching.cancel()
            self.lost(gone, "was removed from the list of engines")
        for name, entry in listed.items():
            engine = self._engines.get(name)
            if engine is None:
                self._engines[name] = EngineRecord(entry)
            else:
                engine.entry = entry
        self._version += 1

    def act(self, wanted: Sequence[Action]) -> None:
        for action in wanted:
            self._do(action)

    def _do(self, action: Action) -> None:
        self._version += 1
        match action:
            case actions.StartReplica(replica_spec):
                self._slots[replica_spec.id] = ReplicaSlot(replica_spec, replica_spec.role)
                self.bind()
            case actions.DrainReplica(replica) if replica in self._slots:
                self._slots[replica].draining = True
            case actions.StopReplica(replica):
                slot = self._slots.pop(replica, None)
                if slot is not None and slot.engine is not None:
                    self._release(slot.engine, "was stopped by the plan")
            case actions.FlipReplica(replica, role) if replica in self._slots:
                self._change_role(self._slots[replica], role)
            case actions.Reassign(replica_spec) if replica_spec.id in self._slots:
                self._slots[replica_spec.id].member = replica_spec
                if (endpoint := self._endpoints.get(replica_spec.id)) is not None:
                    self._endpoints[replica_spec.id] = replace(
                        endpoint, unit=replica_spec.unit, codec=self._codec_inside(replica_spec.template)
                    )
                    self._changed()
                self._change_role(self._slots[replica_spec.id], replica_spec.role)
            case actions.Replan():
                self._replan = action
            case actions.ResyncCache(replica) if replica in self._slots:
                engine = self._slots[replica].engine
                if engine is not None:
                    engine.cache_epoch = None

    def _change_role(self, slot: ReplicaSlot, role: Role) -> None:
        slot.role = role
        if slot.engine is not None and slot.engine.entry.kind == "segments":
            self._spawn(self._call(self.caller.role(slot.engine, role)))

    def planned(self) -> None:
        """Somebody answered the last Replan, or told another plan, which may have KV cross in other codecs."""
        self._replan = None
        self._version += 1
        for name, slot in self._slots.items():
            if (endpoint := self._endpoints.get(name)) is not None:
                self._endpoints[name] = replace(endpoint, codec=self._codec_inside(slot.member.template))
        self._changed()

    def heard(self, engine: EngineRecord) -> None:
        if not engine.up and not engine.replica:
            engine.note = f"{engine.entry.url} {NO_REPLICA}"
        engine.up = True
        engine.heard_s = time.monotonic()
        self._emptied_elsewhere(engine)
        if not engine.replica:
            self.bind()
            return
        slot, report = self._slots.get(engine.replica), engine.said
        if slot is None or not slot.ready or report is None:
            return
        if report.role != slot.role:
            self._spawn(self._call(self.caller.role(engine, slot.role)))  # a call before did not reach it
        if engine.peers is None and report.kv and (engine.peers_call is None or engine.peers_call[1].done()):
            self._spawn(self._call(self._share_peers(engine)))
        endpoint = self._endpoints.get(engine.replica)
        if endpoint is not None and endpoint.adapters != report.adapters:
            self._endpoints[engine.replica] = replace(endpoint, adapters=report.adapters)
            self._changed()

    def _emptied_elsewhere(self, engine: EngineRecord) -> None:
        """Somebody else empties it, another gateway perhaps: so do we, and use it for nothing until that is over."""
        empties = engine.said is not None and engine.said.state in ("draining", "drained")
        engine.drained_elsewhere = engine.drained_elsewhere and empties
        slot = self._slots.get(engine.replica)
        if empties and not engine.drained and slot is not None and slot.ready and not slot.draining:
            engine.drained_elsewhere = True
            self._tell(events.OperatorOrdered(engine.replica, "drain"))

    def silent(self, engine: EngineRecord) -> None:
        """It takes longer to answer than it ever does. The Brain hears it first: nothing new is sent there."""
        if engine.replica in self._endpoints:
            self._tell(events.ReplicaSilent(engine.replica))
            for call in self.on_gone:
                call(engine.replica)

    def lost(self, engine: EngineRecord, why: str) -> None:
        engine.up = False
        engine.peers = None
        replica = engine.replica
        if not replica:
            engine.note = why
            return
        self._release(engine, why)
        slot = self._slots.get(replica)
        if slot is None:
            return
        self._version += 1
        if not slot.ready and not slot.draining:
            slot.engine = None  # it never was there, and is still wanted
            return
        del self._slots[replica]
        for call in self.on_gone:
            call(replica)
        self._tell(events.ReplicaLost(replica, why))

    def _release(self, engine: EngineRecord, why: str) -> None:
        replica, engine.replica, engine.note = engine.replica, "", why
        engine.cache_epoch, engine.cache_after = None, 0
        if self._endpoints.pop(replica, None) is not None:
            self._changed()

    def look(self) -> None:
        for replica, slot in list(self._slots.items()):
            if slot.draining and slot.ready and not self._busy(replica):
                slot.ready = False
                engine = slot.engine
                if engine is not None and engine.entry.kind == "segments" and not engine.drained_elsewhere:
                    engine.drained = True
                    self._spawn(self._call(self.caller.drain(engine, resume=False)))
                self._tell(events.ReplicaDrained(replica))
        self.bind()

    def bind(self) -> None:
        if self._binding:
            return
        self._binding = True
        try:
            free = {engine.entry.name: engine for engine in self._engines.values() if self._is_free(engine)}
            lacking = [slot.member for slot in self._slots.values() if slot.engine is None]
            for replica_spec, entry in matched(lacking, [engine.entry for engine in free.values()]):
                engine, slot = free[entry.name], self._slots[replica_spec.id]
                problem = self._unsuited(engine, replica_spec)
                if problem:
                    engine.note = problem
                    continue
                engine.replica, engine.note, slot.engine = replica_spec.id, "", engine
                self._spawn(self._ready(engine, slot))
        finally:
            self._binding = False

    def _is_free(self, engine: EngineRecord) -> bool:
        usable = engine.said is None or engine.said.state != "failed"
        return engine.up and not engine.replica and usable and not engine.drained_elsewhere

    def _unsuited(self, engine: EngineRecord, replica_spec: ReplicaSpec) -> str:
        if engine.entry.kind == "openai" and engine.models is not None:
            return self._not_listed(engine, replica_spec)
        if engine.said is None:
            return ""
        mark = engine.said.fingerprint
        others = {
            endpoint.fingerprint
            for endpoint in self._endpoints.values()
            if endpoint.model == replica_spec.model and endpoint.fingerprint
        }
        if mark and others and mark not in others:
            return f"has other weights than the replicas of {replica_spec.model} that serve"
        return ""

    def _not_listed(self, engine: EngineRecord, replica_spec: ReplicaSpec) -> str:
        """Why a server does not serve this replica's model; one whose entry names no model must list it, unless both
        plan and server have a single model."""
        entry, names = engine.entry, [model.id for model in engine.models or ()]
        several = len({slot.member.model for slot in self._slots.values()}) > 1
        if several and not entry.model and not entry.served_model and replica_spec.model not in names:
            return (
                f"{entry.base_url} lists {listed_text(names)}, none of the plan's models; set `model:` for it"
            )
        try:
            served_name(with_model(entry, replica_spec.model), engine.models)
        except ServerUnusable as error:
            return str(error)
        return ""

    async def _ready(self, engine: EngineRecord, slot: ReplicaSlot) -> None:
        replica_spec, report = slot.member, engine.said
        try:
            served = engine.entry.served_model
            if engine.entry.kind == "segments":
                if engine.drained or (report is not None and report.state in ("draining", "drained")):
                    await self.caller.drain(engine, resume=True)
                    engine.drained = False
                if report is None or report.role != slot.role:
                    await self.caller.role(engine, slot.role)
                await self._share_peers(engine)
            elif engine.models is not None:
                served = served_name(with_model(engine.entry, replica_spec.model), engine.models)
            elif not served:
                served = await self.caller.served_model(engine)
        except (EngineNoAnswer, PotluckError, ValueError) as error:
            self.lost(engine, str(error))
            return
        if engine.replica != replica_spec.id or self._slots.get(replica_spec.id) is not slot:
            return  # it was stopped or lost meanwhile
        self._endpoints[replica_spec.id] = Endpoint(
            replica_spec.id,
            replica_spec.model,
            replica_spec.region,
            engine.entry.address,
            engine.entry.kind,
            report.kv if report else "",
            report.fingerprint if report else "",
            served or (report.model if report else ""),
            key=engine.entry.key,
            token_ids=engine.entry.token_ids,
            cache_salt=engine.entry.cache_salt,
            unit=replica_spec.unit,
            codec=self._codec_inside(replica_spec.template),
            own=report is not None and report.own,
            adapters=report.adapters if report else (),
            path_prefix=engine.entry.path_prefix,
        )
        slot.ready = True
        self._version += 1
        self._changed()
        limits = (report.kv_version, report.max_running) if report else ()
        self._tell(events.ReplicaReady(replica_spec.id, *limits))

    async def _share_peers(self, new_engine: EngineRecord) -> None:
        """All are told of each other. Two may come at once: whoever is being told already is waited for as well, as
        a replica that does not know its peers yet would fail whatever it is to fetch from them."""
        there = [engine for engine in self._engines.values() if engine.up and engine.said and engine.said.kv]
        known = frozenset(engine.said.kv for engine in there if engine.said)
        unaware = [engine for engine in there if engine.peers != known]
        if unaware:
            await asyncio.wait([self._peers_call(engine, known) for engine in unaware], timeout=PEERS_WAIT_S)
        while new_engine.peers_call is not None and not new_engine.peers_call[1].done():
            await asyncio.wait([new_engine.peers_call[1]])
        if new_engine in there and new_engine.peers is None:
            raise EngineNoAnswer("could not be told of its peers")

    def _peers_call(self, engine: EngineRecord, known: frozenset[str]) -> asyncio.Task[None]:
        before = engine.peers_call
        if before is not None and before[0] == known and not before[1].done():
            return before[1]
        task = asyncio.get_running_loop().create_task(self._send_peers(engine, known, before and before[1]))
        engine.peers_call = known, task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_peers(
        self, engine: EngineRecord, known: frozenset[str], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:  # Else what is older could arrive last.
            await asyncio.wait([before])
        if engine.peers_call is None or engine.peers_call[0] != known:
            return  # It is to hear more than that by now.
        engine.peers = None
        try:
            await self.caller.peers(engine, known - {engine.said.kv if engine.said else ""})
        except EngineNoAnswer as error:
            log.warning("an engine was not told of its peers: %s", error)
        else:
            engine.peers = known

    def _changed(self) -> None:
        self.refresh()
        for call in self.on_endpoints:
            call()

    async def _call(self, what: Coroutine[Any, Any, None]) -> None:
        """Something that may fail without harm to requests; it is said, and a role is asked for again."""
        try:
            await what
        except (PotluckError, ValueError) as error:
            log.warning("an engine did not do as asked: %s", error)

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for engine in self._engines.values():
            if engine.watching is not None:
                engine.watching.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
