"""CORAL's first baseline takes its most cost-efficient type, and the next one only where nodes run out."""

from __future__ import annotations

from plan_problems import a_problem, an_ask

from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

BRIEF = SolveSettings(time_limit_s=10)


def types(available: int, rate_per_s: float) -> tuple[set[str], float]:
    """Node types of the plan, and the fraction it serves, with so many of the best type."""
    item = an_ask(rate_per_s=rate_per_s)
    problem = a_problem(item, offers={"east": {"1xL40S": (0.5, available), "1xA10G": (1.0, 40)}})
    plan = STRATEGIES["homo"](TemplateFactory(problem), BRIEF).plan
    assert verify(problem, plan) == ()
    return {node for _, node in plan.nodes}, plan.fraction


def test_one_type_where_it_suffices() -> None:
    assert types(40, 30.0) == ({"1xL40S"}, 1.0)


def test_the_next_type_where_the_best_runs_out() -> None:
    assert types(3, 30.0) == ({"1xL40S", "1xA10G"}, 1.0)
