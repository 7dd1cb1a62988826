"""The acts of the demo's day: what each does to the service, by which sign its answer shows, what is told of it.

All that is told comes from the service itself: its decisions with their reasons, its prices, its fleet before and
after, and what its clients saw.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.traffic import DemoLoad, RequestCounts
from potluck.control.gateway_client import GatewayClient

NEAR, FAR = "near", "far"
LINK = f"{FAR}->{NEAR}"
SHOP, LAB = "shop", "lab"
CHEAP = "1xA10"  # The node that is on offer at last.
CROSSES = re.compile(rf"prompts of .* beyond (\d+) tokens go over {LINK}")
LENGTHS = re.compile(r"(prompts|answers) of .* (rose|fell) from")
RAISED, CLEAR = 1.15, 1.1
"""Times the planned length: from the first on a threshold is raised, up to the second the link is clear."""
LEAST_USD = 0.01
CHEAPER_BY = 0.2  # Share of what the fleet cost before that a cheaper GPU must save at least.
LEAST_ASKED, LEAST_SEEN = 8, 4
"""Of one tenant, to say how long its answers take; of all, to say that there are answers."""
MOST_OF, LESS_OF = 0.75, 0.5
"""Of one who keeps to its share so much is answered, at least; of one who floods so much of that, at most."""


MOVED_KV = "potluck_kv_bytes_total"
RETRIED = "potluck_retries_total"
REPLICA = ("replica", "role", "state", "region", "template", "url", "open_requests", "unit")


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """As the gateway's snapshot has it (`REPLICA`)."""

    name: str
    role: str
    state: str
    region: str
    template: str
    url: str
    open_requests: int
    unit: str = ""  # The copy of its template that it is part of.


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A line of the log of decisions."""

    number: int
    kind: str
    what: str
    why: str

    @property
    def line(self) -> str:
        return f"{self.what} ({self.why})" if self.why else self.what


@dataclass(frozen=True, slots=True)
class FleetLook:
    """One moment."""

    at_s: float
    replicas: tuple[ReplicaLook, ...]
    usd_per_h: float
    threshold_tokens: float  # From which length on prompts may cross; 0 where none do.
    planned_tokens: float  # The same, as planned.
    crossed_bytes: float  # KV that came from another region so far.
    moved: int  # Attempts beyond requests' first so far.
    last: int  # Number of the latest decision.
    planned_copies: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Of the plan in force: (template, region) to copies."""
    replan_pending: bool = False  # Another plan was asked for and has not been answered.

    def ready(self, role: str = "", region: str = "") -> tuple[ReplicaLook, ...]:
        return tuple(
            replica
            for replica in self.replicas
            if replica.state == "ready" and role in ("", replica.role) and region in ("", replica.region)
        )

    @property
    def calm(self) -> bool:
        """Nothing is about to come."""
        return not any(replica.state == "starting" for replica in self.replicas)

    @property
    def settled(self) -> bool:
        """The fleet is exactly what the plan in force says, all of it ready, and no other plan is on its way.

        Only then is its price that of a plan: in between, replicas of the old plan are paid for beside the new ones.
        """
        copies = {(replica.template, replica.region, replica.unit) for replica in self.replicas}
        there = Counter((template, region) for template, region, _ in copies)
        all_ready = all(replica.state == "ready" for replica in self.replicas)
        planned = {copy: count for copy, count in self.planned_copies.items() if count}
        return all_ready and there == planned and not self.replan_pending

    def count_on(self, node: str, region: str) -> int:
        """Replicas that stay."""
        stay = [replica for replica in self.replicas if replica.state in ("starting", "ready")]
        return sum(node in replica_look.template and replica_look.region == region for replica_look in stay)


