"""By which signs the answers of the demo's acts show, and what is told of what came of them.

Pure: all of it is read from what the service says of itself, its decisions with their reasons, its prices, its fleet
before and after, and from what its clients saw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from potluck.cli.demo.fleet_looks import FleetLook, LoggedDecision
from potluck.cli.demo.traffic import RequestCounts

NEAR, FAR = "near", "far"
LINK = f"{FAR}->{NEAR}"
SHOP, LAB = "shop", "lab"
CHEAP = "1xA10"
"""The node that is on offer at last."""
CROSSES = re.compile(rf"prompts of .* beyond (\d+) tokens go over {LINK}")
LENGTHS = re.compile(r"(prompts|answers) of .* (rose|fell) from")
RAISED = 1.2
LEAST_USD = 0.01
LEAST_ASKED, LEAST_SEEN = 8, 4
"""Of one tenant, to say how long its answers take; of all, to say that there are answers."""
MOST_OF, LESS_OF = 0.75, 0.5
"""Of one who keeps to its share so much is answered, at least; of one who floods so much of that, at most."""


@dataclass(frozen=True, slots=True)
class ActEvidence:
    """What an act has brought about so far."""

    before: FleetLook
    now: FleetLook
    decided: tuple[LoggedDecision, ...]
    by_tenant: Mapping[str, RequestCounts]
    """Of requests that have ended."""
    earlier: Mapping[str, RequestCounts]
    """Of those that were sent while the act waited for its moment."""
    victim: str = ""
    """The replica that something was done to."""
    near_usd_per_h: float = 0.0
    """What the cheapest fleet costs that has nothing in the other region."""

    def of(self, *kinds: str) -> tuple[LoggedDecision, ...]:
        """Of remarks only those on what may cross: paces are remarked on too."""
        return tuple(
            each
            for each in self.decided
            if each.kind in kinds and (each.kind != "remark" or CROSSES.search(each.what))
        )

    @property
    def more(self) -> int:
        """Replicas that are ready, more than before."""
        return len(self.now.ready()) - len(self.before.ready())

    @property
    def changed_roles(self) -> int:
        """Replicas that were there before, in another role."""
        roles = {each.name: each.role for each in self.before.replicas}
        return sum(roles.get(each.name, each.role) != each.role for each in self.now.ready())

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
        remarks, enough = self.of("remark"), RAISED * self.before.threshold_tokens
        first = next((each for each in remarks if _crossing(each) >= enough), None)
        return first or max(remarks, key=_crossing, default=None)

    @property
    def raised_tokens(self) -> float:
        """The longest prompt that was kept from crossing then."""
        return 0.0 if self.raised is None else _crossing(self.raised)


def _crossing(remark: LoggedDecision) -> float:
    """From which length on prompts may cross, of a remark that says so."""
    found = CROSSES.search(remark.what)
    return float(found[1]) if found else 0.0


# By what it shows.


def always(seen: ActEvidence) -> bool:
    return True


def crossing(seen: ActEvidence) -> bool:
    """Something could be kept from crossing."""
    return seen.now.threshold_tokens > 0 and bool(seen.now.ready(region=FAR))


def usual(seen: ActEvidence) -> bool:
    """So many were asked and answered before it that one knows how long they take."""
    return seen.now.calm and seen.earlier[SHOP].answered >= LEAST_ASKED


def crossed(seen: ActEvidence) -> bool:
    return seen.crossed_gb > 0 and sum(each.requests for each in seen.by_tenant.values()) >= LEAST_SEEN


def grown(seen: ActEvidence) -> bool:
    return bool(seen.of("plan")) and seen.more > 0


def reshaped(seen: ActEvidence) -> bool:
    """A plan for the lengths that were seen, and something that was done for it."""
    plans = [each.number for each in seen.of("plan") if LENGTHS.search(each.why)]
    return bool(plans) and any(
        each.number > plans[0] for each in seen.of("recast", "flip", "ready", "drain", "stop")
    )


def replaced(seen: ActEvidence) -> bool:
    lost = [each.number for each in seen.of("lost") if each.what.startswith(seen.victim)]
    return bool(lost) and any(each.number > lost[0] for each in seen.of("ready", "plan"))


def kept_near(seen: ActEvidence) -> bool:
    return seen.raised_tokens >= RAISED * seen.before.threshold_tokens > 0


def fair(seen: ActEvidence) -> bool:
    mine, flood = seen.by_tenant[SHOP], seen.by_tenant[LAB]
    return (
        min(mine.requests, flood.requests) >= LEAST_ASKED
        and mine.answered_share >= MOST_OF
        and flood.answered_share <= LESS_OF * mine.answered_share
    )


def moving_house(seen: ActEvidence) -> bool:
    cheaper = bool(seen.of("plan")) and saved_since(seen) > LEAST_USD
    return cheaper and any(CHEAP in each.template for each in seen.now.ready(region=NEAR))


# What came of it.


def far_share(seen: ActEvidence) -> str:
    usd, alone = seen.now.usd_per_h, seen.near_usd_per_h
    told = f"Longer prompts are computed in {FAR}, and their KV crosses to {NEAR}: {seen.crossed_gb:.1f} GB so far."
    price = f" The fleet costs ${usd:.2f} an hour instead of ${alone:.2f} in {NEAR} alone."
    return told + (price if alone > usd else "")


def peak(seen: ActEvidence) -> str:
    more = seen.now.usd_per_h - seen.before.usd_per_h
    joined = _many(seen.more, "more replica serves", "more replicas serve")
    return f"{joined}, for ${more:.2f} an hour more, and only while the burst lasts."


def in_place(seen: ActEvidence) -> str:
    changed = _many(seen.changed_roles, "replica", "replicas")
    roles = f" {changed} changed roles without loading weights again." if seen.changed_roles else ""
    return f"The fleet was planned anew for these lengths.{roles} {_price(seen)}"


def went_on(seen: ActEvidence) -> str:
    lost = sum(each.lost for each in seen.by_tenant.values())
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


def nothing_saved(seen: ActEvidence) -> float:
    return 0.0


def saved_by_far(seen: ActEvidence) -> float:
    return seen.near_usd_per_h - seen.now.usd_per_h if seen.near_usd_per_h else 0.0


def saved_since(seen: ActEvidence) -> float:
    return seen.before.usd_per_h - seen.now.usd_per_h
