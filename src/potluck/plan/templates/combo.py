"""CAUCHY's combos: prefill nodes of one type feeding decode nodes of another (or the same), 1:1 to 2:6.

A combo is a closed group: it serves what the slowest of its two sides and their network cards can,

    C_b = min(n_p P_b, n_d Q_b, u G_p / (h kv_b), u G_d / (h kv_b))

G are the bits a second of each side's cards, u how busy they may be so that KV is there in time (`network_cards`;
equations 17 and 18), h the share of time that the program plans with. Of the two directions of a pair of types the
one with the higher cost efficiency (tokens per dollar) is kept; aggregated replicas are combos too.

The paper counts combos in GPUs, <2 x H800, 4 x H20>. *Ranking* (3.3.1): a pair's cost efficiency is equation 15 of
`perf.timers.cauchy` with the demand's mean lengths; the SHORTLIST best pairs whose sides keep the objective are
candidates. A model that the closed form does not cover is ranked by what its combos are seen to serve per dollar.
*Counts*: one or two units of GPUs prefill for one to six that decode, a unit being as many GPUs as the model needs on
that node. Nodes are rented whole, so a template is as many combos as fill its nodes; two sides that fit one node
share it, and their KV uses no network card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, single
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template
from potluck.core.values.types import Codec, NodeType, Role
from potluck.perf.step_timer import Floats
from potluck.perf.timers.cauchy_timer import CauchyModel, ComboSide, ce
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.perf.timers.roofline import check_tp
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.network_cards import NetworkCards, busy_limit, cards_of, sojourn_s, wire_bits
from potluck.plan.timing.rate_cache import RateCache
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, fits, useful, wait_factor

RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 3), (2, 5), (2, 6))
"""(prefill nodes, decode nodes), from 1:1 to 2:6."""


def combos(
    problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template], prices: dict[str, float]
) -> list[Template]:
    """Combos of single-node templates, and the aggregated ones; `prices` ($/h a node) settle directions.

    KV crosses in the smallest codec that is allowed; whether a more exact one does is seen once counts are known.
    """
    best = {role: _best_per_node(demand, single, role) for role in ("prefill", "decode", "mixed")}
    templates = [replace(template, kind="combo") for template in best["mixed"].values()]
    prefills, decodes = (
        {
            node: (template, {n: _times(problem, template, n) for n in {ratio[place] for ratio in RATIOS}})
            for node, template in best[role].items()
        }
        for place, role in enumerate(("prefill", "decode"))
    )
    for first in prefills:
        for second in decodes:
            forward = _pair(problem, demand, prefills[first], decodes[second])
            if first < second and second in best["prefill"] and first in best["decode"]:
                backward = _pair(problem, demand, prefills[second], decodes[first])
                forward = max((forward, backward), key=lambda ts: _best_efficiency(demand, ts, prices))
            elif first > second and first in best["decode"] and second in best["prefill"]:
                continue  # that pair was settled the other way round
            templates += forward
    return templates


def efficiency_tokens_per_usd(demand: ModelDemand, template: Template, prices: dict[str, float]) -> float:
    """Tokens per dollar when a template serves the model's mix of buckets by itself."""
    rate = served_per_s(demand, template)
    cost = sum(node_count.count * prices[node_count.node] for node_count in template.nodes)
    tokens = demand.tokens_per_s / demand.rate_per_s if demand.rate_per_s else 0.0
    return rate * tokens * 3600.0 / cost if cost > 0 else float("inf")


def served_per_s(demand: ModelDemand, template: Template) -> float:
    """Requests a second of the model's own mix that one copy serves, closed; 0 if it lacks a bucket."""
    time = 0.0
    for bucket, capacity in zip(demand.buckets, template.capacity, strict=True):
        if bucket.rate_per_s <= 0:
            continue
        if capacity.closed_per_s <= 0:
            return 0.0
        time += bucket.rate_per_s / capacity.closed_per_s
    return demand.rate_per_s / time if time > 0 else 0.0


def _best_per_node(demand: ModelDemand, single: Sequence[Template], role: Role) -> dict[str, Template]:
    """One template per node type: the paper shards a phase over all of a server's GPUs or not at all."""
    best: dict[str, Template] = {}
    for template in single:
        if template.replicas[0].role != role or template.model != demand.name:
            continue
        node = template.nodes[0].node
        if node not in best or _total(template) > _total(best[node]):
            best[node] = template
    return best


def _total(template: Template) -> float:
    return sum(c.prefill_per_s + c.decode_per_s + c.closed_per_s for c in template.capacity)


