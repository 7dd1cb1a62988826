"""Sharing of a group copy's requests among its replicas: as planned, or solved anew when it differs from the plan.

While all replicas of a copy serve in their planned roles, its template's flows hold (X and Y of THUNDERSERVE 3.3).
After a loss, a role flip or a shift in lengths the flows are THUNDERSERVE's transportation problem,

    maximise   sum_ij (1 - w t_ij) f_ij + sum_k g_k        i prefills, j decodes, k does both
    within     sum_j f_ij <= P_i,  sum_i f_ij <= Q_j,  g_k <= C_k,  sum_ij s_ij,l f_ij <= 1 for each link l

t_ij is the transfer time of a request's KV, w a weight so small that it only breaks ties, s the seconds that the
transfer occupies a link. f = 0 is feasible, so a primal simplex needs no first phase. The planner has its own solver
(`plan/search/kernels.py`); tests compare the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts, GroupFacts, ReplicaFacts
from potluck.core.values.plan import Template
from potluck.core.values.types import Role

PLANNED_UTILIZATION = 0.8  # Utilization that replicas are planned for; links are used fully.


# Share of the TPOT objective that the mean TPOT may reach on a replica that prefills and decodes.
MAX_TPOT_SHARE = 0.9


class MeanLengths(NamedTuple):
    prompt_tokens: float
    output_tokens: float


class GroupShare(NamedTuple):
    """A share of a copy's requests: the indices of the prefill and the decode replica (may be the same), and the
    weight."""

    prefill: int
    decode: int
    weight: float


Serving = Mapping[int, Role]  # Template replica index -> present role, for the replicas that serve.


def planned_shares(template: Template, serving: Serving, bucket: int) -> list[GroupShare]:
    return [
        GroupShare(flow.prefill, flow.decode, flow.share)
        for flow in template.flows
        if flow.bucket == bucket and flow.prefill in serving and flow.decode in serving
    ]


def as_planned(template: Template, serving: Serving) -> bool:
    return all(serving.get(place) == replica.role for place, replica in enumerate(template.replicas))


def group_shares(
    facts: FleetFacts, template: Template, serving: Serving, bucket: int, lengths: MeanLengths, shifted: bool
) -> list[GroupShare]:
    """How a copy's requests of a bucket are shared; weights add up to 1 when the copy is complete."""
    known_facts = facts.groups.get(template.name)
    if (as_planned(template, serving) and not shifted) or known_facts is None:
        return planned_shares(template, serving, bucket)
    routing = best_routing(facts, template.name, serving, lengths)
    planned_roles: dict[int, Role] = {place: replica.role for place, replica in enumerate(template.replicas)}
    planned_rate = sum(rate for *_, rate in best_routing(facts, template.name, planned_roles, lengths))
    total_rate = sum(rate for *_, rate in routing)
    if total_rate <= 0:
        return planned_shares(template, serving, bucket)
    full_rate = planned_rate if planned_rate > 0 else total_rate
    return [GroupShare(i, j, rate / full_rate) for i, j, rate in routing if rate > 1e-6 * total_rate]


def best_routing(
    facts: FleetFacts,
    template: str,
    serving: Serving,
    lengths: MeanLengths,
    group_rates: GroupRates | None = None,
) -> list[tuple[int, int, float]]:
    """(prefill replica, decode replica or the same one, requests/s) of the best routing for these roles."""
    known_facts = facts.groups.get(template)
    if known_facts is None:
        return []
    rates = group_rates or GroupRates(facts, template, lengths)
    prefill_indices = [index for index, role in serving.items() if role == "prefill"]
    decode_indices = [index for index, role in serving.items() if role == "decode"]
    result = [(k, k, rates.mixed(k)) for k, role in serving.items() if role == "mixed"]
    index_pairs = [(x, y, i, j) for x, i in enumerate(prefill_indices) for y, j in enumerate(decode_indices)]
    pairs = [KvPair(x, y, *rates.crossing(i, j)) for x, y, i, j in index_pairs if rates.in_time(i, j)]
    flows = best_flows(
        [rates.prefill(i) for i in prefill_indices], [rates.decode(j) for j in decode_indices], pairs
    )
    result += [
        (prefill_indices[p.prefill], decode_indices[p.decode], flow)
        for p, flow in zip(pairs, flows, strict=True)
    ]
    return [routed_share for routed_share in result if routed_share[2] > 0]


