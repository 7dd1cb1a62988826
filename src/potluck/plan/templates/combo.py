"""CAUCHY's combos: prefill nodes of one type with decode nodes of another or the same type, 1:1 to 2:6.

A combo is a closed group, limited by the slowest of its two sides and their network cards,

    C_b = min(n_p P_b, n_d Q_b, u G_p / (h kv_b), u G_d / (h kv_b))

where G is the bandwidth of each side's cards, u their largest utilization with KV in time (`network_cards`; equations
17 and 18), and h the headroom. Of the two directions of a pair of types, the one with the higher cost efficiency
(tokens per dollar) is kept. Aggregated replicas are combos too.

The paper counts combos in GPUs, <2 x H800, 4 x H20>. *Ranking* (3.3.1): a pair's cost efficiency is equation 15 of
`perf.timers.cauchy` with the demand's mean lengths; the SHORTLIST best pairs whose sides keep the objective are
candidates. A model that the closed form does not cover is ranked by the tokens per dollar of its timed combos.
*Counts*: one or two units of GPUs prefill for one to six that decode; a unit is the fewest GPUs of the node that hold
the model. Nodes are rented whole, so a template has as many combos as fill its nodes. Two sides that fit one node
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
    """Combos of single-node templates, and aggregated ones; `prices` (USD/h per node) decide the direction.

    KV is sent in the smallest allowed codec; a more exact one is chosen once counts are known.
    """
    best_by_role = {role: _best_per_node(demand, single, role) for role in ("prefill", "decode", "mixed")}
    templates = [replace(template, kind="combo") for template in best_by_role["mixed"].values()]
    prefills, decodes = (
        {
            node: (
                template,
                {n: _multiplied(problem, template, n) for n in {ratio[side] for ratio in RATIOS}},
            )
            for node, template in best_by_role[role].items()
        }
        for side, role in enumerate(("prefill", "decode"))
    )
    for first_node in prefills:
        for second_node in decodes:
            forward = _pair(problem, demand, prefills[first_node], decodes[second_node])
            if (
                first_node < second_node
                and second_node in best_by_role["prefill"]
                and first_node in best_by_role["decode"]
            ):
                backward = _pair(problem, demand, prefills[second_node], decodes[first_node])
                forward = max((forward, backward), key=lambda ts: _best_efficiency(demand, ts, prices))
            elif (
                first_node > second_node
                and first_node in best_by_role["decode"]
                and second_node in best_by_role["prefill"]
            ):
                continue  # This pair was handled in the other order.
            templates += forward
    return templates


def efficiency_tokens_per_usd(demand: ModelDemand, template: Template, prices: dict[str, float]) -> float:
    """Tokens per dollar of a template that serves the model's mix of buckets alone."""
    rate = served_per_s(demand, template)
    cost = sum(node_count.count * prices[node_count.node] for node_count in template.nodes)
    tokens = demand.tokens_per_s / demand.rate_per_s if demand.rate_per_s else 0.0
    return rate * tokens * 3600.0 / cost if cost > 0 else float("inf")


def served_per_s(demand: ModelDemand, template: Template) -> float:
    """Requests/s of the model's mix that one closed copy serves; 0 if it cannot serve some bucket."""
    copy_time = 0.0
    for bucket, capacity in zip(demand.buckets, template.capacity, strict=True):
        if bucket.rate_per_s <= 0:
            continue
        if capacity.closed_per_s <= 0:
            return 0.0
        copy_time += bucket.rate_per_s / capacity.closed_per_s
    return demand.rate_per_s / copy_time if copy_time > 0 else 0.0


def _best_per_node(demand: ModelDemand, single: Sequence[Template], role: Role) -> dict[str, Template]:
    """The template of each node type with the highest rates: the paper shards over all GPUs of a server or none."""
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
    """Capacity of prefill, decode and mixed replicas together, computed from their layouts."""
    mixed = _side(problem, demand, replicas, "mixed", rate_cache)
    prefill_side, decode_side = (
        _side(problem, demand, replicas, role, rate_cache) for role in ("prefill", "decode")
    )
    closed = [BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0) for bucket in demand.buckets]
    if prefill_side is not None and decode_side is not None:
        bits = wire_bits(demand, codec)
        closed = _closed_capacity(
            problem, demand, prefill_side, decode_side, bits * (not _share_one_node(problem, replicas))
        )
    if mixed is None:
        return tuple(closed)
    return tuple(
        replace(capacity, closed_per_s=capacity.closed_per_s + other_capacity.closed_per_s)
        for capacity, other_capacity in zip(closed, mixed.capacity, strict=True)
    )


