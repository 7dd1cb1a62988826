"""What a plan said beside what ran: rates, busy times, bytes and promises, and where they disagree.

    served        share of requests that were answered, against the planned one             SERVED
    attainment    share within the objective, against the promise
    work          a replica that the plan counts on got nothing at all: the worst of all    broken
    rate, flow    requests a second of a replica, or from one place to another              RATE and noise
    busy          share of time that a replica was busy                                     BUSY
    link          bytes a second over a link between regions or named machines              BYTES and noise

The plan is asked what it says of the lengths that came and of as many requests as came. Where more came than it was
made for, only what fell short of it disagrees. A run in which replicas came, went or changed their roles is not
compared: the plan it began with says nothing of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Literal

import numpy as np

from potluck.core.routing.template_weights import ModelWeights, offers
from potluck.runtime.expectations import (
    BucketLengths,
    ModelExpectation,
    Place,
    PlanExpectations,
    ReplicaExpectation,
    ValueRange,
    promises,
)
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.results.metrics import MOMENT_S, judge
from potluck.sim.results.records import ANSWERED, CANCELLED, ReplicaRecord, RequestRecords, SimResult

SERVED, BUSY, BYTES, RATE = 0.02, 0.10, 0.10, 0.25
NOISE = 3.0
"""Standard deviations that counts may be off by chance."""
LEAST_REQUESTS = 20
"""A replica that should have got fewer may have got none by chance."""

What = Literal["served", "attainment", "work", "rate", "flow", "busy", "link"]
Verdict = Literal["agrees", "differs", "broken"]


@dataclass(frozen=True, slots=True)
class PlanDeviation:
    """One thing that the plan said, and what became of it."""

    what: What
    name: str
    planned: ValueRange
    ran: float
    verdict: Verdict


def compared(
    resolved: ResolvedPlan,
    result: SimResult,
    balance: str = "learned",
    replica_models: ReplicaModels | None = None,
) -> tuple[PlanDeviation, ...]:
    """Everything that the scene's plan says of a run; empty where its fleet did not stay as planned."""
    records, plan = result.records, resolved.plan
    if not len(records) or not plan.shares or not steady(result.replicas):
        return ()
    if replica_models is None:
        replica_models = ReplicaModels(resolved)
        replica_models.learn(plan)
    span_s = _span_s(result)
    came = {name: int((records.model == place).sum()) / span_s for place, name in enumerate(records.models)}
    scale = {
        each.model: min(1.0, came.get(each.model, 0.0) / (each.demand_per_s * plan.fraction_of(each.model)))
        for each in plan.predictions
        if each.demand_per_s * plan.fraction_of(each.model) > 0
    }
    said = promises(plan, replica_models, lengths_of(records, offers(plan, balance)), balance, scale)
    over = {
        each.model for each in said.models if came.get(each.model, 0.0) > each.served_per_s * (1 + SERVED)
    }
    return (
        *_models(said, result, came),
        *_replicas(said, result, span_s, over),
        *_flows(said, result, span_s, over),
        *_links(said, result, span_s, bool(over)),
    )


def described(each: PlanDeviation) -> tuple[str, str]:
    """(planned, ran) in words."""
    low, high, ran = each.planned.low, each.planned.high, each.ran
    if each.what in ("served", "attainment"):
        return f"at least {low:.1%}", f"{ran:.1%}"
    if each.what == "work":
        return f"{low:.0f} requests", "none"
    if each.what == "busy":
        return f"{low:.0%}" if high - low < 0.005 else f"{low:.0%} to {high:.0%}", f"{ran:.0%}"
    if each.what == "link":
        return f"{low / 1e6:.4g} MB/s", f"{ran / 1e6:.4g} MB/s"
    planned = f"{low:.3g}" if high - low < 0.005 * high else f"{low:.3g} to {high:.3g}"
    return f"{planned} req/s", f"{ran:.3g} req/s"


