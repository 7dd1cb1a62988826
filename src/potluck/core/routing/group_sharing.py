"""How the requests of a group's copy are shared among its replicas: as planned, or anew when it is not as planned.

While all replicas of a copy serve in their planned roles, its template's flows hold (X and Y of THUNDERSERVE 3.3).
When one is lost or flipped, or lengths have shifted, they are decided anew: THUNDERSERVE's transportation problem,

    maximise   sum_ij (1 - w t_ij) f_ij + sum_k g_k        i prefills, j decodes, k does both
    within     sum_j f_ij <= P_i,  sum_i f_ij <= Q_j,  g_k <= C_k,  sum_ij s_ij,l f_ij <= 1 for each link l

t_ij is how long a request's KV takes, w so small that it only tells equal routings apart, s the seconds that it keeps
a link busy. f = 0 is feasible, so a primal simplex needs no first phase. The planner has its own
(`plan/search/kernels.py`); tests hold both to the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts, GroupFacts, ReplicaFacts
from potluck.core.values.plan import Template
from potluck.core.values.types import Role

PLANNED_BUSY = 0.8  # Share of their time that replicas are counted on for, beside links that are used whole.


MARGIN = 0.9  # Share of the TPOT objective that answers beside prompts may take on average.


class MeanLengths(NamedTuple):
    prompt_tokens: float
    output_tokens: float


class GroupShare(NamedTuple):
    """A share of a copy's requests: who prefills, who decodes (the same one may do both), and how much."""

    prefill: int
    decode: int
    weight: float


Serving = Mapping[int, Role]  # Places of a template's replicas that serve, and their present roles.


def planned_parts(template: Template, serving: Serving, bucket: int) -> list[GroupShare]:
    return [
        GroupShare(flow.prefill, flow.decode, flow.share)
        for flow in template.flows
        if flow.bucket == bucket and flow.prefill in serving and flow.decode in serving
    ]


def as_planned(template: Template, serving: Serving) -> bool:
    return all(serving.get(place) == replica.role for place, replica in enumerate(template.replicas))


def parts(
    facts: FleetFacts, template: Template, serving: Serving, bucket: int, lengths: MeanLengths, shifted: bool
) -> list[GroupShare]:
    """How a copy's requests of a bucket are shared; weights add up to 1 when it is whole."""
    known_facts = facts.groups.get(template.name)
    if (as_planned(template, serving) and not shifted) or known_facts is None:
        return planned_parts(template, serving, bucket)
    now = rated(facts, template.name, serving, lengths)
    roles: dict[int, Role] = {place: replica.role for place, replica in enumerate(template.replicas)}
    whole = sum(rate for *_, rate in rated(facts, template.name, roles, lengths))
    served = sum(rate for *_, rate in now)
    if served <= 0:
        return planned_parts(template, serving, bucket)
    most = whole if whole > 0 else served
    return [GroupShare(i, j, rate / most) for i, j, rate in now if rate > 1e-6 * served]


def rated(
    facts: FleetFacts,
    template: str,
    serving: Serving,
    lengths: MeanLengths,
    group_rates: GroupRates | None = None,
) -> list[tuple[int, int, float]]:
    """(prefilling replica, decoding one or itself, requests a second) of the best routing in these roles."""
    known_facts = facts.groups.get(template)
    if known_facts is None:
        return []
    pace = group_rates or GroupRates(facts, template, lengths)
    first = [place for place, role in serving.items() if role == "prefill"]
    second = [place for place, role in serving.items() if role == "decode"]
    result = [(k, k, pace.mixed(k)) for k, role in serving.items() if role == "mixed"]
    ends = [(x, y, i, j) for x, i in enumerate(first) for y, j in enumerate(second)]
    pairs = [KvPair(x, y, *pace.crossing(i, j)) for x, y, i, j in ends if pace.in_time(i, j)]
    flows = orchestrated([pace.prefill(i) for i in first], [pace.decode(j) for j in second], pairs)
    result += [(first[p.prefill], second[p.decode], flow) for p, flow in zip(pairs, flows, strict=True)]
    return [item for item in result if item[2] > 0]


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
        self._tpot_s = MARGIN * slo.tpot_s if slo is not None else float("inf")

    def prefill(self, place: int) -> float:
        service_s = self._prefill_s(place)
        return PLANNED_BUSY / service_s if service_s > 0 else 0.0

    def decode(self, place: int) -> float:
        facts = self._replica(place)
        if facts is None or facts.decode_step_s <= 0:
            return 0.0
        batch = self._batch(facts)
        return PLANNED_BUSY * batch / (facts.decode_step_s * max(1.0, self._lengths.output_tokens))

    def _batch(self, facts: ReplicaFacts) -> float:
        tokens = self._lengths.prompt_tokens + self._lengths.output_tokens
        return min(float(facts.decode_batch), facts.total_blocks * BLOCK_TOKENS / max(1.0, tokens))

    def mixed(self, place: int) -> float:
        """Both, one beside the other: the most answers n with s(n) + n c fast enough, c their prompts' share."""
        facts, output = self._replica(place), max(1.0, self._lengths.output_tokens)
        if facts is None or facts.decode_step_s <= 0:
            return 0.0
        batch = self._batch(facts)
        known = 0 < facts.decode_first_s <= facts.decode_step_s
        first_s = facts.decode_first_s if known else facts.decode_step_s
        slope_s = (facts.decode_step_s - first_s) / max(1, facts.decode_batch - 1)
        prompts_s = self._prefill_s(place) / output
        most = (self._tpot_s - first_s + slope_s) / max(slope_s + prompts_s, 1e-12)
        answers = min(batch, most)
        if answers < 1.0:
            return 0.0
        return PLANNED_BUSY * answers / (output * (first_s + slope_s * (answers - 1) + answers * prompts_s))

    def crossing(self, first: int, second: int) -> tuple[tuple[tuple[str, float], ...], float]:
        """(seconds of every link, seconds until all is there) for one request's KV; links work side by side."""
        size = self._group.kv_bytes_per_token * self._lengths.prompt_tokens
        busy, slowest = [], 0.0
        for link, fixed_s, s_per_byte in self._hops.get((first, second), ()):
            slowest = max(slowest, fixed_s + size * s_per_byte)
            if link:
                busy.append((link, size * s_per_byte))
        return tuple(busy), slowest

    def in_time(self, first: int, second: int) -> bool:
        """Whether a first token may come in time: a prompt behind as many as an M/D/1 queue has, and its KV."""
        wait = 1.0 + PLANNED_BUSY / (2.0 * (1.0 - PLANNED_BUSY))
        return self._prefill_s(first) * wait + self.crossing(first, second)[1] <= self._limit_s

    def _prefill_s(self, place: int) -> float:
        facts = self._replica(place)
        if facts is None:
            return 0.0
        return facts.prefill_fixed_s + facts.prefill_s_per_token * self._lengths.prompt_tokens

    def _replica(self, place: int) -> ReplicaFacts | None:
        return self._facts.replicas.get((self._template, place))


