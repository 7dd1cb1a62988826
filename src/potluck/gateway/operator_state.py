"""What operators told a Brain, kept in files for another that takes its place: plan, engines, prices, cordons."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from potluck.core.codec import decode, encode
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.state.events import Event, OperatorOrdered
from potluck.core.state.fleet import ReplicaState
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.registry import ReplicaRegistry

T = TypeVar("T")


class OperatorState:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def only_entries(self) -> None:
        for name in ("plan", "market", "cordons"):
            (self._folder / name).unlink(missing_ok=True)

    def planned(self, plan: Plan, version: int, why: str) -> None:
        self._keep("plan", {"plan": encode(plan), "version": version, "why": why})

    def plan(self) -> tuple[Plan | None, int, str]:
        result = self._read("plan")
        if result is None:
            return None, 0, ""
        return decode(Plan, result["plan"], "plan"), result["version"], result["why"]

    def enlisted(self, entries: tuple[EngineEntry, ...]) -> None:
        self._keep("roster", [encode(entry) for entry in entries])

    def entries(self) -> tuple[EngineEntry, ...] | None:
        return self._kept("roster", tuple[EngineEntry, ...])

    def quoted(self, regions: tuple[Region, ...]) -> None:
        self._keep("market", [encode(region) for region in regions])

    def market(self) -> tuple[Region, ...] | None:
        return self._kept("market", tuple[Region, ...])

    def cordoned(self, marks: Iterable[str]) -> None:
        self._keep("cordons", list(marks))

    def cordons(self) -> list[str]:
        return list(self._kept("cordons", tuple[str, ...]) or ())

    def _keep(self, name: str, value: object) -> None:
        made = self._folder / f"{name}.new"
        made.write_text(json.dumps(value), "utf-8")
        os.replace(made, self._folder / name)

    def _kept(self, name: str, kind: type[T]) -> T | None:
        result = self._read(name)
        return None if result is None else decode(kind, result, name)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            return None


class Cordons:
    def __init__(
        self,
        views: Mapping[str, ReplicaState],
        registry: ReplicaRegistry,
        tell: Callable[[Event], object],
        keep: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """`keep` hears what holds, for a process that takes this one's place."""
        self._views, self._registry, self._tell, self._keep = views, registry, tell, keep
        self._marks: set[str] = set()

    @property
    def marks(self) -> list[str]:
        return sorted(self._marks)

    def inherit(self, marks: Iterable[str]) -> None:
        self._marks.update(marks)

    def told(self, body: Mapping[str, object]) -> list[str]:
        """A `replica` or a `node`, or the `marks` that another gateway had: replicas that get nothing new by it."""
        marks = body.get("marks")
        if marks is None:
            self._marks.add(self._named(body.get("replica"), body.get("node")))
        elif isinstance(marks, list) and all(isinstance(mark, str) for mark in marks):
            self._marks.update(marks)
        else:
            raise InputError("marks", "must be a list of names")
        return self._changed()

    def lift(self, body: Mapping[str, object]) -> list[str]:
        replica, node = body.get("replica"), body.get("node")
        mark = self._named(replica, node)
        if mark not in self._marks:
            holds = sorted(self._marks & self._places(str(replica))) if node is None else []
            problem = f"is cordoned with {holds[0]}: uncordon that" if holds else "is not cordoned"
            raise InputError("replica" if node is None else "node", f"{replica or node} {problem}")
        self._marks.discard(mark)
        return self._changed()

    def _changed(self) -> list[str]:
        if self._keep is not None:
            self._keep(self.marks)
        return self._settled()

    def look(self) -> None:
        self._settled()

    def _settled(self) -> list[str]:
        settled = []
        for name, replica in tuple(self._views.items()):
            cordoned = bool(self._marks) and not self._marks.isdisjoint(self._places(name))
            if replica.state == "ready" and replica.cordoned != cordoned:
                self._tell(OperatorOrdered(name, "cordon" if cordoned else "uncordon"))
                settled.append(name)
        return settled

    def _named(self, replica: object, node: object) -> str:
        """By what it is remembered: an engine's address, or the name of a machine."""
        if (replica is None) == (node is None):
            raise InputError("replica", "or node must be named, and not both")
        if node is None:
            if not isinstance(replica, str):
                raise InputError("replica", "must be the name of one")
            if replica not in self._views:
                raise UnknownNameError("replica", replica, self._views)
            address = self._address(replica)
            if not address:
                raise InputError("replica", f"{replica} has no engine; only one that is ready takes orders")
            return address
        hosts = {engine.entry.address.host for engine in self._registry.engines}
        known = self._marks | hosts.union(
            *(replica_state.member.nodes for replica_state in self._views.values())
        )
        if not isinstance(node, str) or node not in known:
            raise UnknownNameError("node", str(node), known)
        return node

    def _places(self, replica: str) -> set[str]:
        replica_state, address = self._views.get(replica), self._address(replica)
        named = set() if replica_state is None else set(replica_state.member.nodes)
        return {address, address.rpartition(":")[0], *named} - {""}

    def _address(self, replica: str) -> str:
        endpoint = self._registry.find(replica)
        return "" if endpoint is None else f"{endpoint.address.host}:{endpoint.address.port}"
