"""What goes wrong, and when: faults by hand or by chance, and prices and supply that change.

A fault file is YAML or JSON:

    faults:
      - {at_s: 60, kind: replica, replica: 'chat*#0/0'}     # gone; names may hold * and ?
      - {at_s: 60, kind: node, node: 'chat*#1/1xL40S/0'}    # a machine, with every replica on it
      - {at_s: 90, kind: region, region: east}
      - {at_s: 90, kind: link, source: east, target: west, factor: 0.1, duration_s: 30}    # or gbps: 2; 0 is down
      - {at_s: 120, kind: slow, replica: '*', factor: 3, duration_s: 20}     # steps take three times as long
      - {at_s: 150, kind: reports, replica: '*', duration_s: 10}             # its reports do not arrive
      - {at_s: 200, kind: spot, region: east, node: 1xL40S, count: 2, notice_s: 30}
      - {at_s: 210, kind: cancel, request: 17}                               # the user goes away
    random: {replica_per_h: 2, node_per_h: 1, link_per_h: 4, slow_per_h: 6, reports_per_h: 6, spot_per_h: 1}
    prices: [{at_s: 3600, region: east, node: 1xL40S, usd_per_h: 2.5}]
    availability: [{at_s: 1800, region: east, node: 1xL40S, available: 3}]

A pattern means the first replica (or machine) that it fits and that is there at the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any, Literal, get_args

import numpy as np
import yaml

from potluck.core.errors import InputError, UnknownNameError

FaultKind = Literal["replica", "node", "region", "link", "slow", "reports", "spot", "cancel"]
NOTICE_S = 30.0
"""Warning before a spot machine goes when nothing is said (Azure and Google give 30 s, Amazon 120 s)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. Which fields count depends on the kind; see the module's text."""

    at_s: float
    kind: FaultKind
    replica: str = ""
    node: str = ""
    region: str = ""
    source: str = ""
    target: str = ""
    factor: float | None = None
    gbps: float | None = None
    duration_s: float = inf
    notice_s: float = 0.0
    count: int = 1
    request: int = -1
    pick: float | None = None
    """Instead of a name: a number in [0, 1) that picks among those there are. Made by `random_faults`."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each kind of fault comes by chance, per hour of the whole fleet."""

    replica_per_h: float = 0.0
    node_per_h: float = 0.0
    link_per_h: float = 0.0
    slow_per_h: float = 0.0
    reports_per_h: float = 0.0
    spot_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class PriceChange:
    at_s: float
    region: str
    node: str
    usd_per_h: float


@dataclass(frozen=True, slots=True)
class SupplyChange:
    """From then on a region has so many nodes of a type; what is in use beyond that is taken away."""

    at_s: float
    region: str
    node: str
    available: int
    notice_s: float = NOTICE_S


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that happens to a fleet from outside."""

    faults: tuple[Fault, ...] = ()
    random: FaultRates | None = None
    prices: tuple[PriceChange, ...] = ()
    availability: tuple[SupplyChange, ...] = ()

    def drawn(self, seed: int, horizon_s: float) -> tuple[Fault, ...]:
        """The listed faults and those by chance, in order of time."""
        chance = () if self.random is None else random_faults(self.random, seed, horizon_s)
        return tuple(sorted((*self.faults, *chance), key=lambda fault: fault.at_s))


def random_faults(rates: FaultRates, seed: int, horizon_s: float) -> tuple[Fault, ...]:
    """Poisson faults of every kind up to a time; whom they hit is picked when they come."""
    found: list[Fault] = []
    streams = np.random.default_rng(np.random.SeedSequence((seed, 0xFA))).spawn(len(fields(FaultRates)))
    for each, stream in zip(fields(FaultRates), streams, strict=True):
        rate_per_s = getattr(rates, each.name) / 3600.0
        count = int(stream.poisson(rate_per_s * horizon_s)) if rate_per_s > 0 else 0
        for at_s in np.sort(stream.random(count) * horizon_s).tolist():
            pick, size, long = stream.random(3).tolist()
            duration_s = -np.log1p(-long) * 30.0
            kind = each.name.removesuffix("_per_h")
            if kind == "link":
                found.append(
                    Fault(at_s, "link", factor=max(0.0, size * 1.2 - 0.2), duration_s=duration_s, pick=pick)
                )
            elif kind == "slow":
                found.append(Fault(at_s, "slow", factor=1.0 + 4.0 * size, duration_s=duration_s, pick=pick))
            elif kind == "reports":
                found.append(Fault(at_s, "reports", duration_s=duration_s, pick=pick))
            elif kind == "spot":
                found.append(Fault(at_s, "spot", notice_s=NOTICE_S, pick=pick))
            else:
                found.append(Fault(at_s, "replica" if kind == "replica" else "node", pick=pick))
    return tuple(found)


NEEDS: dict[str, tuple[str, ...]] = {
    "replica": ("replica",),
    "node": ("node",),
    "region": ("region",),
    "link": ("source", "target"),
    "slow": ("replica", "factor", "duration_s"),
    "reports": ("duration_s",),
    "spot": ("region", "node"),
    "cancel": ("request",),
}
MAY: dict[str, tuple[str, ...]] = {
    "link": ("factor", "gbps", "duration_s"),
    "reports": ("replica",),
    "spot": ("count", "notice_s"),
    "node": ("notice_s",),
    "replica": ("notice_s",),
}


def parse_faults(text: str, name: str = "faults") -> Faults:
    """Read a fault file; an error names the entry and what is wrong with it, on one line."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(name, f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InputError(name, "must have `faults:`, `random:`, `prices:` or `availability:` at the top")
    known = [each.name for each in fields(Faults)]
    for key in data:
        if key not in known:
            raise UnknownNameError(name, str(key), known)
    random = data.get("random")
    return Faults(
        tuple(_fault(entry, where) for where, entry in _entries(data, "faults", name)),
        None
        if random is None
        else FaultRates(**_numbers(random, [each.name for each in fields(FaultRates)], f"{name}: random")),
        tuple(_change(PriceChange, entry, where) for where, entry in _entries(data, "prices", name)),
        tuple(_change(SupplyChange, entry, where) for where, entry in _entries(data, "availability", name)),
    )