def _share_one_node(problem: PlanningProblem, replicas: Sequence[PlannedReplica]) -> bool:
    """Whether all replicas fit on one node, so that their KV uses no network card."""
    members = [node for replica in replicas for stage in replica.layout.stages for node in stage.nodes]
    first = members[0].node
    return all(stage_node.node == first for stage_node in members) and sum(
        stage_node.tp for stage_node in members
    ) <= (problem.node(first).gpus)


@dataclass(frozen=True, slots=True)
class _Side:
    """All replicas of one phase: their total rates, number and network cards."""

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
    """The side of all replicas with this role; None where there are none."""
    members = [replica for replica in replicas if replica.role == role]
    if not members:
        return None
    total = [BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0) for bucket in demand.buckets]
    for layout in {replica.layout for replica in members}:
        copies = sum(1 for replica in members if replica.layout == layout)
        bucket_capacities = rate_cache.replica(problem, demand, layout, role).times(copies).capacity
        total = [
            _sum(capacity, other_capacity)
            for capacity, other_capacity in zip(total, bucket_capacities, strict=True)
        ]
    return _Side(total, len(members), cards_of(members, problem.by_name))


def _sum(capacity: BucketCapacity, other_capacity: BucketCapacity) -> BucketCapacity:
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
    """Combos of two single-node templates in all ratios, given with the sides of each count."""
    templates, (prefill, prefill_sides), (decode, decode_sides) = [], prefills, decodes
    codec = problem.codecs[-1]
    bits = wire_bits(demand, codec)
    for n_p, n_d in RATIOS:
        replicas = prefill.replicas * n_p + decode.replicas * n_d
        prefill_node, decode_node = prefill.nodes[0].node, decode.nodes[0].node
        capacity = tuple(_closed_capacity(problem, demand, prefill_sides[n_p], decode_sides[n_d], bits))
        if not useful(capacity):
            continue
        same_type = prefill_node == decode_node
        nodes = (
            (NodeCount(prefill_node, n_p + n_d),)
            if same_type
            else (NodeCount(prefill_node, n_p), NodeCount(decode_node, n_d))
        )
        templates.append(
            Template(
                name=f"{demand.name}: combo {n_p} {prefill_node} -> {n_d} {decode_node}",
                kind="combo",
                model=demand.name,
                nodes=nodes,
                replicas=replicas,
                capacity=capacity,
                confidence=max((prefill.confidence, decode.confidence), key=ORDER.index),
                codec=codec,
            )
        )
    return templates


def _multiplied(problem: PlanningProblem, template: Template, n: int) -> _Side:
    """The side of n nodes of a template."""
    capacity = [
        replace(c, prefill_per_s=c.prefill_per_s * n, decode_per_s=c.decode_per_s * n)
        for c in template.capacity
    ]
    return _Side(capacity, len(template.replicas) * n, cards_of(template.replicas * n, problem.by_name))