def look_at(client: GatewayClient, far: str, link: str, last: int) -> FleetLook:
    """`far` is where KV comes from that crosses the `link`; `last` the latest decision that is known."""
    text = client.snapshot()
    metrics = client.metrics().splitlines()
    mine = [item for item in text["thresholds"] if item["link"] == link]
    return FleetLook(
        time.time(),
        tuple(ReplicaLook(*(item[name] for name in REPLICA)) for item in text["replicas"]),
        sum(item["usd_per_h"] for item in text["models"].values()),
        max((item["tokens"] for item in mine), default=0.0),
        max((item["planned_tokens"] for item in mine), default=0.0),
        _total(metrics, MOVED_KV, f'source="[^"]*@{far}#'),
        round(_total(metrics, RETRIED, "")),
        last,
        {(item["template"], item["region"]): item["count"] for item in text["plan"]["deployments"]},
        text["wanted"]["replan"] is not None,
    )


def _total(lines: Sequence[str], name: str, label: str) -> float:
    """Of a counter, of its lines those that have such a label. To read all of them takes longer than all else."""
    mine = re.compile(rf"{name}{{.*{label}")
    return sum(float(line.rpartition(" ")[2]) for line in lines if mine.match(line))


def decided_since(client: GatewayClient, number: int) -> tuple[LoggedDecision, ...]:
    result: Sequence[dict[str, Any]] = client.decisions(number)["decisions"]
    return tuple(LoggedDecision(item["number"], item["kind"], item["what"], item["why"]) for item in result)


@dataclass(frozen=True, slots=True)
class ActEvidence:
    """What an act has brought about so far."""

    before: FleetLook
    now: FleetLook
    decided: tuple[LoggedDecision, ...]
    by_tenant: Mapping[str, RequestCounts]  # Of requests that have ended.
    earlier: Mapping[str, RequestCounts]  # Of those that were sent while the act waited for its moment.
    victim: str = ""  # The replica that something was done to.
    near_usd_per_h: float = 0.0  # What the cheapest fleet costs that has nothing in the other region.
    waited_s: float = 0.0  # Since the act began to wait for its moment.
    window_s: float = 0.0  # After so long the service has seen nothing but the rates and lengths of now.

    def of(self, *kinds: str) -> tuple[LoggedDecision, ...]:
        """Of remarks only those on what may cross: paces are remarked on too."""
        return tuple(
            logged_decision
            for logged_decision in self.decided
            if logged_decision.kind in kinds
            and (logged_decision.kind != "remark" or CROSSES.search(logged_decision.what))
        )

    @property
    def more(self) -> int:
        """Replicas that are ready, more than before."""
        return len(self.now.ready()) - len(self.before.ready())

    @property
    def changed_roles(self) -> int:
        """Replicas that were there before, in another role."""
        roles = {replica.name: replica.role for replica in self.before.replicas}
        return sum(
            roles.get(replica_look.name, replica_look.role) != replica_look.role
            for replica_look in self.now.ready()
        )

    @property
    def moved(self) -> int:
        """Attempts that went on elsewhere."""
        return self.now.moved - self.before.moved

    @property
    def crossed_gb(self) -> float:
        return (self.now.crossed_bytes - self.before.crossed_bytes) / 1e9

    @property
    def raised(self) -> LoggedDecision | None:
        """What was said when clearly fewer prompts might cross than before; else the most that was said."""
        remarks, enough = self.of("remark"), RAISED * self.before.planned_tokens
        first = next((remark for remark in remarks if _crossing(remark) >= enough), None)
        return first or max(remarks, key=_crossing, default=None)

    @property
    def raised_tokens(self) -> float:
        """The longest prompt that was kept from crossing then."""
        return 0.0 if self.raised is None else _crossing(self.raised)


def _crossing(remark: LoggedDecision) -> float:
    """From which length on prompts may cross, of a remark that says so."""
    result = CROSSES.search(remark.what)
    return float(result[1]) if result else 0.0


# By what it shows.


