"""What a node costs, per cloud and region.

`prices.csv` quotes listed prices for whole machines; a number of GPUs that a cloud does not rent is
filled in from its nearest machine and says so in `basis`. The papers' own prices stand under the clouds
`paper-cauchy` and `paper-thunderserve` and are used only when asked for or when nothing else is known.
Spot prices are the median over a region's zones on that day.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from pathlib import Path
from statistics import median

from potluck.catalog import gpus, nodes
from potluck.catalog.figure_sources import DATA
from potluck.core.errors import FormatError, InputError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Price:
    node: str
    cloud: str
    region: str
    price_usd_per_h: float  # On demand; in what `price_usd_per_h(..., spot=True)` returns, the spot price.
    spot_usd_per_h: float | None
    instance_type: str
    source: str
    date: str
    basis: str  # `listed`, or `derived: ...` with how.

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


def in_region(region: str, among: Sequence[Price] | None = None) -> tuple[Price, ...]:
    """The prices of `aws/us-east-1`, `aws:us-east-1`, `us-east-1` or a whole cloud such as `runpod`."""
    wanted, listed = region.strip().casefold().replace(":", "/"), prices() if among is None else among
    result = tuple(price for price in listed if wanted in (price.place, price.region, price.cloud))
    if not result:
        known = {spelling for price in listed for spelling in (price.place, price.region, price.cloud)}
        raise UnknownNameError("region", region, known)
    return result


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


INSTALLED = Path.home() / ".sky" / "catalogs"
MOST_BYTES = 256 << 20
COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region", "SpotPrice")
CALLED = {"A100": "A100-40", "V100": "V100-16"}  # GPUs that SkyPilot and our catalog mean different sizes by.
MEMORY = re.compile(r"'SizeInMiB': (\d+)")
NEAR = 0.15  # By which a GPU's memory may differ from the catalog's: makers count in several ways.


@dataclass(frozen=True, slots=True)
class SkyPilotPrices:
    """What was read.

        InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone

    SkyPilot fetches these files when it first runs (`~/.sky/catalogs/vN/CLOUD/vms.csv`). Of machines with the same
    GPUs in a region the cheapest counts; spot prices are the median over its zones. Whatever cannot be used is
    listed.
    """

    prices: tuple[Price, ...]
    left_out: tuple[tuple[str, int], ...]  # Why rows with accelerators are not among them, and how many.


def installed(folder: Path | None = None) -> tuple[Path, ...]:
    """The files of the newest schema that SkyPilot has fetched."""
    root = INSTALLED if folder is None else folder
    versions = sorted(root.glob("v[0-9]*"), key=lambda each: int(re.sub(r"\D", "", each.name) or 0))
    paths = tuple(sorted(versions[-1].glob("*/vms.csv"))) if versions else ()
    if not paths:
        raise InputError(
            "--from", f"no catalog of SkyPilot in {root}; run `sky gpus list` once, or name a file"
        )
    return paths


def read_all(paths: Iterable[Path]) -> SkyPilotPrices:
    prices: list[Price] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        received = read(path)
        prices += received.prices
        left_out.update(dict(received.left_out))
    return SkyPilotPrices(tuple(prices), tuple(left_out.most_common()))


def read(path: Path) -> SkyPilotPrices:
    """One cloud's file; the cloud is named by its folder (`aws/vms.csv`) or by itself (`aws.csv`)."""
    cloud = path.parent.name if path.stem == "vms" else path.stem
    try:
        result = path.stat()
        if result.st_size > MOST_BYTES:
            raise InputError(
                "--from", f"{path} is larger than {MOST_BYTES >> 20} MiB; is it SkyPilot's vms.csv?"
            )
        date = datetime.fromtimestamp(result.st_mtime, UTC).date().isoformat()
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise FormatError(str(path), f"has no column {missing[0]}; is it SkyPilot's vms.csv?")
            return _listed(rows, cloud.lower(), date, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = getattr(error, "strerror", None) or "is not a text of comma-separated values"
        raise InputError("--from", f"{path}: {problem}") from error


def _listed(rows: csv.DictReader[str], cloud: str, date: str, path: Path) -> SkyPilotPrices:
    left_out: Counter[str] = Counter()
    machines: dict[tuple[str, str, str], list[tuple[float, float | None]]] = {}
    for row in rows:
        name = (row.get("AcceleratorName") or "").strip()
        if not name:
            continue
        where = f"{path.name} line {rows.line_num}"
        node = _node(name, row, where)
        price, spot = _number(row, "Price", where), _number(row, "SpotPrice", where)
        if node.startswith("!"):
            left_out[node[1:]] += 1
        elif not (row.get("InstanceType") or "").strip():
            left_out[f"{name}: a price of the GPU alone, without its machine"] += 1
        elif price is None:
            left_out[f"{name}: no price on demand"] += 1
        else:
            key = (node, str(row["Region"]).strip(), str(row["InstanceType"]).strip())
            machines.setdefault(key, []).append((price, spot))
    return SkyPilotPrices(_cheapest(machines, cloud, date), tuple(left_out.most_common()))


def _node(name: str, row: Mapping[str, str | None], where: str) -> str:
    """The node type of a row; with a mark in front, why it is none."""
    count = _number(row, "AcceleratorCount", where)
    try:
        gpu = gpus.canonical(CALLED.get(name, name))
    except UnknownNameError:
        return f"!{name}: unknown to the catalog"
    info = row.get("GpuInfo") or row.get("GPUInfo") or ""
    text = MEMORY.search(info)
    if text is not None:
        there_gb, known_gb = int(text[1]) * 2**20 / 1e9, gpus.gpu(gpu).memory_gb
        if abs(there_gb - known_gb) > NEAR * known_gb:
            return f"!{name}: has {there_gb:.0f} GB, the catalog's {gpu} {known_gb:g} GB"
    if count is None or count != int(count) or count < 1:
        return f"!{name}: a part of a GPU"
    if count > nodes.MOST_GPUS:
        return f"!{name}: more than {nodes.MOST_GPUS} in a machine"
    return f"{int(count)}x{gpu}"


def _cheapest(
    machines: Mapping[tuple[str, str, str], list[tuple[float, float | None]]], cloud: str, date: str
) -> tuple[Price, ...]:
    best: dict[tuple[str, str], Price] = {}
    for (node, region, instance), zones in machines.items():
        spots = [spot for _, spot in zones if spot is not None]
        spot_usd = median(spots) if spots else None
        whole_usd = min(price for price, _ in zones)
        price = Price(node, cloud, region, whole_usd, spot_usd, instance, f"skypilot-{cloud}", date, "listed")
        before = best.get((node, region))
        if before is None:
            best[node, region] = price
            continue
        kept = min(before, price, key=lambda each: each.price_usd_per_h)
        known = [item.spot_usd_per_h for item in (before, price) if item.spot_usd_per_h is not None]
        best[node, region] = replace(kept, spot_usd_per_h=min(known, default=None))
    return tuple(best.values())


def _number(row: Mapping[str, str | None], column: str, where: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value != value:  # as pandas writes what is missing
        return None
    if not isfinite(value) or value < 0:
        raise FormatError(f"{where}: {column}", f"must be a number from 0, is {text[:40]!r}")
    return value


def offer_price(prices: Iterable[Price], node: str, region: str, spot: bool) -> Price | None:
    """The cheapest of a node type in a region, named with its cloud or without; on demand, or as spot."""
    wanted = region.strip().casefold().replace(":", "/")
    result = [
        replace(price, price_usd_per_h=price.spot_usd_per_h)
        if spot and price.spot_usd_per_h is not None
        else price
        for price in prices
        if price.node == node
        and wanted in (price.region.casefold(), price.place.casefold())
        and (not spot or price.spot_usd_per_h is not None)
    ]
    return min(result, key=lambda each: each.price_usd_per_h, default=None)
