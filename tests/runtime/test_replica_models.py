"""Replica sizes and facts derived from a plan agree with `perf`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_fleets import (
    LLAMA,
    MODEL,
    NODES,
    SLOW,
    closed_plan,
    combo,
    flow_plan,
    load,
    mixed,
    pair,
    prefill_only,
    problem,
)

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError, UnknownNameError
from potluck.core.routing.link_states import LinkStates
from potluck.core.routing.opportunistic import step_seconds
from potluck.core.scaling.prfaas_scaling import ClusterBalance, rate_per_s
from potluck.core.scaling.roles import Flippable
from potluck.core.scaling.traffic_window import LengthCount
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.request_state import RequestState
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.model import Model
from potluck.core.values.plan import NodeCount, PlannedReplica, Template
from potluck.core.values.types import Codec, Request, Slo
from potluck.perf.memory import kv_bytes, state_bytes, weight_bytes
from potluck.perf.phases import decode_knees, decode_step_s, prefill_s
from potluck.perf.startup import from_place, startup_s
from potluck.perf.step_timer import steps
from potluck.perf.timers.pipeline_timer import PipelineTimer, layout_requests
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import codec_ratio, crossing_bytes
from potluck.plan.problem import CODECS, BucketDemand, ModelDemand
from potluck.plan.search.workload import PoolWorkload
from potluck.plan.templates.pair import _wire_bits
from potluck.plan.timing.network_cards import wire_bits
from potluck.runtime.replica_models import ReplicaModels, _model_facts, kv_of, places, total_blocks
from potluck.runtime.resolved_plan import DEFAULT_ENGINE, PROMPT_ENGINE, EngineSetup, ResolvedPlan
from potluck.sim.results.metrics import summarise
from potluck.sim.run import build, simulate

SOME = [models.model(name) for name in models.names()]


def facts_of(model: Model) -> ModelFacts:
    nothing: dict[str, Any] = {}
    resolved = SimpleNamespace(
        model=lambda name: model, slos=nothing, idle_s=nothing, mean_tokens=nothing, survive=nothing
    )
    return _model_facts(cast(Any, resolved), "m", 16)


@given(st.sampled_from(SOME), st.integers(1, 200_000), st.data())
def test_transferred_kv_bytes_equal_the_memory_model(model: object, tokens: int, data: st.DataObject) -> None:
    kv = kv_of(model)  # type: ignore[arg-type]
    whole = kv.wire_bytes(0, tokens)
    assert whole == pytest.approx(kv_bytes(model, float(tokens)))  # type: ignore[call-overload]
    have = data.draw(st.integers(0, tokens))
    part = kv.wire_bytes(have, tokens)
    assert 0 <= part <= whole * (1 + 1e-9)
    assert (part == 0) == (have == tokens)
    small = kv.wire_bytes(have, tokens, "int4")
    if have < tokens:
        ratio = codec_ratio("int4", kv.kv_bits, latent=kv.latent)
        assert small == pytest.approx((part - kv.state_bytes) * ratio + kv.state_bytes)


@pytest.mark.parametrize("node", sorted(NODES))
@pytest.mark.parametrize("tokens", [500, 4000])
def test_kv_blocks_hold_as_many_requests_as_planned(node: str, tokens: int) -> None:
    layout = single(node, 1, LLAMA.layer_count)
    blocks = total_blocks(LLAMA, layout, NODES, tokens)
    assert blocks * 16 // tokens == pytest.approx(layout_requests(LLAMA, layout, NODES, tokens), abs=1)


def test_model_that_does_not_fit_is_refused() -> None:
    big = models.model("Llama-3.1-70B")
    with pytest.raises(CapacityError, match="does not fit"):
        total_blocks(big, single("1xL4", 1, big.layer_count), NODES, 1000)


def group(*parts: tuple[str, int, str], nodes: tuple[tuple[str, int], ...]) -> Template:
    half = LLAMA.layer_count // 2
    made = []
    for node, tp, machine in parts:
        stage_node = StageNode(node, tp, machine)
        made.append(
            PlannedReplica(
                "mixed", Layout((Stage(half, (stage_node,)), Stage(LLAMA.layer_count - half, (stage_node,))))
            )
        )
    counts = tuple(NodeCount(node, count) for node, count in nodes)
    return Template("g", "group", MODEL, counts, tuple(made), (), "measured")


def test_replicas_are_packed_onto_nodes_and_named_machines_stay_one() -> None:
    four = Template(
        "four",
        "homogeneous",
        MODEL,
        (NodeCount("4xL4", 2),),
        (PlannedReplica("mixed", single("4xL4", 2, LLAMA.layer_count)),) * 4,
        (),
        "measured",
    )
    assert places(four, NODES) == ((("4xL4", 0),), (("4xL4", 0),), (("4xL4", 1),), (("4xL4", 1),))
    named = group(("4xL4", 1, "b"), ("4xL4", 1, "a"), ("4xL4", 1, "b"), nodes=(("4xL4", 2),))
    first, second, third = places(named, NODES)
    assert first == third != second
    assert len(first) == 1, "both stages stand on one machine"
    parts = (("1xL4", 1, "c"), ("1xL4", 1, "d"), ("4xL4", 1, "a"), ("4xL4", 1, "b"))
    result = places(group(*parts, nodes=(("1xL4", 2), ("4xL4", 2))), NODES)
    assert len(set(result)) == 4, "machines of one type are apart, whatever those of another have taken"
    apart = group(("4xL4", 2, ""), nodes=(("4xL4", 2),))
    assert places(apart, NODES) == ((("4xL4", 0), ("4xL4", 1)),), "unnamed stages stand on nodes of their own"
    assert places(pair(), NODES) == ((("1xL4", 0),), (("1xH100-SXM", 0),))


def test_decode_time_of_a_pipeline_counts_all_its_batches() -> None:
    """Two stages make answers of two batches at once: twice as many as one batch alone, in hardly more time."""
    half = LLAMA.layer_count // 2
    stages = tuple(Stage(layers, (StageNode("1xL4", 1),)) for layers in (half, LLAMA.layer_count - half))
    piped = Template(
        "p",
        "pipeline",
        MODEL,
        (NodeCount("1xL4", 2),),
        (PlannedReplica("decode", Layout(stages)),),
        (),
        "measured",
    )
    plan = closed_plan((piped, "east", 1))
    replica_models = ReplicaModels(replace(problem(plan), slos={MODEL: Slo(2.0, 0.08)}))
    replica_models.learn(plan)
    facts, timer = replica_models.facts().replicas["p", 0], replica_models.replica_models["p", 0].timer
    assert isinstance(timer, PipelineTimer)
    prompt, answer = replica_models.resolved.mean_tokens[MODEL]
    part = steps(
        decodes=facts.decode_batch / 2, decode_context=facts.decode_batch / 2 * (prompt + answer / 2)
    )
    interval_s, way_s = float(timer.interval_s(part)[0]), float(timer.step_s(part)[0])
    assert facts.decode_step_s == pytest.approx(max(way_s, 2 * interval_s), rel=0.01)
    assert facts.decode_step_s <= 0.08


def test_decode_steps_of_a_mixture_of_experts_are_interpolated_between_knees() -> None:
    """A few requests read nearly all experts: a straight line would have steps of 20 half as long as they are."""
    timer = roofline(models.model("GPT-OSS-20B"), nodes.node_type("1xA10"), 1)
    batch, context = 128, 600.0
    knees = decode_knees(timer, batch, context)
    assert knees
    first_s, full_s = (float(decode_step_s(timer, count, context)[0]) for count in (1, batch))
    facts = ReplicaFacts(1e-4, 0.0, full_s, batch, 1000, 10_000, first_s, decode_knees=knees)
    for count in range(1, batch + 1, 9):
        real_s = float(decode_step_s(timer, count, context)[0])
        assert step_seconds(facts, count) == pytest.approx(real_s, rel=0.1)
    assert step_seconds(replace(facts, decode_knees=()), 20) < 0.6 * step_seconds(facts, 20)
    assert decode_knees(roofline(LLAMA, nodes.node_type("1xL4"), 1), 16, context) == ()
    few = facts.with_slots(20)
    for count in (1, 7, 20):
        assert step_seconds(few, count) == pytest.approx(step_seconds(facts, count)), "it is no faster"
    assert step_seconds(few, 40) == pytest.approx(2 * few.decode_step_s), "the others wait"
    assert facts.with_slots(0) == facts.with_slots(batch + 1) == facts


def test_replica_facts_have_times_and_memory_of_the_replica() -> None:
    plan = closed_plan((pair(), "east", 1), (mixed(), "east", 1))
    replica_models = ReplicaModels(problem(plan))
    replica_models.learn(plan)
    facts = replica_models.facts()
    assert set(facts.replicas) == {("chat: pair", 0), ("chat: pair", 1), ("chat: mixed 1xH100", 0)}
    assert set(facts.splits) == {"chat: pair"}
    for key, fact in facts.replicas.items():
        replica_model = replica_models.replica_models[key]
        guess = fact.prefill_fixed_s + fact.prefill_s_per_token * 4000
        assert guess == pytest.approx(float(prefill_s(replica_model.timer, 4000)[0]), rel=0.25)
        assert fact.total_blocks == replica_model.total_blocks
        assert fact.max_tokens <= replica_model.total_blocks * 16
    assert facts.models[MODEL].kv_bytes_per_token == pytest.approx(kv_bytes(LLAMA, 1000.0) / 1000)
    assert not facts.models[MODEL].exact_prefix
    split = facts.splits["chat: pair"]
    assert split.k_p > 0
    assert split.chunk_tokens > 0
    replica_models.learn(closed_plan((combo(1, 1), "east", 1)))
    assert ("chat: combo 1P1D", 1) in facts.replicas, "the Brain's facts grow with a new plan"


def test_paced_engines_have_a_token_budget_that_fits_the_objective() -> None:
    plan = closed_plan((mixed(SLOW), "east", 1), (mixed(), "east", 1), (combo(1, 1, SLOW), "east", 1))
    paced = replace(problem(plan), paced=True, slos={MODEL: Slo(4.0, 0.12)})

    def engines(resolved: ResolvedPlan) -> dict[tuple[str, int], EngineSetup]:
        replica_models = ReplicaModels(resolved)
        replica_models.learn(plan)
        return {key: replica_model.engine for key, replica_model in replica_models.replica_models.items()}

    slow = ("chat: mixed 1xL4", 0)
    result = engines(paced)
    assert result[slow].slots <= result[slow].token_budget < DEFAULT_ENGINE.token_budget
    prompts = ("chat: combo 1P1D", 0)
    assert result.pop(prompts) == PROMPT_ENGINE, "no answers wait for its steps"
    assert all(engine == DEFAULT_ENGINE for key, engine in result.items() if key != slow), (
        "nobody waits there"
    )
    named = EngineSetup(token_budget=4096)
    assert engines(replace(paced, engines={slow: named}))[slow] == named
    assert (
        engines(replace(paced, paced=False))[slow] == engines(replace(paced, slos={}))[slow] == DEFAULT_ENGINE
    )


def test_paced_engines_attain_more_in_simulation() -> None:
    resolved = replace(problem(closed_plan((mixed(SLOW), "east", 3))), slos={MODEL: Slo(4.0, 0.12)})
    work = load(1000, 1.5, prompt=(50, 4000), output=(5, 120))
    kept = [
        summarise(simulate(replace(resolved, paced=paced), work)).models[0].attainment or 0.0
        for paced in (False, True)
    ]
    assert kept[1] > kept[0] + 0.03


def test_startup_time_depends_on_where_the_weights_are() -> None:
    plan = closed_plan((mixed(SLOW), "east", 1))
    resolved = problem(plan)

    def start_s(resolved: ResolvedPlan) -> float:
        replica_models = ReplicaModels(resolved)
        replica_models.learn(plan)
        (replica_model,) = replica_models.replica_models.values()
        return replica_model.startup_s

    usual = start_s(resolved)
    assert start_s(replace(resolved, startups={MODEL: from_place("cache", None)})) < usual
    assert start_s(replace(resolved, startups={MODEL: from_place("store", None)})) > usual
    fast = from_place("store", 100.0)
    assert start_s(replace(resolved, startups={MODEL: fast})) == pytest.approx(
        startup_s(weight_bytes(LLAMA), 1, fast).total_s
    )


def test_idle_time_of_a_model_is_one_of_its_facts() -> None:
    plan = closed_plan((mixed(SLOW), "east", 1))
    replica_models = ReplicaModels(replace(problem(plan), idle_s={MODEL: 60.0}))
    replica_models.learn(plan)
    assert replica_models.facts().models[MODEL].idle_s == 60.0


def test_unknown_models_and_regions_are_refused() -> None:
    plan = flow_plan((prefill_only(), "west", 1), (mixed(), "east", 1))
    broken = problem(plan)
    with pytest.raises(UnknownNameError, match="plan: model"):
        ReplicaModels(type(broken)(plan, {}, broken.nodes, broken.regions)).learn(plan)
    work = load(5)
    with pytest.raises(UnknownNameError, match="workload: model"):
        build(problem(plan), type(work)(("other",), work.arrival_s, work.model, work.prompt_tokens,
                                        work.output_tokens, work.priority))  # fmt: skip
    with pytest.raises(CapacityError, match="deploys nothing"):
        simulate(problem(closed_plan()), work)


def test_e2e_objective_tightens_the_admission_limits() -> None:
    plan = closed_plan((mixed(), "east", 1))
    for e2e_s, factor in ((None, None), (1e6, 1.0), (7.3, 0.5)):
        resolved = replace(problem(plan), slos={MODEL: Slo(2.0, 0.06, e2e_s=e2e_s)})
        replica_models = ReplicaModels(resolved)
        replica_models.learn(plan)
        model = replica_models.facts().models[MODEL]
        assert model.slo == resolved.slos[MODEL], "which is what answers are held to"
        if factor is None:
            assert model.limits is None
        else:  # 2 s and 210 gaps of 0.06 s are 14.6 s
            assert model.limits is not None
            assert model.limits.tpot_s == pytest.approx(0.06 * factor)
            assert model.limits.ttft_s == pytest.approx(2.0 * factor)


FAST = ReplicaFacts(1e-12, 0.0, 1e-9, 64, 10**9, 10**9)


def scaled_bytes(facts: object, tokens: int, codec: Codec) -> float:
    """What the scaler reckons one prompt puts on a link: the rate of a link that is the only limit."""
    local = (Flippable("d", "here", "decode", 0, 1e12, 1e12, FAST),)
    cluster_balance = ClusterBalance(Counter({FAST: 1}), local, 1e3, facts, codec)  # type: ignore[arg-type]
    return 1e3 / rate_per_s(cluster_balance, (LengthCount(tokens, tokens + 1, 1, tokens),), 0, [True])


@given(st.sampled_from(SOME), st.sampled_from(CODECS), st.integers(1, 130_000))
def test_all_packages_count_the_same_transfer_bytes(model, codec: Codec, tokens: int) -> None:
    sent = kv_of(model).wire_bytes(0, tokens, codec)
    held = kv_bytes(model, float(tokens))
    assert crossing_bytes(model, held, codec) == pytest.approx(sent)
    facts = facts_of(model)
    assert facts.wire_bytes(tokens, codec) == pytest.approx(sent)
    assert scaled_bytes(facts, tokens, codec) == pytest.approx(sent)
    links = LinkStates(FleetFacts({"m": facts}, {}))
    links.codecs["m", "a", "b"] = codec
    links.register_crossing(RequestState(Request("1", "m", 0.0, tokens, 1)), "a", "b", tokens)
    assert links.open_bytes == pytest.approx(sent)
    demand = BucketDemand(model.name, 0, tokens, tokens, 1, 0, 1.0, held)
    model_demand = ModelDemand(model.name, model, Slo(1.0, 1.0), (demand,))
    assert wire_bits(model_demand, codec)[0] / 8 == pytest.approx(sent)
    assert _wire_bits(model_demand, tokens, codec) / 8 == pytest.approx(sent)
    work = PoolWorkload(replace(model, max_context_tokens=200_000), Slo(1.0, 1.0), tokens, 1, 1.0, codec)
    assert work.kv_bytes_per_layer * model.layer_count == pytest.approx(sent)


@given(st.sampled_from(SOME), st.integers(1, 130_000))
def test_codecs_never_enlarge_kv_and_never_encode_the_state(model, tokens: int) -> None:
    sizes = [kv_of(model).wire_bytes(0, tokens, codec) for codec in CODECS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= state_bytes(model)


def test_state_of_a_hybrid_model_is_not_quantised() -> None:
    hybrids = [model for model in SOME if state_bytes(model) > 0]
    assert hybrids
    for model in hybrids:
        whole, small = (kv_of(model).wire_bytes(0, 8192, codec) for codec in ("fp16", "int4"))
        assert small / whole > 0.267
        assert scaled_bytes(facts_of(model), 8192, "int4") == pytest.approx(small)
