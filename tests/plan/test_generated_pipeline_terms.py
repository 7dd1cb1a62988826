"""Generated pipelines are priced with all terms of the program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pipelines

from potluck.core.values.plan import Template
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import Slo
from potluck.plan.allocate.relaxation import Duals, Pricer
from potluck.plan.assemble.codecs import solve_with_codecs
from potluck.plan.assemble.columns import ProgramColumns, columns
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import copy_costs
from potluck.plan.templates.placement_table import MAX_MULTISETS, nodes_at_most, placement_table_of

ONE = ((1500, 200, 1.0),)
OFFERS = {"east": {"1xL4": (0.8, 4), "1xL40S": (1.86, 2)}, "west": {"1xL4": (0.7, 3), "1xL40S": (1.7, 1)}}


def two_model_problem(terms: ModelTerms) -> PlanningProblem:
    """Two models; reserved and spot nodes, head nodes and storage that are paid for."""
    phi = a_demand("phi", model="Phi-4", rate_per_s=1.5, slo=Slo(3.0, 0.1), lengths=ONE)
    problem = a_problem(replace(phi, terms=terms), a_demand("chat", lengths=ONE), offers=OFFERS)
    east, west = problem.regions
    l4, l40s = east.offers
    cheap, other = west.offers
    east = replace(east, offers=(replace(l4, reserved=3), l40s), head_usd_per_h=0.4)
    spot = replace(cheap, spot=True, preemptions_per_h=0.2)
    west = replace(west, offers=(spot, other), storage_usd_per_gb_month=0.1)
    return replace(problem, regions=(east, west))


TERMS = ModelTerms(min_copies=1, max_copies=9, max_gpu_kinds=2)


@cache
def priced_program() -> tuple[PlanningProblem, ProgramColumns]:
    problem = two_model_problem(TERMS)
    return problem, columns(
        problem, {demand.name: all_pipelines_of(problem, demand.name, 6) for demand in problem.demands}
    )


def all_pipelines_of(problem: PlanningProblem, name: str, few: int) -> list[Template]:
    demand = next(item for item in problem.demands if item.name == name)
    return pipelines(problem, demand, TemplateFactory(problem).prices, few=few)


@cache
def unconstrained_pipelines() -> tuple[Template, ...]:
    """All pipelines of the first model, which know nothing of terms."""
    return tuple(all_pipelines_of(two_model_problem(ModelTerms()), "phi", 10_000))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), factor=st.sampled_from([0.0, 1.0, 1.3]))
def test_priced_placement_costs_what_its_column_costs(seed: int, factor: float) -> None:
    problem, result = priced_program()
    program, draw = result.program, np.random.default_rng(seed)
    bins = sum(len(model.buckets) for model in program.models)
    shape = program.fleet.available.shape
    duals = Duals(
        draw.uniform(0, 1, (2, bins, len(program.fleet.regions))),
        draw.uniform(0, 1, bins),
        draw.uniform(0, 2, shape),
        np.zeros(0),
        float(draw.uniform(0, 1)),
        draw.uniform(0, 1, shape),
        draw.normal(0, 1, len(program.limits)),
    )
    pricer = Pricer(program)
    assert len(program.limits) > 5
    for m, group in enumerate(result.templates):
        uses = np.array([[t.node_counts.get(node.name, 0) for node in problem.nodes] for t in group])
        expected = pricer.reduced(m, duals, factor) + pricer.earnings(m, duals)
        phase = np.array([int(t.replicas[0].role == "decode") for t in group])
        mine = copy_costs(problem, m, uses, phase, program.fleet, duals, factor).T
        there = np.isfinite(expected)
        assert there.any()
        assert mine[there] == pytest.approx(expected[there])


@pytest.mark.parametrize("terms", [ModelTerms(max_copies=3), ModelTerms(max_nodes=3, max_gpu_kinds=1)])
def test_generated_pipelines_give_the_same_cost_as_all_pipelines(terms: ModelTerms) -> None:
    """`coral` with the pipelines that were asked for costs what it does with all of them."""
    problem = two_model_problem(terms)
    problem = replace(problem, demands=problem.demands[:1])
    (demand,) = problem.demands
    exact = SolveSettings(time_limit_s=30.0, gap_target=1e-7)
    grown = STRATEGIES["coral"](TemplateFactory(problem), exact)
    single = TemplateFactory(problem).phased(demand)
    _, allocation = solve_with_codecs(
        problem, {demand.name: [*single, *unconstrained_pipelines()]}, gap_target=1e-7
    )
    assert grown.allocation.found == allocation.found
    if allocation.found:
        assert grown.allocation.cost_usd_per_h == pytest.approx(allocation.cost_usd_per_h, rel=1e-5)


def test_pipelines_excluded_by_terms_are_not_generated() -> None:
    problem = two_model_problem(ModelTerms(max_nodes=2, nodes=("1xL4",), regions=("east",)))
    demand = problem.demands[0]
    placement_table = placement_table_of(problem, demand)
    few = len(placement_table.per_s)
    costs = np.zeros((2, few))
    chosen = placement_table.worth(problem, demand, costs, np.ones((2, len(demand.buckets), 2)), few, 1.0)
    names = [node.name for node in problem.nodes]
    for row in chosen.tolist():
        used = {names[c]: int(n) for c, n in enumerate(placement_table.uses[row]) if n}
        assert set(used) == {"1xL4"}
        assert used["1xL4"] <= 2
    free = replace(demand, terms=ModelTerms())
    assert len(
        placement_table.worth(problem, free, costs, np.ones((2, len(demand.buckets), 2)), few, 1.0)
    ) > len(chosen)


@pytest.mark.parametrize(("types", "models", "most"), [(4, 2, 6), (20, 6, 6), (30, 1, 5), (30, 10, 4)])
def test_pipeline_node_limit_falls_with_more_types_and_models(types: int, models: int, most: int) -> None:
    """So that no more are gone through than for the twenty types and six models of CORAL's extended setting."""
    assert nodes_at_most(types, models) == most
    assert comb(types + most, most) * models <= MAX_MULTISETS


def test_pipeline_table_has_part_of_the_libraries_when_time_is_short() -> None:
    problem = two_model_problem(ModelTerms())
    demand = problem.demands[0]
    some, whole = (
        placement_table_of(problem, demand, out_of_time=lambda: True),
        placement_table_of(problem, demand),
    )
    assert 0 < len(some.per_s) < len(whole.per_s)
    assert (some.uses == whole.uses[: len(some.uses)]).all()