def combo_capacity(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    rate_cache: RateCache,
) -> tuple[BucketCapacity, ...]:
    """What replicas of the two phases, and mixed ones beside them, serve together, from their layouts alone."""
    mixed = _side(problem, demand, replicas, "mixed", rate_cache)
    prefill_side, decode_side = (
        _side(problem, demand, replicas, role, rate_cache) for role in ("prefill", "decode")
    )
    closed = [BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0) for bucket in demand.buckets]
    if prefill_side is not None and decode_side is not None:
        bits = wire_bits(demand, codec)
        closed = _closed(
            problem, demand, prefill_side, decode_side, bits * (not _one_node(problem, replicas))
        )
    if mixed is None:
        return tuple(closed)
    return tuple(
        replace(capacity, closed_per_s=capacity.closed_per_s + other_capacity.closed_per_s)
        for capacity, other_capacity in zip(closed, mixed.capacity, strict=True)
    )


def _one_node(problem: PlanningProblem, replicas: Sequence[PlannedReplica]) -> bool:
    """Whether all of them stand on one node, which then is all that they rent: their KV uses no network card."""
    members = [node for replica in replicas for stage in replica.layout.stages for node in stage.nodes]
    first = members[0].node
    return all(stage_node.node == first for stage_node in members) and sum(
        stage_node.tp for stage_node in members
    ) <= (problem.node(first).gpus)


@dataclass(frozen=True, slots=True)
class _Side:
    """Replicas that do one phase: their rates together, how many they are, and their network cards."""

    capacity: Sequence[BucketCapacity]
    copies: int
    cards: NetworkCards


def _side(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    role: Role,
    rate_cache: RateCache,
) -> _Side | None:
    members = [replica for replica in replicas if replica.role == role]
    if not members:
        return None
    total = [BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0) for bucket in demand.buckets]
    for layout in {replica.layout for replica in members}:
        copies = sum(1 for replica in members if replica.layout == layout)
        bucket_capacities = rate_cache.replica(problem, demand, layout, role).times(copies).capacity
        total = [
            _added(capacity, other_capacity)
            for capacity, other_capacity in zip(total, bucket_capacities, strict=True)
        ]
    return _Side(total, len(members), cards_of(members, problem.by_name))


def _added(capacity: BucketCapacity, other_capacity: BucketCapacity) -> BucketCapacity:
    return BucketCapacity(
        capacity.bucket,
        capacity.prefill_per_s + other_capacity.prefill_per_s,
        capacity.decode_per_s + other_capacity.decode_per_s,
        capacity.closed_per_s + other_capacity.closed_per_s,
        max(capacity.ttft_s, other_capacity.ttft_s),
        max(capacity.tpot_s, other_capacity.tpot_s),
    )


def _pair(
    problem: PlanningProblem,
    demand: ModelDemand,
    prefills: tuple[Template, dict[int, _Side]],
    decodes: tuple[Template, dict[int, _Side]],
) -> list[Template]:
    """Combos of two single nodes, each of which is given with so many of it."""
    made, (prefill, before), (decode, after) = [], prefills, decodes
    codec = problem.codecs[-1]
    bits = wire_bits(demand, codec)
    for n_p, n_d in RATIOS:
        replicas = prefill.replicas * n_p + decode.replicas * n_d
        first, second = prefill.nodes[0].node, decode.nodes[0].node
        capacity = tuple(_closed(problem, demand, before[n_p], after[n_d], bits))
        if not useful(capacity):
            continue
        same = first == second
        nodes = (NodeCount(first, n_p + n_d),) if same else (NodeCount(first, n_p), NodeCount(second, n_d))
        made.append(
            Template(
                name=f"{demand.name}: combo {n_p} {first} -> {n_d} {second}",
                kind="combo",
                model=demand.name,
                nodes=nodes,
                replicas=replicas,
                capacity=capacity,
                confidence=max((prefill.confidence, decode.confidence), key=ORDER.index),
                codec=codec,
            )
        )
    return made


def _times(problem: PlanningProblem, template: Template, n: int) -> _Side:
    capacity = [
        replace(c, prefill_per_s=c.prefill_per_s * n, decode_per_s=c.decode_per_s * n)
        for c in template.capacity
    ]
    return _Side(capacity, len(template.replicas) * n, cards_of(template.replicas * n, problem.by_name))


