"""What a plan said beside what ran: rates, busy times, bytes and promises, and where they disagree.

    served        share of requests that were answered, against the planned one             SERVED
    attainment    share within the objective, against the promise
    work          a replica that the plan counts on got nothing at all: the worst of all    broken
    rate, flow    requests a second of a replica, or from one place to another              RATE and noise
    busy          share of time that a replica was busy                                     BUSY
    link          bytes a second over a link between regions or named machines              BYTES and noise

The plan is asked about the lengths and the number of requests that came. Where more came than it was made for, only
what fell short of it disagrees. A run in which replicas came, went or changed their roles is not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf, sqrt
from typing import Literal

import numpy as np

from potluck.core.routing.template_weights import PHASES, ModelWeights, Phase, model_weights
from potluck.core.values.plan import Plan, Prediction, Template
from potluck.perf.phases import chunked_prefill_s, decode_step_s, prompts_in_step, prompts_s
from potluck.perf.step_timer import StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.results.metrics import MOMENT_S, judge
from potluck.sim.results.records import ANSWERED, CANCELLED, ReplicaRecord, RequestRecords, SimResult

Place = tuple[str, str, int]
"""(template, region, which of the template's replicas)"""


@dataclass(frozen=True, slots=True)
class BucketLengths:
    prompt_tokens: float
    """Those that are computed."""
    output_tokens: float
    context_tokens: float
    """The whole prompt."""


MeanLengths = dict[tuple[str, int], BucketLengths]
"""By model and bucket."""
LinkRates = dict[tuple[str, str], tuple[float, float]]
"""By both ends: bytes and requests a second."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ReplicaExpectation:
    place: Place
    model: str
    rate_per_s: ValueRange
    """Requests that it has a part in."""
    counted_per_s: float
    """By the plan's program alone: what it counts on this replica for."""
    busy: ValueRange | None
    """Share of time; None where the Brain decides request by request."""
    interchangeable: bool = False
    """Whether nothing tells it apart from others of its copy for which the same is said."""


@dataclass(frozen=True, slots=True)
class FlowExpectation:
    model: str
    source: str
    """A region, or a replica of a copy as `template@region/index`."""
    target: str
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class LinkExpectation:
    """KV on a link between regions, or between two machines that the plan names."""

    source: str
    target: str
    bytes_per_s: float
    requests_per_s: float
    """Whose KV that is."""


@dataclass(frozen=True, slots=True)
class ModelExpectation:
    model: str
    demand_per_s: float
    served_per_s: float
    attainment: float | None
    """Share of what is served; None without an objective."""


@dataclass(frozen=True, slots=True)
class PlanExpectations:
    models: tuple[ModelExpectation, ...]
    replicas: tuple[ReplicaExpectation, ...]
    flows: tuple[FlowExpectation, ...]
    links: tuple[LinkExpectation, ...]


@dataclass(slots=True)
class _ExpectedWork:
    """What one replica does for one bucket, as the program has it and as the weights do."""

    prompts: dict[int, list[float]] = field(default_factory=dict)
    answers: dict[int, list[float]] = field(default_factory=dict)
    requests: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, bucket: int, rates: tuple[float, float], prompt: bool, answer: bool) -> None:
        for side, rate in enumerate(rates):
            self.requests[side] += rate
            if prompt:
                self.prompts.setdefault(bucket, [0.0, 0.0])[side] += rate
            if answer:
                self.answers.setdefault(bucket, [0.0, 0.0])[side] += rate


