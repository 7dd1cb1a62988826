"""Prefill here or in another region, by length (PrfaaS 3.3 and 3.4.3).

A request is prefilled elsewhere when more than t of its tokens have to be computed:

    bandwidth scarce      each region's cache by itself:  l_total - l_here                 > t
    bandwidth abundant    the best cache anywhere:        l_total - max(l_here, l_there)   > t

In the second case, if the region that does not compute has the longer prefix, its KV crosses first.

t starts where the plan has it: the plan's buckets are cut at lengths, and from some bucket on they cross. It
moves with the link: congested (utilisation at least 0.9, or more than half a second of bytes waiting) raises t
by a quarter, so that fewer and longer prompts cross, which carry more prefill per byte; a link that is clear
again (below 0.7, no such queue) lets t go back by a tenth of what is between. A link that carries nothing is
not used at all. The regime is scarce from a utilisation of 0.7 on and abundant below 0.5. The paper names the
signals, not the figures; they are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from potluck.core.brain.events import LinkReported
from potluck.core.routing.offers import Offers

CONGESTED: Final = 0.9
CLEAR: Final = 0.7
ABUNDANT: Final = 0.5
"""Utilisation of the link."""
QUEUE_S: Final = 0.5
RAISE: Final = 1.25
RETURN: Final = 0.1
MOST_RAISED: Final = 64.0
"""How far above its base t may go."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The present rule for one model."""

    base_tokens: float
    """Where the plan, or the long-term update, has it."""
    tokens: float
    scarce: bool = True


class Prefill(NamedTuple):
    """Where to prefill, and whose cache to begin with."""

    remote: bool
    fetch: bool
    """The other side's cached prefix is the longer one and should be sent over."""


def decide(threshold: Threshold, total_tokens: int, cached_here: int, cached_there: int) -> Prefill:
    """`here` is where it would be decoded, `there` where it could be prefilled instead."""
    if threshold.scarce:
        return Prefill(total_tokens - cached_here > threshold.tokens, False)
    remote = total_tokens - max(cached_here, cached_there) > threshold.tokens
    return Prefill(remote, cached_here > cached_there if remote else cached_there > cached_here)


def after_report(threshold: Threshold, report: LinkReported) -> Threshold:
    """The threshold after a word of the link."""
    tokens = threshold.tokens
    queue_s = report.queued_bytes * 8 / (report.gbps * 1e9) if report.gbps > 0 else inf
    if report.utilisation >= CONGESTED or queue_s > QUEUE_S:
        tokens = min(max(tokens, 1.0) * RAISE, max(threshold.base_tokens, 1.0) * MOST_RAISED)
    elif report.utilisation < CLEAR:
        tokens += (threshold.base_tokens - tokens) * RETURN
    scarce = threshold.scarce
    if report.utilisation >= CLEAR or queue_s > QUEUE_S:
        scarce = True
    elif report.utilisation < ABUNDANT:
        scarce = False
    return replace(threshold, tokens=tokens, scarce=scarce)


def rebased(threshold: Threshold, base_tokens: float) -> Threshold:
    """A new long-term value; how far congestion has moved t above it stays, as a ratio."""
    moved = threshold.tokens / threshold.base_tokens if threshold.base_tokens > 0 else 1.0
    return replace(threshold, base_tokens=base_tokens, tokens=base_tokens * moved)


def planned(offers: Offers) -> Threshold | None:
    """The plan's own threshold; None where the plan has no choice between here and there, or not by length.

    The first bucket that crosses at all is cut where its part that crosses begins, as if lengths were spread evenly.
    """
    crossing = [0.0] * len(offers.longest_tokens)
    local = [0.0] * len(offers.longest_tokens)
    for flow in offers.flows:
        for bucket, rate in enumerate(flow.rates_per_s):
            (local if flow.source == flow.target else crossing)[bucket] += rate
    for offer in offers.copies.values():
        for bucket, rate in enumerate(offer.closed):
            local[bucket] += rate
    if not any(crossing) or not any(local):
        return None
    shares = [
        far / (far + near) if far + near > 0 else 0.0 for far, near in zip(crossing, local, strict=True)
    ]
    used = [share for share, far, near in zip(shares, crossing, local, strict=True) if far + near > 0]
    if any(later < earlier - 1e-9 for earlier, later in pairwise(used)):
        return None
    first = next(bucket for bucket, share in enumerate(shares) if share > 0)
    shortest = offers.longest_tokens[first - 1] if first else 0.0
    longest = offers.longest_tokens[first]
    tokens = shortest if longest == inf else longest - shares[first] * (longest - shortest)
    return Threshold(tokens, tokens)