def crossing(seen: ActEvidence) -> bool:
    """Something crosses that could be kept from it: the link and its far end are clear."""
    tokens, planned = seen.now.threshold_tokens, seen.now.planned_tokens
    return 0 < tokens <= CLEAR * planned and seen.now.calm and bool(seen.now.ready(region=FAR))


def usual(seen: ActEvidence) -> bool:
    """So many were asked and answered before it that one knows how long they take."""
    return seen.now.calm and seen.earlier[SHOP].answered >= LEAST_ASKED


def planned_for_this(seen: ActEvidence) -> bool:
    """The fleet is a plan's, for the traffic of now: what was asked before has left the service's window."""
    return seen.waited_s >= seen.window_s and seen.now.settled


def crossed(seen: ActEvidence) -> bool:
    return (
        seen.crossed_gb > 0
        and sum(request_counts.requests for request_counts in seen.by_tenant.values()) >= LEAST_SEEN
    )


def grown(seen: ActEvidence) -> bool:
    return bool(seen.of("plan")) and seen.more > 0


def reshaped(seen: ActEvidence) -> bool:
    """A plan for the lengths that were seen, and something that was done for it."""
    plans = [
        logged_decision.number for logged_decision in seen.of("plan") if LENGTHS.search(logged_decision.why)
    ]
    return bool(plans) and any(
        logged_decision.number > plans[0]
        for logged_decision in seen.of("recast", "flip", "ready", "drain", "stop")
    )


def replaced(seen: ActEvidence) -> bool:
    lost = [
        logged_decision.number
        for logged_decision in seen.of("lost")
        if logged_decision.what.startswith(seen.victim)
    ]
    return bool(lost) and any(
        logged_decision.number > lost[0] for logged_decision in seen.of("ready", "plan")
    )


def kept_near(seen: ActEvidence) -> bool:
    """Measured against the plan: the threshold of the moment may be on its way up or down."""
    planned, now = seen.before.planned_tokens, seen.raised_tokens
    return now >= RAISED * planned > 0 and now > seen.before.threshold_tokens


def fair(seen: ActEvidence) -> bool:
    mine, flood = seen.by_tenant[SHOP], seen.by_tenant[LAB]
    return (
        min(mine.requests, flood.requests) >= LEAST_ASKED
        and mine.answered_share >= MOST_OF
        and flood.answered_share <= LESS_OF * mine.answered_share
    )


def moved_to_cheaper(seen: ActEvidence) -> bool:
    """A plan was adopted and carried out, it uses the cheap GPU, and its fleet costs clearly less than before."""
    uses_it = any(CHEAP in replica_look.template for replica_look in seen.now.ready(region=NEAR))
    saved_enough = saved_since(seen) >= max(LEAST_USD, CHEAPER_BY * seen.before.usd_per_h)
    return bool(seen.of("plan")) and seen.now.settled and uses_it and saved_enough


# What came of it.


def far_share(seen: ActEvidence) -> str:
    usd, alone = seen.now.usd_per_h, seen.near_usd_per_h
    text = f"Longer prompts are computed in {FAR}, and their KV crosses to {NEAR}: {seen.crossed_gb:.1f} GB so far."
    price = f" The fleet costs ${usd:.2f} an hour instead of ${alone:.2f} in {NEAR} alone."
    return text + (price if alone > usd else "")


def peak(seen: ActEvidence) -> str:
    more = seen.now.usd_per_h - seen.before.usd_per_h
    joined = _many(seen.more, "more replica serves", "more replicas serve")
    return f"{joined}, for ${more:.2f} an hour more, and only while the burst lasts."


def in_place(seen: ActEvidence) -> str:
    changed = _many(seen.changed_roles, "replica", "replicas")
    roles = f" {changed} changed roles without loading weights again." if seen.changed_roles else ""
    price = f" {_price(seen)}" if _both_settled(seen) else ""
    return f"The fleet was planned anew for these lengths.{roles}{price}"


