"""Weight formats as a choice of the planner, against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from json import dumps

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.catalog import models
from potluck.cli.engine.emulate import mock_model
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands, WeightFormats
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.values.layout import EmulatedReplica, single
from potluck.core.values.model import Format
from potluck.core.values.plan import Plan, plan_from_json, plan_to_json
from potluck.plan.current_problem import with_candidates
from potluck.plan.explain import explain
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.replan_options import at_once
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.variants import formats_of
from potluck.plan.verify import verify
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.spec.load_spec import parse_spec

ONE_LENGTH = ((1200.0, 150.0, 1.0),)
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "int4")
ROOMY: dict[str, tuple[float, int]] = {"1xL4": (0.8, 4), "1xA100-80": (2.0, 2), "1xL40S": (1.9, 2)}


def demand_with_formats(rate_per_s: float, formats: tuple[Format, ...], name: str = "chat") -> ModelDemand:
    first = a_demand(name, rate_per_s=rate_per_s, lengths=ONE_LENGTH).in_format(formats[0])
    return replace(first, formats=formats)


def solve_formats(problem: PlanningProblem, running_plan: Plan | None = None) -> PlanOutcome:
    return STRATEGIES["melange"](
        TemplateFactory(problem), SolveSettings(time_limit_s=20.0, running=running_plan)
    )


def cheapest_by_enumeration(problem: PlanningProblem) -> float | None:
    """Over every combination of formats and every number of copies; of aggregated replicas and one length."""
    (region,) = problem.regions
    price = {offer.node: offer.price_usd_per_h for offer in region.offers}
    there = {offer.node: offer.available for offer in region.offers}
    best: float | None = None
    for item in product(*(demand.variants for demand in problem.demands)):
        shop = TemplateFactory(replace(problem, demands=item))
        for chosen in product(*[list(_ways(shop, demand, problem.headroom, there)) for demand in item]):
            used = {node: sum(way.get(node, 0) for way in chosen) for node in there}
            if all(used[node] <= there[node] for node in there):
                cost = sum(price[node] * count for node, count in used.items())
                best = cost if best is None else min(best, cost)
    return best


def _ways(
    shop: TemplateFactory, demand: ModelDemand, headroom: float, there: dict[str, int]
) -> Iterator[dict[str, int]]:
    """Numbers of nodes that serve a model by itself, the best template of each type on all of them."""
    rate = dict.fromkeys(there, 0.0)
    for template in shop.mixed(demand):
        (count,) = template.nodes
        rate[count.node] = max(rate[count.node], template.capacity[0].closed_per_s)
    for counts in product(*(range(there[node] + 1) for node in there)):
        used = dict(zip(there, counts, strict=True))
        if sum(rate[node] * count for node, count in used.items()) * headroom >= demand.rate_per_s * (
            1 - 1e-9
        ):
            yield used


@given(
    rate_per_s=st.floats(0.5, 12.0),
    formats=st.permutations(FORMATS).flatmap(lambda all_: st.integers(1, 3).map(lambda n: tuple(all_[:n]))),
    prices=st.tuples(*(st.floats(0.3, 3.0) for _ in range(2))),
)
@settings(max_examples=8, deadline=None)
def test_chosen_format_equals_brute_force_and_no_single_format_is_cheaper(
    rate_per_s: float, formats: tuple[Format, ...], prices: tuple[float, float]
) -> None:
    offers = {"1xL4": (prices[0], 4), "1xA100-80": (prices[1], 2)}
    problem = a_problem(demand_with_formats(rate_per_s, formats), offers={"east": offers})
    result = solve_formats(problem)
    best = cheapest_by_enumeration(problem)
    assert (result.plan.fraction >= 1) == (best is not None)
    if best is None:
        return
    assert result.plan.cost_usd_per_h == pytest.approx(best, rel=1e-6)
    assert verify(problem, result.plan) == ()
    assert result.plan.format_of("chat") in formats
    for item in formats:
        alone = solve_formats(
            a_problem(demand_with_formats(rate_per_s, (item,)), offers={"east": offers})
        ).plan
        assert alone.fraction < 1 or result.plan.cost_usd_per_h <= alone.cost_usd_per_h * (1 + 1e-9)


def test_formats_of_two_models_are_chosen_jointly() -> None:
    """Nodes are few, so that what one takes the other lacks."""
    asks = demand_with_formats(5.0, ("bf16", "fp8")), demand_with_formats(4.0, ("fp8", "bf16"), "other")
    problem = a_problem(*asks, offers={"east": ROOMY})
    result = solve_formats(problem)
    assert result.plan.cost_usd_per_h == pytest.approx(cheapest_by_enumeration(problem), rel=1e-6)
    assert len(result.tried) == 4
    assert min(item.usd_per_h for item in result.tried if item.served_fraction >= 1) == pytest.approx(
        result.plan.total_usd_per_h
    )


def test_format_listed_first_is_chosen_when_costs_are_equal() -> None:
    for formats in (("bf16", "fp8"), ("fp8", "bf16")):
        problem = a_problem(demand_with_formats(0.1, formats), offers={"east": {"1xA100-80": (2.0, 2)}})
        assert solve_formats(problem).plan.formats == (("chat", formats[0]),)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    return a_problem(
        demand_with_formats(20.0, ("bf16", "fp8")), offers={"east": {"1xL40S": (1.9, 12), "1xL4": (1.9, 2)}}
    )


@pytest.fixture(scope="module")
def outcome(problem: PlanningProblem) -> PlanOutcome:
    plan_outcome = solve_formats(problem)
    assert plan_outcome.plan.formats == (("chat", "fp8"),), "an L40S has FP8 units"
    return plan_outcome


def test_plan_records_its_formats_and_verify_checks_them(
    problem: PlanningProblem, outcome: PlanOutcome
) -> None:
    plan = outcome.plan
    assert verify(problem, plan) == ()
    assert plan_from_json(plan_to_json(plan)) == plan
    assert any(
        "is not allowed by the spec" in item
        for item in verify(problem, replace(plan, formats=(("chat", "int4"),)))
    )
    assert any("names no weight format" in item for item in verify(problem, replace(plan, formats=())))
    slower = verify(problem, replace(plan, formats=(("chat", "bf16"),)))
    assert slower, "the same copies do less with larger weights"


def test_explanation_candidates_and_rerouting_keep_the_chosen_format(
    problem: PlanningProblem, outcome: PlanOutcome
) -> None:
    shop = TemplateFactory(problem)
    explanation = explain(shop, outcome, STRATEGIES["melange"], SolveSettings(time_limit_s=4.0))
    assert {item.formats for item in explanation.formats} == {(("chat", "bf16"),), (("chat", "fp8"),)}
    offered = with_candidates(shop, outcome.plan)
    settled = problem.in_formats(outcome.plan.formats).demands[0]
    own = {
        homogeneou.name: homogeneou.capacity
        for homogeneou in TemplateFactory(problem).with_formats_of(outcome.plan).homogeneous(settled)
    }
    assert any(each.name in own and each.capacity == own[each.name] for each in offered.candidates)
    rerouted, _ = at_once(problem, outcome.plan, SolveSettings(time_limit_s=2.0))
    assert rerouted.plan.formats == outcome.plan.formats
    assert rerouted.served_fraction == pytest.approx(1.0)


def test_replanning_keeps_the_format_of_a_running_plan(
    problem: PlanningProblem, outcome: PlanOutcome
) -> None:
    loaded = replace(outcome.plan, formats=(("chat", "bf16"),))
    assert formats_of(problem, loaded) == [(("chat", "bf16"),)]
    assert solve_formats(problem, running_plan=loaded).plan.formats == (("chat", "bf16"),)


def test_resolved_plan_has_the_model_in_its_planned_format(
    problem: PlanningProblem, outcome: PlanOutcome
) -> None:
    resolved = ResolvedPlan(
        outcome.plan, {"chat": problem.demands[0].model}, problem.by_name, problem.regions
    )
    assert resolved.model("chat").weights_are == "fp8"
    assert replace(resolved, plan=replace(outcome.plan, formats=())).model("chat").weights_are == "bf16"


def test_too_many_format_combinations_are_refused() -> None:
    asks = [demand_with_formats(1.0, FORMATS, f"m{place}") for place in range(4)]
    with pytest.raises(InputError, match="81 combinations"):
        solve_formats(a_problem(*asks))


# fmt: off
TOLD = [
    ("vllm", "bf16", "fp8", ["--quantization", "fp8_per_tensor"]), ("vllm", "mxfp4", "fp8", None),
    ("vllm", "bf16", "fp8_block", ["--quantization", "fp8_per_block"]), ("vllm", "fp8", "fp8", []),
    ("vllm", "bf16", "mxfp4", ["--quantization", "mxfp4"]), ("vllm", "bf16", "int4", None),
    ("vllm", "fp8", "bf16", None), ("gpu", "bf16", "fp8", None), ("gpu", "bf16", "bf16", []),
    ("mock", "bf16", "int4", ["1xL4:m@int4:1"]),
]
# fmt: on


@pytest.mark.parametrize(("style", "stored", "planned", "words"), TOLD)
def test_engine_command_sets_the_planned_format_or_refuses_one_it_cannot_make(
    style: str, stored: Format, planned: Format, words: list[str] | None
) -> None:
    weights = {"m": WeightFormats(planned, stored)}
    if words is None:
        with pytest.raises(InputError, match=f"{planned} of a checkpoint in {stored}"):
            EngineCommands(style, weights=weights)
        return
    command = EngineCommands(style, weights=weights).command(
        EngineSpec("m", single("1xL4", 1, 32), "east"), 1, 2
    )
    assert [word for word in words if word not in command] == []
    assert ("--quantization" in command) == ("--quantization" in words)


def test_checkpoint_with_quantized_experts_is_not_counted_as_bf16() -> None:
    """vLLM refuses `--quantization` for such a one when it starts."""
    assert models.model("GPT-OSS-120B").weights_are == "bf16"
    mostlies = [models.model(name).mostly for name in ("GPT-OSS-120B", "DeepSeek-V3", "Llama-3.1-8B")]
    assert mostlies == ["mxfp4", "fp8_block", "bf16"]


def test_emulated_engine_is_started_with_the_planned_format() -> None:
    emulated_replica = EmulatedReplica("Llama-3.1-8B", single("1xL40S", 1, 32), weights="int8")
    for text, weights in (
        ("1xL40S:llama-3.1-8b@fp8:1", "fp8"),
        ("1xL40S:llama-3.1-8b:1", "bf16"),
        (dumps(encode(emulated_replica)), "int8"),
    ):
        assert mock_model(text).model.weights_are == weights
    with pytest.raises(InputError, match="fp9"):
        mock_model("1xL40S:llama-3.1-8b@fp9:1")


SPEC = """
models:
  - model: Llama-3.1-8B
    slo: {{ttft_ms: 1000, tpot_ms: 50}}
    traffic: {{rate_per_s: 1, input: 100, output: 10}}
    precision: {precision}
