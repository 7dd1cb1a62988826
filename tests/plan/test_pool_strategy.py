"""Groups of named machines as columns of the program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pool_problem
from search_pools import catalog_node, random_pool

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, Pool, PoolNode, Stage, StageNode, uniform_pool
from potluck.core.values.plan import Deployment, PlannedReplica, TemplateFlow, plan_from_json, plan_to_json
from potluck.core.values.types import Codec, Slo
from potluck.plan.allocate.solve import solve
from potluck.plan.assemble.columns import columns, plan_of
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.templates.group import components, group_capacity, group_template, route
from potluck.plan.timing.named_machines import machine_of, named, region_pool
from potluck.plan.timing.network_cards import wire_bits
from potluck.plan.timing.replica_rates import replica_capacity
from potluck.plan.verify import verify

KINDS = ("A5000", "RTX3090Ti", "A40", "L4")
QUICK = SolveSettings(time_limit_s=4.0, gap_target=0.0)


@st.composite
def pools(draw: st.DrawFn) -> PlanningProblem:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    pool = random_pool(rng, draw(st.integers(2, 10)), KINDS)
    # Machines of one type in one region have one price.
    prices = {name: float(rng.uniform(0.3, 4.0)) for name in sorted({n.type.name for n in pool.nodes})}
    regions = ("pool", "far")[: draw(st.integers(1, 2))]
    nodes = tuple(
        replace(node, price_usd_per_h=prices[node.type.name], region=regions[i % len(regions)])
        for i, node in enumerate(pool.nodes)
    )
    wanted = a_demand(rate_per_s=draw(st.floats(0.5, 12.0)), slo=Slo(draw(st.floats(1.0, 4.0)), 0.08))
    return pool_problem(replace(pool, nodes=nodes), wanted)


@settings(max_examples=4)
@given(pools())
def test_auto_is_at_least_as_good_as_the_pool_search_and_both_are_sound(problem: PlanningProblem) -> None:
    factory = TemplateFactory(problem)
    best = STRATEGIES["auto"](factory, QUICK).plan
    names = ("thunderserve", "hexgen", "distserve")
    result, whole, alike = (STRATEGIES[name](factory, QUICK).plan for name in names)
    for plan in (best, result, whole, alike):
        assert verify(problem, plan) == ()
        assert plan_from_json(plan_to_json(plan)) == plan
        stood = [
            m for d in plan.deployments for m in plan.template(d.template).machines for _ in range(d.count)
        ]
        assert len(stood) == len(set(stood))
        assert best.fraction >= plan.fraction - 1e-6
        if plan.fraction >= 1 - 1e-9:
            assert best.cost_usd_per_h <= plan.cost_usd_per_h * (1 + 1e-6)
    for plan in (result, alike):  # as printed
        assert not any(replica.role == "mixed" for t in plan.templates for replica in t.replicas)
    assert all(replica.role == "mixed" for t in whole.templates for replica in t.replicas)
    assert len({problem.node(node).gpu.name for _, node in alike.nodes}) <= 1


def two_machines(gbps: float = 40.0) -> PlanningProblem:
    nodes = [replace(catalog_node(name, "A40", 4), price_usd_per_h=2.0) for name in ("a", "b")]
    return pool_problem(uniform_pool(nodes, gbps), a_demand(rate_per_s=2.0, lengths=((1000, 200, 1.0),)))


def replica_on(machine: str, tp: int = 4, role: str = "mixed", layers: int = 32) -> PlannedReplica:
    return PlannedReplica(role, Layout((Stage(layers, (StageNode("4xA40", tp, machine),)),)))  # type: ignore[arg-type]


def test_template_with_a_named_machine_is_deployed_at_most_once() -> None:
    """Two machines of the type are there, but a template that stands on one of them cannot be had twice."""
    problem = two_machines()
    wanted = replace(problem.demands[0], buckets=(replace(problem.demands[0].buckets[0], rate_per_s=1e4),))
    problem = replace(problem, demands=(wanted,))
    template = group_template(problem, wanted, [replica_on("a")], "fp16")
    rival = group_template(problem, wanted, [replica_on("a", 2), replica_on("a", 2)], "fp16")
    assert template is not None
    assert rival is not None
    program = columns(problem, {wanted.name: [template, rival]})
    plan = plan_of(program, solve(program.program, time_limit_s=5.0), "test")
    assert sum(deployment.count for deployment in plan.deployments) == 1
    assert verify(problem, plan) == ()


def test_verify_refuses_groups_that_exceed_their_machines() -> None:
    problem = two_machines()
    wanted = problem.demands[0]
    template = group_template(problem, wanted, [replica_on("a")], "fp16")
    assert template is not None
    program = columns(problem, {wanted.name: [template]})
    plan = plan_of(program, solve(program.program, time_limit_s=5.0), "test")
    assert verify(problem, plan) == ()

    def broken(**changes: object) -> str:
        changed = replace(template, **changes)  # type: ignore[arg-type]
        return "; ".join(verify(problem, replace(plan, templates=(changed,))))

    assert "4xA40 is named 'c'" in broken(replicas=(replica_on("c"),))
    assert "rents 1" in broken(replicas=(replica_on("a"), replica_on("b")))
    assert "rents 1" in broken(replicas=(replica_on("a"), replica_on("a")))
    assert "must name" in broken(replicas=(replica_on(""),))
    twice = replace(plan, deployments=(Deployment(template.name, "pool", 2),))
    assert any("'a'" in item for item in verify(problem, twice))
    moved = replace(problem.pool, nodes=tuple(replace(n, region="far") for n in problem.pool.nodes))  # type: ignore[type-var, union-attr]
    assert any("is in far" in item for item in verify(replace(problem, pool=moved), plan))
    greedy = tuple(replace(c, closed_per_s=c.closed_per_s * 1.01) for c in template.capacity)
    assert "closed_per_s" in broken(capacity=greedy)


def reference(
    problem: PlanningProblem, wanted: ModelDemand, replicas: list[PlannedReplica], codec: Codec
) -> float:
    """The closed rate of two replicas, prefill and decode, by hand: rates, the link, the objective."""
    from potluck.perf.transfer import alpha_beta, codec_ratio

    demand, h = wanted.buckets[0], problem.headroom
    first, second = (replica_capacity(wanted, r.layout, problem.by_name, r.role, h)[0] for r in replicas)
    sent = demand.kv_bytes * codec_ratio(codec, stored_bits=wanted.model.kv_bits)
    assert problem.pool is not None
    path = alpha_beta(problem.pool.gbps[0][1], problem.pool.rtt_s[0][1])
    if first.ttft_s + path.alpha_s + sent / path.beta_bytes_per_s > wanted.slo.ttft_s:
        return 0.0
    return min(first.prefill_per_s, second.decode_per_s, path.beta_bytes_per_s / sent / h)


@pytest.mark.parametrize("gbps", [100.0, 10.0, 2.0, 0.5, 0.1])
@pytest.mark.parametrize("codec", ["fp16", "int4"])
def test_thin_link_limits_the_capacity_of_a_replica_pair(gbps: float, codec: Codec) -> None:
    problem = two_machines(gbps)
    replicas = [replica_on("a", role="prefill"), replica_on("b", role="decode")]
    result = group_capacity(problem, problem.demands[0], replicas, codec)[0].closed_per_s
    assert result == pytest.approx(reference(problem, problem.demands[0], replicas, codec), rel=1e-6)


def test_kv_transfer_within_a_machine_does_not_use_the_network_link() -> None:
    def rate(gbps: float) -> float:
        problem = two_machines(gbps)
        stages = [Stage(16, (StageNode("4xA40", 2, name),)) for name in ("a", "b")]
        replicas = [
            PlannedReplica("prefill", Layout(tuple(stages))),
            PlannedReplica("decode", Layout(tuple(stages))),
        ]
        return group_capacity(problem, problem.demands[0], replicas, "fp16")[0].closed_per_s

    # KV of so many requests would need many times the link. Activations do cross it, and while they do, each machine
    # waits for the other's part of what is under way.
    assert rate(5.0) * float(wire_bits(two_machines(5.0).demands[0], "fp16")[0]) / 1e9 > 3 * 5.0
    assert rate(5.0) == pytest.approx(rate(100.0), rel=0.2)
    assert rate(5.0) > 0


def test_adding_replicas_never_lowers_routed_capacity() -> None:
    problem = two_machines(5.0)
    wanted = problem.demands[0]
    members = [
        replica_on("a", 2, "prefill"),
        replica_on("a", 2, "decode"),
        replica_on("b", 2, "decode"),
        replica_on("b", 2, "mixed"),
    ]
    last = 0.0
    for size in range(2, 5):
        routed = route(problem, wanted, members[:size], "int4")[0]
        assert routed.capacity.closed_per_s >= last - 1e-9
        last = routed.capacity.closed_per_s
        for place, replica in enumerate(members[:size]):
            rate = replica_capacity(wanted, replica.layout, problem.by_name, replica.role, problem.headroom)[
                0
            ]
            most = problem.headroom * max(rate.prefill_per_s, rate.decode_per_s, rate.closed_per_s)
            assert sum(f for i, j, f in routed.flows if place in (i, j)) <= most * (1 + 1e-9)


def test_components_join_replicas_that_share_a_machine_or_a_flow() -> None:
    members = [replica_on("a"), replica_on("b"), replica_on("b", 2), replica_on("c"), replica_on("d")]
    result = {frozenset(component) for component in components(members, [(3, 0)])}
    assert result == {frozenset({0, 3}), frozenset({1, 2}), frozenset({4})}


def test_machines_of_a_fleet_without_a_pool_are_named_by_region_type_and_index() -> None:
    problem = a_problem(offers={"us/east": {"1xL40S": (1.0, 2)}, "west": {"2xL4": (1.0, 1)}})
    pool = region_pool(problem, "us/east")
    assert pool is not None
    assert [node.name for node in pool.nodes] == ["us/east/1xL40S/0", "us/east/1xL40S/1"]
    for node in pool.nodes:
        machine = machine_of(problem, node.name)
        assert machine is not None
        assert (machine.region, machine.type.name) == ("us/east", "1xL40S")
    assert machine_of(problem, "us/east/1xL40S/2") is None
    assert machine_of(problem, "us/east/2xL4/0") is None
    whole = named(problem)
    assert [n.name for n in region_pool(whole, "west").nodes] == ["west/2xL4/0"]  # type: ignore[union-attr]
    assert named(whole) is whole


def test_thunderserve_searches_a_small_fleet_without_a_pool() -> None:
    problem = a_problem(offers={"home": {"1xL40S": (1.9, 2), "1xA10G": (1.0, 2)}})
    plan = STRATEGIES["thunderserve"](TemplateFactory(problem), QUICK).plan
    assert plan.fraction > 0
    assert verify(problem, plan) == ()


def test_pool_that_lost_machines_by_type_lacks_the_last_one() -> None:
    problem = two_machines()
    fewer = replace(problem.regions[0], offers=(replace(problem.regions[0].offers[0], available=1),))
    pool = region_pool(replace(problem, regions=(fewer,)), "pool")
    assert pool is not None
    assert [node.name for node in pool.nodes] == ["a"]


def test_pool_search_refuses_several_models_and_more_than_256_gpus() -> None:
    both = a_problem(a_demand("x"), a_demand("y"))
    huge = a_problem(offers={"home": {"8xH100": (20.0, 33)}})
    for name in ("thunderserve", "hexgen"):
        with pytest.raises(InputError, match=f"{name} plans one model at a time, not x, y; use auto"):
            STRATEGIES[name](TemplateFactory(both), QUICK)
        with pytest.raises(
            InputError, match=f"{name} takes at most 256 GPUs, there are 264; lower `available`"
        ):
            STRATEGIES[name](TemplateFactory(huge), QUICK)


def test_pool_plan_without_demand_rents_nothing() -> None:
    problem = pool_problem(two_machines().pool, a_demand(rate_per_s=0.0))  # type: ignore[arg-type]
    for name in ("thunderserve", "auto"):
        assert STRATEGIES[name](TemplateFactory(problem), QUICK).plan.deployments == ()


def test_pool_refuses_links_without_positive_bandwidth() -> None:
    pool = two_machines().pool
    assert pool is not None
    assert pool.with_link("a", "b", 7.0).gbps == ((40.0, 7.0), (40.0, 40.0))
    assert pool.only([1]).nodes[0].name == "b"
    with pytest.raises(InputError, match="positive"):
        Pool(
            (PoolNode("a", pool.nodes[0].type, 4), PoolNode("b", pool.nodes[0].type, 4)),
            ((0, 0), (1, 0)),
            pool.rtt_s,
        )


def test_verify_reports_template_flows_that_do_not_add_up_or_overload_a_replica() -> None:
    problem = two_machines()
    replicas = [replica_on("a", 2, "prefill"), replica_on("a", 2, "prefill"), replica_on("b", 4, "decode")]
    made = group_template(problem, problem.demands[0], replicas, "int4")
    assert made is not None
    assert sum(flow.share for flow in made.flows) == pytest.approx(1.0)
    result = columns(problem, {problem.demands[0].name: [made]})
    plan = plan_of(result, solve(result.program, time_limit_s=10.0), "test")
    assert verify(problem, plan) == ()

    def told(flows: tuple[TemplateFlow, ...]) -> str:
        return " ".join(verify(problem, replace(plan, templates=(replace(made, flows=flows),))))

    prefill = next(i for i, replica in enumerate(made.replicas) if replica.role == "prefill")
    decode = next(i for i, replica in enumerate(made.replicas) if replica.role == "decode")
    assert len(made.flows) == 2
    assert "add up to" in told(made.flows[:1])
    assert f"replica {prefill} gets" in told((TemplateFlow(0, prefill, decode, 1.0),))
