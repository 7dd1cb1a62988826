"""Plans use only what their engine supports, and report what its limits cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pool_problem
from search_pools import random_pool

from potluck.catalog import models
from potluck.cli.common.inputs import load_problem, require_runnable
from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import (
    ENGINES,
    UNLIMITED,
    EngineKind,
    limits_of_layout,
    limits_of_model,
    refusals,
)
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Plan, plan_from_json, plan_to_json
from potluck.core.values.types import EngineName, Link, Slo
from potluck.plan.engine_costs import EngineCost, engine_cost
from potluck.plan.explain import planned_rest, why_not
from potluck.plan.problem import PlanningProblem
from potluck.plan.replan_options import ladder
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify
from potluck.spec.load_spec import load_spec

QUICK = SolveSettings(time_limit_s=20.0, gap_target=0.0)
BRIEF = SolveSettings(time_limit_s=5.0, gap_target=0.0)
NODES = ("1xL4", "2xL4", "1xA10G", "1xL40S", "2xL40S", "1xH100")
REALISTIC = Path(__file__).parents[2] / "examples" / "realistic.yaml"
HYBRID = "Kimi-Linear-48B-A3B"


@st.composite
def fleets(draw: st.DrawFn) -> PlanningProblem:
    offers: dict[str, dict[str, tuple[float, int]]] = {}
    for region in ("east", "west")[: draw(st.integers(1, 2))]:
        names = draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True))
        offers[region] = {name: (draw(st.floats(0.3, 9.0)), draw(st.integers(1, 4))) for name in names}
    model = draw(st.sampled_from(("Llama-3.1-8B", "Qwen3-32B", "GPT-OSS-20B")))
    ask = a_demand("chat", model, draw(st.floats(0.2, 4.0)), Slo(draw(st.floats(2.0, 6.0)), 0.12))
    links = (Link("east", "west", 5.0, 0.02),) if len(offers) == 2 else ()
    return a_problem(ask, offers=offers, links=links)


@pytest.mark.slow
@settings(max_examples=5)
@given(fleets(), st.sampled_from(sorted(ENGINES)))
def test_every_template_runs_on_its_engine_and_engine_limits_never_save_money(
    problem: PlanningProblem, engine: EngineName
) -> None:
    limited = replace(problem, engine=ENGINES[engine])
    known = {demand.name: demand.model for demand in problem.demands}
    factory = TemplateFactory(limited)
    outcome = STRATEGIES["auto"](factory, BRIEF)
    if any(limits_of_model(problem.demands[0].model, ENGINES[engine])):
        return  # a spec with it is refused
    assert refusals(outcome.plan, known, ENGINES[engine]) == ()
    assert verify(limited, outcome.plan) == ()
    for name in (
        "homo",
        "vllm-dp",
        "cronus",
        "cauchy-ce",
        *(("coral", "prfaas", "distserve") if engine != "openai" else ()),
    ):
        plan = STRATEGIES[name](factory, BRIEF).plan
        assert refusals(plan, known, ENGINES[engine]) == (), name
    free = STRATEGIES["auto"](TemplateFactory(problem), replace(BRIEF, start_plans=(outcome.plan,))).plan
    assert free.fraction >= outcome.plan.fraction - 1e-6
    if outcome.plan.fraction >= 1 - 1e-9 and free.gap < 1e-6:
        assert free.total_usd_per_h <= outcome.plan.total_usd_per_h * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_pool_groups_use_only_layouts_that_the_engine_runs(engine: EngineName) -> None:
    pool = random_pool(np.random.default_rng(3), 12, ("L4", "A10G", "L40S"))
    problem = replace(pool_problem(pool, a_demand(rate_per_s=2.0, slo=Slo(3.0, 0.1))), engine=ENGINES[engine])
    known = {ask.name: ask.model for ask in problem.demands}
    for strategy in ("thunderserve", "hexgen", "auto"):
        plan = STRATEGIES[strategy](TemplateFactory(problem), replace(QUICK, time_limit_s=3.0)).plan
        assert plan.deployments
        assert refusals(plan, known, ENGINES[engine]) == ()
        assert verify(problem, plan) == ()
        for replan_option in ladder(problem, plan, STRATEGIES["auto"], replace(QUICK, time_limit_s=2.0)):
            assert refusals(replan_option.plan, known, ENGINES[engine]) == (), replan_option.step


def pipeline(*stages: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(tuple(Stage(16, tuple(StageNode(*node) for node in stage)) for stage in stages))


@pytest.mark.parametrize(
    ("layout", "lacking"),
    [
        (single("1xL4", 1, 32), {}),
        (single("4xL4", 4, 32), {"embedded": ["most_tensor"]}),
        (single("4xL4", 4, 32, "tp"), {"embedded": ["most_tensor", "experts"]}),
        (single("4xL4", 4, 32, "dp"), {"vllm": ["experts"], "embedded": ["most_tensor", "experts"]}),
        (pipeline((("1xL4", 1),), (("1xA10G", 1),)), {"embedded": ["pipelines"], "openai": ["pipelines"]}),
        (
            pipeline((("1xL4", 1),), (("1xA10G", 1), ("1xA10G", 1))),
            {
                "vllm": ["shared_stages"],
                "embedded": ["pipelines", "shared_stages"],
                "openai": ["pipelines", "shared_stages"],
            },
        ),
        (
            pipeline((("1xL4", 1),), (("2xL4", 2),)),
            {"vllm": ["unlike_degrees"], "embedded": ["pipelines", "most_tensor"], "openai": ["pipelines"]},
        ),
    ],
)
def test_engine_limits_of_each_layout_are_named(layout: Layout, lacking: dict[str, list[str]]) -> None:
    for name, engine in ENGINES.items():
        assert [limit.ability for limit in limits_of_layout(layout, engine)] == lacking.get(name, []), name
    assert list(limits_of_layout(layout, UNLIMITED)) == []


def test_recurrent_states_are_transferred_only_between_equal_tp_degrees() -> None:
    ask = a_demand("chat", HYBRID, 1.0, Slo(6.0, 0.1), ((2000, 200, 1.0),))
    offers = {"east": {"4xL40S": (8.0, 4), "2xH100": (13.0, 4), "8xL40S": (16.0, 2)}}
    problem = replace(a_problem(ask, offers=offers), engine=ENGINES["vllm"])
    factory = TemplateFactory(problem)
    degrees = {t.replicas[0].layout.stages[0].nodes[0].tp for t in factory.phased(ask)}
    assert len(degrees) == 1
    anywhere = TemplateFactory(replace(problem, engine=UNLIMITED)).phased(ask)
    assert len({t.replicas[0].layout.stages[0].nodes[0].tp for t in anywhere}) > 1, "else nothing is shown"
    for name in ("prfaas", "coral", "cauchy-ce", "cronus", "auto"):
        plan = STRATEGIES[name](factory, QUICK).plan
        assert refusals(plan, {"chat": ask.model}, ENGINES["vllm"]) == (), name
    template, two = (
        next(t for t in anywhere if t.replicas[0].role == role) for role in ("prefill", "decode")
    )
    wide = replace(two.replicas[0], layout=single("4xL40S", 4, ask.model.layer_count))
    narrow = replace(template.replicas[0], layout=single("2xH100", 2, ask.model.layer_count))
    apart = (replace(template, name="p", replicas=(narrow,)), replace(two, name="d", replicas=(wide,)))
    (line,) = refusals(_plan(*apart), {"chat": ask.model}, ENGINES["vllm"])
    assert line.startswith(
        "p to d: needs recurrent states handed over between unlike tensor-parallel degrees"
    )


def _plan(*templates: object) -> Plan:
    return Plan("auto", templates, (), (), (), (), (), 1.0, 0.0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wide_stage_plan() -> tuple[PlanningProblem, Plan]:
    """A problem whose cheapest plan has a stage that two nodes share."""
    ask = a_demand("chat", "Qwen3-32B", 1.0, Slo(6.0, 0.15), ((1000, 200, 1.0),))
    offers = {"east": {"1xL40S": (1.0, 4), "1xA10G": (0.3, 8), "2xL4": (0.5, 8)}}
    problem = a_problem(ask, offers=offers)
    return problem, STRATEGIES["coral"](TemplateFactory(problem), QUICK).plan


def test_verify_refuses_a_plan_that_the_engine_cannot_run(
    wide_stage_plan: tuple[PlanningProblem, Plan],
) -> None:
    problem, plan = wide_stage_plan
    assert verify(problem, plan) == ()
    violations = verify(replace(problem, engine=ENGINES["vllm"]), plan)
    assert any("which vLLM does not do" in line for line in violations), plan.deployments


def test_engine_cost_is_the_saving_of_a_plan_without_engine_limits(
    wide_stage_plan: tuple[PlanningProblem, Plan],
) -> None:
    problem, free = wide_stage_plan
    limited = replace(problem, engine=ENGINES["vllm"])
    factory, outcome, _ = planned_rest(STRATEGIES["coral"], TemplateFactory(limited), QUICK)
    cost = engine_cost(factory, outcome, STRATEGIES["coral"], QUICK, 0.0)
    assert cost is not None
    assert cost.saves_usd_per_h == pytest.approx(outcome.plan.total_usd_per_h - free.total_usd_per_h)
    assert cost.saves_usd_per_h > 0
    assert cost.line.startswith("pipelines with ")
    assert f"would save ${cost.saves_usd_per_h:.2f}/h" in cost.line
    hurried = engine_cost(factory, outcome, STRATEGIES["coral"], QUICK, 0.9 * QUICK.time_limit_s)
    assert hurried is not None
    assert not hurried.known
    assert "is unknown: no time was left" in hurried.line
    assert engine_cost(TemplateFactory(problem), outcome, STRATEGIES["coral"], QUICK, 0.0) is None


def test_engine_cost_line_names_ability_saving_and_capable_engines() -> None:
    about = EngineCost("vllm", "vLLM", ("pipelines with unlike tensor-parallel degrees",), 1.2)
    assert about.line == (
        "pipelines with unlike tensor-parallel degrees would save $1.20/h; no engine runs them"
    )
    more = replace(about, more_fraction=0.25, able=("embedded",), exact=False)
    assert more.line.endswith("would serve about 25.0% more of the demand; `engine: embedded` runs them")
    assert EngineCost("vllm", "vLLM").line == ""


def test_plan_file_without_an_engine_is_read_as_vllm(wide_stage_plan: tuple[PlanningProblem, Plan]) -> None:
    plan = wide_stage_plan[1]
    assert plan.engine == "any"
    body = json.loads(plan_to_json(plan))
    assert body["value"].pop("engine") == "any"
    assert plan_from_json(json.dumps(body)).engine == "vllm"


def _realistic(engine: EngineName) -> tuple[PlanningProblem, Plan]:
    spec = replace(load_spec(REALISTIC), engine=engine)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    assert problem.engine is ENGINES[engine]
    _, outcome, notes = planned_rest(STRATEGIES["auto"], TemplateFactory(problem), QUICK)
    assert notes == ()
    assert outcome.plan.engine == engine
    assert outcome.plan.fraction >= 1
    assert verify(problem, outcome.plan) == ()
    require_runnable(outcome.plan, spec, "plan.json")
    return problem, outcome.plan


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_realistic_example_is_planned_for_each_engine(engine: EngineName) -> None:
    _, plan = _realistic(engine)
    layouts = [replica.layout for template in plan.templates for replica in template.replicas]
    if engine == "embedded":
        assert all(len(layout.stages) == 1 and layout.stages[0].nodes[0].tp == 1 for layout in layouts)
    elif engine == "openai":
        assert {replica.role for template in plan.templates for replica in template.replicas} == {"mixed"}
        assert all(len(layout.stages) == 1 for layout in layouts)
        assert plan.flows == ()
    else:
        for layout in layouts:
            assert all(len(stage.nodes) == 1 for stage in layout.stages)
            assert len({stage.nodes[0].tp for stage in layout.stages}) == 1


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("embedded", "with the embedded engine; `engine: vllm` shards it over the GPUs of a node"),
        ("openai", "fit on no node on offer with a server of OpenAI's API; `engine: vllm` has"),
    ],
)
def test_unservable_reason_names_the_engine_when_a_model_fits_nowhere(engine: EngineName, words: str) -> None:
    node = "8xL4" if engine == "embedded" else "1xL4"
    ask = a_demand("documents", "Qwen3-32B", 1.0, Slo(4.0, 0.06), ((1000, 200, 1.0),))
    problem = replace(a_problem(ask, offers={"home": {node: (3.0, 1)}}), engine=ENGINES[engine])
    assert words in why_not(problem, "documents")


def test_engine_limits_of_a_model_are_named() -> None:
    lacking = {
        name: [limit.ability for limit in limits_of_model(models.model(name), ENGINES["embedded"])]
        for name in (
            "Llama-3.1-8B",
            "Qwen3.5-397B-A17B",
            "GPT-OSS-20B",
            "Kimi-Linear-48B-A3B",
            "MiniMax-M2.5",
        )
    }
    assert lacking["Llama-3.1-8B"] == lacking["Qwen3.5-397B-A17B"] == []
    assert set(lacking["GPT-OSS-20B"]) == {"sinks", "expert_bias"}
    assert set(lacking["Kimi-Linear-48B-A3B"]) == {"linear"}
    assert lacking["MiniMax-M2.5"] == ["full_norm"]


def test_disaggregated_strategies_are_refused_for_an_engine_without_kv_transfer() -> None:
    problem = replace(a_problem(), engine=ENGINES["openai"])
    for name in ("prfaas", "coral"):
        with pytest.raises(InputError, match=f"{name} hands KV over.*use auto, or `engine: vllm`"):
            STRATEGIES[name](TemplateFactory(problem), QUICK)


def test_engine_kind_with_a_single_missing_ability_yields_a_valid_plan() -> None:
    """An engine that only lacked unlike degrees would have nodes that share stages, and the other way round."""
    kinds = [
        replace(UNLIMITED, engine="vllm", **{name: False}) for name in ("unlike_degrees", "shared_stages")
    ]
    ask = a_demand("chat", "Qwen3-32B", 1.0, Slo(6.0, 0.15), ((1000, 200, 1.0),))
    offers = {"east": {"1xL40S": (1.0, 4), "1xA10G": (0.3, 8), "2xL4": (0.5, 8)}}
    for kind in kinds:
        assert isinstance(kind, EngineKind)
        problem = replace(a_problem(ask, offers=offers), engine=kind)
        plan = STRATEGIES["coral"](TemplateFactory(problem), QUICK).plan
        assert verify(problem, plan) == ()
