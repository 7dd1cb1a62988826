"""Node names in every spelling, their links, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import gpus, nodes, prices
from potluck.core.errors import InputError, PotluckError, UnknownNameError


def test_all_listed_nodes_are_built() -> None:
    assert len(nodes.names()) == 4 * len(gpus.names())
    for name in nodes.names():
        node = nodes.node_type(name)
        assert node.name == name
        assert node.network_gbps > 0
        assert (node.interconnect.kind == "none") == (node.gpus == 1)


@pytest.mark.parametrize("spelling", ["2xL40S", "2xl40s", "L40S:2", " 2 x L40S ", "l40s-48gb:2", "2*L40S"])
def test_spellings_of_one_node(spelling: str) -> None:
    assert nodes.canonical(spelling) == "2xL40S"
    assert nodes.node_type(spelling) == nodes.node_type("2xL40S")


def test_a_plain_gpu_is_one() -> None:
    assert nodes.canonical("h100") == "1xH100-SXM"
    assert nodes.node_type("3xL4").gpus == 3


@pytest.mark.parametrize("count", [0, 9, 16, 10**30])
def test_other_counts_are_refused(count: int) -> None:
    with pytest.raises(InputError, match="write 1 to 8"):
        nodes.node_type(f"{count}xL40S")


@pytest.mark.parametrize("name", ["", "x", "2x", "xL40S", "2xFOO", "L40S:2:2", "2xL40S:2", "-1xL4", "nodes"])
def test_malformed_names_say_what_to_write(name: str) -> None:
    with pytest.raises(InputError, match=r"^node: .*(write|did you mean)"):
        nodes.node_type(name)


@given(st.text(max_size=40))
def test_any_text_is_a_node_or_a_clean_error(name: str) -> None:
    try:
        node = nodes.node_type(name)
    except PotluckError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        return
    assert 1 <= node.gpus <= 8


def test_links_follow_the_hardware() -> None:
    link = {name: nodes.node_type(name).interconnect for name in nodes.names()}
    assert (link["8xH100-SXM"].kind, link["8xH100-SXM"].gb_per_s) == ("nvswitch", 450)
    assert (link["8xA100-80"].kind, link["8xA100-80"].gb_per_s) == ("nvswitch", 300)
    assert link["8xH800"].gb_per_s == link["8xA800-SXM"].gb_per_s == 200
    assert link["8xB200"].gb_per_s == 900
    # Bridges join pairs only: four cards talk over PCIe.
    for name in ("A30", "A40", "A6000", "A5000", "RTX3090Ti", "A100-80-PCIe"):
        assert link[f"2x{name}"].kind == "nvlink"
        assert link[f"4x{name}"].kind == link[f"8x{name}"].kind == "pcie"
    for name in ("L4", "L40S", "A10", "A10G", "T4", "RTX4090", "L20"):
        assert {link[f"{count}x{name}"].kind for count in (2, 4, 8)} == {"pcie"}
    # Meshes without a switch: a pair has only the links between the two.
    assert link["2xMI300X"].gb_per_s == pytest.approx(64, rel=1e-3)
    assert link["2xV100-16"].gb_per_s == pytest.approx(50, rel=1e-3)


def test_listed_prices_of_one_region() -> None:
    price = prices.price_usd_per_h("8xH100", "aws/us-east-1")
    assert (price.price_usd_per_h, price.instance_type, price.basis) == (55.04, "p5.48xlarge", "listed")
    assert prices.price_usd_per_h("8xH100", "aws:us-east-1") == price
    assert prices.price_usd_per_h("8xh100-sxm", "us-east-1") == price
    spot = prices.price_usd_per_h("8xH100", "us-east-1", spot=True)
    assert spot.price_usd_per_h == price.spot_usd_per_h
    assert prices.price_usd_per_h("L4", "gcp/us-central1").price_usd_per_h == pytest.approx(0.7068)


def test_a_size_nobody_rents_is_derived_and_says_so() -> None:
    two = prices.price_usd_per_h("2xL40S", "us-east-2")
    four = prices.price_usd_per_h("4xL40S", "us-east-2")
    assert two.price_usd_per_h == pytest.approx(four.price_usd_per_h / 2, abs=1e-4)
    assert two.basis == "derived: per-GPU price of 4xL40S x2"
    three = prices.price_usd_per_h("3xL40S", "us-east-2")
    assert three.price_usd_per_h == pytest.approx(four.price_usd_per_h * 3 / 4)
    assert not three.listed


def test_cheapest_anywhere_prefers_listed_and_leaves_papers_last() -> None:
    for node in {price.node for price in prices.prices()}:
        best = prices.price_usd_per_h(node)
        same = [price for price in prices.prices() if price.node == node]
        market = [price for price in same if not price.from_paper] or same
        listed = [price for price in market if price.listed] or market
        assert best.price_usd_per_h == min(price.price_usd_per_h for price in listed)
    assert prices.price_usd_per_h("H20").cloud == "paper-cauchy"  # listed nowhere else


def test_a_gpu_has_a_price_or_says_that_it_has_none() -> None:
    priced = {nodes.parse(price.node)[1] for price in prices.prices()}
    assert len(priced) >= 30
    assert {"A800-SXM", "L20", "GB200", "MI325X"}.isdisjoint(priced)
    for name in gpus.names():
        if name in priced:
            assert prices.price_usd_per_h(f"8x{name}").price_usd_per_h > 0
        else:
            with pytest.raises(InputError, match=f"no price for 8x{name}; give price_usd_per_h"):
                prices.price_usd_per_h(f"8x{name}")


def test_unknown_region_and_missing_spot_price() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'us-east-1'"):
        prices.price_usd_per_h("L4", "us-est-1")
    with pytest.raises(InputError, match="no spot price for 1xRTX4090"):
        prices.price_usd_per_h("RTX4090", spot=True)
    assert "aws/ap-northeast-2" in prices.regions()


def test_cauchy_prices_are_there() -> None:
    for row in gpus.paper_gpus("cauchy").values():
        price = prices.price_usd_per_h(row.gpu, "paper-cauchy")
        assert price.price_usd_per_h == row.price_usd_per_h
