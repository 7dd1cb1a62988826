"""How far a plan's rates may be off: the widest bar of the replicas that it counts on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from potluck.core.values.plan import PlannedShare, Template
from potluck.core.values.types import NodeType
from potluck.perf.fits.error_bars import bar, slower
from potluck.perf.timers.profile import profile_for
from potluck.perf.timers.roofline import roofline
from potluck.plan.problem import ModelDemand


def range_per_s(
    ask: ModelDemand,
    shares: Iterable[PlannedShare],
    used: Mapping[str, Template],
    nodes: Mapping[str, NodeType],
    rate_per_s: float,
) -> tuple[float, float]:
    """(slowest, fastest) of a model's replicas together, where they are planned to do `rate_per_s`.

    Replicas are taken to err alike, as what they have in common is most of it: so nothing averages out. Where one
    was measured by `potluck profile`, it does not err at all. (0, 0) where nothing is served.
    """
    lows, highs = [1.0], [1.0]
    names = {share.template for share in shares if share.rate_per_s > 0}
    places = {
        (member.node, member.tp, member.ep)
        for name in names
        for replica in used[name].replicas
        for stage in replica.layout.stages
        for member in stage.nodes
    }
    for name, tp, ep in places:
        node = nodes[name]
        if profile_for(ask.profiles, ask.model, node, tp) is not None:
            continue
        who = (ask.model, tp, node.gpu.name, roofline(ask.model, node, tp, ep=ep).confidence)
        planned, around = slower(*who, ask.sure) if ask.sure > 0.5 else 1.0, bar("rate", *who)
        lows.append(planned / around.high)
        highs.append(planned / around.low)
    return (rate_per_s * min(lows), rate_per_s * max(highs)) if places else (0.0, 0.0)
