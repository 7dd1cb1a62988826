"""Ways between machines that a plan names: for activations inside a pipeline, and for KV between replicas.

A pool says what its links carry; where it does not, or where machines have names but no pool, the smaller of two
network cards counts, as the planner has it (`plan/timing/named_machines.py`).
"""

from __future__ import annotations

from potluck.core.state.facts import GroupFacts
from potluck.core.values.layout import RTT_S, Layout, layers_between
from potluck.core.values.plan import Template
from potluck.perf.delays.transfer import AlphaBeta, alpha_beta
from potluck.perf.operators.network import HANDOVER_SHARE, Hop
from potluck.perf.timers.pipeline_timer import layout_hops
from potluck.runtime.resolved_plan import ResolvedPlan


def hops_of(resolved: ResolvedPlan, layout: Layout) -> tuple[Hop, ...]:
    """From each stage to the next and back to the first, over the links between machines that the layout names."""
    return layout_hops(layout, resolved.nodes, resolved.machine_gbps)


def group_facts(
    resolved: ResolvedPlan, template: Template, kv_bytes_per_token: float, mean: tuple[float, float]
) -> GroupFacts:
    """How KV gets from each of a group's replicas to each other, over the links between their machines."""
    nodes = {n.machine: n.node for r in template.replicas for s in r.layout.stages for n in s.nodes}
    hops = []
    for i, first in enumerate(template.replicas):
        for j, second in enumerate(template.replicas):
            layers = layers_between(first.layout, second.layout)
            whole = sum(layers.values())
            parts = []
            for (a, b), count in sorted(layers.items()):
                path = machine_path(resolved, (a, nodes[a]), (b, nodes[b]))
                if path is not None:
                    name = f"{a}->{b}" if a != b else ""
                    parts.append((name, path.alpha_s, count / whole / path.beta_bytes_per_s))
            hops.append((i, j, tuple(parts)))
    return GroupFacts(template.model, kv_bytes_per_token, tuple(hops), *mean)


def machine_path(resolved: ResolvedPlan, first: tuple[str, str], second: tuple[str, str]) -> AlphaBeta | None:
    """The way of KV from one machine (its name and type) to another; None within one that has a single GPU."""
    if first[0] == second[0]:
        inside = resolved.node(first[1]).interconnect
        if inside.kind == "none":
            return None
        return AlphaBeta(inside.latency_s, inside.gb_per_s * 1e9 * HANDOVER_SHARE)
    cards = (min(resolved.node(first[1]).network_gbps, resolved.node(second[1]).network_gbps), RTT_S)
    return alpha_beta(*resolved.machine_gbps.get((first[0], second[0]), cards))
