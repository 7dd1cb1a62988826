"""What a plan says will happen, in the words of what happens: rates, busy times, bytes and promises kept.

For every replica the requests a second that it prefills for others, decodes for others or does alone; who hands to
whom; how busy that keeps it; how many bytes cross each link; and the share of requests within the objective. A rate
is a range: from what the plan's program sent there to what the Brain's weights make of it, which spread the time that
copies have to spare (`core.routing.offers`).

Busy is a range too, whatever arrivals are like. With u the time that prompts take and n the answers that would be
under way at once if each ran alone, both per second,

    low = 1 - (1 - u) exp(-n)      arrivals by chance: answers overlap and share steps
    high = min(1, u + n)           arrivals in turn

Inside combos and pairs the Brain decides request by request who does what (in place, split, overflow). There the
plan counts on the copy as a whole, so nothing is said of a single replica but that it gets work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp

from potluck.core.routing.template_weights import PHASES, ModelWeights, Phase, offers
from potluck.core.values.plan import Plan, Template
from potluck.perf.serving.phases import (
    CHUNK_TOKENS,
    chunked_prefill_s,
    decode_step_s,
    prompts_in_step,
    prompts_s,
)
from potluck.perf.step_timer import StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer
from potluck.runtime.replica_models import ReplicaModels

Place = tuple[str, str, int]
"""(template, region, which of the template's replicas)"""


@dataclass(frozen=True, slots=True)
class BucketLengths:
    """Mean lengths of a bucket's requests."""

    prompt_tokens: float
    """Those that are computed."""
    output_tokens: float
    context_tokens: float
    """The whole prompt."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """From the least to the most that was said."""

    low: float
    high: float

    def away(self, value: float) -> float:
        """How far outside it is."""
        return max(self.low - value, value - self.high, 0.0)


@dataclass(frozen=True, slots=True)
class ReplicaExpectation:
    """One of a template's replicas in one copy."""

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
    """Requests a second from where they are prefilled to where they are decoded."""

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


@dataclass(frozen=True, slots=True)
class ModelExpectation:
    model: str
    demand_per_s: float
    """That the plan was made for."""
    served_per_s: float
    attainment: float | None
    """Share of what is served; None without an objective."""


@dataclass(frozen=True, slots=True)
class PlanExpectations:
    """All of it, at the planned demand."""

    models: tuple[ModelExpectation, ...]
    replicas: tuple[ReplicaExpectation, ...]
    flows: tuple[FlowExpectation, ...]
    links: tuple[LinkExpectation, ...]


@dataclass(slots=True)
class _Work:
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
    lengths: Mapping[tuple[str, int], BucketLengths],
    balance: str = "learned",
    scale: Mapping[str, float] | None = None,
) -> PlanExpectations:
    """What the plan says of requests with these mean lengths, by model and bucket.

    `scale` has for each model what share of the planned requests come.
    """
    if scale is not None:
        plan = _scaled(plan, scale)
    read = offers(plan, balance)
    work: dict[Place, _Work] = {}
    pairs: dict[tuple[str, Place, Place], float] = {}
    links: dict[tuple[str, str], float] = {}
    for (name, region), rates in copy_rates(plan, read).items():
        template = plan.template(name)
        for (phase, bucket), both in rates.items():
            for first, second, share in _inside(template, phase, bucket):
                mine = (both[0] * share, both[1] * share)
                for index, prompt, answer in _parts(first, second):
                    place = (name, region, index)
                    work.setdefault(place, _Work()).add(bucket, mine, prompt, answer)
                if template.flows and first is not None and second is not None:
                    ends = (template.model, (name, region, first), (name, region, second))
                    pairs[ends] = pairs.get(ends, 0.0) + mine[0]
                    _cross(
                        replica_models, template, ends, mine[0], lengths.get((template.model, bucket)), links
                    )
    return PlanExpectations(
        tuple(_model(plan, each.model, replica_models) for each in plan.predictions),
        tuple(
            _replica(plan.template(place[0]), place, each, replica_models, lengths)
            for place, each in work.items()
        ),
        (*_regions(plan), *(_pair(ends, rate) for ends, rate in pairs.items())),
        tuple(
            LinkExpectation(*ends, rate)
            for ends, rate in {**_between(plan, replica_models, lengths), **links}.items()
        ),
    )


