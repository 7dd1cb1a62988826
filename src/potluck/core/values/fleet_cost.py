"""What a fleet costs while it runs: the same for a plan, a simulated run and a service.

    rent      nodes beyond the reserved ones, at the price of their offer
    heads     once per region with any node
    storage   once per model and region with a copy of it

Egress is paid per byte that crosses a link. What preemptions cost is the planner's estimate; a simulated run pays for
the copies that start again instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from potluck.core.values.types import NodeOffer, Region

HOURS_PER_MONTH = 730.0
HEADS = "head nodes"  # What a plan's charge for them is called.
Offers = Mapping[tuple[str, str], NodeOffer]


def offers_in(regions: Iterable[Region]) -> dict[tuple[str, str], NodeOffer]:
    """(region, node type) to its offer."""
    return {(region.name, offer.node): offer for region in regions for offer in region.offers}


def rent_usd_per_h(offers: Offers, nodes: Mapping[tuple[str, str], int]) -> float:
    """The rent of so many nodes of each (region, node type); nothing for nodes that no region offers."""
    total = 0.0
    for key, count in nodes.items():
        offer = offers.get(key)
        if offer is not None:
            total += max(0, count - offer.reserved) * offer.price_usd_per_h
    return total


def heads_usd_per_h(regions: Iterable[Region], used: Collection[str]) -> float:
    """Head nodes of the regions in use."""
    return sum(region.head_usd_per_h for region in regions if region.name in used)


def storage_usd_per_h(region: Region, weight_bytes: float) -> float:
    """A model's weights in a region's storage."""
    return weight_bytes / 1e9 * region.storage_usd_per_gb_month / HOURS_PER_MONTH
