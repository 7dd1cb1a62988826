"""What the gateway decided and what was asked of it, kept in the state: reasons for `events`, rates for forecasts.

The gateway numbers its decisions anew when it starts (another epoch), and counts requests from nothing; so what was
read last is kept with its epoch, and nothing is counted twice by any reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from potluck.control.gateway_client import GatewayClient
from potluck.control.state_store import StateStore
from potluck.core.errors import PotluckError
from potluck.core.scaling.forecast import BIN_S
from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.plan import Template

READ = "gateway read"
HISTORY_BINS = 14 * 144
DAY_BINS = 144
MIN_OBSERVED_BIN_SHARE = 0.5  # Of a bin that must have been observed for its rate to count.
_NUMBERS = re.compile(r"[0-9.]+")


class DecisionHistory:
    def __init__(
        self,
        store: StateStore,
        gateway: GatewayClient,
        note_once: Callable[[str, str, str], None],
        clock: Callable[[], float],
        paces: Callable[[Sequence[dict[str, Any]]], None] = lambda said: None,
    ) -> None:
        """`paces` hears what the Brain thinks of its replicas' speed."""
        self._store, self._gateway, self._note_once, self._clock = store, gateway, note_once, clock
        self._paces = paces

    def turn(self) -> None:
        read = self._store.get(READ) or {}
        try:
            text = self._gateway.decisions(int(read.get("number", 0)))
        except PotluckError:
            return  # it is asked again at the next turn
        if text.get("epoch") != read.get("epoch"):  # another gateway: all that it says is new
            read = {"epoch": text.get("epoch"), "number": 0, "ended": {}}
            try:
                text = self._gateway.decisions(0)
            except PotluckError:
                return
        self._paces(text.get("paces", ()))
        number = int(read.get("number", 0))
        for item in text.get("decisions", ()):
            if item["number"] > number:
                self._store.note(item["at_s"], "brain", str(item["what"]), str(item["why"]))
                number = item["number"]
        thinks = str(text.get("thinks", ""))
        if thinks:
            # What only differs in its figures was said before.
            self._note_once("brain scaling", "brain", thinks)
        now = {**read, "number": number, **self._counted(read, text.get("ended") or {})}
        if now != read:
            self._store.set(READ, now)

    def _counted(self, read: dict[str, Any], ended: dict[str, int]) -> dict[str, Any]:
        """Requests that ended since, in the bin of now; a bin that is over becomes a rate."""
        now_s = self._clock()
        place = int(now_s // BIN_S)
        counts = dict(read.get("counts") or {})
        since_s = float(read.get("since_s", now_s))
        if read.get("bin", place) != place:
            begun_s = read["bin"] * BIN_S
            watched_s = begun_s + BIN_S - max(begun_s, since_s)
            if watched_s >= MIN_OBSERVED_BIN_SHARE * BIN_S and counts:
                self._store.add_rates(read["bin"], [(name, n / watched_s) for name, n in counts.items()])
            counts, since_s = dict.fromkeys(counts, 0), place * BIN_S
        before = read.get("ended") or {}
        for model, count in ended.items():
            counts[model] = counts.get(model, 0) + max(0, count - before.get(model, 0))
        return {"ended": ended, "counts": counts, "bin": place, "since_s": since_s}


def gist(line: str) -> str:
    return _NUMBERS.sub("", line)


def history_of(store: StateStore, now_s: float, bins: int = HISTORY_BINS) -> dict[str, tuple[float, ...]]:
    """Each model's rates up to now, for forecasts: from the first bin that was seen, without gaps."""
    last = int(now_s // BIN_S) - 1
    result = {model: without_gaps(store.rates(model, last, bins)) for model in store.rated_models()}
    return {model: rates for model, rates in result.items() if rates}


def without_gaps(rates: Sequence[float | None]) -> tuple[float, ...]:
    """Fills unobserved bins with those of the day before, else with the last observed bin."""
    values: list[float] = []
    for rate in rates:
        if rate is None and not values:
            continue
        if rate is None:
            rate = values[-DAY_BINS] if len(values) >= DAY_BINS else values[-1]
        values.append(rate)
    return tuple(values)


PACES = "paces"
SPEED_POLL_INTERVAL_S = 5.0
ENOUGH = 6  # Looks at a replica that had done something new each time: half a minute of work at least.
MIN_PLANNED_S = 1.0  # Of work that a look must tell of.
NEWEST_WEIGHT = 0.2  # Of the newest look in the mean.
FORGET_S = 24 * 3600.0
MAX_REPLICAS_PER_KIND = 64  # Of one kind; the ones heard of last stay.
Json = dict[str, Any]


class ObservedSpeeds:
    """`clock` is the time of day; `templates` are those that replicas were started from."""

    def __init__(
        self, store: StateStore, templates: Mapping[str, Template], clock: Callable[[], float]
    ) -> None:
        self._store, self._templates, self._clock = store, templates, clock
        self._heard: dict[str, float] = {}  # Replica to when the Brain had learned something last.
        self._next_s = 0.0

    def hear(self, said: Sequence[Json]) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SPEED_POLL_INTERVAL_S
        kinds: Json = {}
        for item in said:
            kind = self._kind(item)
            name, learned_s, planned_s = item["replica"], float(item["learned_s"]), float(item["planned_s"])
            if kind is None or planned_s < MIN_PLANNED_S or self._heard.get(name) == learned_s:
                continue
            self._heard[name] = learned_s
            if not kinds:
                kinds = _kinds(self._store)
            replicas = kinds.setdefault(kind, {})
            mean, looks, _ = replicas.pop(name, (None, 0, 0.0))
            ratio = float(item["observed_s"]) / planned_s
            replicas[name] = [
                ratio if mean is None else mean + NEWEST_WEIGHT * (ratio - mean),
                looks + 1,
                now_s,
            ]
            for old in list(replicas)[:-MAX_REPLICAS_PER_KIND]:
                del replicas[old]
        if kinds:
            self._store.set(PACES, {"spec": _facts(self._store), "kinds": kinds})

    def now(self) -> tuple[ObservedSpeed, ...]:
        return paces_of(self._store, self._clock())

    def _kind(self, said: Json) -> str | None:
        """Model, node and shards; None for replicas over several nodes, whose pace belongs to no single node type."""
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


def paces_of(store: StateStore, now_s: float) -> tuple[ObservedSpeed, ...]:
    observed_speeds = []
    for kind, replicas in sorted(_kinds(store).items()):
        seen = replicas.values()
        means = [mean for mean, looks, at_s in seen if looks >= ENOUGH and now_s - at_s < FORGET_S]
        if means:
            model, node, tp = kind.split("\n")
            observed_speeds.append(ObservedSpeed(model, node, int(tp), median(means), len(means)))
    return tuple(observed_speeds)


def _kinds(store: StateStore) -> Json:
    kept = store.get(PACES) or {}
    kinds = kept.get("kinds") if kept.get("spec") == _facts(store) else None
    return kinds or {}


def _facts(store: StateStore) -> object:
    """What facts rest on: the spec's text, and which profiles."""
    return [store.get("spec"), (store.get("spec files") or {}).get("profiles")]