def copy_rates(
    plan: Plan, read: Mapping[str, ModelWeights]
) -> dict[tuple[str, str], dict[tuple[Phase, int], tuple[float, float]]]:
    """Per copy, phase and bucket: requests a second by the program, and by the weights that routing has."""
    counts: dict[tuple[str, str], int] = {}
    for each in plan.deployments:
        counts[each.template, each.region] = counts.get((each.template, each.region), 0) + each.count
    planned: dict[tuple[str, str, Phase, int], float] = {}
    for share in plan.shares:
        part = (share.template, share.region, share.phase, share.bucket)
        planned[part] = planned.get(part, 0.0) + share.rate_per_s
    found: dict[tuple[str, str], dict[tuple[Phase, int], tuple[float, float]]] = {}
    for mine in read.values():
        for phase in PHASES:
            for bucket in range(len(mine.longest_tokens)):
                # Whole requests are spread over all regions; prompts and answers within one, as flows have it.
                for keys in _groups(mine, phase, bucket, counts):
                    rate = sum(planned.get((*key, phase, bucket), 0.0) for key in keys)
                    weight = sum(mine.copies[key].weights(phase)[bucket] * counts[key] for key in keys)
                    for key in keys:
                        said = planned.get((*key, phase, bucket), 0.0) / counts[key]
                        own = rate * mine.copies[key].weights(phase)[bucket] / weight
                        found.setdefault(key, {})[phase, bucket] = (said, own)
    return found


def _scaled(plan: Plan, scale: Mapping[str, float]) -> Plan:
    model_of = {template.name: template.model for template in plan.templates}
    return replace(
        plan,
        shares=tuple(
            replace(each, rate_per_s=each.rate_per_s * scale.get(model_of[each.template], 1.0))
            for each in plan.shares
        ),
        flows=tuple(
            replace(each, rate_per_s=each.rate_per_s * scale.get(each.model, 1.0)) for each in plan.flows
        ),
    )


def _groups(
    mine: ModelWeights, phase: Phase, bucket: int, counts: Mapping[tuple[str, str], int]
) -> list[list[tuple[str, str]]]:
    keys = [k for k, each in mine.copies.items() if counts.get(k) and each.weights(phase)[bucket] > 0]
    if phase == "closed":
        return [keys] if keys else []
    return [[key for key in keys if key[1] == region] for region in dict.fromkeys(key[1] for key in keys)]


def _inside(template: Template, phase: Phase, bucket: int) -> list[tuple[int | None, int | None, float]]:
    """(who prefills, who decodes, share) of what a copy is sent."""
    if phase == "closed" and template.flows:
        return [(flow.prefill, flow.decode, flow.share) for flow in template.flows if flow.bucket == bucket]
    roles = [replica.role for replica in template.replicas]
    if phase != "closed":
        able = [index for index, role in enumerate(roles) if role in (phase, "mixed")]
        one: list[tuple[int | None, int | None]] = [
            (index, None) if phase == "prefill" else (None, index) for index in able
        ]
        return [(*ends, 1.0 / len(able)) for ends in one]
    mixed = [index for index, role in enumerate(roles) if role == "mixed"]
    first = [index for index, role in enumerate(roles) if role == "prefill"]
    if not first:
        return [(index, index, 1.0 / len(mixed)) for index in mixed]
    second = [index for index, role in enumerate(roles) if role != "prefill"]
    return [(i, j, 1.0 / (len(first) * len(second))) for i in first for j in second]


def _parts(first: int | None, second: int | None) -> list[tuple[int, bool, bool]]:
    """(replica, whether it has the prompt, whether it has the answer)"""
    if first is not None and first == second:
        return [(first, True, True)]
    found = [] if first is None else [(first, True, False)]
    return found if second is None else [*found, (second, False, True)]


def _replica(
    template: Template,
    place: Place,
    work: _Work,
    replica_models: ReplicaModels,
    lengths: Mapping[tuple[str, int], BucketLengths],
) -> ReplicaExpectation:
    said, spread = work.requests
    busy: ValueRange | None = None
    if template.flows or template.kind not in ("combo", "pair"):
        timer = replica_models.replica_models[template.name, place[2]].timer
        budget = replica_models.replica_models[template.name, place[2]].engine.token_budget
        spans = [
            busy_span(template.model, timer, work.prompts, work.answers, lengths, side, budget)
            for side in (0, 1)
        ]
        busy = ValueRange(min(each.low for each in spans), max(each.high for each in spans))
    rate = ValueRange(min(said, spread), max(said, spread))
    return ReplicaExpectation(place, template.model, rate, said, busy, not template.flows)