def disagreements(found: Iterable[PlanDeviation]) -> tuple[PlanDeviation, ...]:
    """Those to speak of, the worst first."""
    wrong = [each for each in found if each.verdict != "agrees"]
    return tuple(sorted(wrong, key=lambda each: each.verdict != "broken"))


def steady(replicas: tuple[ReplicaRecord, ...]) -> bool:
    """Whether all replicas were there in their role from the first moment to the last."""
    return all(
        each.ready_s == 0.0
        and {state for _, state, _ in each.changes} <= {"starting", "ready"}
        # a flip is a change to the state that it has already
        and len({role for _, _, role in each.changes}) == 1
        for each in replicas
        if not each.stood_by
    )


def lengths_of(
    records: RequestRecords, read: Mapping[str, ModelWeights]
) -> dict[tuple[str, int], BucketLengths]:
    """Mean lengths of what came, by model and bucket."""
    found: dict[tuple[str, int], BucketLengths] = {}
    for place, name in enumerate(records.models):
        mine = read.get(name)
        if mine is None:
            continue
        chosen = records.model == place
        buckets = np.searchsorted(np.array(mine.longest_tokens), records.prompt_tokens)
        for bucket in range(len(mine.longest_tokens)):
            rows = chosen & (buckets == bucket)
            if rows.any():
                whole = float(records.prompt_tokens[rows].mean())
                cached = float(records.cached_tokens[rows].mean())
                output = float(records.output_tokens[rows].mean())
                found[name, bucket] = BucketLengths(max(1.0, whole - cached), output, whole)
    return found


def _span_s(result: SimResult) -> float:
    """How long requests came."""
    arrivals = result.records.arrival_s
    # n requests have n - 1 gaps between them
    span_s = float(arrivals[-1] - arrivals[0]) * len(arrivals) / max(1, len(arrivals) - 1)
    return span_s if span_s > MOMENT_S else max(result.end_s, MOMENT_S)


def _models(said: PlanExpectations, result: SimResult, came: Mapping[str, float]) -> Iterable[PlanDeviation]:
    records = result.records
    verdict = judge(records, result.slos, result.end_s, result.classes)
    for each in said.models:
        rows = records.model == records.models.index(each.model) if each.model in records.models else None
        if rows is None or not rows.any():
            continue
        asked = rows & (records.outcome != CANCELLED)
        answered = int((asked & (records.outcome == ANSWERED)).sum()) / max(1, int(asked.sum()))
        planned = _share(each, came[each.model])
        yield _at_least("served", each.model, planned, answered, SERVED)
        judged = int((rows & verdict.judged).sum())
        if each.attainment is not None and judged:
            kept = int((rows & verdict.met).sum()) / judged
            yield _at_least("attainment", each.model, each.attainment * planned, kept, 0.0)


def _share(each: ModelExpectation, came_per_s: float) -> float:
    """Of what came, how much the plan serves."""
    return min(1.0, each.served_per_s / came_per_s) if came_per_s > 0 else 1.0


def _at_least(what: What, name: str, planned: float, ran: float, slack: float) -> PlanDeviation:
    verdict: Verdict = "agrees" if ran >= planned - slack - 1e-12 else "differs"
    return PlanDeviation(what, name, ValueRange(planned, 1.0), ran, verdict)


