"""Terms in specs: values, node names, with line and fix of every problem."""

from __future__ import annotations

import numpy as np
import pytest
from spec_texts import GOOD, parsed_spec, problems_of

from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.spec.traces import Trace, rates_by_hour

ASKED = GOOD.replace(
    "    slo: {ttft_ms: 500, tpot_ms: 50}\n",
    """\
    slo: {ttft_ms: 500, tpot_ms: 50}
    priority: 3
    redundancy: {survive: node, share: 0.8}
    max_spot_share: 0.25
    limits:
      no_regions: [west]
      no_nodes: [L4]
      max_gpu_kinds: 1
      max_stages: 2
      max_nodes: 2
      min_copies: 1
      max_copies: 6
""",
)
NODES = """\
        - node: 2xL40S
          available: 4
          price_usd_per_h: 3.5
"""


def with_offers(*lines: str) -> str:
    return GOOD.replace(NODES, "".join(f"        - {line}\n" for line in lines))


def test_omitted_terms_set_no_limits() -> None:
    assert parsed_spec().model("chat").terms == NO_TERMS
    assert not NO_TERMS.asked


def test_written_terms_are_applied() -> None:
    terms = parsed_spec(ASKED).model("chat").terms
    assert terms == ModelTerms("node", 0.8, 0.25, ("east",), None, ("2xL40S", "8xH100-SXM"), 1, 2, 2, 1, 6, 3)
    assert list(terms.asked) == [
        *("redundancy", "max_spot_share", "regions", "nodes", "max_gpu_kinds", "max_stages"),
        *("max_nodes", "min_copies", "max_copies"),
    ]
    for name in terms.asked:
        assert name not in terms.without(name).asked


def test_bare_survive_domain_covers_all_demand() -> None:
    terms = parsed_spec(ASKED.replace("{survive: node, share: 0.8}", "region")).model("chat").terms
    assert (terms.survive, terms.survive_share) == ("region", 1.0)


def test_spot_and_zone_offers_of_one_node_have_their_own_names() -> None:
    spec = parsed_spec(
        with_offers(
            "{node: 2xL40S, available: 4, price_usd_per_h: 3.5, reserved: 2}",
            "{node: 2xL40S, available: 9, price_usd_per_h: 1.5, spot: true, preemptions_per_h: 0.2}",
            "{node: 2xL40S, available: 1, price_usd_per_h: 3.6, zone: b}",
        )
    )
    offers = {offer.node: offer for offer in spec.region("east").offers}
    assert list(offers) == ["2xL40S", "2xL40S spot", "2xL40S b", "1xL4"]
    assert offers["2xL40S spot"].preemptions_per_h == 0.2
    assert offers["2xL40S"].reserved == 2
    assert offers["2xL40S b"].zone == "b"
    assert spec.node_type("2xL40S spot").gpu == spec.node_type("2xL40S").gpu


def test_spot_offer_without_a_preemption_rate_gets_the_default_with_a_note() -> None:
    spec = parsed_spec(with_offers("{node: 2xL40S, available: 4, price_usd_per_h: 1.5, spot: true}"))
    assert spec.region("east").offers[0].preemptions_per_h == 0.05
    assert any("assumed to be taken away 0.05 times an hour" in note for note in spec.notes)


def test_cloud_and_residency_terms_become_regions() -> None:
    text = ASKED.replace("no_regions: [west]", "only_clouds: [aws]\n      residency: [aws, west]")
    terms = (
        parsed_spec(text.replace("    - name: east\n", "    - name: east\n      cloud: aws\n"))
        .model("chat")
        .terms
    )
    assert terms.regions == ("east",)
    assert terms.residency == ("east", "west")


def test_egress_storage_and_head_node_prices_are_read() -> None:
    text = GOOD.replace("rtt_ms: 60}", "rtt_ms: 60, egress_usd_per_gb: 0.02}").replace(
        "    - name: east\n",
        "    - name: east\n      head_usd_per_h: 0.3\n      storage_usd_per_gb_month: 0.08\n",
    )
    spec = parsed_spec(text)
    assert [link.egress_usd_per_gb for link in spec.links] == [0.02, 0.02]
    east = spec.region("east")
    assert (east.head_usd_per_h, east.storage_usd_per_gb_month) == (0.3, 0.08)


