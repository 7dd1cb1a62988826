"""`potluck catalog prices --from skypilot`: what is really rented at which price, as a table or for a spec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.catalog.prices import Price
    from potluck.catalog.skypilot_prices import SkyPilotPrices
    from potluck.spec.spec_values import Spec

MOST_SHOWN = 12


def listed_from(where: str) -> SkyPilotPrices:
    """Of a file, a folder of SkyPilot's catalogs, or the one that it has fetched."""
    from potluck.catalog import skypilot_prices

    if where == "installed":
        return skypilot_prices.read_all(skypilot_prices.installed())
    path = Path(where)
    if path.is_dir():
        return skypilot_prices.read_all(skypilot_prices.installed(path))
    return skypilot_prices.read(path)


@dataclass(frozen=True, slots=True)
class MarketOffers:
    """A spec's offers at listed prices, as a market file has them."""

    text: str
    found: int
    kept: tuple[str, ...]
    """Those that nobody lists, which keep the price that they have."""


def offers_for(spec: Spec, prices: Sequence[Price], source: str) -> MarketOffers:
    from potluck.catalog.skypilot_prices import offer_price

    types = {node.name: node for node in spec.node_types}
    lines, kept, dates = [], [], set()
    for region in spec.regions:
        for offer in region.offers:
            node = types[offer.node]
            price = offer_price(prices, f"{node.gpus}x{node.gpu.name}", region.name, offer.spot)
            if price is None:
                kept.append(f"{offer.node} in {region.name}" + (" (spot)" if offer.spot else ""))
                continue
            dates.add(price.date)
            value = {
                "region": region.name,
                "node": offer.node,
                "price_usd_per_h": round(price.price_usd_per_h, 6),
            }
            lines.append(f"  - {json.dumps(value)}  # {price.cloud} {price.instance_type}")
    if not lines:
        raise InputError("--spec", "none of its nodes is listed in its regions; those must be named as there")
    head = f"# Prices of SkyPilot's catalog ({source}, {', '.join(sorted(dates))}), for --market.\noffers:\n"
    return MarketOffers(head + "\n".join(lines) + "\n", len(lines), tuple(kept))


def write_offers(offered: MarketOffers, out: Path | None) -> None:
    """To a file, or to the screen; what keeps its price is said beside it."""
    if out is None:
        click.echo(offered.text, nl=False)
    else:
        try:
            out.write_text(offered.text, encoding="utf-8")
        except OSError as error:
            raise InputError("--out", f"{out} cannot be written ({error.strerror})") from error
        click.echo(f"{out}: {offered.found} offers; `potluck plan SPEC --market {out}` takes them")
    for each in offered.kept:
        click.echo(f"not listed, keeps its price: {each}", err=True)


def show_left_out(listed: SkyPilotPrices) -> None:
    """Every reason for which rows are not in the table, with how many there are."""
    if not listed.left_out:
        return
    click.echo("left out:")
    for why, count in listed.left_out[:MOST_SHOWN]:
        click.echo(f"  {why} ({count} row{'s' if count > 1 else ''})")
    rest = listed.left_out[MOST_SHOWN:]
    if rest:
        click.echo(f"  and {len(rest)} more reasons ({sum(count for _, count in rest)} rows); --json has all")
