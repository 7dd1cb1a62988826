"""CAUCHY's combos: prefill nodes of one type feeding decode nodes of another (or the same), 1:1 to 2:6.

A combo is a closed group: it serves what the slower of its two sides can, C_b = min(n_p P_b, n_d Q_b). Of
the two directions of a pair of types the one with the higher cost efficiency (tokens per dollar) is kept, as
the paper does; aggregated replicas (one type, both phases) are combos too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potluck.core.values.plan import BucketCapacity, NodeCount, Template
from potluck.core.values.types import Role
from potluck.perf.pipeline import ORDER
from potluck.plan.problem import Ask
from potluck.plan.rates import useful

RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 3), (2, 5), (2, 6))
"""(prefill nodes, decode nodes), from 1:1 to 2:6."""


def combos(ask: Ask, single: Sequence[Template], prices: dict[str, float]) -> list[Template]:
    """Combos of single-node templates, and the aggregated ones; `prices` ($/h a node) settle directions."""
    best = {role: _best_per_node(ask, single, role) for role in ("prefill", "decode", "mixed")}
    found = [replace(template, kind="combo") for template in best["mixed"].values()]
    for first in best["prefill"]:
        for second in best["decode"]:
            forward = _pair(ask, best["prefill"][first], best["decode"][second])
            if first < second and second in best["prefill"] and first in best["decode"]:
                backward = _pair(ask, best["prefill"][second], best["decode"][first])
                forward = max((forward, backward), key=lambda ts: _best_efficiency(ask, ts, prices))
            elif first > second and first in best["decode"] and second in best["prefill"]:
                continue  # that pair was settled the other way round
            found += forward
    return found


def efficiency_tokens_per_usd(ask: Ask, template: Template, prices: dict[str, float]) -> float:
    """Tokens per dollar when a template serves the model's mix of buckets by itself."""
    rate = served_per_s(ask, template)
    cost = sum(each.count * prices[each.node] for each in template.nodes)
    tokens = ask.tokens_per_s / ask.rate_per_s if ask.rate_per_s else 0.0
    return rate * tokens * 3600.0 / cost if cost > 0 else float("inf")


def served_per_s(ask: Ask, template: Template) -> float:
    """Requests a second of the model's own mix that one copy serves, closed; 0 if it lacks a bucket."""
    time = 0.0
    for demand, capacity in zip(ask.demands, template.capacity, strict=True):
        if demand.rate_per_s <= 0:
            continue
        if capacity.closed_per_s <= 0:
            return 0.0
        time += demand.rate_per_s / capacity.closed_per_s
    return ask.rate_per_s / time if time > 0 else 0.0


def _best_per_node(ask: Ask, single: Sequence[Template], role: Role) -> dict[str, Template]:
    """One template per node type: the paper shards a phase over all of a server's GPUs or not at all."""
    found: dict[str, Template] = {}
    for template in single:
        if template.replicas[0].role != role or template.model != ask.name:
            continue
        node = template.nodes[0].node
        if node not in found or _total(template) > _total(found[node]):
            found[node] = template
    return found


def _total(template: Template) -> float:
    return sum(c.prefill_per_s + c.decode_per_s + c.closed_per_s for c in template.capacity)


def _pair(ask: Ask, prefill: Template, decode: Template) -> list[Template]:
    made = []
    for n_p, n_d in RATIOS:
        capacity = tuple(
            _slower(n_p, p, n_d, d) for p, d in zip(prefill.capacity, decode.capacity, strict=True)
        )
        if not useful(capacity):
            continue
        first, second = prefill.nodes[0].node, decode.nodes[0].node
        same = first == second
        nodes = (NodeCount(first, n_p + n_d),) if same else (NodeCount(first, n_p), NodeCount(second, n_d))
        made.append(
            Template(
                name=f"{ask.name}: combo {n_p} {first} -> {n_d} {second}",
                kind="combo",
                model=ask.name,
                nodes=nodes,
                replicas=prefill.replicas * n_p + decode.replicas * n_d,
                capacity=capacity,
                confidence=max((prefill.confidence, decode.confidence), key=ORDER.index),
            )
        )
    return made


def _slower(n_p: int, prefill: BucketCapacity, n_d: int, decode: BucketCapacity) -> BucketCapacity:
    rate = min(n_p * prefill.prefill_per_s, n_d * decode.decode_per_s)
    return BucketCapacity(prefill.bucket, 0.0, 0.0, rate, prefill.ttft_s, decode.tpot_s)


def _best_efficiency(ask: Ask, templates: Sequence[Template], prices: dict[str, float]) -> float:
    return max((efficiency_tokens_per_usd(ask, each, prices) for each in templates), default=0.0)