def _replicas(
    said: PlanExpectations, result: SimResult, span_s: float, over: set[str]
) -> Iterable[PlanDeviation]:
    """Replicas of a copy that are alike and do the same are one: which of them gets a request is nobody's promise."""
    records = result.records
    size = len(result.replicas)
    first = np.bincount(records.prefill_replica[records.prefill_replica >= 0], minlength=size)
    both = records.prefill_replica == records.decode_replica
    second = np.bincount(records.decode_replica[(records.decode_replica >= 0) & ~both], minlength=size)
    promised: dict[Place, ReplicaExpectation] = {each.place: each for each in said.replicas}
    alike: dict[tuple[str, ReplicaExpectation], list[int]] = {}
    for number, replica in enumerate(result.replicas):
        each = promised.get(place_of(replica))
        if each is not None and not replica.stood_by:
            kind = replace(each, place=(*each.place[:2], 0)) if each.interchangeable else each
            alike.setdefault((replica.unit, kind), []).append(number)
    for (_, each), numbers in alike.items():
        one, count = result.replicas[numbers[0]], len(numbers)
        name = one.id if count == 1 else f"{one.id} and {count - 1} like it"
        got = sum(int(first[number] + second[number]) for number in numbers) / count
        expected = float(round(each.counted_per_s * span_s))
        if not got and expected >= LEAST_REQUESTS:
            yield PlanDeviation("work", name, ValueRange(expected, expected), 0.0, "broken")
        if each.busy is None:
            continue
        open_end = one.model in over
        rate = each.rate_per_s
        slack = max(RATE * rate.high, NOISE * sqrt(rate.high / span_s))
        yield _within("rate", name, rate, got / span_s, slack, open_end)
        busy_s = sum(result.replicas[number].busy_s for number in numbers) / count
        share = min(1.0, busy_s / result.end_s) if result.end_s > 0 else 0.0
        # Chance in how many came while it ran.
        noise = NOISE * each.busy.high / sqrt(max(rate.high * span_s, 1.0)) if each.busy.high < 1 else 0.0
        # Where one of those alike has most of the answers, they share steps, and all together are less busy.
        busy = ValueRange((1.0 - (1.0 - each.busy.low) ** count) / count, each.busy.high)
        yield _within("busy", name, busy, share, BUSY + min(noise, BUSY), open_end)


def place_of(replica: ReplicaRecord) -> Place:
    return replica.template, replica.region, int(replica.id.rpartition("/")[2])


def _flows(
    said: PlanExpectations, result: SimResult, span_s: float, over: set[str]
) -> Iterable[PlanDeviation]:
    records, replicas = result.records, result.replicas
    seen: dict[tuple[str, str, str], int] = {}
    sent = (records.prefill_replica >= 0) & (records.decode_replica >= 0)
    pairs = np.stack([records.prefill_replica[sent], records.decode_replica[sent]], axis=1)
    for (first, second), count in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
        a, b = replicas[first], replicas[second]
        names = [(f"{x.template}@{x.region}/{place_of(x)[2]}") for x in (a, b)]
        for source, target in ((a.region, b.region) if first != second else ("", ""), tuple(names)):
            key = (a.model, source, target)
            seen[key] = seen.get(key, 0) + int(count)
    for each in said.flows:
        ran = seen.get((each.model, each.source, each.target), 0) / span_s
        slack = max(RATE * each.rate_per_s, NOISE * sqrt(each.rate_per_s / span_s))
        planned = ValueRange(each.rate_per_s, each.rate_per_s)
        name = f"{each.source} -> {each.target}"
        yield _within("flow", name, planned, ran, slack, each.model in over)


def _links(said: PlanExpectations, result: SimResult, span_s: float, over: bool) -> Iterable[PlanDeviation]:
    records = {(link.source, link.target): link for link in result.links}
    for each in said.links:
        found = records.get((each.source, each.target))
        ran = 0.0 if found is None else found.sent_bytes / span_s
        noise = NOISE / sqrt(found.transfers) if found is not None and found.transfers else 0.0
        slack = each.bytes_per_s * (BYTES + noise)
        planned = ValueRange(each.bytes_per_s, each.bytes_per_s)
        yield _within("link", f"{each.source} -> {each.target}", planned, ran, slack, over)


def _within(
    what: What, name: str, planned: ValueRange, ran: float, slack: float, open_end: bool
) -> PlanDeviation:
    short, more = planned.low - ran, ran - planned.high
    verdict: Verdict = "differs" if max(short, -inf if open_end else more) > slack + 1e-12 else "agrees"
    return PlanDeviation(what, name, planned, ran, verdict)