def _entries(data: Mapping[str, Any], key: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    entries = data.get(key) or []
    if not isinstance(entries, list):
        raise InputError(f"{name}: {key}", "must be a list")
    found = []
    for place, entry in enumerate(entries):
        where = f"{name}: {key}[{place}]"
        if not isinstance(entry, dict):
            raise InputError(where, "must be a mapping such as {at_s: 60, ...}")
        found.append((where, {str(k): v for k, v in entry.items()}))
    return found


def _fault(entry: dict[str, Any], where: str) -> Fault:
    kind = str(entry.get("kind"))
    if kind not in get_args(FaultKind):
        raise UnknownNameError(f"{where}: kind", kind, get_args(FaultKind))
    needed, allowed = NEEDS[kind], ("at_s", "kind", *NEEDS[kind], *MAY.get(kind, ()))
    _keys(entry, ("at_s", *needed), allowed, where)
    if kind == "link" and ("factor" in entry) == ("gbps" in entry):
        raise InputError(where, "needs either `factor` or `gbps`")
    values: dict[str, Any] = {"kind": kind}
    if kind == "reports":
        values["replica"] = "*"
    if kind == "spot":
        values["notice_s"] = NOTICE_S
    for key, value in entry.items():
        if key == "kind":
            continue
        values[key] = _value(key, value, where)
    if kind == "slow" and not values["factor"] > 0:
        raise InputError(f"{where}: factor", f"must be above 0, is {values['factor']:g}")
    return Fault(**values)


def _change(kind: type[Any], entry: dict[str, Any], where: str) -> Any:
    names = [each.name for each in fields(kind)]
    _keys(entry, [n for n in names if n != "notice_s"], names, where)
    return kind(**{key: _value(key, value, where) for key, value in entry.items()})


def _keys(entry: Mapping[str, Any], needed: Any, allowed: Any, where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise UnknownNameError(where, key, allowed)
    for key in needed:
        if key not in entry:
            raise InputError(f"{where}: {key}", "is missing")


def _value(key: str, value: Any, where: str) -> Any:
    if key in ("replica", "node", "region", "source", "target"):
        if not isinstance(value, str) or not value:
            raise InputError(f"{where}: {key}", "must be a name")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise InputError(f"{where}: {key}", f"must be a number that is not negative, is {str(value)[:40]!r}")
    if key in ("count", "request", "available"):
        if value != int(value):
            raise InputError(f"{where}: {key}", f"must be a whole number, is {value}")
        return int(value)
    return float(value)


def _numbers(data: Any, names: list[str], where: str) -> dict[str, float]:
    if not isinstance(data, dict):
        raise InputError(where, "must be a mapping such as {replica_per_h: 2}")
    _keys(data, (), names, where)
    return {str(key): float(_value(str(key), value, where)) for key, value in data.items()}