class GroupRates:
    def __init__(self, facts: FleetFacts, template: str, lengths: MeanLengths) -> None:
        self._facts = facts
        self._template = template
        self._lengths = lengths
        self._group: GroupFacts = facts.groups[template]
        self._hops = {(i, j): hops for i, j, hops in self._group.hops}
        model = facts.models.get(self._group.model)
        slo = model.slo if model is not None else None
        self._limit_s = slo.ttft_s if slo is not None else float("inf")
        self._tpot_s = MAX_TPOT_SHARE * slo.tpot_s if slo is not None else float("inf")

    def prefill(self, index: int) -> float:
        service_s = self._prefill_s(index)
        return PLANNED_UTILIZATION / service_s if service_s > 0 else 0.0

    def decode(self, index: int) -> float:
        facts = self._replica(index)
        if facts is None or facts.decode_step_s <= 0:
            return 0.0
        batch = self._batch(facts)
        return PLANNED_UTILIZATION * batch / (facts.decode_step_s * max(1.0, self._lengths.output_tokens))

    def _batch(self, facts: ReplicaFacts) -> float:
        tokens = self._lengths.prompt_tokens + self._lengths.output_tokens
        return min(float(facts.decode_batch), facts.total_blocks * BLOCK_TOKENS / max(1.0, tokens))

    def mixed(self, index: int) -> float:
        """Requests/s of a replica that prefills and decodes: the most answers n with s(n) + n c within the TPOT
        limit, where s(n) is the decode step and c the prefill time per output token."""
        facts, output_tokens = self._replica(index), max(1.0, self._lengths.output_tokens)
        if facts is None or facts.decode_step_s <= 0:
            return 0.0
        batch = self._batch(facts)
        has_first_step = 0 < facts.decode_first_s <= facts.decode_step_s
        first_s = facts.decode_first_s if has_first_step else facts.decode_step_s
        slope_s = (facts.decode_step_s - first_s) / max(1, facts.decode_batch - 1)
        prefill_s_per_output = self._prefill_s(index) / output_tokens
        max_answers = (self._tpot_s - first_s + slope_s) / max(slope_s + prefill_s_per_output, 1e-12)
        answers = min(batch, max_answers)
        if answers < 1.0:
            return 0.0
        return (
            PLANNED_UTILIZATION
            * answers
            / (output_tokens * (first_s + slope_s * (answers - 1) + answers * prefill_s_per_output))
        )

    def crossing(self, first: int, second: int) -> tuple[tuple[tuple[str, float], ...], float]:
        """((link, seconds occupied) of each link, transfer seconds) of one request's KV; links work in parallel."""
        size_bytes = self._group.kv_bytes_per_token * self._lengths.prompt_tokens
        link_seconds, slowest_s = [], 0.0
        for link, fixed_s, s_per_byte in self._hops.get((first, second), ()):
            slowest_s = max(slowest_s, fixed_s + size_bytes * s_per_byte)
            if link:
                link_seconds.append((link, size_bytes * s_per_byte))
        return tuple(link_seconds), slowest_s

    def in_time(self, first: int, second: int) -> bool:
        """Whether TTFT can be met: prefill behind the mean queue of an M/D/1 server, then the KV transfer."""
        wait_factor = 1.0 + PLANNED_UTILIZATION / (2.0 * (1.0 - PLANNED_UTILIZATION))
        return self._prefill_s(first) * wait_factor + self.crossing(first, second)[1] <= self._limit_s

    def _prefill_s(self, index: int) -> float:
        facts = self._replica(index)
        if facts is None:
            return 0.0
        return facts.prefill_fixed_s + facts.prefill_s_per_token * self._lengths.prompt_tokens

    def _replica(self, index: int) -> ReplicaFacts | None:
        return self._facts.replicas.get((self._template, index))


def bucket_tokens(longest: Sequence[float], bucket: int, known_facts: GroupFacts | None) -> float:
    """The prompt length assumed for a bucket: its longest, or the mean where the bucket has no upper end."""
    mean_tokens = known_facts.prompt_tokens if known_facts is not None else 1024.0
    if len(longest) == 1 or longest[bucket] == float("inf"):
        return max(mean_tokens, longest[bucket - 1] if len(longest) > 1 else 1.0)
    return longest[bucket]


HANDOVER_WEIGHT = 1e-5
PIVOT_TOLERANCE = 1e-9
FloatSequence = Sequence[float]


@dataclass(frozen=True, slots=True)
class KvPair:
    prefill: int
    decode: int
    busy_s: tuple[tuple[str, float], ...]
    handover_s: float


