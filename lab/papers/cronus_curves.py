"""CRONUS's Figure 4: TTFT p99 and TBT p99 against the rate, five approaches on four settings, in simulation.

The paper draws the curves and prints neither rates nor times, so they are drawn here too: every approach at shares of
its own highest throughput, at fixed intervals, with the host that `cronus.py` fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers.cronus import APPROACHES, RequestLengthList, Setting, latency
from papers.rows import Line, Plot

SHARES = (0.2, 0.4, 0.6, 0.75, 0.85)


def curves(
    settings: Sequence[Setting],
    most_per_s: Mapping[str, Mapping[str, float]],
    requests: RequestLengthList,
    shares: Sequence[float] = SHARES,
) -> tuple[Plot, ...]:
    plots = []
    for setting in settings:
        lines: dict[str, list[Line]] = {"TTFT": [], "TBT": []}
        for approach in APPROACHES:
            rates = [share * most_per_s[setting.name][approach] for share in shares]
            found = [latency(setting, approach, requests, rate) for rate in rates]
            lines["TTFT"].append(Line(approach, tuple(rates), tuple(item.ttft_p99_s for item in found)))
            lines["TBT"].append(Line(approach, tuple(rates), tuple(item.tbt_p99_s * 1e3 for item in found)))
        for metric, unit in (("TTFT", "s"), ("TBT", "ms")):
            name = f"Figure 4, {metric}, {setting.name}"
            plots.append(Plot(name, "requests/s", f"{metric} p99, {unit}", tuple(lines[metric])))
    return tuple(plots)