def promises(
    plan: Plan,
    replica_models: ReplicaModels,
    lengths: MeanLengths,
    balance: str = "learned",
    scale: Mapping[str, float] | None = None,
) -> PlanExpectations:
    """What the plan says of requests with these mean lengths, by model and bucket.

    `scale` has for each model what share of the planned requests come. A rate is a range: from what the plan's
    program sent there to what the Brain's weights make of it (`core.routing.offers`). Busy is a range too. With u the
    time that prompts take and n the answers that would be under way at once if each ran alone, both per second,

        low = 1 - (1 - u) exp(-n)      arrivals by chance: answers overlap and share steps
        high = min(1, u + n)           arrivals in turn

    Inside combos and pairs the Brain decides request by request who does what: nothing is said of a single replica
    but that it gets work.
    """
    if scale is not None:
        plan = _scaled(plan, scale)
    read = model_weights(plan, balance)
    work: dict[Place, _ExpectedWork] = {}
    pairs: dict[tuple[str, Place, Place], float] = {}
    links: LinkRates = {}
    for (name, region), rates in copy_rates(plan, read).items():
        template = plan.template(name)
        for (phase, bucket), both in rates.items():
            for first, second, share in _inside(template, phase, bucket):
                mine = (both[0] * share, both[1] * share)
                for index, prompt, answer in _parts(first, second):
                    place = (name, region, index)
                    work.setdefault(place, _ExpectedWork()).add(bucket, mine, prompt, answer)
                if template.flows and first is not None and second is not None:
                    ends = (template.model, (name, region, first), (name, region, second))
                    pairs[ends] = pairs.get(ends, 0.0) + mine[0]
                    length = lengths.get((template.model, bucket))
                    _cross(replica_models, template, ends, mine[0], length, links)
    links = _between(plan, replica_models, lengths) | links
    return PlanExpectations(
        tuple(_model(plan, prediction, replica_models) for prediction in plan.predictions),
        tuple(_replica(plan, place, each, replica_models, lengths) for place, each in work.items()),
        (*_regions(plan), *(_pair(ends, rate) for ends, rate in pairs.items())),
        tuple(LinkExpectation(*ends, *rates) for ends, rates in links.items()),
    )


def copy_rates(
    plan: Plan, read: Mapping[str, ModelWeights]
) -> dict[tuple[str, str], dict[tuple[Phase, int], tuple[float, float]]]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for each in plan.deployments:
        counts[each.template, each.region] += each.count
    planned: dict[tuple[str, str, Phase, int], float] = defaultdict(float)
    for share in plan.shares:
        planned[share.template, share.region, share.phase, share.bucket] += share.rate_per_s
    result: dict[tuple[str, str], dict[tuple[Phase, int], tuple[float, float]]] = {}
    for own_weights in read.values():
        for phase in PHASES:
            for bucket in range(len(own_weights.longest_tokens)):
                # Whole requests are spread over all regions; prompts and answers within one, as flows have it.
                for keys in _groups(own_weights, phase, bucket, counts):
                    rate = sum(planned.get((*key, phase, bucket), 0.0) for key in keys)
                    weight = sum(own_weights.copies[key].weights(phase)[bucket] * counts[key] for key in keys)
                    for key in keys:
                        value = planned.get((*key, phase, bucket), 0.0) / counts[key]
                        own = rate * own_weights.copies[key].weights(phase)[bucket] / weight
                        result.setdefault(key, {})[phase, bucket] = (value, own)
    return result


def _scaled(plan: Plan, scale: Mapping[str, float]) -> Plan:
    model_of = {template.name: template.model for template in plan.templates}
    return replace(
        plan,
        shares=tuple(
            replace(s, rate_per_s=s.rate_per_s * scale.get(model_of[s.template], 1.0)) for s in plan.shares
        ),
        flows=tuple(replace(f, rate_per_s=f.rate_per_s * scale.get(f.model, 1.0)) for f in plan.flows),
    )


def _groups(
    own_weights: ModelWeights, phase: Phase, bucket: int, counts: Mapping[tuple[str, str], int]
) -> list[list[tuple[str, str]]]:
    keys = [k for k, copy in own_weights.copies.items() if counts.get(k) and copy.weights(phase)[bucket] > 0]
    if phase == "closed":
        return [keys] if keys else []
    return [[key for key in keys if key[1] == region] for region in dict.fromkeys(key[1] for key in keys)]


