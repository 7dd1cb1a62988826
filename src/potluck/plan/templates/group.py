"""Groups of machines that serve together (THUNDERSERVE): replicas on named machines, as one closed template.

Replicas belong together when they share a machine or hand KV to one another. What they serve in a bucket is a
transportation problem over the rates that `plan.timing.replica_rates` gives each of them:

    maximise   sum_ij D_ij f_ij + sum_k D_k g_k    i prefills, j decodes, k does both
    prefill_i  sum_j f_ij <= h P_i                 h: the share of time a replica is planned to be busy
    decode_j   sum_i f_ij <= h Q_j
    mixed_k    g_k <= h C_k
    link_ab    sum_ij s_ij,ab f_ij <= 1            s: seconds that one request's KV keeps the link busy

where f_ij exists only if i's TTFT and the KV from i to j are within the objective together. D is 1, or the share of
requests within the objective where each pair was tried (`plan.search.search_templates`). KV goes in one piece
after the prefill, each layer from the machine that has it at i to the one that needs it at j, links side by side
(THUNDERSERVE's equation 1). The template's closed rate is the optimum over h, since the program puts h back.
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
"""What a second of hand-over counts beside a request: of equal routings the one over faster links is taken."""
ID_LETTERS = 6
GROUP_NAME = "group "  # After the model's name; an id follows.


@dataclass(frozen=True, slots=True)
class KvRoute:
    """KV from one replica to another: layers per link, and until the last is there."""

    prefill: int
    decode: int
    busy_s: tuple[tuple[str, str, float], ...]  # (from, to, seconds of the link) for one request.
    handover_s: float


@dataclass(frozen=True, slots=True)
class RoutedBucket:
    capacity: BucketCapacity
    flows: tuple[tuple[int, int, float], ...]
    """(prefilling replica, decoding one or itself, requests/s at the planned utilisation)"""


Attained = Mapping[tuple[Layout, Layout], float]
"""D_ij by the two layouts; twice the same for a replica that does both."""


def group_capacity(
    problem: PlanningProblem, demand: ModelDemand, replicas: Sequence[PlannedReplica], codec: Codec
) -> tuple[BucketCapacity, ...]:
    return tuple(routed_bucket.capacity for routed_bucket in route(problem, demand, replicas, codec))


def route(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    attained: Attained | None = None,
) -> tuple[RoutedBucket, ...]:
    """The same with the routing behind it."""
    known: dict[tuple[str, Layout], tuple[BucketCapacity, ...]] = {}
    for replica in replicas:
        if (replica.role, replica.layout) not in known:
            timer = timer_of(problem, demand, replica.layout)
            known[replica.role, replica.layout] = replica_capacity(
                demand, replica.layout, problem.by_name, replica.role, problem.headroom, timer=timer
            )
    rates = [known[replica.role, replica.layout] for replica in replicas]
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
    """Replicas as one template of whole machines; None when they serve nothing.

    Its name holds a digest of the replicas: what bears the same name is laid out the same, on the same machines.
    """
    members = tuple(sorted(replicas, key=repr))
    routed = route(problem, demand, members, codec, attained)
    capacity = tuple(routed_bucket.capacity for routed_bucket in routed)
    if not useful(capacity):
        return None
    counts = machine_counts(members)
    machines = sum(counts.values())
    roles = [replica.role for replica in members]
    parts = " + ".join(
        f"{roles.count(role)} {role}" for role in ("prefill", "decode", "mixed") if role in roles
    )
    digest = hashlib.sha256(repr((members, codec)).encode()).hexdigest()[:ID_LETTERS]
    layouts = {replica.layout for replica in members}
    return Template(
        name=f"{demand.name}: {GROUP_NAME}{digest} {parts} on {machines} machine{'s' * (machines > 1)}",
        kind="group",
        model=demand.name,
        nodes=tuple(NodeCount(node, count) for node, count in sorted(counts.items())),
        replicas=members,
        capacity=capacity,
        confidence=max((timer_of(problem, demand, item).confidence for item in layouts), key=ORDER.index),
        codec=codec,
        flows=flows_of(routed),
    )


def flows_of(routed: Iterable[RoutedBucket]) -> tuple[TemplateFlow, ...]:
    """X and Y of every bucket; what is less than a millionth of it is rounding."""
    template_flows = []
    for routed_bucket in routed:
        total = sum(rate for *_, rate in routed_bucket.flows)
        kept = [flow for flow in routed_bucket.flows if flow[2] > 1e-6 * total]
        whole = sum(rate for *_, rate in kept)
        template_flows += [
            TemplateFlow(routed_bucket.capacity.bucket, i, j, rate / whole) for i, j, rate in kept
        ]
    return tuple(template_flows)


def machine_counts(replicas: Iterable[PlannedReplica]) -> dict[str, int]:
    """How many machines of each type some replicas stand on."""
    machines = {
        (node.node, node.machine) for each in replicas for stage in each.layout.stages for node in stage.nodes
    }
    counts: dict[str, int] = {}
    for node, _ in machines:
        counts[node] = counts.get(node, 0) + 1
    return counts


def components(replicas: Sequence[PlannedReplica], joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Places of replicas that share a machine or are joined, directly or through others."""
    leader = list(range(len(replicas)))

    def find(place: int) -> int:
        while leader[place] != place:
            place = leader[place]
        return place

    first: dict[str, int] = {}
    edges = list(joined)
    for place, replica in enumerate(replicas):
        edges += [(first.setdefault(machine, place), place) for machine in replica.layout.machines]
    for a, b in edges:
        leader[find(a)] = find(b)
    result: dict[int, list[int]] = {}
    for place in range(len(replicas)):
        result.setdefault(find(place), []).append(place)
    return list(result.values())