fleet:
  regions:
    - name: here
      nodes: [{{node: 1xL4, available: 1, price_usd_per_h: 1}}]
"""


def test_spec_accepts_one_precision_or_a_list() -> None:
    (one,) = parse_spec(SPEC.format(precision="fp8").encode()).models
    both = parse_spec(SPEC.format(precision="[fp8, bf16]").encode())
    (two,) = both.models
    assert (one.formats, one.model.weights_are, one.stored) == (("fp8",), "fp8", "bf16")
    assert (two.formats, two.model.weights_are, two.stored) == (("fp8", "bf16"), "fp8", "bf16")
    settled = both.in_formats((("Llama-3.1-8B", "bf16"),))
    assert settled.models[0].model.weights_are == "bf16"
    some = parse_spec(SPEC.format(precision="[int4, bf16]").encode())
    assert some.models[0].formats == ("bf16",), "vLLM makes no int4 of 16 bits"
    assert "int4 left out" in some.notes[0]
    with pytest.raises(InputError, match="precision: needs int4 made of a checkpoint in bf16.*stored so"):
        parse_spec(SPEC.format(precision="int4").encode())
    anybody = parse_spec(f"engine: openai\n{SPEC.format(precision='int4')}".encode())
    assert anybody.models[0].formats == ("int4",)
    for wrong in ("[]", "[fp8, fp8]", "fp9", "3"):
        with pytest.raises(InputError, match="precision"):
            parse_spec(SPEC.format(precision=wrong).encode())
