"""Prefill here or in another region, by length (PrfaaS 3.3 and 3.4.3).

A request is prefilled elsewhere when more than t of its tokens have to be computed:

    bandwidth scarce      each region's cache by itself:  l_total - l_here                 > t
    bandwidth abundant    the best cache anywhere:        l_total - max(l_here, l_there)   > t

In the second case, if the region that does not compute has the longer prefix, its KV crosses first.

t starts where the plan has it: the plan's buckets are cut at lengths, and from some bucket on they cross. It
moves with the link and what is behind it: congested (utilisation at least 0.9, more than half a second of bytes
waiting, a hundredth of what was sent lost and sent again, or prompts waiting a second longer in the prefill cluster
than at home) raises t by a quarter, so that fewer and longer prompts cross, which carry more prefill per byte; a
link that is clear again (utilisation below 0.7, none of the others) lets t go back by a tenth of what is between. A t
below 512, 0 too, rises as if it were 512. A link that carries nothing is not used at all. The regime is scarce from a
utilisation of 0.7 on, and abundant below 0.5. The paper names the signals, not the figures; they are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from potluck.core.routing.template_weights import ModelWeights
from potluck.core.state.events import LinkReported

CONGESTED: Final = 0.9
CLEAR: Final = 0.7
ABUNDANT: Final = 0.5
"""Utilisation of the link."""
QUEUE_S: Final = 0.5
LOST: Final = 0.01
"""Of what was sent."""
AHEAD_S: Final = 1.0
RAISE: Final = 1.25
LEAST_TOKENS: Final = 512.0
"""From where a t rises that is lower."""
RETURN: Final = 0.1
MOST_RAISED: Final = 64.0
"""How far above its base t may go."""


@dataclass(frozen=True, slots=True)
class LengthThreshold:
    """The present rule for one model."""

    base_tokens: float
    """Where the plan, or the long-term update, has it."""
    tokens: float
    scarce: bool = True


class PrefillChoice(NamedTuple):
    """Where to prefill, and whose cache to begin with."""

    remote: bool
    fetch: bool
    """The other side's cached prefix is the longer one and should be sent over."""


def decide(
    threshold: LengthThreshold, total_tokens: int, cached_here: int, cached_there: int
) -> PrefillChoice:
    """`here` is where it would be decoded, `there` where it could be prefilled instead."""
    if threshold.scarce:
        return PrefillChoice(total_tokens - cached_here > threshold.tokens, False)
    remote = total_tokens - max(cached_here, cached_there) > threshold.tokens
    return PrefillChoice(remote, cached_here > cached_there if remote else cached_there > cached_here)


def after_report(threshold: LengthThreshold, report: LinkReported, ahead_s: float = 0.0) -> LengthThreshold:
    """The threshold after a word of the link; prompts wait `ahead_s` longer in its prefill cluster than at home."""
    tokens = threshold.tokens
    queue_s = report.queued_bytes * 8 / (report.gbps * 1e9) if report.gbps > 0 else inf
    lossy = report.lost_share > LOST
    if report.utilisation >= CONGESTED or queue_s > QUEUE_S or lossy or ahead_s > AHEAD_S:
        most = max(threshold.base_tokens, LEAST_TOKENS) * MOST_RAISED
        tokens = min(max(tokens, LEAST_TOKENS) * RAISE, most)
    elif report.utilisation < CLEAR:
        tokens += (threshold.base_tokens - tokens) * RETURN
    scarce = threshold.scarce
    if report.utilisation >= CLEAR or queue_s > QUEUE_S or lossy:
        scarce = True
    elif report.utilisation < ABUNDANT:
        scarce = False
    return replace(threshold, tokens=tokens, scarce=scarce)


def rebased(threshold: LengthThreshold, base_tokens: float) -> LengthThreshold:
    """A new long-term value; how far congestion has moved t above it stays, as a ratio."""
    if threshold.tokens <= threshold.base_tokens:
        return replace(threshold, base_tokens=base_tokens, tokens=base_tokens)
    moved = max(threshold.tokens, LEAST_TOKENS) / max(threshold.base_tokens, LEAST_TOKENS)
    tokens = max(base_tokens, LEAST_TOKENS) * moved if moved > 1.0 else base_tokens
    return replace(threshold, base_tokens=base_tokens, tokens=tokens)


def planned(offers: ModelWeights) -> LengthThreshold | None:
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
    return LengthThreshold(tokens, tokens)
