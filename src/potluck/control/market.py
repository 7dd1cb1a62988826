"""What nodes cost and how many can be had, from a file that an external price watcher updates.

    offers:
      - {region: east, node: 1xL4, price_usd_per_h: 0.30, available: 4}
    notices:
      - {engine: m-12ab34cd, at: 2026-11-16T04:00:00Z}       this engine's machine goes then
      - {region: east, node: 1xL4, count: 2, at: 1763265600}  two of these go

What the file does not name is as the spec has it. Notices are of machines that will vanish: their replicas are
emptied before. A file that cannot be read leaves what was read last, and says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from potluck.control.control_values import EngineInstance
from potluck.core.errors import FormatError, InputError, PotluckError, UnknownNameError
from potluck.core.values.types import NodeOffer, NodeType, Region

MAX_MARKET_LINES = 10_000
OFFER_KEYS = {"region", "node", "price_usd_per_h", "available"}
NOTICE_KEYS = {"engine", "region", "node", "count", "at"}
Lines = list[tuple[dict[str, Any], str]]  # Mappings, each with the words that name it in errors.


@dataclass(frozen=True, slots=True)
class Quote:
    """One line about a node type in a region; None: as the spec has it."""

    region: str
    node: str
    price_usd_per_h: float | None = None
    available: int | None = None


@dataclass(frozen=True, slots=True)
class VanishNotice:
    """Machines that vanish at a time of day: an engine's, or so many of a type."""

    at_s: float
    engine: str = ""
    region: str = ""
    node: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Market:
    quotes: tuple[Quote, ...] = ()
    notices: tuple[VanishNotice, ...] = ()

    def regions(self, spec: Sequence[Region]) -> tuple[Region, ...]:
        quotes = {(quote.region, quote.node): quote for quote in self.quotes}

        def quoted(region: Region) -> tuple[NodeOffer, ...]:
            return tuple(_quoted(offer, quotes.get((region.name, offer.node))) for offer in region.offers)

        return tuple(replace(region, offers=quoted(region)) for region in spec)

    def leaving(self, instances: Iterable[EngineInstance]) -> dict[str, VanishNotice]:
        """Engines whose machines will vanish. Of a type, those go that were noticed first to be up."""
        ranked = sorted(instances, key=lambda instance: (instance.since_s, instance.name))
        names = {one.name for one in ranked}
        leaving = {notice.engine: notice for notice in self.notices if notice.engine in names}
        for notice in self.notices:
            if notice.engine:
                continue
            alike = [
                one.name
                for one in ranked
                if one.make.region == notice.region
                and one.name not in leaving
                and notice.node in one.make.layout.node_counts
            ]
            leaving |= dict.fromkeys(alike[: notice.count], notice)
        return leaving


def _quoted(offer: NodeOffer, quote: Quote | None) -> NodeOffer:
    if quote is None:
        return offer
    price = offer.price_usd_per_h if quote.price_usd_per_h is None else quote.price_usd_per_h
    available = offer.available if quote.available is None else quote.available
    return replace(offer, price_usd_per_h=price, available=available)


def read_market(text: str, where: str, spec: Sequence[Region]) -> Market:
    """A file's text, checked against the regions and nodes that the spec has."""
    offers, notices = market_lines(text, where, OFFER_KEYS, NOTICE_KEYS)
    return Market(
        tuple(quote_of(item, at, spec) for item, at in offers),
        tuple(_notice(item, at, spec) for item, at in notices),
    )


def market_lines(text: str, where: str, offer_keys: set[str], notice_keys: set[str]) -> tuple[Lines, Lines]:
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise FormatError(where, f"is not YAML ({' '.join(str(error).split())[:160]})") from error
    if data is None:
        return [], []
    if not isinstance(data, dict) or set(data) - {"offers", "notices"}:
        raise FormatError(where, "must have offers and notices, and nothing else")
    return _listed(data, "offers", offer_keys, where), _listed(data, "notices", notice_keys, where)


def _listed(data: dict[str, Any], name: str, known: set[str], where: str) -> Lines:
    listed = data.get(name)
    if listed is None:
        return []
    if not isinstance(listed, list) or len(listed) > MAX_MARKET_LINES:
        raise FormatError(f"{where}: {name}", f"must be a list of at most {MAX_MARKET_LINES}")
    lines = []
    for place, item in enumerate(listed):
        at = f"{where}: {name}[{place}]"
        if not isinstance(item, dict) or {str(key) for key in item} - known:
            raise FormatError(at, f"must be a mapping of {', '.join(sorted(known))}")
        lines.append((item, at))
    return lines


def quote_of(each: dict[str, Any], at: str, spec: Sequence[Region]) -> Quote:
    region, node = place_of(each, at, spec)
    price, available = each.get("price_usd_per_h"), each.get("available")
    if price is not None and not (_number(price) and 0 <= price < 1e6):
        raise InputError(f"{at}.price_usd_per_h", f"must be a price from 0, is {price!r}")
    if available is not None and not (type(available) is int and 0 <= available <= 1_000_000):
        raise InputError(f"{at}.available", f"must be a whole number from 0, is {available!r}")
    return Quote(region, node, None if price is None else float(price), available)


def _notice(each: dict[str, Any], at: str, spec: Sequence[Region]) -> VanishNotice:
    at_s = _time(each.get("at"), f"{at}.at")
    engine = each.get("engine")
    if engine is not None:
        if not isinstance(engine, str) or {"region", "node", "count"} & each.keys():
            raise InputError(f"{at}.engine", "is a name, and needs neither region, node nor count")
        return VanishNotice(at_s, engine)
    return VanishNotice(at_s, "", *place_of(each, at, spec), count_of(each, at))