def _inside(template: Template, phase: Phase, bucket: int) -> list[tuple[int | None, int | None, float]]:
    """(who prefills, who decodes, share) of what a copy is sent."""
    if phase == "closed" and template.flows:
        return [(flow.prefill, flow.decode, flow.share) for flow in template.flows if flow.bucket == bucket]
    roles = [replica.role for replica in template.replicas]
    if phase != "closed":
        able, part = [i for i, role in enumerate(roles) if role in (phase, "mixed")], phase == "prefill"
        return [(i if part else None, None if part else i, 1.0 / len(able)) for i in able]
    mixed = [i for i, role in enumerate(roles) if role == "mixed"]
    first = [i for i, role in enumerate(roles) if role == "prefill"]
    if not first:
        return [(i, i, 1.0 / len(mixed)) for i in mixed]
    second = [i for i, role in enumerate(roles) if role != "prefill"]
    return [(i, j, 1.0 / (len(first) * len(second))) for i in first for j in second]


def _parts(first: int | None, second: int | None) -> list[tuple[int, bool, bool]]:
    """(replica, whether it has the prompt, whether it has the answer)"""
    if first is not None and first == second:
        return [(first, True, True)]
    result = [] if first is None else [(first, True, False)]
    return result if second is None else [*result, (second, False, True)]


def _replica(
    plan: Plan, place: Place, work: _ExpectedWork, replica_models: ReplicaModels, lengths: MeanLengths
) -> ReplicaExpectation:
    template, (value, spread) = plan.template(place[0]), work.requests
    busy: ValueRange | None = None
    if template.flows or template.kind not in ("combo", "pair"):
        mine = {
            bucket: bucket_lengths
            for (model, bucket), bucket_lengths in lengths.items()
            if model == template.model
        }
        replica_model = replica_models.replica_models[template.name, place[2]]
        given = (replica_model.timer, replica_model.engine.token_budget, work.prompts, work.answers, mine)
        spans = [busy_span(*given, side) for side in (0, 1)]
        busy = ValueRange(min(span.low for span in spans), max(span.high for span in spans))
    rate = ValueRange(min(value, spread), max(value, spread))
    return ReplicaExpectation(place, template.model, rate, value, busy, not template.flows)


def busy_span(
    timer: StepTimer,
    budget: int,
    prompts: Mapping[int, list[float]],
    answers: Mapping[int, list[float]],
    lengths: Mapping[int, BucketLengths],
    side: int,
) -> ValueRange:
    least = most = alone = 0.0
    for bucket, rates in prompts.items():
        if bucket in lengths:
            fast_s, slow_s = prompt_s(timer, lengths[bucket], budget, shared=not answers)
            least += rates[side] * fast_s
            most += rates[side] * slow_s
    for bucket, rates in answers.items():
        if bucket in lengths:
            length = lengths[bucket]
            context = length.context_tokens + length.output_tokens / 2
            step_s = float(decode_step_s(timer, 1, context)[0])
            alone += rates[side] * length.output_tokens * step_s
    least, most = min(least, 1.0), min(most, 1.0)
    return ValueRange(1.0 - (1.0 - least) * exp(-alone), min(1.0, most + alone))


def prompt_s(
    timer: StepTimer, bucket_lengths: BucketLengths, budget: int, shared: bool
) -> tuple[float, float]:
    """Seconds of a replica that a prompt takes: as one of many, and alone; `shared`: several fill a step."""
    tokens = max(1, round(bucket_lengths.prompt_tokens))
    cached = max(0.0, bucket_lengths.context_tokens - bucket_lengths.prompt_tokens)
    slow_s, many = chunked_prefill_s(timer, tokens, budget), prompts_in_step(tokens, budget) if shared else 1
    if not isinstance(timer, PipelineTimer):
        return min(slow_s, float(prompts_s(timer, many, tokens, 0.0, budget)[0]) / many), slow_s
    fast_s = 0.0
    for start in range(0, tokens, budget):
        chunk = steps(min(budget, tokens - start), cached + start)
        fast_s += float(timer.interval_s(chunk)[0])
    return min(fast_s, slow_s), slow_s