@pytest.mark.parametrize(
    ("written", "line", "problem"),
    [
        (ASKED.replace("survive: node", "survive: rack"), 6, "survive"),
        (ASKED.replace("survive: node", "survive: zone"), 6, "zone is not known of any node"),
        (ASKED.replace("[west]", "[wset]"), 9, "unknown region 'wset'; did you mean 'west'?"),
        (ASKED.replace("[L4]", "[L5]"), 10, "unknown node 'L5'"),
        (ASKED.replace("no_regions: [west]", "no_regions: [east, west]"), 8, "leaves nothing to run on"),
        (ASKED.replace("no_regions: [west]", "only_clouds: [aws]"), 9, "the fleet names none"),
        (ASKED.replace("max_copies: 6", "max_copies: 0"), 15, "max_copies"),
        (ASKED.replace("min_copies: 1", "min_copies: 7"), 15, "must not be below min_copies, 7"),
        (ASKED.replace("rate_per_s: 4", "rate_per_s: 0"), 14, "asks for copies of a model at rate 0"),
        (ASKED.replace("max_spot_share: 0.25", "max_spot_share: 25"), 7, "max_spot_share"),
        (ASKED.replace("priority: 3", "priority: high"), 5, "priority"),
        (
            with_offers("{node: 2xL40S, available: 4, price_usd_per_h: 1, reserved: 5}"),
            13,
            "reserved must not be above available, 5 is above 4",
        ),
        (
            with_offers("{node: 2xL40S, available: 4, price_usd_per_h: 1, preemptions_per_h: 1}"),
            13,
            "preemptions_per_h is for spot nodes",
        ),
        (
            with_offers("{node: 2xL40S, available: 4, price_usd_per_h: 1, spot: true, reserved: 1}"),
            13,
            "spot nodes cannot be reserved",
        ),
    ],
)
def test_invalid_terms_are_refused_with_line_and_fix(written: str, line: int, problem: str) -> None:
    result = problems_of(written)
    assert len(result) == 1
    assert result[0].line == line
    assert problem in str(result[0])


def test_rates_by_hour_set_the_peak_rate() -> None:
    model = parsed_spec(GOOD.replace("rate_per_s: 4", "rate_by_hour: [1, 2, 7, 3]")).model("chat")
    assert model.rates_by_hour == (1, 2, 7, 3)
    assert model.traffic.rate_per_s == 7
    both = GOOD.replace("rate_per_s: 4", "rate_per_s: 4\n      rate_by_hour: [1, 2]")
    assert parsed_spec(both).model("chat").traffic.rate_per_s == 4
    (result,) = problems_of(GOOD.replace("rate_per_s: 4", "rate_by_hour: [1]"))
    assert "rate_by_hour" in str(result)


def test_trace_over_several_hours_gives_rates_by_hour() -> None:
    times = np.concatenate([np.arange(0, 3600, 10.0), np.arange(3600, 10800, 2.0)])
    ones = np.ones(len(times))
    rates = rates_by_hour(Trace("made", times, ones, ones, None, 0))
    assert rates[:3] == pytest.approx((0.1, 0.5, 0.5), rel=0.01)
    assert set(rates[3:]) == {min(rates)}
    assert rates_by_hour(Trace("made", times[:300], ones[:300], ones[:300], None, 0)) == ()


PLACES = (
    GOOD.replace(
        "      input: 1024\n",
        "      input: 1024\n      classes: {interactive: 0.3}\n      origins: {europe: 0.6, asia: 0.4}\n",
    )
    + """\
origins:
  - {name: europe, rtt_ms: {east: 90, west: 20}}
  - {name: asia, rtt_ms: {east: 200, west: 150}}
"""
)


def test_request_classes_and_origins_of_a_model_are_read() -> None:
    spec = parsed_spec(PLACES)
    traffic = spec.model("chat").traffic
    assert traffic.classes == (("interactive", 0.3),)
    assert traffic.origins == (("europe", 0.6), ("asia", 0.4))
    assert dict(spec.origins)["asia"] == (("east", 0.2), ("west", 0.15))


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("interactive: 0.3", "interactiv: 0.3", 8, "unknown class 'interactiv'; did you mean 'interactive'?"),
        ("interactive: 0.3", "interactive: 0.3, batch: 0.8", 8, "must not add up to more than 1"),
        ("europe: 0.6,", "europ: 0.6,", 9, "unknown origin 'europ'; did you mean 'europe'?"),
        ("asia: 0.4", "asia: 0.3", 9, "shares must add up to 1, not 0.9"),
        ("asia: 0.4", "asia: lots", 9, "must be a number"),
        ("{east: 90, west: 20}", "{east: 90}", 27, "says nothing of 'west'"),
        ("{east: 90, west: 20}", "{east: 90, west: 20, wst: 1}", 27, "unknown region 'wst'"),
        ("name: asia", "name: europe", 9, "duplicate origin 'europe'"),
    ],
)
def test_invalid_classes_and_origins_are_refused_with_their_line(
    old: str, new: str, line: int, problem: str
) -> None:
    result = problems_of(PLACES.replace(old, new))
    assert result[0].line == line
    assert problem in " ".join(str(item) for item in result)