def best_flows(
    prefill_per_s: FloatSequence, decode_per_s: FloatSequence, pairs: Sequence[KvPair]
) -> list[float]:
    """The flow of every pair in requests/s; replicas are identified by their indices in the two rate sequences."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    limits: dict[tuple[str, str], float] = {}
    for column, pair in enumerate(pairs):
        for side, index, rate in (
            ("prefill", pair.prefill, prefill_per_s[pair.prefill]),
            ("decode", pair.decode, decode_per_s[pair.decode]),
        ):
            key = (side, str(index))
            rows.setdefault(key, {})[column] = 1.0
            limits[key] = rate
        for link, seconds in pair.busy_s:
            rows.setdefault(("link", link), {})[column] = seconds
            limits["link", link] = 1.0
    max_flows = [min(prefill_per_s[pair.prefill], decode_per_s[pair.decode]) for pair in pairs]
    binding_keys = [
        key
        for key, row in rows.items()
        # A link that can carry all possible flow is no constraint.
        if key[0] != "link" or sum(value * max_flows[column] for column, value in row.items()) > 1.0
    ]
    gains = [1.0 - HANDOVER_WEIGHT * min(1.0, pair.handover_s) for pair in pairs]
    return maximize(gains, [rows[key] for key in binding_keys], [limits[key] for key in binding_keys])


def maximize(gains: FloatSequence, rows: Sequence[dict[int, float]], limits: FloatSequence) -> list[float]:
    """x >= 0 that maximizes gains x subject to rows x <= limits; no limit is negative."""
    columns, height = len(gains), len(rows)
    table = [[row.get(column, 0.0) for column in range(columns)] for row in rows]
    right_side, reduced_gains = [max(0.0, limit) for limit in limits], list(gains)
    basis = list(range(columns, columns + height))
    nonbasic = list(range(columns))
    for iteration in count():
        entering = _entering_column(reduced_gains, nonbasic, careful=iteration > 8 * (columns + height))
        if entering < 0:
            break
        leaving = _leaving_row(table, right_side, basis, entering)
        if leaving < 0:
            break  # Unbounded; impossible, as every pair has limits.
        _pivot(table, right_side, reduced_gains, leaving, entering)
        basis[leaving], nonbasic[entering] = nonbasic[entering], basis[leaving]
    values = [0.0] * columns
    for row, name in enumerate(basis):
        if name < columns:
            values[name] = right_side[row]
    return values


def _entering_column(gain: list[float], outside: list[int], careful: bool) -> int:
    """The column with the largest gain; after many iterations the first column with a gain (Bland), which cannot
    cycle."""
    best_column, largest_gain = -1, PIVOT_TOLERANCE
    for column, value in enumerate(gain):
        if value > PIVOT_TOLERANCE and (
            (not careful and value > largest_gain)
            or (careful and (best_column < 0 or outside[column] < outside[best_column]))
        ):
            best_column, largest_gain = column, value
    return best_column


def _leaving_row(table: list[list[float]], right_side: list[float], basis: list[int], column: int) -> int:
    best_row, least_ratio = -1, 0.0
    for row, values in enumerate(table):
        if values[column] > PIVOT_TOLERANCE:
            ratio = right_side[row] / values[column]
            if (
                best_row < 0
                or ratio < least_ratio - PIVOT_TOLERANCE
                or (ratio <= least_ratio + PIVOT_TOLERANCE and basis[row] < basis[best_row])
            ):
                best_row, least_ratio = row, ratio
    return best_row


def _pivot(
    table: list[list[float]], right_side: list[float], reduced_gains: list[float], row: int, column: int
) -> None:
    """Pivot a condensed tableau: the entering variable's column becomes that of the leaving variable."""
    pivot = table[row][column]
    pivot_row = [value / pivot for value in table[row]]
    pivot_row[column] = 1.0 / pivot
    right_side[row] /= pivot
    for other_row, values in enumerate(table):
        factor = values[column]
        if other_row == row or factor == 0.0:
            continue
        for index, value in enumerate(pivot_row):
            if value:
                values[index] -= factor * value
        values[column] = -factor * pivot_row[column]
        right_side[other_row] = max(0.0, right_side[other_row] - factor * right_side[row])
    table[row] = pivot_row
    factor = reduced_gains[column]
    for index, value in enumerate(pivot_row):
        if value:
            reduced_gains[index] -= factor * value
    reduced_gains[column] = -factor * pivot_row[column]
