"""What a node costs, per cloud and region.

`prices.csv` quotes listed prices for whole machines; a number of GPUs that a cloud does not rent is
filled in from its nearest machine and says so in `basis`. The papers' own prices stand under the clouds
`paper-cauchy` and `paper-thunderserve` and are used only when asked for or when nothing else is known.
Spot prices are the median over a region's zones on that day.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from potluck.catalog import nodes
from potluck.catalog.figure_sources import DATA
from potluck.core.errors import InputError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one node type in one region."""

    node: str
    cloud: str
    region: str
    price_usd_per_h: float
    """On demand; in what `price_usd_per_h(..., spot=True)` returns, the spot price."""
    spot_usd_per_h: float | None
    instance_type: str
    source: str
    date: str
    basis: str
    """`listed`, or `derived: ...` with how."""

    @property
    def place(self) -> str:
        return f"{self.cloud}/{self.region}"

    @property
    def listed(self) -> bool:
        return self.basis.startswith("listed")

    @property
    def from_paper(self) -> bool:
        return self.cloud.startswith("paper-")


@cache
def prices() -> tuple[Price, ...]:
    """Every price of the catalog."""
    with (DATA / "prices.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Price(
                node=row["node"],
                cloud=row["cloud"],
                region=row["region"],
                price_usd_per_h=float(row["price_usd_per_h"]),
                spot_usd_per_h=float(row["spot_usd_per_h"]) if row["spot_usd_per_h"] else None,
                instance_type=row["instance_type"],
                source=row["source"],
                date=row["date"],
                basis=row["basis"],
            )
            for row in csv.DictReader(file)
        )


def regions() -> tuple[str, ...]:
    """Every place with prices, as `cloud/region`."""
    return tuple(dict.fromkeys(price.place for price in prices()))


def in_region(region: str) -> tuple[Price, ...]:
    """The prices of `aws/us-east-1`, `aws:us-east-1`, `us-east-1` or a whole cloud such as `runpod`."""
    wanted = region.strip().casefold().replace(":", "/")
    found = tuple(price for price in prices() if wanted in (price.place, price.region, price.cloud))
    if not found:
        known = {spelling for price in prices() for spelling in (price.place, price.region, price.cloud)}
        raise UnknownNameError("region", region, known)
    return found


def price_usd_per_h(node: str, region: str | None = None, spot: bool = False) -> Price:
    """The price of a node type, the cheapest where several fit, listed ones before derived.

    Without a region: the cheapest anywhere. With `spot`, `price_usd_per_h` of the answer is the spot price.
    """
    name = nodes.canonical(node)
    candidates = [
        price for price in (prices() if region is None else in_region(region)) if price.node == name
    ]
    if not candidates:
        candidates = _other_count(name, region)
    if spot:
        candidates = [
            replace(price, price_usd_per_h=price.spot_usd_per_h)
            for price in candidates
            if price.spot_usd_per_h is not None
        ]
    if not candidates:
        where = f" in {region}" if region is not None else ""
        kind = "spot price" if spot else "price"
        raise InputError("price", f"the catalog has no {kind} for {name}{where}; give price_usd_per_h")
    return min(candidates, key=_rank)


def _rank(price: Price) -> tuple[bool, bool, float]:
    return price.from_paper, not price.listed, price.price_usd_per_h


def _other_count(name: str, region: str | None) -> list[Price]:
    """Prices for 3, 5, 6 or 7 GPUs: that share of the next larger machine of the same place."""
    count, gpu = nodes.parse(name)
    larger = [size for size in nodes.LISTED_COUNTS if size > count]
    if count in nodes.LISTED_COUNTS or not larger:
        return []
    base = f"{larger[0]}x{gpu}"
    pool: Iterable[Price] = prices() if region is None else in_region(region)
    return [_scaled(price, name, count / larger[0]) for price in pool if price.node == base]


def _scaled(price: Price, name: str, share: float) -> Price:
    spot = None if price.spot_usd_per_h is None else price.spot_usd_per_h * share
    basis = f"derived: {share:g} of the price of {price.node}"
    whole = price.price_usd_per_h * share
    return replace(price, node=name, price_usd_per_h=whole, spot_usd_per_h=spot, basis=basis)
