"""What one plan has otherwise than another, in words."""

from __future__ import annotations

from collections import Counter

from potluck.core.values.plan import Plan, Template


def copies_changed(before: Plan, after: Plan) -> str:
    """Which copies come and go: `2 more L4 (decode) in near, 1 fewer A10 (prefill) in far`."""
    counts: Counter[tuple[str, str]] = Counter()
    for plan, sign in ((before, -1), (after, 1)):
        for each in plan.deployments:
            counts[_said(plan.template(each.template)), each.region] += sign * each.count
    lines = [
        f"{abs(more)} {'more' if more > 0 else 'fewer'} {what} in {region}"
        for (what, region), more in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        if more
    ]
    return ", ".join(lines) or "the same GPUs in the same roles"


def _said(template: Template) -> str:
    """Its GPUs with their roles."""
    parts = []
    for replica in template.replicas:
        nodes = " + ".join(
            node.removeprefix("1x") if count == 1 else f"{count} {node}"
            for node, count in replica.layout.node_counts.items()
        )
        parts.append(nodes if replica.role == "mixed" else f"{nodes} ({replica.role})")
    return " with ".join(parts)
