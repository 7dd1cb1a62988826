"""Machines of a cluster that somebody else operates, and the market that they are: what is gone cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from potluck.control.market import Market, MarketSource, Quote, changed
from potluck.core.values.types import NodeType, Region


@dataclass(frozen=True, slots=True)
class NodeTypeLabels:
    """A node type of the spec, as it is looked for in a cluster."""

    gpus: int
    names: tuple[str, ...]
    """What its GPU may be called there, the likeliest first."""


Spellings = Mapping[str, NodeTypeLabels]
"""By node type."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine of a cluster."""

    id: str
    region: str
    """Empty: it does not say."""
    gpus: tuple[tuple[str, int], ...]
    """What they are called, and how many."""
    well: bool = True
    """Whether something may be started there."""

    def count(self, kind: NodeTypeLabels) -> int:
        """How many nodes of a kind it can be."""
        return max((have // kind.gpus for name, have in self.gpus if name in kind.names), default=0)


def spellings_of(
    nodes: Sequence[NodeType], aliases: Callable[[str], Sequence[str]], told: Mapping[str, str]
) -> dict[str, NodeTypeLabels]:
    """What the spec's nodes are called; `told` names GPUs as the cluster does, where somebody said so."""
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
    return tuple(
        Quote(
            region.name,
            offer.node,
            available=sum(
                node.count(spellings[offer.node])
                for node in there
                if node.well and (anywhere or node.region == region.name)
            ),
        )
        for region in regions
        for offer in region.offers
    )


class ClusterMarket:
    """What a cluster has now; prices and notices are those of `below`, where there is a file of them."""

    def __init__(
        self,
        there: Callable[[], Sequence[ClusterNode]],
        spellings: Spellings,
        spec: Sequence[Region],
        below: MarketSource | None = None,
    ) -> None:
        self._there, self._spellings, self.spec, self._below = there, spellings, tuple(spec), below
        self._shown: tuple[Region, ...] = ()
        self.market = Market()
        self.problem = ""

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.market.regions(self.spec)

    def changes(self) -> str:
        before, self._shown = self._shown, self.regions
        return changed(before, self._shown)

    def look(self) -> None:
        prices: dict[tuple[str, str], float | None] = {}
        notices = self.market.notices
        if self._below is not None:
            self._below.look()
            self.problem, notices = self._below.problem, self._below.market.notices
            prices = {(each.region, each.node): each.price_usd_per_h for each in self._below.market.quotes}
        there = quotes_of(self._there(), self._spellings, self.spec)
        quotes = tuple(replace(each, price_usd_per_h=prices.get((each.region, each.node))) for each in there)
        self.market = Market(quotes, notices)
