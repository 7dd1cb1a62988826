"""On each paper's example its mechanism is what its strategy plans, not something else that would do as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.cli.common.inputs import load_problem, read_spec
from potluck.core.values.plan import Plan, Template
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

EXAMPLES = Path(__file__).parents[2] / "examples"


def phases(template: Template) -> dict[str, set[str]]:
    """The node types of each role in a template."""
    types: dict[str, set[str]] = {}
    for replica in template.replicas:
        types.setdefault(replica.role, set()).update(replica.layout.node_counts)
    return types


def a_combo(plan: Plan) -> bool:
    return all(phases(t) == {"prefill": {"1xA800-PCIe"}, "decode": {"1xH20"}} for t in plan.templates)


def a_pair(plan: Plan) -> bool:
    return [template.kind for template in plan.templates] == ["pair"]


def a_mixed_pipeline(plan: Plan) -> bool:
    return any(t.kind == "pipeline" and len(t.nodes) > 1 for t in plan.templates)


def a_crossing(plan: Plan) -> bool:
    return {(flow.prefill_region, flow.decode_region) for flow in plan.flows} == {("compute", "memory")}


def groups(plan: Plan) -> bool:
    return {"prefill", "decode"} <= {r.role for t in plan.templates if t.kind == "group" for r in t.replicas}


@pytest.mark.parametrize(
    ("example", "strategy", "shows"),
    [
        ("papers/cauchy.yaml", "cauchy", a_combo),
        ("papers/cronus.yaml", "cronus", a_pair),
        ("papers/coral.yaml", "coral", a_mixed_pipeline),
        ("papers/prfaas.yaml", "prfaas", a_crossing),
        ("pool.yaml", "thunderserve", groups),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_mechanism_is_what_is_planned(example: str, strategy: str, shows: Callable[[Plan], bool]) -> None:
    problem = load_problem(read_spec(EXAMPLES / example), 0.8, None, (), 0.0)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=20.0)).plan
    assert plan.fraction == pytest.approx(1.0)
    assert shows(plan), [template.name for template in plan.templates]