def went_on(seen: ActEvidence) -> str:
    lost = sum(request_counts.lost for request_counts in seen.by_tenant.values())
    moved = _many(seen.moved, "attempt", "attempts")
    return f"{moved} went on at another replica; {_many(lost, 'request was', 'requests were')} lost."


def not_sent(seen: ActEvidence) -> str:
    now, before = seen.raised_tokens, seen.before.threshold_tokens
    return f"Only prompts beyond {now:,.0f} tokens still cross the thin link, not those beyond {before:,.0f}."


def shielded(seen: ActEvidence) -> str:
    mine, flood, before = seen.by_tenant[SHOP], seen.by_tenant[LAB], seen.earlier[SHOP]
    return (
        f"The tenant {SHOP} had {mine.answered_share:.0%} of its {mine.requests} requests answered, 19 of 20 begun "
        f"within {mine.ttft_s:.1f} s ({before.ttft_s:.1f} s before). {LAB} had {flood.answered_share:.0%} of "
        f"{flood.requests} answered; the rest were told at once when to come again."
    )


def not_shown(seen: ActEvidence) -> str:
    """What there was instead of the expected answer."""
    steady = "" if seen.now.settled else " and is still changing"
    return (
        f"The expected answer was not seen. The fleet costs ${seen.now.usd_per_h:.2f} an hour{steady}; "
        f"it cost ${seen.before.usd_per_h:.2f} before."
    )


def cheaper_now(seen: ActEvidence) -> str:
    return f"The fleet moved to the cheaper GPUs. {_price(seen)}"


def _price(seen: ActEvidence) -> str:
    before, now = seen.before.usd_per_h, seen.now.usd_per_h
    if abs(now - before) < LEAST_USD:
        return f"It costs ${now:.2f} an hour, as before."
    return f"It costs ${now:.2f} an hour instead of ${before:.2f}."


def _many(count: int, one: str, several: str) -> str:
    """`no replicas`, `1 replica`, `2 replicas`."""
    return f"{count or 'no'} {one if count == 1 else several}"


# What it saved, in USD an hour.


def saved_by_far(seen: ActEvidence) -> float:
    return seen.near_usd_per_h - seen.now.usd_per_h if seen.near_usd_per_h else 0.0


def saved_since(seen: ActEvidence) -> float:
    return seen.before.usd_per_h - seen.now.usd_per_h


def saved_once_settled(seen: ActEvidence) -> float:
    return saved_since(seen) if _both_settled(seen) else 0.0


def _both_settled(seen: ActEvidence) -> bool:
    """Whether both fleets are as planned; else the prices have replicas that start or leave, and no plan has them."""
    return seen.before.settled and seen.now.settled


CHAT, CODE = (1350, 60), (2700, 10)  # Mean tokens of prompts and answers.
RATE_PER_S = 4.0  # Of both tenants together, as the spec has it.
BURST, FLOOD = 2.0, 3.0  # Times the usual rate.
THIN_GBPS, WIDE_GBPS = 1.0, 10.0
USUAL, USUAL_COUNT, USUAL_USD_PER_H = "1xL4", 10, 0.6  # As in the spec.
CHEAP_COUNT, CHEAP_USD_PER_H = 12, 0.15
"""All of them cost less than the fewest of the usual GPUs that serve as much, and serve twice what is asked: even
where a slow machine makes the planner think that it needs more, the cheap ones win clearly."""
MOST_TOLD = 2  # Decisions that are told of one answer.


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
            with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
                answer.read()  # It may have been stopped since.


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
    begin: Callable[[DemoControls, FleetLook], str] = lambda means, look: ""
    """Does it; the replica that it is done to, if any."""
    lasts: bool = False
    """Whether it is done again to whatever comes meanwhile."""
    moment: Callable[[ActEvidence], bool] = lambda seen: True
    """When it may begin."""
    earlier: tuple[DemoLoad, ...] = ()
    """What is asked until then; nothing: what was asked before."""
    prepare: Callable[[DemoControls, FleetLook], str] = lambda means, look: ""
    """Done before that."""
    saved_usd_per_h: Callable[[ActEvidence], float] = lambda seen: 0.0
    end: Callable[[DemoControls, FleetLook], str] = lambda means, look: ""
    """Takes back what would keep the act's requests from ending."""


