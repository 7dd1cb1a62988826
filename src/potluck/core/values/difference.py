"""What one plan has otherwise than another, in words."""

from __future__ import annotations

from potluck.core.values.plan import Plan


def copies_changed(before: Plan, after: Plan) -> str:
    """Which copies come and go: `+2 decode 1xL4 in near, -1 prefill 1xA10 in far`."""
    old = {(each.template, each.region): each.count for each in before.deployments}
    new = {(each.template, each.region): each.count for each in after.deployments}
    lines = []
    for key in sorted({*old, *new}):
        more = new.get(key, 0) - old.get(key, 0)
        if more:
            lines.append(f"{more:+d} {key[0]} in {key[1]}")
    return ", ".join(lines) or "the same copies"
