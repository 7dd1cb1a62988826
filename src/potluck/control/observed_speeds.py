"""How long replicas really take, kind of node by kind of node: learned from what the gateway's Brain learns of each.

The Brain forgets within minutes, as routing must. Here looks at it are averaged over minutes and kept in the state,
so that plans can rest on them. What counts for a kind of node is the middle of its replicas: one that is ill says
nothing about its kind. Paces are of the facts that a spec and its profiles give; another spec begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from potluck.control.store.state_store import StateStore
from potluck.core.values.observed_speed import ObservedSpeed
from potluck.core.values.plan import Template

PACES = "paces"
"""The setting that has them."""
LOOK_S = 5.0
ENOUGH = 6
"""Looks at a replica that had done something new each time: half a minute of work at least."""
LEAST_PLANNED_S = 1.0
"""Of work that a look must tell of."""
SHARE = 0.2
"""Of the newest look in the mean."""
FORGET_S = 24 * 3600.0
MOST_REPLICAS = 64
"""Of one kind; the ones heard of last stay."""
Json = dict[str, Any]


class ObservedSpeeds:
    """`clock` is the time of day; `templates` are those that replicas were started from."""

    def __init__(
        self, store: StateStore, templates: Mapping[str, Template], clock: Callable[[], float]
    ) -> None:
        self._store, self._templates, self._clock = store, templates, clock
        self._heard: dict[str, float] = {}
        """Replica to when the Brain had learned something last."""
        self._next_s = 0.0

    def hear(self, said: Sequence[Json]) -> None:
        """What the Brain thinks of its replicas."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        kinds: Json = {}
        for each in said:
            kind = self._kind(each)
            name, learned_s, planned_s = (
                str(each["replica"]),
                float(each["learned_s"]),
                float(each["planned_s"]),
            )
            if kind is None or planned_s < LEAST_PLANNED_S or self._heard.get(name) == learned_s:
                continue
            self._heard[name] = learned_s
            if not kinds:
                kinds = self._kept()
            replicas = kinds.setdefault(kind, {})
            mean, looks, _ = replicas.pop(name, (None, 0, 0.0))
            ratio = float(each["observed_s"]) / planned_s
            replicas[name] = [ratio if mean is None else mean + SHARE * (ratio - mean), looks + 1, now_s]
            for old in list(replicas)[:-MOST_REPLICAS]:
                del replicas[old]
        if kinds:
            self._store.set(PACES, {"spec": _facts(self._store), "kinds": kinds})

    def now(self) -> tuple[ObservedSpeed, ...]:
        """Of kinds of nodes of which enough was seen."""
        return paces_of(self._store, self._clock())

    def _kind(self, said: Json) -> str | None:
        """Model, node and shards; None for replicas over several nodes, whose pace is nobody's alone."""
        template = self._templates.get(str(said["template"]))
        if template is None or not 0 <= said["index"] < len(template.replicas):
            return None
        stages = template.replicas[said["index"]].layout.stages
        if len(stages) != 1 or len(stages[0].nodes) != 1:
            return None
        node = stages[0].nodes[0]
        if node.ep != "none":
            return None  # profiles are of sharded experts
        return f"{template.model}\n{node.node}\n{node.tp}"

    def _kept(self) -> Json:
        return _kinds(self._store)


def paces_of(store: StateStore, now_s: float) -> tuple[ObservedSpeed, ...]:
    """As the state has them."""
    found = []
    for kind, replicas in sorted(_kinds(store).items()):
        means = [
            mean for mean, looks, at_s in replicas.values() if looks >= ENOUGH and now_s - at_s < FORGET_S
        ]
        if means:
            model, node, tp = kind.split("\n")
            found.append(ObservedSpeed(model, node, int(tp), median(means), len(means)))
    return tuple(found)


def _kinds(store: StateStore) -> Json:
    kept = store.get(PACES) or {}
    kinds = kept.get("kinds") if kept.get("spec") == _facts(store) else None
    return kinds or {}


def _facts(store: StateStore) -> object:
    """What facts rest on: the spec's text, and which profiles."""
    return [store.get("spec"), (store.get("spec files") or {}).get("profiles")]