def _closed(
    problem: PlanningProblem, model_demand: ModelDemand, prefill_side: _Side, decode_side: _Side, bits: Floats
) -> list[BucketCapacity]:
    """What two sides serve, bucket by bucket; their cards are as busy as the tightest bucket lets them be."""
    pairs = list(zip(model_demand.buckets, prefill_side.capacity, decode_side.capacity, strict=True))
    limits = [
        _busy(problem, model_demand, demand, capacity, prefill_side, decode_side, bits)
        for demand, capacity, _ in pairs
    ]
    asked = [
        u for u, bucket in zip(limits, model_demand.buckets, strict=True) if u > 0 and bucket.rate_per_s > 0
    ]
    busy = min(asked, default=problem.headroom)
    narrow = min(prefill_side.cards.all_bits_per_s, decode_side.cards.all_bits_per_s)
    slow = min(prefill_side.cards.one_bits_per_s, decode_side.cards.one_bits_per_s)
    closed = []
    for (demand, capacity, d), limit in zip(pairs, limits, strict=True):
        rate = min(capacity.prefill_per_s, d.decode_per_s)
        kv_bits = float(bits[demand.bucket])
        if kv_bits > 0:
            rate = min(rate, busy * narrow / (problem.headroom * kv_bits))
        if not (rate > 0 and limit > 0):
            closed.append(BucketCapacity(demand.bucket, 0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        used = problem.headroom * rate * kv_bits / narrow
        late_s = max(0.0, sojourn_s(kv_bits / slow, used) - prefill_side.copies / capacity.prefill_per_s)
        closed.append(BucketCapacity(demand.bucket, 0.0, 0.0, rate, capacity.ttft_s + late_s, d.tpot_s))
    return closed


def _busy(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    demand: BucketDemand,
    capacity: BucketCapacity,
    prefill_side: _Side,
    decode_side: _Side,
    bits: Floats,
) -> float:
    """How busy the cards may be so that TTFT holds with this prefill: (w - 1) S + t / (1 - u) within it."""
    if not capacity.prefill_per_s > 0:
        return 0.0
    service_s = prefill_side.copies / capacity.prefill_per_s
    limit_s = model_demand.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S
    within_s = limit_s - (wait_factor(problem.headroom) - 1.0) * service_s
    slow = min(prefill_side.cards.one_bits_per_s, decode_side.cards.one_bits_per_s)
    return busy_limit(float(bits[demand.bucket]) / slow, within_s, problem.headroom)


def _best_efficiency(demand: ModelDemand, templates: Sequence[Template], prices: dict[str, float]) -> float:
    return max((efficiency_tokens_per_usd(demand, template, prices) for template in templates), default=0.0)


SHORTLIST = 4  # Pairs of types that are passed on, as in the paper's example.
PREFILL_UNITS, DECODE_UNITS = (1, 2), (1, 2, 3, 4, 5, 6)
MOST_NODES = 8


@dataclass(frozen=True, slots=True)
class RankedPair:
    """A pair of node types, prefill first, and its cost efficiency in tokens per dollar."""

    prefill: str
    decode: str
    ce_tokens_per_usd: float
    printed: bool  # By equation 15; otherwise by what its combos serve.


def ranked(
    problem: PlanningProblem,
    demand: ModelDemand,
    single_node: Sequence[Template],
    prices: Mapping[str, float],
    rate_cache: RateCache,
) -> list[RankedPair]:
    """All pairs whose sides keep the objective, in their better direction, the most efficient first."""
    able = {
        role: sorted({t.nodes[0].node for t in single_node if t.replicas[0].role == role})
        for role in ("prefill", "decode")
    }
    ranked_pairs: dict[frozenset[str], RankedPair] = {}
    for first in able["prefill"]:
        for second in able["decode"]:
            value = _efficiency(problem, demand, single_node, prices, first, second, rate_cache)
            best = ranked_pairs.get(frozenset((first, second)))
            if best is None or value.ce_tokens_per_usd > best.ce_tokens_per_usd:
                ranked_pairs[frozenset((first, second))] = value
    return sorted(
        ranked_pairs.values(), key=lambda each: (-each.ce_tokens_per_usd, each.prefill, each.decode)
    )


def gpu_combos(
    problem: PlanningProblem, demand: ModelDemand, pairs: Sequence[RankedPair], rate_cache: RateCache
) -> list[Template]:
    templates: dict[str, Template] = {}
    for pair in pairs:
        first, second = problem.node(pair.prefill), problem.node(pair.decode)
        for n_p in PREFILL_UNITS:
            for n_d in DECODE_UNITS:
                template = _combo(problem, demand, (first, second), n_p, n_d, rate_cache)
                if template is not None:
                    templates.setdefault(template.name, template)
    return list(templates.values())


def _combo(
    problem: PlanningProblem,
    demand: ModelDemand,
    types: tuple[NodeType, NodeType],
    n_p: int,
    n_d: int,
    rate_cache: RateCache,
) -> Template | None:
    first, second = types
    prefill = _instances(problem, demand, first, "prefill", n_p, rate_cache)
    decode = _instances(problem, demand, second, "decode", n_d, rate_cache)
    if prefill is None or decode is None:
        return None
    nodes: tuple[NodeCount, ...]
    gpus_p, gpus_d = (sum(_gpus(replica) for replica in side) for side in (prefill, decode))
    if first.name == second.name and first.gpus % (gpus_p + gpus_d) == 0:
        times, nodes = first.gpus // (gpus_p + gpus_d), (NodeCount(first.name, 1),)
    else:
        times = _lcm(first.gpus // gcd(first.gpus, gpus_p), second.gpus // gcd(second.gpus, gpus_d))
        counts = (times * gpus_p // first.gpus, times * gpus_d // second.gpus)
        if sum(counts) > MOST_NODES:
            return None
        nodes = (NodeCount(first.name, counts[0]), NodeCount(second.name, counts[1]))
        if first.name == second.name:
            nodes = (NodeCount(first.name, sum(counts)),)
    replicas = tuple(prefill) * times + tuple(decode) * times
    codec = problem.codecs[-1]
    capacity = combo_capacity(problem, demand, replicas, codec, rate_cache)
    if not useful(capacity):
        return None
    known = [rate_cache.replica(problem, demand, side[0].layout, side[0].role) for side in (prefill, decode)]
    name = f"{times} x <{gpus_p} {first.gpu.name}, {gpus_d} {second.gpu.name}>"
    on = " + ".join(f"{node_count.count} {node_count.node}" for node_count in nodes)
    return Template(
        name=f"{demand.name}: combo {name} on {on}",
        kind="combo",
        model=demand.name,
        nodes=nodes,
        replicas=replicas,
        capacity=capacity,
        confidence=max((rated_layout.confidence for rated_layout in known), key=ORDER.index),
        codec=codec,
    )


def _instances(
    problem: PlanningProblem,
    demand: ModelDemand,
    node: NodeType,
    role: Role,
    units: int,
    rate_cache: RateCache,
) -> list[PlannedReplica] | None:
    """So many units of a node's GPUs as few instances of the largest tensor-parallel degree there is."""
    degrees = rate_cache.once(
        ("degrees", node.name, problem.engine.most_tensor), lambda: _degrees(problem, demand, node)
    )
    if not degrees:
        return None
    gpus = min(degrees) * units
    tp = max(tp for tp in degrees if gpus % tp == 0)
    return [PlannedReplica(role, degrees[tp])] * (gpus // tp)


def _degrees(problem: PlanningProblem, demand: ModelDemand, node: NodeType) -> dict[int, Layout]:
    """Layouts on one node by tensor-parallel degree, where the model fits."""
    most = min(node.gpus, problem.engine.most_tensor or node.gpus)
    made = {tp: _layout(problem, demand, node, tp) for tp in range(1, most + 1) if node.gpus % tp == 0}
    return {tp: layout for tp, layout in made.items() if layout is not None}


def _layout(problem: PlanningProblem, demand: ModelDemand, node: NodeType, tp: int) -> Layout | None:
    try:
        check_tp(demand.model, node, tp)
    except InputError:
        return None
    layout = single(node.name, tp, demand.model.layer_count)
    return layout if fits(demand, layout, problem.by_name) else None


def _gpus(replica: PlannedReplica) -> int:
    return sum(node.tp for stage in replica.layout.stages for node in stage.nodes)


def _lcm(a: int, b: int) -> int:
    return a * b // gcd(a, b)


def _efficiency(
    problem: PlanningProblem,
    demand: ModelDemand,
    single_node: Sequence[Template],
    prices: Mapping[str, float],
    first: str,
    second: str,
    rate_cache: RateCache,
) -> RankedPair:
    rate = demand.rate_per_s or 1.0
    r_in = (
        sum(bucket.rate_per_s * bucket.input_tokens for bucket in demand.buckets) / rate
        or demand.buckets[0].input_tokens
    )
    r_out = (
        sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets) / rate
        or demand.buckets[0].output_tokens
    )
    try:
        model = CauchyModel.from_model(demand.model)
        sides = [
            ComboSide(node.gpu, node.gpus, prices[node.name] / node.gpus)
            for node in (problem.node(first), problem.node(second))
        ]
    except InputError:  # not covered, or free of charge
        pair = [RankedPair(first, second, 0.0, False)]
        made = gpu_combos(problem, demand, pair, rate_cache)
        best = max(
            (efficiency_tokens_per_usd(demand, template, dict(prices)) for template in made), default=0.0
        )
        return RankedPair(first, second, best, False)
    batch = max(_batch(demand, t) for t in single_node if _is(t, second, "decode"))
    return RankedPair(first, second, ce(model, batch, r_in, r_out, sides[0], sides[1]), True)


def _is(template: Template, node: str, role: Role) -> bool:
    return template.nodes[0].node == node and template.replicas[0].role == role


def _batch(model_demand: ModelDemand, template: Template) -> float:
    """Answers that one of its replicas makes at a time, at its rate in the bucket that most requests are of."""
    most = max(model_demand.buckets, key=lambda demand: demand.rate_per_s)
    capacity = template.capacity[most.bucket]
    return max(1.0, capacity.decode_per_s * most.output_tokens * capacity.tpot_s / len(template.replicas))