def bucket_tokens(longest: Sequence[float], bucket: int, known_facts: GroupFacts | None) -> float:
    """How long prompts of a bucket are taken to be: its longest, or the mean where it has no end."""
    mean = known_facts.prompt_tokens if known_facts is not None else 1024.0
    if len(longest) == 1 or longest[bucket] == float("inf"):
        return max(mean, longest[bucket - 1] if len(longest) > 1 else 1.0)
    return longest[bucket]


HANDOVER_WEIGHT = 1e-5
TINY = 1e-9
Numbers = Sequence[float]


@dataclass(frozen=True, slots=True)
class KvPair:
    prefill: int
    decode: int
    busy_s: tuple[tuple[str, float], ...]
    handover_s: float


def orchestrated(prefill_per_s: Numbers, decode_per_s: Numbers, pairs: Sequence[KvPair]) -> list[float]:
    """The flow of every pair, in requests a second; replicas are named by their places in the two rates."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    limits: dict[tuple[str, str], float] = {}
    for column, pair in enumerate(pairs):
        for side, place, rate in (
            ("prefill", pair.prefill, prefill_per_s[pair.prefill]),
            ("decode", pair.decode, decode_per_s[pair.decode]),
        ):
            key = (side, str(place))
            rows.setdefault(key, {})[column] = 1.0
            limits[key] = rate
        for link, seconds in pair.busy_s:
            rows.setdefault(("link", link), {})[column] = seconds
            limits["link", link] = 1.0
    most = [min(prefill_per_s[pair.prefill], decode_per_s[pair.decode]) for pair in pairs]
    kept = [
        key
        for key, row in rows.items()
        # A link that carries all that could ever be sent over it binds nothing.
        if key[0] != "link" or sum(value * most[column] for column, value in row.items()) > 1.0
    ]
    worth = [1.0 - HANDOVER_WEIGHT * min(1.0, pair.handover_s) for pair in pairs]
    return maximised(worth, [rows[key] for key in kept], [limits[key] for key in kept])


def maximised(worth: Numbers, rows: Sequence[dict[int, float]], limits: Numbers) -> list[float]:
    """x >= 0 that maximises worth x within rows x <= limits; no limit is negative."""
    columns, height = len(worth), len(rows)
    table = [[row.get(column, 0.0) for column in range(columns)] for row in rows]
    right, gain = [max(0.0, limit) for limit in limits], list(worth)
    basis = list(range(columns, columns + height))
    outside = list(range(columns))
    for turn in count():
        entering = _entering(gain, outside, careful=turn > 8 * (columns + height))
        if entering < 0:
            break
        leaving = _leaving(table, right, basis, entering)
        if leaving < 0:
            break  # unbounded: cannot be, as every pair has limits
        _pivot(table, right, gain, leaving, entering)
        basis[leaving], outside[entering] = outside[entering], basis[leaving]
    values = [0.0] * columns
    for row, name in enumerate(basis):
        if name < columns:
            values[name] = right[row]
    return values


def _entering(gain: list[float], outside: list[int], careful: bool) -> int:
    """The column that gains most; after very many turns the first that gains (Bland), which cannot go in circles."""
    best, most = -1, TINY
    for column, value in enumerate(gain):
        if value > TINY and (
            (not careful and value > most) or (careful and (best < 0 or outside[column] < outside[best]))
        ):
            best, most = column, value
    return best


def _leaving(table: list[list[float]], right: list[float], basis: list[int], column: int) -> int:
    best, least = -1, 0.0
    for row, values in enumerate(table):
        if values[column] > TINY:
            ratio = right[row] / values[column]
            if best < 0 or ratio < least - TINY or (ratio <= least + TINY and basis[row] < basis[best]):
                best, least = row, ratio
    return best


def _pivot(table: list[list[float]], right: list[float], gain: list[float], row: int, column: int) -> None:
    """A condensed tableau: the entering column becomes that of the leaving variable."""
    pivot = table[row][column]
    line = [value / pivot for value in table[row]]
    line[column] = 1.0 / pivot
    right[row] /= pivot
    for other, values in enumerate(table):
        factor = values[column]
        if other == row or factor == 0.0:
            continue
        for place, value in enumerate(line):
            if value:
                values[place] -= factor * value
        values[column] = -factor * line[column]
        right[other] = max(0.0, right[other] - factor * right[row])
    table[row] = line
    factor = gain[column]
    for place, value in enumerate(line):
        if value:
            gain[place] -= factor * value
    gain[column] = -factor * line[column]
