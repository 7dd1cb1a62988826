"""A day of spot prices and spot machines, for `prices.py`.

AWS's spot prices of g6.xlarge (1xL4), g5.xlarge (1xA10G) and g6e.xlarge (1xL40S) in the first zone of us-east-2 and
ap-northeast-2, the last 24 days on record, each played for an hour; and how many of 16 spot machines could be had in
us-east-2b and us-west-2a, every five minutes, from 2023-08-27 on: of V100s, as there is no record of these.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from parts.common import DATA
from potluck.core.values.types import NodeOffer, Region

FILES = ("aws_gpu_spot_price_history_daily.parquet", "spot_v100_k80_traces_rle.csv.gz")
INSTANCES = {"g6.xlarge": "1xL4", "g5.xlarge": "1xA10G", "g6e.xlarge": "1xL40S"}
NODES = tuple(INSTANCES.values())
ZONES = {"us-east-2": "use2-az1", "ap-northeast-2": "apne2-az1"}
COUNTS = {"us-east-2": ("us-east-2b", (3, 0, 1)), "ap-northeast-2": ("us-west-2a", (1, 0, 5))}
"""Region to whose record its counts are, and which days of it its node types have: of each record's first week those
three in which counts changed most, the most restless for the dearest."""
CAMPAIGN = "aws-08-27-2023"
COLUMNS = "date availability_zone region instance_type price_usd_per_h spot_price_usd_per_h"
ON_DEMAND = "us-east-2 on demand"
AMPLE = 16
HOUR_S, TICK_S, TICKS = 3600.0, 300.0, 288
NOTICE_S = 120.0
"""What AWS gives."""
Key = tuple[str, str]


@dataclass(frozen=True)
class Change:
    """From a moment on: another price, or another count, of a node type in a region."""

    at_s: float
    region: str
    node: str
    usd_per_h: float | None = None
    available: int | None = None


@dataclass(frozen=True)
class Market:
    changes: tuple[Change, ...]
    """In order of time; those at 0 say how it begins."""

    @cached_property
    def times(self) -> tuple[float, ...]:
        return tuple(sorted({change.at_s for change in self.changes}))

    def after(self, at_s: float) -> Market:
        moved = (replace(change, at_s=max(0.0, change.at_s - at_s)) for change in self.changes)
        return Market(tuple(moved))

    def regions(self, at_s: float) -> tuple[Region, ...]:
        offers: dict[Key, NodeOffer] = {}
        for change in self.changes:
            if change.at_s > at_s:
                break
            key = (change.region, change.node)
            old = offers.get(key, NodeOffer(change.node, 0.0, 0, spot=change.region != ON_DEMAND))
            price = old.price_usd_per_h if change.usd_per_h is None else change.usd_per_h
            count = old.available if change.available is None else change.available
            offers[key] = NodeOffer(old.node, price, count, old.spot)
        names = dict.fromkeys(region for region, _ in offers)
        return tuple(Region(n, tuple(o for (region, _), o in offers.items() if region == n)) for n in names)


def the_market() -> Market:
    hourly, steady = recorded_prices()
    counts = recorded_counts()
    changes = [Change(0.0, ON_DEMAND, node, price, AMPLE) for node, price in steady.items()]
    for (region, node), prices in hourly.items():
        changes += [Change(h * HOUR_S, region, node, usd_per_h=p) for h, p in _changes(prices)]
    for (region, node), ticks in counts.items():
        changes += [Change(t * TICK_S, region, node, available=int(n)) for t, n in _changes(ticks)]
    return Market(tuple(sorted(changes, key=lambda change: change.at_s)))


def _changes(values: list[float]) -> list[tuple[int, float]]:
    """The first value, and every one that differs from the one before, with their places."""
    return [(0, values[0]), *((i, b) for i, (a, b) in enumerate(pairwise(values), 1) if a != b)]


def recorded_prices() -> tuple[dict[Key, list[float]], dict[str, float]]:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(
        DATA / FILES[0],
        columns=COLUMNS.split(),
        filters=[("instance_type", "in", list(INSTANCES)), ("region", "in", list(ZONES))],
    ).to_pylist()
    spot: dict[Key, dict[str, float]] = {}
    steady: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: str(row["date"])):
        if row["availability_zone"] != ZONES[row["region"]] or not row["spot_price_usd_per_h"]:
            continue
        node = INSTANCES[row["instance_type"]]
        spot.setdefault((row["region"], node), {})[str(row["date"])] = round(row["spot_price_usd_per_h"], 3)
        if row["region"] in ON_DEMAND and row["price_usd_per_h"]:
            steady[node] = round(row["price_usd_per_h"], 3)
    return {key: list(days.values())[-24:] for key, days in sorted(spot.items())}, steady


def recorded_counts() -> dict[Key, list[float]]:
    ticks: dict[str, list[float]] = {}
    with gzip.open(DATA / FILES[1], "rt") as file:
        for row in csv.DictReader(file):
            if row["campaign"] == CAMPAIGN and row["kind"] == "availability":
                run = [float(row["value"])] * int(row["run_length_ticks"])
                ticks.setdefault(row["zone"], []).extend(run)
    return {
        (region, node): ticks[zone][day * TICKS : (day + 1) * TICKS]
        for region, (zone, days) in COUNTS.items()
        for node, day in zip(NODES, days, strict=True)
    }