def chosen(act: Act, seen: ActEvidence) -> str:
    """What the service decided, in its own words."""
    lines: list[str] = []
    for kind in act.told:
        if kind == "no":
            lines += [
                f"{tenant} is told: {request_counts.no}"
                for tenant, request_counts in seen.by_tenant.items()
                if request_counts.no
            ]
        elif kind == "remark":
            lines += [] if seen.raised is None else [seen.raised.line]
        else:
            lines += [logged_decision.line for logged_decision in seen.of(kind)[-1:]]
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
    urls = [replica_look.url for replica_look in look.ready(region=FAR)]
    means.network(urls, THIN_GBPS / max(1, len(urls)))
    return ""


def _wide(means: DemoControls, look: FleetLook) -> str:
    """The link is as it was."""
    means.network([replica_look.url for replica_look in look.ready(region=FAR)], WIDE_GBPS)
    return ""


def _scarce(means: DemoControls, look: FleetLook) -> str:
    """No further GPU of the usual kind can be had."""
    means.quote(NEAR, USUAL, look.count_on(USUAL, NEAR), USUAL_USD_PER_H)
    return ""


def _plenty(means: DemoControls, look: FleetLook) -> str:
    """The usual kind can be had again, but for the node that died."""
    means.quote(NEAR, USUAL, USUAL_COUNT - 1, USUAL_USD_PER_H)
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
            crossed,
            ("plan",),
            far_share,
            saved_usd_per_h=saved_by_far,
        ),
        Act(
            "thin",
            "A thin link",
            f"The link from {FAR} to {NEAR} carries {THIN_GBPS:g} Gbit/s instead of {WIDE_GBPS:g}.",
            asked(RATE_PER_S, CHAT),
            kept_near,
            ("remark",),
            not_sent,
            _thin,
            lasts=True,
            moment=crossing,
            end=_wide,
        ),
        Act(
            "burst",
            "A burst",
            f"{BURST:g} times as many chats arrive.",
            asked(BURST * RATE_PER_S, CHAT),
            grown,
            ("plan", "replan"),
            peak,
        ),
        Act(
            "shift",
            "Chats become coding",
            f"The burst is over; prompts have {CODE[0]:,} tokens instead of {CHAT[0]:,}, answers {CODE[1]} instead "
            f"of {CHAT[1]}.",
            asked(RATE_PER_S, CODE),
            reshaped,
            ("plan", "recast", "flip"),
            in_place,
            saved_usd_per_h=saved_once_settled,
        ),
    )


def _troubles(coding: tuple[DemoLoad, ...]) -> tuple[Act, ...]:
    return (
        Act(
            "killed",
            "A node dies",
            "The busiest replica that computes prompts is killed, and its node does not come back.",
            coding,
            replaced,
            ("lost", "plan", "ready"),
            went_on,
            _kill,
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
            fair,
            ("no",),
            shielded,
            moment=usual,
            earlier=told_no,
            prepare=_scarce,
        ),
        Act(
            "cheaper",
            "A cheaper GPU",
            f"{CHEAP_COUNT} {CHEAP.removeprefix('1x')}s can be rented in {NEAR} for ${CHEAP_USD_PER_H:.2f}/h each.",
            coding,
            moved_to_cheaper,
            ("plan", "replan"),
            cheaper_now,
            _cheaper,
            moment=planned_for_this,
            earlier=coding,
            prepare=_plenty,
            saved_usd_per_h=saved_since,
        ),
    )