def busy_span(
    model: str,
    timer: StepTimer,
    prompts: Mapping[int, list[float]],
    answers: Mapping[int, list[float]],
    lengths: Mapping[tuple[str, int], BucketLengths],
    side: int,
    budget: int = CHUNK_TOKENS,
) -> ValueRange:
    """How busy prompts and answers at these rates keep a replica whose steps hold so many tokens."""
    least = most = alone = 0.0
    for bucket, rates in prompts.items():
        each = lengths.get((model, bucket))
        if each is not None:
            fast_s, slow_s = prompt_s(timer, each, budget, shared=not answers)
            least += rates[side] * fast_s
            most += rates[side] * slow_s
    for bucket, rates in answers.items():
        each = lengths.get((model, bucket))
        if each is not None:
            context = each.context_tokens + each.output_tokens / 2
            step_s = float(decode_step_s(timer, 1, context)[0])
            alone += rates[side] * each.output_tokens * step_s
    least, most = min(least, 1.0), min(most, 1.0)
    return ValueRange(1.0 - (1.0 - least) * exp(-alone), min(1.0, most + alone))


def prompt_s(
    timer: StepTimer, each: BucketLengths, budget: int = CHUNK_TOKENS, shared: bool = False
) -> tuple[float, float]:
    """Seconds of a replica that a prompt takes: as one of many, and alone; `shared`: several fill a step."""
    tokens = max(1, round(each.prompt_tokens))
    cached = max(0.0, each.context_tokens - each.prompt_tokens)
    slow_s, many = chunked_prefill_s(timer, tokens, budget), prompts_in_step(tokens, budget) if shared else 1
    if not isinstance(timer, PipelineTimer):
        return min(slow_s, float(prompts_s(timer, many, tokens, 0.0, budget)[0]) / many), slow_s
    fast_s = 0.0
    for start in range(0, tokens, budget):
        chunk = steps(min(budget, tokens - start), cached + start)
        fast_s += float(timer.interval_s(chunk)[0])
    return min(fast_s, slow_s), slow_s


def _model(plan: Plan, model: str, replica_models: ReplicaModels) -> ModelExpectation:
    said = next(each for each in plan.predictions if each.model == model)
    slo = replica_models.resolved.slos.get(model)
    attained = None if slo is None else slo.attainment
    return ModelExpectation(model, said.demand_per_s, said.demand_per_s * plan.fraction_of(model), attained)


def _regions(plan: Plan) -> list[FlowExpectation]:
    rates: dict[tuple[str, str, str], float] = {}
    for flow in plan.flows:
        key = (flow.model, flow.prefill_region, flow.decode_region)
        rates[key] = rates.get(key, 0.0) + flow.rate_per_s
    return [FlowExpectation(*key, rate) for key, rate in rates.items() if rate > 0]


def _pair(ends: tuple[str, Place, Place], rate: float) -> FlowExpectation:
    model, (name, region, first), (_, _, second) = ends
    return FlowExpectation(model, f"{name}@{region}/{first}", f"{name}@{region}/{second}", rate)


def _between(
    plan: Plan, replica_models: ReplicaModels, lengths: Mapping[tuple[str, int], BucketLengths]
) -> dict[tuple[str, str], float]:
    """Bytes a second over links between regions."""
    found: dict[tuple[str, str], float] = {}
    for flow in plan.flows:
        each = lengths.get((flow.model, flow.bucket))
        if flow.prefill_region != flow.decode_region and each is not None:
            size = replica_models.kv[flow.model].wire_bytes(0, round(each.context_tokens), flow.codec)
            ends = (flow.prefill_region, flow.decode_region)
            found[ends] = found.get(ends, 0.0) + flow.rate_per_s * size
    return found


def _cross(
    replica_models: ReplicaModels,
    template: Template,
    ends: tuple[str, Place, Place],
    rate: float,
    each: BucketLengths | None,
    links: dict[tuple[str, str], float],
) -> None:
    """Add what a flow between two replicas of a copy puts on the links between their machines."""
    _, first, second = ends
    if first == second or each is None:
        return
    size = replica_models.kv[template.model].wire_bytes(0, round(each.context_tokens), template.codec)
    for (source, target), share in replica_models.crossing(template.name, first[2], second[2]).items():
        if (source, target) in replica_models.resolved.machine_gbps:
            links[source, target] = links.get((source, target), 0.0) + rate * size * share