def _model(plan: Plan, prediction: Prediction, replica_models: ReplicaModels) -> ModelExpectation:
    model, demand = prediction.model, prediction.demand_per_s
    slo = replica_models.resolved.slos.get(model)
    attained = None if slo is None else slo.attainment
    return ModelExpectation(model, demand, demand * plan.fraction_of(model), attained)


def _regions(plan: Plan) -> list[FlowExpectation]:
    rates: dict[tuple[str, str, str], float] = {}
    for flow in plan.flows:
        key = (flow.model, flow.prefill_region, flow.decode_region)
        rates[key] = rates.get(key, 0.0) + flow.rate_per_s
    return [FlowExpectation(*key, rate) for key, rate in rates.items() if rate > 0]


def _pair(ends: tuple[str, Place, Place], rate: float) -> FlowExpectation:
    model, (name, region, first), (_, _, second) = ends
    return FlowExpectation(model, f"{name}@{region}/{first}", f"{name}@{region}/{second}", rate)


def _between(plan: Plan, replica_models: ReplicaModels, lengths: MeanLengths) -> LinkRates:
    values: LinkRates = {}
    for flow in plan.flows:
        length = lengths.get((flow.model, flow.bucket))
        if flow.prefill_region != flow.decode_region and length is not None:
            size = replica_models.kv[flow.model].wire_bytes(0, round(length.context_tokens), flow.codec)
            ends = (flow.prefill_region, flow.decode_region)
            _add(values, ends, flow.rate_per_s, size)
    return values


def _add(links: LinkRates, ends: tuple[str, str], rate_per_s: float, size: float) -> None:
    before = links.get(ends, (0.0, 0.0))
    links[ends] = (before[0] + rate_per_s * size, before[1] + rate_per_s)


def _cross(
    replica_models: ReplicaModels,
    template: Template,
    ends: tuple[str, Place, Place],
    rate: float,
    bucket_lengths: BucketLengths | None,
    links: LinkRates,
) -> None:
    """Add what a flow between two replicas of a copy puts on the links between their machines."""
    _, first, second = ends
    if first == second or bucket_lengths is None:
        return
    size = replica_models.kv[template.model].wire_bytes(
        0, round(bucket_lengths.context_tokens), template.codec
    )
    for (source, target), share in replica_models.crossing(template.name, first[2], second[2]).items():
        if (source, target) in replica_models.resolved.machine_gbps:
            _add(links, (source, target), rate, size * share)


SERVED, BUSY, BYTES, RATE = 0.02, 0.10, 0.10, 0.25
NOISE = 3.0
"""Standard deviations that counts may be off by chance."""
LEAST_REQUESTS = 20
"""A replica that should have got fewer may have got none by chance."""

What = Literal["served", "attainment", "work", "rate", "flow", "busy", "link"]
Verdict = Literal["agrees", "differs", "broken"]


@dataclass(frozen=True, slots=True)
class PlanDeviation:
    what: What
    name: str
    planned: ValueRange
    ran: float
    verdict: Verdict


Deviations = Iterable[PlanDeviation]


def compared(
    resolved: ResolvedPlan,
    result: SimResult,
    balance: str = "learned",
    replica_models: ReplicaModels | None = None,
) -> tuple[PlanDeviation, ...]:
    """`replica_models`: as the run had them, if they are at hand."""
    records, plan = result.records, resolved.plan
    if not len(records) or not plan.shares or not steady(result.replicas):
        return ()
    if replica_models is None:
        replica_models = ReplicaModels(resolved)
        replica_models.learn(plan)
    span_s = _span_s(result)
    values = {name: int((records.model == place).sum()) / span_s for place, name in enumerate(records.models)}
    served = {each.model: each.demand_per_s * plan.fraction_of(each.model) for each in plan.predictions}
    scale = {name: min(1.0, values.get(name, 0.0) / rate) for name, rate in served.items() if rate > 0}
    expectations = promises(
        plan, replica_models, lengths_of(records, model_weights(plan, balance)), balance, scale
    )
    over = {name for name, rate in served.items() if values.get(name, 0.0) > rate * (1 + SERVED)}
    return (
        *_models(expectations, result, values),
        *_replicas(expectations, result, span_s, over),
        *_flows(expectations, result, span_s, over),
        *_links(expectations, result, span_s, bool(over)),
    )


