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


def groups(plan: Plan) -> bool:
    return {"prefill", "decode"} <= {r.role for t in plan.templates if t.kind == "group" for r in t.replicas}


COMBO, CROSSING = {"prefill": {"1xA800-PCIe"}, "decode": {"1xH20"}}, {("compute", "memory")}
SHOWS: dict[tuple[str, str], Callable[[Plan], bool]] = {
    ("papers/cauchy.yaml", "cauchy"): lambda plan: all(phases(t) == COMBO for t in plan.templates),
    ("papers/cronus.yaml", "cronus"): lambda plan: [t.kind for t in plan.templates] == ["pair"],
    ("papers/coral.yaml", "coral"): lambda plan: any(
        t.kind == "pipeline" and len(t.nodes) > 1 for t in plan.templates
    ),
    ("papers/prfaas.yaml", "prfaas"): lambda plan: (
        {(flow.prefill_region, flow.decode_region) for flow in plan.flows} == CROSSING
    ),
    ("pool.yaml", "thunderserve"): groups,
}


@pytest.mark.slow
@pytest.mark.parametrize(("example", "strategy"), list(SHOWS))
def test_strategy_plans_the_mechanism_of_its_paper(example: str, strategy: str) -> None:
    problem = load_problem(read_spec(EXAMPLES / example), 0.8, None, (), 0.0)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=20.0)).plan
    assert plan.fraction == pytest.approx(1.0)
    assert SHOWS[example, strategy](plan), [template.name for template in plan.templates]


def test_coral_also_returns_a_plan_without_pipelines() -> None:
    """Where pipelines do not hold in a rehearsal, single nodes of the same columns may."""
    problem = load_problem(read_spec(EXAMPLES / "two-regions.yaml"), 0.8, None, (), 0.0)
    outcome = STRATEGIES["coral"](TemplateFactory(problem), SolveSettings(time_limit_s=10.0))
    (single,) = outcome.alternatives
    assert {template.kind for template in single.templates} == {"homogeneous"}
    assert single.fraction == pytest.approx(1.0)
