"""What copies of templates serve together, in requests a second of the mix of lengths that is asked for.

A template's capacity is given bucket by bucket, each as if it did nothing else. Time is shared among buckets, so
for a mix with shares w_b one copy serves

    C = 1 / sum_b (w_b / C_b)          over the buckets it can serve at all, their shares made to add up to 1

and copies serve together what they serve by themselves plus the lesser of what they prefill and what they decode
for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from potluck.core.values.plan import BucketCapacity, LengthBucket, Plan, Template


class CopyRates(NamedTuple):
    """Requests a second: from prompt to last token, prompts for others, answers to others' prompts."""

    closed_per_s: float = 0.0
    prefill_per_s: float = 0.0
    decode_per_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.closed_per_s > 0 or self.prefill_per_s > 0 or self.decode_per_s > 0

    def times(self, count: float) -> CopyRates:
        return CopyRates(self.closed_per_s * count, self.prefill_per_s * count, self.decode_per_s * count)

    def plus(self, other: CopyRates) -> CopyRates:
        return CopyRates(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def served_per_s(self) -> float:
        """What copies with these rates in total serve together."""
        return self.closed_per_s + min(self.prefill_per_s, self.decode_per_s)


NOTHING = CopyRates()


def total(each: Iterable[CopyRates]) -> CopyRates:
    found = list(each)
    return CopyRates(*(sum(column) for column in zip(*found, strict=True))) if found else NOTHING


def rates_of(template: Template, mix: Mapping[int, float]) -> CopyRates:
    """What one copy does for a mix of buckets (bucket to weight); all 0 when its capacity is not known.

    A copy that serves requests by itself is counted as doing that only: it cannot give the same time twice.
    """
    closed = _harmonic(((c, c.closed_per_s) for c in template.capacity), mix)
    if closed > 0:
        return CopyRates(closed_per_s=closed)
    prefill = _harmonic(((c, c.prefill_per_s) for c in template.capacity), mix)
    decode = _harmonic(((c, c.decode_per_s) for c in template.capacity), mix)
    return CopyRates(0.0, prefill, decode)


def _harmonic(capacity: Iterable[tuple[BucketCapacity, float]], mix: Mapping[int, float]) -> float:
    weight = seconds = 0.0
    for bucket, rate in capacity:
        share = mix.get(bucket.bucket, 0.0)
        if rate > 0 and share > 0:
            weight += share
            seconds += share / rate
    return weight / seconds if seconds > 0 else 0.0


def planned_mix(plan: Plan, model: str) -> dict[int, float]:
    """The shares of a model's buckets that the plan was made for; even where it expects nothing."""
    mine = [bucket for bucket in plan.buckets if bucket.model == model]
    whole = sum(bucket.rate_per_s for bucket in mine)
    return {b.bucket: b.rate_per_s / whole if whole > 0 else 1.0 / len(mine) for b in mine}


def buckets_of(plan: Plan, model: str) -> list[LengthBucket]:
    """A model's buckets, shortest first."""
    return sorted((b for b in plan.buckets if b.model == model), key=lambda b: b.longest_tokens)