def described(deviation: PlanDeviation) -> tuple[str, str]:
    """(planned, ran) in words."""
    low, high, ran = deviation.planned.low, deviation.planned.high, deviation.ran
    if deviation.what in ("served", "attainment"):
        return f"at least {low:.1%}", f"{ran:.1%}"
    if deviation.what == "work":
        return f"{low:.0f} requests", "none"
    if deviation.what == "busy":
        return f"{low:.0%}" if high - low < 0.005 else f"{low:.0%} to {high:.0%}", f"{ran:.0%}"
    if deviation.what == "link":
        return f"{low / 1e6:.4g} MB/s", f"{ran / 1e6:.4g} MB/s"
    planned = f"{low:.3g}" if high - low < 0.005 * high else f"{low:.3g} to {high:.3g}"
    return f"{planned} req/s", f"{ran:.3g} req/s"


def disagreements(plan_deviations: Iterable[PlanDeviation]) -> tuple[PlanDeviation, ...]:
    wrong = [deviation for deviation in plan_deviations if deviation.verdict != "agrees"]
    return tuple(sorted(wrong, key=lambda deviation: deviation.verdict != "broken"))


def steady(replicas: tuple[ReplicaRecord, ...]) -> bool:
    """Whether all replicas were there in their role from the first moment to the last."""
    return all(
        replica.ready_s == 0.0
        and {state for _, state, _ in replica.changes} <= {"starting", "ready"}
        # a flip is a change to the state that it has already
        and len({role for _, _, role in replica.changes}) == 1
        for replica in replicas
        if not replica.only_starting
    )


def lengths_of(records: RequestRecords, read: Mapping[str, ModelWeights]) -> MeanLengths:
    lengths: MeanLengths = {}
    for place, name in enumerate(records.models):
        own_weights = read.get(name)
        if own_weights is None:
            continue
        chosen = records.model == place
        buckets = np.searchsorted(np.array(own_weights.longest_tokens), records.prompt_tokens)
        for bucket in range(len(own_weights.longest_tokens)):
            rows = chosen & (buckets == bucket)
            if rows.any():
                whole = float(records.prompt_tokens[rows].mean())
                cached = float(records.cached_tokens[rows].mean())
                output = float(records.output_tokens[rows].mean())
                lengths[name, bucket] = BucketLengths(max(1.0, whole - cached), output, whole)
    return lengths


def _span_s(result: SimResult) -> float:
    """How long requests came."""
    arrivals = result.records.arrival_s
    # n requests have n - 1 gaps between them
    span_s = float(arrivals[-1] - arrivals[0]) * len(arrivals) / max(1, len(arrivals) - 1)
    return span_s if span_s > MOMENT_S else max(result.end_s, MOMENT_S)


def _models(expectations: PlanExpectations, result: SimResult, rates: Mapping[str, float]) -> Deviations:
    records = result.records
    verdict = judge(records, result.slos, result.end_s, result.classes)
    for model in expectations.models:
        if not rates.get(model.model):
            continue
        rows = records.model == records.models.index(model.model)
        asked = rows & (records.outcome != CANCELLED)
        answered = int((asked & (records.outcome == ANSWERED)).sum()) / max(1, int(asked.sum()))
        planned = min(1.0, model.served_per_s / rates[model.model])
        yield _at_least("served", model.model, planned, answered, SERVED)
        judged = int((rows & verdict.judged).sum())
        if model.attainment is not None and judged:
            kept = int((rows & verdict.met).sum()) / judged
            yield _at_least("attainment", model.model, model.attainment * planned, kept, 0.0)


def _at_least(what: What, name: str, planned: float, ran: float, slack: float) -> PlanDeviation:
    verdict: Verdict = "agrees" if ran >= planned - slack - 1e-12 else "differs"
    return PlanDeviation(what, name, ValueRange(planned, 1.0), ran, verdict)


