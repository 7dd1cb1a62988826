"""The acts of the demo's day. Each does something to the service, and knows by which sign its answer shows.

What is told of an answer comes from the service itself: its log of decisions, its prices, its fleet before and after
(`signs.py`). Here are only the causes, and which of those records belong to which.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from potluck.cli.demo import signs
from potluck.cli.demo.fleet_looks import FleetLook
from potluck.cli.demo.signs import CHEAP, FAR, LAB, NEAR, SHOP, ActEvidence
from potluck.cli.demo.traffic import DemoLoad
from potluck.control.gateway_client import GatewayClient

CHAT, CODE = (1350, 60), (2700, 10)
"""Mean tokens of prompts and answers."""
RATE_PER_S = 4.0
"""Of both tenants together, as the spec has it."""
BURST, FLOOD = 2.0, 3.0
"""Times the usual rate."""
THIN_GBPS, WIDE_GBPS = 1.0, 10.0
USUAL, USUAL_COUNT, USUAL_USD_PER_H = "1xL4", 10, 0.6
"""As in the spec."""
CHEAP_COUNT, CHEAP_USD_PER_H = 6, 0.25
MOST_TOLD = 2
"""Decisions that are told of one answer."""


@dataclass(slots=True)
class DemoControls:
    """With what things are done to the service."""

    client: GatewayClient
    market: Path
    """The file of prices that its controller watches."""
    quotes: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(region, node) to how many, for how much, where it is not as in the spec."""

    def quote(self, region: str, node: str, count: int, usd_per_h: float) -> None:
        self.quotes[region, node] = (count, usd_per_h)
        lines = [
            f"  - {{region: {where}, node: {what}, available: {many}, price_usd_per_h: {price}}}"
            for (where, what), (many, price) in self.quotes.items()
        ]
        draft = self.market.with_suffix(".draft")
        draft.write_text("\n".join(["offers:", *lines]), "utf-8")
        draft.replace(self.market)  # whole, for whoever reads it meanwhile

    def network(self, urls: Sequence[str], gbps: float) -> None:
        for url in urls:
            body = json.dumps({"gbps": gbps}).encode()
            request = urllib.request.Request(f"{url}/network", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                answer.read()


def _nothing(means: DemoControls, look: FleetLook) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Act:
    name: str
    title: str
    happens: str
    asks: tuple[DemoLoad, ...]
    shown: Callable[[ActEvidence], bool]
    """Whether the answer is there."""
    told: tuple[str, ...]
    """Kinds of decisions that the answer is told by, the latest of each (of remarks the first that
    kept clearly more from crossing); `no`: what the refused were told."""
    result: Callable[[ActEvidence], str]
    """What came of it, in sentences."""
    begin: Callable[[DemoControls, FleetLook], str] = _nothing
    """Does it; the replica that it is done to, if any."""
    moment: Callable[[ActEvidence], bool] = signs.always
    """When it may begin."""
    earlier: tuple[DemoLoad, ...] = ()
    """What is asked until then; nothing: what was asked before."""
    prepare: Callable[[DemoControls, FleetLook], str] = _nothing
    """Done before that."""
    saved_usd_per_h: Callable[[ActEvidence], float] = signs.nothing_saved


def chosen(act: Act, seen: ActEvidence) -> str:
    """What the service decided, in its own words."""
    lines: list[str] = []
    for kind in act.told:
        if kind == "no":
            lines += [f"{tenant} is told: {each.no}" for tenant, each in seen.by_tenant.items() if each.no]
        elif kind == "remark":
            lines += [] if seen.raised is None else [seen.raised.line]
        else:
            lines += [each.line for each in seen.of(kind)[-1:]]
    return "; ".join(lines[:MOST_TOLD])


def asked(
    rate_per_s: float, lengths: tuple[int, int], request_class: str = "standard"
) -> tuple[DemoLoad, ...]:
    """Half of it by each tenant."""
    return tuple(DemoLoad(tenant, rate_per_s / 2, *lengths, request_class) for tenant in (SHOP, LAB))


# What is done.


def _kill(means: DemoControls, look: FleetLook) -> str:
    """The busiest replica that computes prompts here; its node does not come back."""
    victim = max(look.ready("prefill", NEAR) or look.ready(), key=lambda each: each.open_requests)
    means.quote(NEAR, USUAL, USUAL_COUNT - 1, USUAL_USD_PER_H)
    means.client.kill(victim.name)
    return victim.name


def _thin(means: DemoControls, look: FleetLook) -> str:
    """All who send over the link share it."""
    urls = [each.url for each in look.ready(region=FAR)]
    means.network(urls, THIN_GBPS / max(1, len(urls)))
    return ""


def _wide(means: DemoControls, look: FleetLook) -> str:
    """The link is as it was; no further GPU of the usual kind can be had."""
    means.network([each.url for each in look.ready(region=FAR)], WIDE_GBPS)
    means.quote(NEAR, USUAL, look.count_on(USUAL, NEAR), USUAL_USD_PER_H)
    return ""


def _cheaper(means: DemoControls, look: FleetLook) -> str:
    means.quote(NEAR, CHEAP, CHEAP_COUNT, CHEAP_USD_PER_H)
    return ""


def the_day() -> tuple[Act, ...]:
    return (*_morning(), *_troubles(asked(RATE_PER_S, CODE)), *_evening(asked(RATE_PER_S, CODE)))


def _morning() -> tuple[Act, ...]:
    return (
        Act(
            "steady",
            "Morning",
            f"Two tenants chat as planned, {RATE_PER_S:g} requests a second together.",
            asked(RATE_PER_S, CHAT),
            signs.crossed,
            ("plan",),
            signs.far_share,
            saved_usd_per_h=signs.saved_by_far,
        ),
        Act(
            "burst",
            "A burst",
            f"{BURST:g} times as many chats arrive.",
            asked(BURST * RATE_PER_S, CHAT),
            signs.grown,
            ("plan", "replan"),
            signs.peak,
        ),
        Act(
            "shift",
            "Chats become coding",
            f"The burst is over; prompts have {CODE[0]:,} tokens instead of {CHAT[0]:,}, answers {CODE[1]} instead "
            f"of {CHAT[1]}.",
            asked(RATE_PER_S, CODE),
            signs.reshaped,
            ("plan", "recast", "flip"),
            signs.in_place,
            saved_usd_per_h=signs.saved_since,
        ),
    )


def _troubles(coding: tuple[DemoLoad, ...]) -> tuple[Act, ...]:
    return (
        Act(
            "killed",
            "A node dies",
            "The busiest replica that computes prompts is killed, and its node does not come back.",
            coding,
            signs.replaced,
            ("lost", "plan", "ready"),
            signs.went_on,
            _kill,
        ),
        Act(
            "thin",
            "A thin link",
            f"The link from {FAR} to {NEAR} carries {THIN_GBPS:g} Gbit/s instead of {WIDE_GBPS:g}.",
            coding,
            signs.kept_near,
            ("remark",),
            signs.not_sent,
            _thin,
            moment=signs.crossing,
        ),
    )


def _evening(coding: tuple[DemoLoad, ...]) -> tuple[Act, ...]:
    told_no = asked(RATE_PER_S, CODE, "interactive")
    return (
        Act(
            "flood",
            "A tenant floods",
            f"The tenant {LAB} sends {2 * FLOOD:g} times as much as before, and no more GPUs can be rented.",
            (told_no[0], DemoLoad(LAB, FLOOD * RATE_PER_S, *CODE, "interactive")),
            signs.fair,
            ("no",),
            signs.shielded,
            moment=signs.usual,
            earlier=told_no,
            prepare=_wide,
        ),
        Act(
            "cheaper",
            "A cheaper GPU",
            f"{CHEAP_COUNT} {CHEAP.removeprefix('1x')}s can be rented in {NEAR} for ${CHEAP_USD_PER_H:.2f}/h each.",
            coding,
            signs.moving_house,
            ("plan", "replan"),
            signs.cheaper_now,
            _cheaper,
            saved_usd_per_h=signs.saved_since,
        ),
    )
