"""Groups of named machines that serve together (THUNDERSERVE), as one closed template.

Replicas form a group when they share a machine or transfer KV to one another. Their capacity in a bucket is a
transportation problem over the rates of `plan.timing.replica_rates`:

    maximise   sum_ij D_ij f_ij + sum_k D_k g_k    i prefills, j decodes, k does both
    prefill_i  sum_j f_ij <= h P_i                 h: planned utilization of a replica
    decode_j   sum_i f_ij <= h Q_j
    mixed_k    g_k <= h C_k
    link_ab    sum_ij s_ij,ab f_ij <= 1            s: seconds that one request's KV occupies the link

where f_ij exists only if i's TTFT plus the KV transfer from i to j meet the objective. D is 1, or the SLO attainment
of each pair where it was simulated (`plan.search.search_templates`). KV is sent in one piece after the prefill, each
layer from its machine at i to its machine at j, over all links in parallel (THUNDERSERVE's equation 1). The
template's closed rate is the optimum divided by h, as the program multiplies by h again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from potluck.core.values.engine_abilities import limit_of_hand_over
from potluck.core.values.layout import Layout, layers_between
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template, TemplateFlow
from potluck.core.values.types import Codec
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.perf.transfer import crossing_bytes
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.named_machines import kv_path, timer_of
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, replica_capacity, useful

LP_LIMIT_S = 10.0
HANDOVER_WEIGHT = 1e-5
"""Cost of one second of KV transfer relative to one request, which prefers faster links among equal routings."""
ID_LETTERS = 6
GROUP_NAME = "group "  # After the model's name; an id follows.


@dataclass(frozen=True, slots=True)
class KvRoute:
    """KV transfer from one replica to another: time on each link, and until all KV has arrived."""

    prefill: int
    decode: int
    busy_s: tuple[tuple[str, str, float], ...]  # (from, to, seconds of the link) for one request.
    handover_s: float


@dataclass(frozen=True, slots=True)
class RoutedBucket:
    """Capacity of a group in one bucket, with the flows between its replicas."""

    capacity: BucketCapacity
    flows: tuple[tuple[int, int, float], ...]
    """(prefilling replica, decoding one or itself, requests/s at the planned utilisation)"""


Attained = Mapping[tuple[Layout, Layout], float]
"""D_ij by the two layouts; twice the same for a replica that does both."""


def group_capacity(
    problem: PlanningProblem, demand: ModelDemand, replicas: Sequence[PlannedReplica], codec: Codec
) -> tuple[BucketCapacity, ...]:
    """Capacity of a group by bucket."""
    return tuple(routed_bucket.capacity for routed_bucket in route(problem, demand, replicas, codec))


def route(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    attained: Attained | None = None,
) -> tuple[RoutedBucket, ...]:
    """Capacity of a group by bucket, with the optimal routing inside it."""
    capacity_by_layout: dict[tuple[str, Layout], tuple[BucketCapacity, ...]] = {}
    for replica in replicas:
        if (replica.role, replica.layout) not in capacity_by_layout:
            timer = timer_of(problem, demand, replica.layout)
            capacity_by_layout[replica.role, replica.layout] = replica_capacity(
                demand, replica.layout, problem.by_name, replica.role, problem.headroom, timer=timer
            )
    rates = [capacity_by_layout[replica.role, replica.layout] for replica in replicas]
    return tuple(
        _bucket(problem, demand, bucket, replicas, [rate[bucket.bucket] for rate in rates], codec, attained)
        for bucket in demand.buckets
    )


def group_template(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    attained: Attained | None = None,
) -> Template | None:
    """The template of a group of replicas on whole machines; None when it cannot serve.

    Its name contains a digest of the replicas, so equal names mean equal layouts on the same machines.
    """
    members = tuple(sorted(replicas, key=repr))
    routed_buckets = route(problem, demand, members, codec, attained)
    capacity = tuple(routed_bucket.capacity for routed_bucket in routed_buckets)
    if not useful(capacity):
        return None
    machines_by_type = machine_counts(members)
    machine_count = sum(machines_by_type.values())
    roles = [replica.role for replica in members]
    parts = " + ".join(
        f"{roles.count(role)} {role}" for role in ("prefill", "decode", "mixed") if role in roles
    )
    digest = hashlib.sha256(repr((members, codec)).encode()).hexdigest()[:ID_LETTERS]
    layouts = {replica.layout for replica in members}
    return Template(
        name=f"{demand.name}: {GROUP_NAME}{digest} {parts} on {machine_count} machine{'s' * (machine_count > 1)}",
        kind="group",
        model=demand.name,
        nodes=tuple(NodeCount(node, count) for node, count in sorted(machines_by_type.items())),
        replicas=members,
        capacity=capacity,
        confidence=max((timer_of(problem, demand, item).confidence for item in layouts), key=ORDER.index),
        codec=codec,
        flows=flows_of(routed_buckets),
    )


def flows_of(routed_buckets: Iterable[RoutedBucket]) -> tuple[TemplateFlow, ...]:
    """Shares of the flows in every bucket, without rounding errors below a millionth."""
    template_flows = []
    for routed_bucket in routed_buckets:
        total = sum(rate for *_, rate in routed_bucket.flows)
        kept_flows = [flow for flow in routed_bucket.flows if flow[2] > 1e-6 * total]
        kept_total = sum(rate for *_, rate in kept_flows)
        template_flows += [
            TemplateFlow(routed_bucket.capacity.bucket, i, j, rate / kept_total) for i, j, rate in kept_flows
        ]
    return tuple(template_flows)


def machine_counts(replicas: Iterable[PlannedReplica]) -> dict[str, int]:
    """Number of machines of each node type that the replicas use."""
    machines = {
        (node.node, node.machine)
        for replica in replicas
        for stage in replica.layout.stages
        for node in stage.nodes
    }
    counts: dict[str, int] = {}
    for node, _ in machines:
        counts[node] = counts.get(node, 0) + 1
    return counts


def components(replicas: Sequence[PlannedReplica], joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components of replica indices, by shared machines and by the given edges."""
    leader = list(range(len(replicas)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    first_on_machine: dict[str, int] = {}
    edges = list(joined)
    for index, replica in enumerate(replicas):
        edges += [(first_on_machine.setdefault(machine, index), index) for machine in replica.layout.machines]
    for a, b in edges:
        leader[find(a)] = find(b)
    members_of_root: dict[int, list[int]] = {}
    for index in range(len(replicas)):
        members_of_root.setdefault(find(index), []).append(index)
    return list(members_of_root.values())


def _bucket(
    problem: PlanningProblem,
    demand: ModelDemand,
    bucket: BucketDemand,
    replicas: Sequence[PlannedReplica],
    rates: Sequence[BucketCapacity],
    codec: Codec,
    attained: Attained | None,
) -> RoutedBucket:
    pairs = _kv_routes(problem, demand, bucket, replicas, rates, codec)
    weights = [1.0] * len(pairs)
    if attained is not None:
        layouts = [(replicas[pair.prefill].layout, replicas[pair.decode].layout) for pair in pairs]
        weights = [attained.get(layout_pair, 1.0) for layout_pair in layouts]
    mixed = [k for k, rate in enumerate(rates) if rate.closed_per_s > 0]
    rates_of_flows = _transport(problem.headroom, pairs, weights, mixed, rates)
    flows = [(p.prefill, p.decode, f) for p, f in zip(pairs, rates_of_flows, strict=False) if f > 0]
    flows += [(k, k, f) for k, f in zip(mixed, rates_of_flows[len(pairs) :], strict=True) if f > 0]
    total = sum(f for *_, f in flows)
    if not total > 0:
        return RoutedBucket(BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0), ())
    handover_s = {(p.prefill, p.decode): p.handover_s for p in pairs}
    ttft_s = sum(f * (rates[i].ttft_s + handover_s.get((i, j), 0.0)) for i, j, f in flows) / total
    tpot_s = sum(f * rates[j].tpot_s for _, j, f in flows) / total
    closed_per_s = total / problem.headroom
    return RoutedBucket(BucketCapacity(bucket.bucket, 0.0, 0.0, closed_per_s, ttft_s, tpot_s), tuple(flows))


def _kv_routes(
    problem: PlanningProblem,
    demand: ModelDemand,
    bucket: BucketDemand,
    replicas: Sequence[PlannedReplica],
    rates: Sequence[BucketCapacity],
    codec: Codec,
) -> list[KvRoute]:
    """KV routes from every prefill to every decode replica that meet the TTFT objective."""
    limit_s = demand.slo.ttft_s if bucket.promised else UNPROMISED_TTFT_S
    layer_bytes = crossing_bytes(demand.model, bucket.kv_bytes, codec) / demand.model.layer_count
    transfer_by_layouts: dict[tuple[Layout, Layout], tuple[tuple[tuple[str, str, float], ...], float]] = {}
    kv_routes = []
    for i, prefill_capacity in enumerate(rates):
        for j, decode_capacity in enumerate(rates):
            if prefill_capacity.prefill_per_s > 0 and decode_capacity.decode_per_s > 0:
                layouts = (replicas[i].layout, replicas[j].layout)
                if limit_of_hand_over(*layouts, demand.model, problem.engine):
                    continue
                if layouts not in transfer_by_layouts:
                    transfer_by_layouts[layouts] = _transfer_times(problem, *layouts, layer_bytes)
                busy_s, handover_s = transfer_by_layouts[layouts]
                if prefill_capacity.ttft_s + handover_s <= limit_s:
                    kv_routes.append(KvRoute(i, j, busy_s, handover_s))
    return kv_routes


def _transfer_times(
    problem: PlanningProblem, first_layout: Layout, second_layout: Layout, layer_bytes: float
) -> tuple[tuple[tuple[str, str, float], ...], float]:
    """(seconds on every link between machines, seconds until all KV has arrived) for one request."""
    link_times, slowest_s = [], 0.0
    for (a, b), count in sorted(layers_between(first_layout, second_layout).items()):
        path = kv_path(problem, a, b)
        if path is None:
            continue
        sent_bytes = count * layer_bytes
        slowest_s = max(slowest_s, float(path.time_s(sent_bytes)))
        if a != b:
            link_times.append((a, b, float(path.stream_s(sent_bytes))))
    return tuple(link_times), slowest_s


def _transport(
    headroom: float,
    pairs: Sequence[KvRoute],
    weights: Sequence[float],
    mixed: Sequence[int],
    rates: Sequence[BucketCapacity],
) -> list[float]:
    """Optimal flows: of every KV route, then of every mixed replica."""
    mixed_flows = [headroom * rates[k].closed_per_s for k in mixed]
    if not pairs:
        return mixed_flows
    rows: dict[tuple[str, ...], int] = {}
    limits: list[float] = []
    entries: list[tuple[int, int, float]] = []

    def add_entry(name: tuple[str, ...], limit: float, column: int, value: float) -> None:
        if name not in rows:
            rows[name] = len(limits)
            limits.append(limit)
        entries.append((rows[name], column, value))

    for column, pair in enumerate(pairs):
        i, j = pair.prefill, pair.decode
        add_entry(("prefill", str(i)), headroom * rates[i].prefill_per_s, column, 1.0)
        add_entry(("decode", str(j)), headroom * rates[j].decode_per_s, column, 1.0)
        for a, b, seconds in pair.busy_s:
            add_entry(("link", a, b), 1.0, column, seconds)
    row, column_of_entry, value = (np.array(item) for item in zip(*entries, strict=True))
    milp_result = solve_milp(
        Milp(
            cost=np.array(
                [
                    HANDOVER_WEIGHT * min(1.0, pair.handover_s) - weight
                    for pair, weight in zip(pairs, weights, strict=True)
                ]
            ),
            lower=np.zeros(len(pairs)),
            upper=np.full(len(pairs), np.inf),
            integer=np.zeros(len(pairs), bool),
            row_lower=np.full(len(limits), -np.inf),
            row_upper=np.array(limits),
            row=row.astype(np.int64),
            column=column_of_entry.astype(np.int64),
            value=value.astype(np.float64),
        ),
        time_limit_s=LP_LIMIT_S,
        relax=True,
    )
    pair_flows = [0.0] * len(pairs) if milp_result.x is None else np.maximum(milp_result.x, 0.0).tolist()
    return [*pair_flows, *mixed_flows]