def count_of(each: dict[str, Any], at: str) -> int:
    count = each.get("count", 1)
    if type(count) is not int or count < 1:
        raise InputError(f"{at}.count", f"must be a whole number from 1, is {count!r}")
    return count


def place_of(each: dict[str, Any], at: str, spec: Sequence[Region]) -> tuple[str, str]:
    names = {region.name: region for region in spec}
    region, node = each.get("region"), each.get("node")
    if not isinstance(region, str) or not isinstance(node, str):
        raise InputError(at, "needs a region and a node")
    if region not in names:
        raise UnknownNameError(f"{at}.region", region, names)
    nodes = [offer.node for offer in names[region].offers]
    if node not in nodes:
        raise UnknownNameError(f"{at}.node", node, nodes)
    return region, node


def _time(value: object, at: str) -> float:
    """Seconds since 1970, or a date with its time; without a zone it is UTC."""
    if _number(value):
        return float(str(value))
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    raise InputError(at, "must be a time: 2026-11-16T04:00:00Z, or seconds since 1970")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


class MarketSource(ABC):
    """Current prices and node counts; values that are missing are those of the spec."""

    def __init__(self, spec: Sequence[Region]) -> None:
        self.spec = self._shown = tuple(spec)
        self.market = Market()
        self.problem = ""  # Why what is known now is not used.

    @abstractmethod
    def look(self) -> None:
        """Find out what has changed."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The spec's at these prices."""
        return self.market.regions(self.spec)

    def changes(self) -> str:
        """Changes since the last call, in words."""
        known = {(region.name, offer.node): offer for region in self._shown for offer in region.offers}
        self._shown = self.regions
        lines = [
            f"{offer.available} x {offer.node} in {region.name} at ${offer.price_usd_per_h:.2f}/h"
            for region in self._shown
            for offer in region.offers
            if known.get((region.name, offer.node)) != offer
        ]
        return ", ".join(lines) or "as before"


class MarketFile(MarketSource):
    """A market in a file, read again when it has changed. Without the file, the spec's own prices hold."""

    def __init__(self, path: Path, spec: Sequence[Region]) -> None:
        super().__init__(spec)
        self._path = path
        self._stamp: tuple[int, int, int] | None = (-1, -1, -1)

    def look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            text = "" if stamp is None else self._path.read_text("utf-8")
            self.market = read_market(text, self._path.name, self.spec)
            self.problem = ""
        except (OSError, UnicodeDecodeError):
            self.problem = f"{self._path} cannot be read"
        except PotluckError as error:
            self.problem = str(error)

    def _stamped(self) -> tuple[int, int, int] | None:
        try:
            result = self._path.stat()
        except OSError:
            return None
        return result.st_mtime_ns, result.st_size, result.st_ino


@dataclass(frozen=True, slots=True)
class NodeTypeLabels:
    """A node type of the spec, as it is looked for in a cluster."""

    gpus: int
    names: tuple[str, ...]  # What its GPU may be called there, the likeliest first.


Spellings = Mapping[str, NodeTypeLabels]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    id: str
    region: str  # Empty: it does not say.
    gpus: tuple[tuple[str, int], ...]
    well: bool = True  # Whether something may be started there.

    def count(self, labels: NodeTypeLabels) -> int:
        return max((have // labels.gpus for name, have in self.gpus if name in labels.names), default=0)


def spellings_of(
    nodes: Sequence[NodeType], aliases: Callable[[str], Sequence[str]], told: Mapping[str, str]
) -> dict[str, NodeTypeLabels]:
    """What the spec's nodes are called; `told` names GPUs as the cluster does, where the user gave names."""
    return {
        node.name: NodeTypeLabels(
            node.gpus,
            (told[node.gpu.name],)
            if node.gpu.name in told
            else tuple(dict.fromkeys((node.gpu.name, *aliases(node.gpu.name)))),
        )
        for node in nodes
    }


def quotes_of(
    there: Sequence[ClusterNode], spellings: Spellings, regions: Sequence[Region]
) -> tuple[Quote, ...]:
    """How many nodes of each type there are. A node counts for every type that it can be."""
    anywhere = not any(node.region for node in there)
    quotes = []
    for region in regions:
        here = [node for node in there if node.well and (anywhere or node.region == region.name)]
        for offer in region.offers:
            available = sum(node.count(spellings[offer.node]) for node in here)
            quotes.append(Quote(region.name, offer.node, available=available))
    return tuple(quotes)


class ClusterMarket(MarketSource):
    """What a cluster has now; prices and notices are those of `below`, where there is a file of them."""

    def __init__(
        self,
        there: Callable[[], Sequence[ClusterNode]],
        spellings: Spellings,
        spec: Sequence[Region],
        below: MarketSource | None = None,
    ) -> None:
        super().__init__(spec)
        self._there, self._spellings, self._below = there, spellings, below
        self._shown = ()  # what there is at first is said, too

    def look(self) -> None:
        prices: dict[tuple[str, str], float | None] = {}
        notices = self.market.notices
        if self._below is not None:
            self._below.look()
            self.problem, notices = self._below.problem, self._below.market.notices
            prices = {(one.region, one.node): one.price_usd_per_h for one in self._below.market.quotes}
        there = quotes_of(self._there(), self._spellings, self.spec)
        quotes = (replace(one, price_usd_per_h=prices.get((one.region, one.node))) for one in there)
        self.market = Market(tuple(quotes), notices)
