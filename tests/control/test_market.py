"""Prices, availability and notices from a market file that changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_controller import PLAN, FixedPlanner, World, run_until_planned

from potluck.cli.simulating.simulation import market_over_time
from potluck.control.manual_changes import leaving
from potluck.control.market import MarketFile, VanishNotice, read_market
from potluck.control.state_store import StateStore
from potluck.core.errors import PotluckError
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.world.faults import Fault, PriceChange, SupplyChange

SPEC = (
    Region("east", (NodeOffer("1xA10", 0.8, 4), NodeOffer("1xL4", 0.5, 0))),
    Region("west", (NodeOffer("1xA10", 0.7, 2),)),
)


def test_market_file_overrides_only_named_offers() -> None:
    text = "offers: [{region: east, node: 1xL4, available: 3}, {region: west, node: 1xA10, price_usd_per_h: 0.2}]"
    assert read_market(text, "m", SPEC).regions(SPEC) == (
        Region("east", (NodeOffer("1xA10", 0.8, 4), NodeOffer("1xL4", 0.5, 3))),
        Region("west", (NodeOffer("1xA10", 0.2, 2),)),
    )
    assert read_market("", "m", SPEC).regions(SPEC) == SPEC


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("offers: [{region: mars, node: 1xL4}]", "offers[0].region: unknown"),
        ("offers: [{region: east, node: 1xL5}]", "offers[0].node: unknown"),
        ("offers: [{region: east, node: 1xL4, available: -1}]", "offers[0].available: must be"),
        ("offers: [{region: east, node: 1xL4, price_usd_per_h: .nan}]", "price_usd_per_h: must be"),
        ("offers: {a: 1}", "offers: must be a list"),
        ("notices: [{engine: x}]", "notices[0].at: must be a time"),
        ("notices: [{engine: x, at: soon}]", "notices[0].at: must be a time"),
        ("notices: [{engine: x, count: 2, at: 5}]", "notices[0].engine: is a name"),
        ("prices: []", "must have offers and notices"),
        ("a: [", "is not YAML"),
    ],
)
def test_invalid_market_file_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(PotluckError) as caught:
        read_market(text, "m", SPEC)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_market_times_are_dates_or_seconds() -> None:
    times = {"a": "1763265600", "b": "2025-11-16T04:00:00Z", "c": "'2025-11-16 04:00'"}
    text = "notices: [" + ", ".join(f"{{engine: {name}, at: {at}}}" for name, at in times.items()) + "]"
    assert read_market(text, "m", SPEC).notices == tuple(VanishNotice(1763265600.0, name) for name in "abc")


def test_invalid_market_file_keeps_the_last_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "market.yaml"
    market = MarketFile(path, SPEC)
    market.look()
    assert (market.regions, market.problem) == (SPEC, "")
    path.write_text("offers: [{region: east, node: 1xL4, available: 3}]")
    market.look()
    assert market.regions[0].offers[1].available == 3
    assert market.changes() == "3 x 1xL4 in east at $0.50/h"
    path.write_text("offers: [")
    os.utime(path, ns=(1, 1))
    market.look()
    assert "is not YAML" in market.problem
    assert market.regions[0].offers[1].available == 3


def _market(gateway: Any, told: list[Any]) -> None:
    wanted = gateway.wanted
    gateway.wanted = lambda: {**wanted(), "market": told[-1] if told else None}
    gateway.set_market = lambda regions: told.append([_as_json(region) for region in regions])


def _as_json(region: Region) -> Any:
    from potluck.core.codec import encode

    return encode(region)


def test_market_changes_are_sent_once_and_again_after_a_gateway_restart(tmp_path: Path) -> None:
    world, message = World(tmp_path), []
    _market(world.gateway, message)
    path = tmp_path / "market.yaml"
    controller = world.controller(market=MarketFile(path, SPEC))
    world.turns(controller, 3)
    assert message == []
    path.write_text("offers: [{region: east, node: 1xL4, available: 3}]")
    world.turns(controller, 3)
    assert [item[0]["offers"][1]["available"] for item in message] == [3]
    message.clear()  # it was started again
    world.turns(controller, 3)
    assert len(message) == 1


def test_plans_use_current_market_prices(tmp_path: Path) -> None:
    world, message, asked = World(tmp_path), [], []
    _market(world.gateway, message)
    path = tmp_path / "market.yaml"
    path.write_text("offers: [{region: west, node: 1xA10, price_usd_per_h: 0.1}]")
    controller = world.controller(FixedPlanner(PLAN, asked), market=MarketFile(path, SPEC))
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "prices"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert asked[0].regions[1].offers[0].price_usd_per_h == 0.1


def test_engine_with_a_notice_is_drained_and_replaced(tmp_path: Path) -> None:
    world, message, drained = World(tmp_path), [], []
    _market(world.gateway, message)
    world.gateway.drain = drained.append  # type: ignore[attr-defined]
    path = tmp_path / "market.yaml"
    controller = world.controller(market=MarketFile(path, SPEC))
    world.gateway.replicas = ["a", "b"]
    world.gateway.urls = True
    world.turns(controller, 4)
    victim = next(item for item in world.gateway.fleet if item.replica == "a")
    path.write_text(f"notices: [{{engine: {victim.name}, at: {world.now_s + 60}}}]")
    world.turns(controller, 3)
    assert drained == ["a"]
    assert leaving(StateStore(world.path)) == {victim.name}
    world.gateway.replicas = ["b", "c"]
    world.turns(controller, 4)
    assert victim.name not in world.machine.running
    assert sorted(item.replica for item in world.gateway.fleet) == ["b", "c"]
    noted = [happening for happening in StateStore(world.path).happenings() if happening.kind == "notice"]
    assert [item.what for item in noted] == [victim.name]


def test_notice_for_a_node_type_covers_the_named_number_of_engines() -> None:
    from test_controller import LAYOUT

    from potluck.control.control_values import EngineInstance, EngineSpec

    engines = [
        EngineInstance(name, EngineSpec("m", LAYOUT, "east"), "up", float(n)) for n, name in enumerate("abc")
    ]
    market = read_market(
        "notices: [{region: east, node: 1xA10, count: 2, at: 5}, {engine: c, at: 9}]", "m", SPEC
    )
    assert {name: notice.at_s for name, notice in market.leaving(engines).items()} == {"c": 9, "a": 5, "b": 5}


DAY_SPEC = (
    Region("east", (NodeOffer("1xL4", 0.6, 4), NodeOffer("1xA10", 1.0, 2))),
    Region("west", (NodeOffer("1xL4", 0.5, 1),)),
)
TEXT = """\
offers:
  - {at_s: 7200, region: east, node: 1xL4, available: 1, notice_s: 120}
  - {region: west, node: 1xL4, available: 3}
  - {at_s: 3600, region: east, node: 1xL4, price_usd_per_h: 0.9}