def _bucket(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    demand: BucketDemand,
    replicas: Sequence[PlannedReplica],
    rates: Sequence[BucketCapacity],
    codec: Codec,
    attained: Attained | None,
) -> RoutedBucket:
    pairs = _pairs(problem, model_demand, demand, replicas, rates, codec)
    worth = [1.0] * len(pairs)
    if attained is not None:
        ends = [(replicas[pair.prefill].layout, replicas[pair.decode].layout) for pair in pairs]
        worth = [attained.get(end, 1.0) for end in ends]
    mixed = [k for k, rate in enumerate(rates) if rate.closed_per_s > 0]
    flow = _transport(problem.headroom, pairs, worth, mixed, rates)
    flows = [(p.prefill, p.decode, f) for p, f in zip(pairs, flow, strict=False) if f > 0]
    flows += [(k, k, f) for k, f in zip(mixed, flow[len(pairs) :], strict=True) if f > 0]
    total = sum(f for *_, f in flows)
    if not total > 0:
        return RoutedBucket(BucketCapacity(demand.bucket, 0.0, 0.0, 0.0, 0.0, 0.0), ())
    late = {(p.prefill, p.decode): p.handover_s for p in pairs}
    ttft_s = sum(f * (rates[i].ttft_s + late.get((i, j), 0.0)) for i, j, f in flows) / total
    tpot_s = sum(f * rates[j].tpot_s for _, j, f in flows) / total
    closed = total / problem.headroom
    return RoutedBucket(BucketCapacity(demand.bucket, 0.0, 0.0, closed, ttft_s, tpot_s), tuple(flows))


def _pairs(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    demand: BucketDemand,
    replicas: Sequence[PlannedReplica],
    rates: Sequence[BucketCapacity],
    codec: Codec,
) -> list[KvRoute]:
    """Every prefilling with every decoding replica, where the KV is there in time."""
    limit_s = model_demand.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S
    layer_bytes = crossing_bytes(model_demand.model, demand.kv_bytes, codec) / model_demand.model.layer_count
    known: dict[tuple[Layout, Layout], tuple[tuple[tuple[str, str, float], ...], float]] = {}
    pairs = []
    for i, first in enumerate(rates):
        for j, second in enumerate(rates):
            if first.prefill_per_s > 0 and second.decode_per_s > 0:
                ends = (replicas[i].layout, replicas[j].layout)
                if limit_of_hand_over(*ends, model_demand.model, problem.engine):
                    continue
                if ends not in known:
                    known[ends] = _crossing(problem, *ends, layer_bytes)
                busy_s, handover_s = known[ends]
                if first.ttft_s + handover_s <= limit_s:
                    pairs.append(KvRoute(i, j, busy_s, handover_s))
    return pairs


def _crossing(
    problem: PlanningProblem, first_layout: Layout, second_layout: Layout, layer_bytes: float
) -> tuple[tuple[tuple[str, str, float], ...], float]:
    """(seconds of every link between machines, seconds until all is there) for one request's KV."""
    busy, slowest = [], 0.0
    for (a, b), count in sorted(layers_between(first_layout, second_layout).items()):
        path = kv_path(problem, a, b)
        if path is None:
            continue
        sent = count * layer_bytes
        slowest = max(slowest, float(path.time_s(sent)))
        if a != b:
            busy.append((a, b, float(path.stream_s(sent))))
    return tuple(busy), slowest


def _transport(
    headroom: float,
    pairs: Sequence[KvRoute],
    worth: Sequence[float],
    mixed: Sequence[int],
    rates: Sequence[BucketCapacity],
) -> list[float]:
    """The flow of every pair, then of every mixed replica."""
    alone = [headroom * rates[k].closed_per_s for k in mixed]
    if not pairs:
        return alone
    rows: dict[tuple[str, ...], int] = {}
    limits: list[float] = []
    entries: list[tuple[int, int, float]] = []

    def entry(name: tuple[str, ...], limit: float, column: int, value: float) -> None:
        if name not in rows:
            rows[name] = len(limits)
            limits.append(limit)
        entries.append((rows[name], column, value))

    for column, pair in enumerate(pairs):
        i, j = pair.prefill, pair.decode
        entry(("prefill", str(i)), headroom * rates[i].prefill_per_s, column, 1.0)
        entry(("decode", str(j)), headroom * rates[j].decode_per_s, column, 1.0)
        for a, b, seconds in pair.busy_s:
            entry(("link", a, b), 1.0, column, seconds)
    row, place, value = (np.array(item) for item in zip(*entries, strict=True))
    answer = solve_milp(
        Milp(
            cost=np.array(
                [HANDOVER_WEIGHT * min(1.0, p.handover_s) - d for p, d in zip(pairs, worth, strict=True)]
            ),
            lower=np.zeros(len(pairs)),
            upper=np.full(len(pairs), np.inf),
            integer=np.zeros(len(pairs), bool),
            row_lower=np.full(len(limits), -np.inf),
            row_upper=np.array(limits),
            row=row.astype(np.int64),
            column=place.astype(np.int64),
            value=value.astype(np.float64),
        ),
        time_limit_s=LP_LIMIT_S,
        relax=True,
    )
    between = [0.0] * len(pairs) if answer.x is None else np.maximum(answer.x, 0.0).tolist()
    return [*between, *alone]
