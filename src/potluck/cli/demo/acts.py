"""The acts of the demo's day. Each does something to the service, and knows by which sign its answer shows.

What is told of an answer comes from the service itself: its log of decisions, its prices, its fleet before and after.
Here are only the causes, and which of those records belong to which.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from potluck.cli.demo.looks import Decided, Look
from potluck.cli.demo.traffic import Ask, Counts
from potluck.control.gateway import GatewayClient

NEAR, FAR = "near", "far"
SHOP, LAB = "shop", "lab"
CHAT, CODE = (900, 60), (1800, 8)
"""Mean tokens of prompts and answers."""
RATE_PER_S = 6.0
BURST, FLOOD = 2.0, 3.0
"""Times the usual rate."""
THIN_GBPS, WIDE_GBPS = 0.5, 10.0
CHEAP_USD_PER_H, CHEAP_COUNT = 0.25, 6
L4_COUNT, L4_USD_PER_H = 8, 0.6
"""As in the spec."""
CROSSES = " may go over "
RAISED = 1.2
LEAST_USD = 0.01
LEAST_ASKED = 4
MOST_TOLD = 2
"""Decisions that are told of one answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an act has brought about so far."""

    before: Look
    now: Look
    decided: tuple[Decided, ...]
    by_tenant: Mapping[str, Counts]
    """Of requests that have ended."""
    victim: str = ""
    """The replica that something was done to."""

    def of(self, *kinds: str) -> tuple[Decided, ...]:
        """Of remarks only those on what may cross: paces are remarked on too."""
        return tuple(
            each
            for each in self.decided
            if each.kind in kinds and (each.kind != "remark" or CROSSES in each.what)
        )

    @property
    def more(self) -> int:
        """Replicas that are ready, more than before."""
        return len(self.now.ready()) - len(self.before.ready())

    @property
    def saved_usd_per_h(self) -> float:
        return self.before.usd_per_h - self.now.usd_per_h

    @property
    def moved(self) -> int:
        """Attempts that went on elsewhere."""
        return self.now.moved - self.before.moved


@dataclass(slots=True)
class Means:
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


def _nothing(means: Means, look: Look) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Act:
    name: str
    title: str
    happens: str
    asks: tuple[Ask, ...]
    shown: Callable[[Seen], bool]
    """Whether the answer is there."""
    told: tuple[str, ...]
    """Kinds of decisions that the answer is told by; the first of each kind, and the latest of the first kind."""
    saved: Callable[[Seen], str]
    begin: Callable[[Means, Look], str] = _nothing
    """Does it; the replica that it is done to, if any."""


def chosen(act: Act, seen: Seen) -> str:
    """What the service decided, in its own words."""
    lines: list[str] = []
    for kind in act.told:
        lines += [each.line for each in seen.of(kind)[-1:]]
    return "; ".join(lines[:MOST_TOLD])


def shop(rate_per_s: float, lengths: tuple[int, int], request_class: str = "standard") -> Ask:
    return Ask(SHOP, rate_per_s, *lengths, request_class)


# What is done.


def _kill(means: Means, look: Look) -> str:
    """The busiest replica that computes prompts here; its node does not come back."""
    victim = max(look.ready("prefill", NEAR) or look.ready(), key=lambda each: each.open_requests)
    means.quote(NEAR, "1xL4", L4_COUNT - 1, L4_USD_PER_H)
    means.client.kill(victim.name)
    return victim.name


def _thin(means: Means, look: Look) -> str:
    means.network([each.url for each in look.ready(region=FAR)], THIN_GBPS)
    return ""


def _flood(means: Means, look: Look) -> str:
    """The link is as it was; no further L4 can be had."""
    means.network([each.url for each in look.ready(region=FAR)], WIDE_GBPS)
    means.quote(NEAR, "1xL4", look.count_on("1xL4", NEAR), L4_USD_PER_H)
    return ""


def _cheaper(means: Means, look: Look) -> str:
    means.quote(NEAR, "1xA10", CHEAP_COUNT, CHEAP_USD_PER_H)
    return ""


# By what it shows.


def _crossed(seen: Seen) -> bool:
    return seen.now.crossed_bytes > seen.before.crossed_bytes and seen.by_tenant[SHOP].requests >= LEAST_ASKED


def _grown(seen: Seen) -> bool:
    return bool(seen.of("plan")) and seen.more > 0


def _shrunk(seen: Seen) -> bool:
    return bool(seen.of("plan")) and seen.saved_usd_per_h > LEAST_USD


def _recast(seen: Seen) -> bool:
    return bool(seen.of("plan")) and bool(seen.of("recast", "flip"))


def _replaced(seen: Seen) -> bool:
    lost = [each.number for each in seen.of("lost") if each.what.startswith(seen.victim)]
    return bool(lost) and any(each.number > lost[0] for each in seen.of("ready", "plan"))


def _kept_near(seen: Seen) -> bool:
    highest = max(seen.before.thresholds, default=0.0)
    return bool(seen.of("remark")) and max(seen.now.thresholds, default=0.0) >= RAISED * highest > 0


def _fair(seen: Seen) -> bool:
    mine, flood = seen.by_tenant[SHOP], seen.by_tenant[LAB]
    return min(mine.requests, flood.requests) >= LEAST_ASKED and _answered(mine) > _answered(flood)


def _moving_house(seen: Seen) -> bool:
    return _shrunk(seen) and any("1xA10" in each.template for each in seen.now.ready(region=NEAR))


def _answered(counts: Counts) -> float:
    return (counts.requests - counts.refused - counts.lost) / max(1, counts.requests)


# What it saved.


def _far_share(seen: Seen) -> str:
    gb = (seen.now.crossed_bytes - seen.before.crossed_bytes) / 1e9
    return f"{gb:.1f} GB of KV came from {FAR}: the longer prompts are computed there"


def _peak(seen: Seen) -> str:
    more = seen.now.usd_per_h - seen.before.usd_per_h
    return f"replicas more: {seen.more}, for ${more:.2f}/h, paid while the burst lasts and not all day"


def _in_place(seen: Seen) -> str:
    changed = len(seen.of("recast", "flip"))
    return f"replicas that changed sides without loading weights: {changed}"


def _went_on(seen: Seen) -> str:
    return f"{seen.moved} attempts went on elsewhere; {seen.by_tenant[SHOP].lost} requests lost"


def _not_sent(seen: Seen) -> str:
    before, now = max(seen.before.thresholds, default=0.0), max(seen.now.thresholds, default=0.0)
    return f"only prompts beyond {now:.0f} tokens wait for the thin link, not those beyond {before:.0f}"


def _shielded(seen: Seen) -> str:
    mine, flood = seen.by_tenant[SHOP], seen.by_tenant[LAB]
    return (
        f"{SHOP}: {_answered(mine):.0%} of {mine.requests} answered; "
        f"{LAB}: {_answered(flood):.0%} of {flood.requests}, the rest told at once when to come again"
    )


def _cheaper_now(seen: Seen) -> str:
    return f"${seen.before.usd_per_h:.2f}/h became ${seen.now.usd_per_h:.2f}/h"


def the_day() -> tuple[Act, ...]:
    return (*_morning(shop(RATE_PER_S, CHAT)), *_evening(shop(RATE_PER_S, CODE)))


def _morning(usual: Ask) -> tuple[Act, ...]:
    return (
        Act(
            "steady",
            "Morning",
            f"{RATE_PER_S:g} chats/s, as planned",
            (usual,),
            _crossed,
            ("plan",),
            _far_share,
        ),
        Act(
            "burst",
            "A burst",
            f"{BURST:g} times the chats",
            (shop(BURST * RATE_PER_S, CHAT),),
            _grown,
            ("plan", "replan"),
            _peak,
        ),
    )


def _evening(coding: Ask) -> tuple[Act, ...]:
    return (
        Act(
            "shift",
            "Chats become coding",
            f"no burst; prompts of {CODE[0]} tokens instead of {CHAT[0]}, answers of {CODE[1]}, not {CHAT[1]}",
            (coding,),
            _recast,
            ("plan", "recast", "flip"),
            _in_place,
        ),
        Act(
            "killed",
            "A node dies",
            "the engine of the busiest replica that computes prompts is killed, and its node is gone",
            (coding,),
            _replaced,
            ("lost", "plan", "ready"),
            _went_on,
            _kill,
        ),
        Act(
            "thin",
            "A thin link",
            f"the way from {FAR} to {NEAR} carries {THIN_GBPS:g} Gbit/s instead of {WIDE_GBPS:g}",
            (coding,),
            _kept_near,
            ("remark",),
            _not_sent,
            _thin,
        ),
        Act(
            "flood",
            "A tenant floods",
            f"{LAB} sends {FLOOD:g} times what the fleet is for, and no further L4 can be had",
            (
                shop(RATE_PER_S / 4, CODE, "interactive"),
                Ask(LAB, FLOOD * RATE_PER_S, *CODE, "interactive"),
            ),
            _fair,
            (),
            _shielded,
            _flood,
        ),
        Act(
            "cheaper",
            "A cheaper GPU",
            f"{CHEAP_COUNT} A10 can be had in {NEAR}, for ${CHEAP_USD_PER_H:.2f}/h each",
            (coding,),
            _moving_house,
            ("plan", "replan"),
            _cheaper_now,
            _cheaper,
        ),
    )