def _replicas(expectations: PlanExpectations, result: SimResult, span_s: float, over: set[str]) -> Deviations:
    """Replicas of a copy that are alike and do the same are one: which of them gets a request is nobody's promise."""
    records = result.records
    size = len(result.replicas)
    first = np.bincount(records.prefill_replica[records.prefill_replica >= 0], minlength=size)
    both = records.prefill_replica == records.decode_replica
    second = np.bincount(records.decode_replica[(records.decode_replica >= 0) & ~both], minlength=size)
    promised: dict[Place, ReplicaExpectation] = {item.place: item for item in expectations.replicas}
    alike: dict[tuple[str, ReplicaExpectation], list[int]] = {}
    for number, replica in enumerate(result.replicas):
        expectation = promised.get(place_of(replica))
        if expectation is not None and not replica.only_starting:
            if expectation.interchangeable:
                expectation = replace(expectation, place=(*expectation.place[:2], 0))
            alike.setdefault((replica.unit, expectation), []).append(number)
    for (_, expectation), numbers in alike.items():
        one, count = result.replicas[numbers[0]], len(numbers)
        name = one.id if count == 1 else f"{one.id} and {count - 1} like it"
        got = sum(int(first[number] + second[number]) for number in numbers) / count
        expected = float(round(expectation.counted_per_s * span_s))
        if not got and expected >= LEAST_REQUESTS:
            yield PlanDeviation("work", name, ValueRange(expected, expected), 0.0, "broken")
        if expectation.busy is None:
            continue
        open_end = one.model in over
        rate = expectation.rate_per_s
        slack = max(RATE * rate.high, NOISE * sqrt(rate.high / span_s))
        yield _within("rate", name, rate, got / span_s, slack, open_end)
        busy_s = sum(result.replicas[number].busy_s for number in numbers) / count
        share = min(1.0, busy_s / result.end_s) if result.end_s > 0 else 0.0
        low, high = expectation.busy.low, expectation.busy.high
        # Chance in how many came while it ran.
        noise = NOISE * high / sqrt(max(rate.high * span_s, 1.0)) if high < 1 else 0.0
        # Where one of those alike has most of the answers, they share steps, and all together are less busy.
        busy = ValueRange((1.0 - (1.0 - low) ** count) / count, high)
        yield _within("busy", name, busy, share, BUSY + min(noise, BUSY), open_end)


def place_of(replica: ReplicaRecord) -> Place:
    return replica.template, replica.region, int(replica.id.rpartition("/")[2])


def _flows(expectations: PlanExpectations, result: SimResult, span_s: float, over: set[str]) -> Deviations:
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
    for flow in expectations.flows:
        ran = seen.get((flow.model, flow.source, flow.target), 0) / span_s
        slack = max(RATE * flow.rate_per_s, NOISE * sqrt(flow.rate_per_s / span_s))
        planned_range = ValueRange(flow.rate_per_s, flow.rate_per_s)
        name = f"{flow.source} -> {flow.target}"
        yield _within("flow", name, planned_range, ran, slack, flow.model in over)


def _links(expectations: PlanExpectations, result: SimResult, span_s: float, over: bool) -> Deviations:
    records = {(link.source, link.target): link for link in result.links}
    for link in expectations.links:
        record, rate = records.get((link.source, link.target)), link.bytes_per_s
        ran = 0.0 if record is None else record.sent_bytes / span_s
        # Of a link for less than a request in all this time nothing can be said.
        noise = NOISE / sqrt(max(link.requests_per_s * span_s, 1.0))
        name, planned_range = f"{link.source} -> {link.target}", ValueRange(rate, rate)
        yield _within("link", name, planned_range, ran, rate * (BYTES + noise), over)


def _within(
    what: What, name: str, planned_range: ValueRange, ran: float, slack: float, open_end: bool
) -> PlanDeviation:
    short, more = planned_range.low - ran, ran - planned_range.high
    verdict: Verdict = "differs" if max(short, -inf if open_end else more) > slack + 1e-12 else "agrees"
    return PlanDeviation(what, name, planned_range, ran, verdict)
