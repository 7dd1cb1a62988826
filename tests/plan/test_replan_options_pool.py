"""Answers to lost machines of a pool are sound and ordered by cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pool_problem
from search_pools import catalog_node

from potluck.core.errors import InputError
from potluck.core.values.layout import Pool
from potluck.core.values.plan import Plan
from potluck.core.values.types import Slo
from potluck.plan.problem import PlanningProblem, without_nodes
from potluck.plan.replan_options import (
    ReplanOption,
    best_answer,
    ladder,
    surviving_replicas,
    with_running_formats,
)
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

QUICK = SolveSettings(time_limit_s=2.0)
MACHINES = (("a", "A40", 4), ("b", "A5000", 4), ("c", "RTX3090Ti", 4), ("d", "A5000", 4), ("e", "A40", 2))


def a_pool() -> Pool:
    nodes = tuple(replace(catalog_node(*machine), price_usd_per_h=0.4 * machine[2]) for machine in MACHINES)
    gbps = np.random.default_rng(3).choice([5.0, 10.0, 40.0], (5, 5))
    return Pool(nodes, tuple(map(tuple, np.minimum(gbps, gbps.T).tolist())), ((2e-4,) * 5,) * 5)


PROBLEM = pool_problem(a_pool(), a_demand("chat", "Llama-2-13B", 9.0, Slo(2.5, 0.1), ((900, 200, 1.0),)))
RUNNING = STRATEGIES["thunderserve"](TemplateFactory(PROBLEM), QUICK).plan


def test_pool_plan_is_sound_and_uses_at_least_four_machines() -> None:
    assert verify(PROBLEM, RUNNING) == ()
    assert sum(len(t.machines) for t in RUNNING.templates) >= 4


def problem_without(problem: PlanningProblem, names: list[str]) -> PlanningProblem:
    assert problem.pool is not None
    for name in names:
        node = problem.pool.nodes[problem.pool.index(name)]
        here = next(r for r in problem.regions if r.name == node.region).offer(node.type.name)
        assert here is not None
        problem = replace(problem, pool=problem.pool.without({name: node.gpus}))  # type: ignore[union-attr]
        problem = without_nodes(problem, node.region, node.type.name, here.available - 1)
    return problem


def checked_answers(now: PlanningProblem, running_plan: Plan) -> tuple[ReplanOption, ...]:
    answers = ladder(now, running_plan, STRATEGIES["auto"], QUICK)
    left = surviving_replicas(with_running_formats(now, running_plan), running_plan)
    loaded = {replica.layout for replicas in left.values() for replica in replicas}
    for replan_option in answers:
        assert verify(now, replan_option.plan) == (), replan_option.step
    reroute, flip, reallocate = answers
    assert flip.served_fraction >= reroute.served_fraction - 1e-6
    assert reallocate.served_fraction >= reroute.served_fraction - 1e-6
    for replan_option in (reroute, flip):
        assert replan_option.starts == 0
        used = {r.layout for t in replan_option.plan.templates if t.kind == "group" for r in t.replicas}
        assert used <= loaded, "weights would have to be loaded"
    assert reroute.flips == 0
    return answers


@pytest.mark.slow
@settings(max_examples=5)
@given(st.sets(st.sampled_from([name for name, *_ in MACHINES]), max_size=4))
def test_pool_answers_to_random_losses_down_to_one_machine_are_sound(names: set[str]) -> None:
    checked_answers(problem_without(PROBLEM, sorted(names)), RUNNING)


def test_loss_of_every_pool_machine_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="has no GPUs"):
        problem_without(PROBLEM, [name for name, *_ in MACHINES])


def test_pool_replan_without_a_change_keeps_the_plan_by_rerouting() -> None:
    answers = checked_answers(PROBLEM, RUNNING)
    assert best_answer(answers).step == "reroute"
    assert answers[0].served_fraction == pytest.approx(RUNNING.fraction, rel=1e-6)
    flip = answers[1]  # flips only for something: more served, or less rented
    assert flip.flips == 0 or (-flip.served_fraction, flip.cost_usd_per_h) < (-1.0, RUNNING.cost_usd_per_h)


def test_loss_by_machine_type_takes_idle_machines_first() -> None:
    """One of two machines of a type is used: losing one of the type loses the other."""
    nodes = [replace(catalog_node(name, "A40", 4), price_usd_per_h=2.0) for name in ("x", "y")]
    problem = pool_problem(
        Pool(tuple(nodes), ((1.0, 9.0), (9.0, 1.0)), ((0.0,) * 2,) * 2), a_demand(rate_per_s=0.5)
    )
    plan = STRATEGIES["thunderserve"](
        TemplateFactory(pool_problem(problem.pool.only([1]), *problem.demands)), QUICK
    ).plan  # type: ignore[union-attr]
    assert set(plan.templates[0].machines) == {"y"}
    fewer = without_nodes(problem, "pool", "4xA40", 1)
    assert [node.name for node in with_running_formats(fewer, plan).pool.nodes] == ["y"]  # type: ignore[union-attr]
    assert checked_answers(fewer, plan)[0].served_fraction == pytest.approx(plan.fraction)


def test_pool_role_flip_serves_at_least_as_much_when_lengths_change() -> None:
    """From long answers to long prompts, on the same machines."""
    now = replace(PROBLEM, demands=(a_demand("chat", "Llama-2-13B", 9.0, Slo(2.5, 0.1), ((1800, 20, 1.0),)),))
    reroute, flip, _ = checked_answers(now, RUNNING)
    assert flip.served_fraction >= reroute.served_fraction
    if flip.served_fraction > reroute.served_fraction + 1e-6:
        assert flip.flips > 0


def test_plan_of_a_fleet_without_a_pool_survives_the_loss_of_named_machines() -> None:
    problem = a_problem(a_demand(rate_per_s=6.0), offers={"home": {"1xL40S": (1.9, 3), "1xA10G": (1.0, 3)}})
    plan = STRATEGIES["thunderserve"](TemplateFactory(problem), QUICK).plan
    (_, node), count = next(iter(plan.nodes.items()))
    checked_answers(without_nodes(problem, "home", node, count - 1), plan)