notices:
  - {at_s: 9000, region: west, node: 1xL4, count: 2}
"""


def offers(regions: tuple[Region, ...]) -> list[tuple[float, int]]:
    return [(offer.price_usd_per_h, offer.available) for region in regions for offer in region.offers]


def test_market_schedule_lines_apply_from_their_time() -> None:
    at_first, changes = market_over_time(TEXT, "day.yaml", DAY_SPEC)
    assert offers(at_first) == [(0.6, 4), (1.0, 2), (0.5, 3)]
    assert changes.prices == (PriceChange(3600.0, "east", "1xL4", 0.9),)
    assert changes.availability == (SupplyChange(7200.0, "east", "1xL4", 1, 120.0),)
    leaving = Fault(8970.0, "spot", region="west", node="1xL4", count=2, notice_s=30.0)
    assert changes.faults == (leaving,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("offers: [{at_s: -1, region: east, node: 1xL4, available: 1}]", "offers[0].at_s: must be seconds"),
        ("offers: [{at_s: 1h, region: east, node: 1xL4, available: 1}]", "is '1h'"),
        ("offers: [{at_s: 1, region: east, node: 1xL40}]", "1xL4"),
        ("notices: [{region: east, node: 1xL4}]", "notices[0].at_s: must be seconds"),
        ("notices: [{at_s: 1, engine: m-1}]", "must be a mapping of"),
        ("", "has no offers and no notices"),
    ],
)
def test_invalid_market_schedule_is_refused_in_one_line(line: str, says: str) -> None:
    with pytest.raises(PotluckError) as caught:
        market_over_time(line, "day.yaml", DAY_SPEC)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