def _closed_capacity(
    problem: PlanningProblem, demand: ModelDemand, prefill_side: _Side, decode_side: _Side, bits: Floats
) -> list[BucketCapacity]:
    """Capacity of two sides by bucket, with network cards at the utilization that the tightest bucket allows."""
    pairs = list(zip(demand.buckets, prefill_side.capacity, decode_side.capacity, strict=True))
    limits = [
        _card_utilization_limit(problem, demand, bucket, prefill_capacity, prefill_side, decode_side, bits)
        for bucket, prefill_capacity, _ in pairs
    ]
    active_limits = [
        u for u, bucket in zip(limits, demand.buckets, strict=True) if u > 0 and bucket.rate_per_s > 0
    ]
    utilization = min(active_limits, default=problem.headroom)
    all_bits_per_s = min(prefill_side.cards.all_bits_per_s, decode_side.cards.all_bits_per_s)
    one_bits_per_s = min(prefill_side.cards.one_bits_per_s, decode_side.cards.one_bits_per_s)
    closed = []
    for (bucket, prefill_capacity, decode_capacity), limit in zip(pairs, limits, strict=True):
        rate = min(prefill_capacity.prefill_per_s, decode_capacity.decode_per_s)
        kv_bits = float(bits[bucket.bucket])
        if kv_bits > 0:
            rate = min(rate, utilization * all_bits_per_s / (problem.headroom * kv_bits))
        if not (rate > 0 and limit > 0):
            closed.append(BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        card_utilization = problem.headroom * rate * kv_bits / all_bits_per_s
        late_s = max(
            0.0,
            sojourn_s(kv_bits / one_bits_per_s, card_utilization)
            - prefill_side.copies / prefill_capacity.prefill_per_s,
        )
        closed.append(
            BucketCapacity(
                bucket.bucket, 0.0, 0.0, rate, prefill_capacity.ttft_s + late_s, decode_capacity.tpot_s
            )
        )
    return closed


def _card_utilization_limit(
    problem: PlanningProblem,
    demand: ModelDemand,
    bucket: BucketDemand,
    capacity: BucketCapacity,
    prefill_side: _Side,
    decode_side: _Side,
    bits: Floats,
) -> float:
    """Largest utilization u of the cards that meets TTFT: (w - 1) S + t / (1 - u) within the objective."""
    if not capacity.prefill_per_s > 0:
        return 0.0
    service_s = prefill_side.copies / capacity.prefill_per_s
    limit_s = demand.slo.ttft_s if bucket.promised else UNPROMISED_TTFT_S
    within_s = limit_s - (wait_factor(problem.headroom) - 1.0) * service_s
    bits_per_s = min(prefill_side.cards.one_bits_per_s, decode_side.cards.one_bits_per_s)
    return busy_limit(float(bits[bucket.bucket]) / bits_per_s, within_s, problem.headroom)


def _best_efficiency(demand: ModelDemand, templates: Sequence[Template], prices: dict[str, float]) -> float:
    return max((efficiency_tokens_per_usd(demand, template, prices) for template in templates), default=0.0)


SHORTLIST = 4  # Pairs of node types kept, as in the paper's example.
PREFILL_UNITS, DECODE_UNITS = (1, 2), (1, 2, 3, 4, 5, 6)
MAX_COMBO_NODES = 8


@dataclass(frozen=True, slots=True)
class RankedPair:
    """A pair of node types, prefill first, and its cost efficiency in tokens per dollar."""

    prefill: str
    decode: str
    ce_tokens_per_usd: float
    printed: bool  # By equation 15; otherwise by its timed combos.


def ranked(
    problem: PlanningProblem,
    demand: ModelDemand,
    single_node: Sequence[Template],
    prices: Mapping[str, float],
    rate_cache: RateCache,
) -> list[RankedPair]:
    """All pairs of node types whose sides meet the SLO, in their better direction, most efficient first."""
    nodes_by_role = {
        role: sorted({t.nodes[0].node for t in single_node if t.replicas[0].role == role})
        for role in ("prefill", "decode")
    }
    ranked_pairs: dict[frozenset[str], RankedPair] = {}
    for prefill_node in nodes_by_role["prefill"]:
        for decode_node in nodes_by_role["decode"]:
            pair = _efficiency(problem, demand, single_node, prices, prefill_node, decode_node, rate_cache)
            known_pair = ranked_pairs.get(frozenset((prefill_node, decode_node)))
            if known_pair is None or pair.ce_tokens_per_usd > known_pair.ce_tokens_per_usd:
                ranked_pairs[frozenset((prefill_node, decode_node))] = pair
    return sorted(
        ranked_pairs.values(), key=lambda pair: (-pair.ce_tokens_per_usd, pair.prefill, pair.decode)
    )


def gpu_combos(
    problem: PlanningProblem, demand: ModelDemand, pairs: Sequence[RankedPair], rate_cache: RateCache
) -> list[Template]:
    """Combos of these pairs of node types in all unit counts."""
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
    prefill_node, decode_node = types
    prefill_replicas = _instances(problem, demand, prefill_node, "prefill", n_p, rate_cache)
    decode_replicas = _instances(problem, demand, decode_node, "decode", n_d, rate_cache)
    if prefill_replicas is None or decode_replicas is None:
        return None
    nodes: tuple[NodeCount, ...]
    prefill_gpus, decode_gpus = (
        sum(_gpus(replica) for replica in side) for side in (prefill_replicas, decode_replicas)
    )
    if prefill_node.name == decode_node.name and prefill_node.gpus % (prefill_gpus + decode_gpus) == 0:
        combo_count, nodes = (
            prefill_node.gpus // (prefill_gpus + decode_gpus),
            (NodeCount(prefill_node.name, 1),),
        )
    else:
        combo_count = _lcm(
            prefill_node.gpus // gcd(prefill_node.gpus, prefill_gpus),
            decode_node.gpus // gcd(decode_node.gpus, decode_gpus),
        )
        node_counts = (
            combo_count * prefill_gpus // prefill_node.gpus,
            combo_count * decode_gpus // decode_node.gpus,
        )
        if sum(node_counts) > MAX_COMBO_NODES:
            return None
        nodes = (NodeCount(prefill_node.name, node_counts[0]), NodeCount(decode_node.name, node_counts[1]))
        if prefill_node.name == decode_node.name:
            nodes = (NodeCount(prefill_node.name, sum(node_counts)),)
    replicas = tuple(prefill_replicas) * combo_count + tuple(decode_replicas) * combo_count
    codec = problem.codecs[-1]
    capacity = combo_capacity(problem, demand, replicas, codec, rate_cache)
    if not useful(capacity):
        return None
    rated_layouts = [
        rate_cache.replica(problem, demand, side[0].layout, side[0].role)
        for side in (prefill_replicas, decode_replicas)
    ]
    name = f"{combo_count} x <{prefill_gpus} {prefill_node.gpu.name}, {decode_gpus} {decode_node.gpu.name}>"
    node_list = " + ".join(f"{node_count.count} {node_count.node}" for node_count in nodes)
    return Template(
        name=f"{demand.name}: combo {name} on {node_list}",
        kind="combo",
        model=demand.name,
        nodes=nodes,
        replicas=replicas,
        capacity=capacity,
        confidence=max((rated_layout.confidence for rated_layout in rated_layouts), key=ORDER.index),
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
    """Replicas on this many units of a node's GPUs, with the largest tensor-parallel degree that divides them."""
    degrees = rate_cache.once(
        ("degrees", node.name, problem.engine.most_tensor), lambda: _degrees(problem, demand, node)
    )
    if not degrees:
        return None
    gpus = min(degrees) * units
    tp = max(tp for tp in degrees if gpus % tp == 0)
    return [PlannedReplica(role, degrees[tp])] * (gpus // tp)


def _degrees(problem: PlanningProblem, demand: ModelDemand, node: NodeType) -> dict[int, Layout]:
    """Single-node layouts that hold the model, by tensor-parallel degree."""
    max_tp = min(node.gpus, problem.engine.most_tensor or node.gpus)
    layouts = {tp: _layout(problem, demand, node, tp) for tp in range(1, max_tp + 1) if node.gpus % tp == 0}
    return {tp: layout for tp, layout in layouts.items() if layout is not None}


def _layout(problem: PlanningProblem, demand: ModelDemand, node: NodeType, tp: int) -> Layout | None:
    """The single-node layout of this degree; None where the model cannot be sharded so or does not fit."""
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
    prefill_node: str,
    decode_node: str,
    rate_cache: RateCache,
) -> RankedPair:
    """The cost efficiency of a pair of node types, by equation 15 or from its timed combos."""
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
            for node in (problem.node(prefill_node), problem.node(decode_node))
        ]
    except InputError:  # Not covered by the closed form, or without a price.
        pair = [RankedPair(prefill_node, decode_node, 0.0, False)]
        templates = gpu_combos(problem, demand, pair, rate_cache)
        best_tokens_per_usd = max(
            (efficiency_tokens_per_usd(demand, template, dict(prices)) for template in templates), default=0.0
        )
        return RankedPair(prefill_node, decode_node, best_tokens_per_usd, False)
    batch = max(_batch(demand, t) for t in single_node if _runs(t, decode_node, "decode"))
    return RankedPair(prefill_node, decode_node, ce(model, batch, r_in, r_out, sides[0], sides[1]), True)


def _runs(template: Template, node: str, role: Role) -> bool:
    """Whether a template has this role on this node type."""
    return template.nodes[0].node == node and template.replicas[0].role == role


def _batch(model_demand: ModelDemand, template: Template) -> float:
    """Mean batch of one replica at its decode rate in the busiest bucket."""
    busiest = max(model_demand.buckets, key=lambda bucket: bucket.rate_per_s)
    capacity = template.capacity[busiest.bucket]
    return max(1.0, capacity.decode_per_s * busiest.output_tokens * capacity.tpot_s / len(template.replicas))
