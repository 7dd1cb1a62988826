"""Capacities of each kind of template within the objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pipelines

from potluck.catalog import nodes
from potluck.core.errors import CapacityError
from potluck.core.routing.capacity import MARGIN
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Template
from potluck.core.values.types import Slo
from potluck.perf.phases import prefill_s
from potluck.perf.throughput import MAX_TPOT_SHARE
from potluck.perf.timers.pipeline_timer import layout_requests
from potluck.plan.templates.combo import combos, efficiency_tokens_per_usd, served_per_s
from potluck.plan.templates.homogeneous import homogeneous
from potluck.plan.templates.pair import pairs
from potluck.plan.templates.placement_table import aggregated
from potluck.plan.timing.rate_cache import memory_rate_cache
from potluck.plan.timing.replica_rates import fits, layout_timer, replica_capacity, wait_factor
from potluck.plan.timing.stage_rates import UNITS_PER_TOKEN, stage_rates
from potluck.plan.verify import retimed

ASK = a_demand()
PROBLEM = a_problem(ASK)
PRICES = {o.node: o.price_usd_per_h for o in PROBLEM.regions[0].offers}
SINGLE = homogeneous(PROBLEM, ASK, memory_rate_cache(ASK))


def templates_of_role(role: str) -> list[Template]:
    return [template for template in SINGLE if template.replicas[0].role == role]


def test_single_templates_exist_for_every_role_and_offer_one_phase_each() -> None:
    assert templates_of_role("mixed")
    assert templates_of_role("prefill")
    assert templates_of_role("decode")
    for template in SINGLE:
        assert len(template.capacity) == len(ASK.buckets)
        for capacity in template.capacity:
            rates = (capacity.prefill_per_s, capacity.decode_per_s, capacity.closed_per_s)
            assert sum(rate > 0 for rate in rates) <= 1


def test_prefill_capacity_keeps_ttft_including_queueing() -> None:
    for template in templates_of_role("prefill"):
        timer = layout_timer(ASK, template.replicas[0].layout, PROBLEM.by_name)
        for capacity, demand in zip(template.capacity, ASK.buckets, strict=True):
            alone_s = float(prefill_s(timer, demand.new_tokens)[0])
            if capacity.prefill_per_s:
                queued_s = (
                    (wait_factor(PROBLEM.headroom) - 1.0) * len(template.replicas) / capacity.prefill_per_s
                )
                assert capacity.ttft_s >= (alone_s + queued_s) * (1 - 1e-9)
                assert not demand.promised or capacity.ttft_s <= ASK.slo.ttft_s
                assert capacity.prefill_per_s >= len(template.replicas) / alone_s * (1 - 1e-9)
    assert wait_factor(0.5) == pytest.approx(1.5)


def test_prefill_capacity_equals_the_pipeline_library_rate() -> None:
    """Both take as many prompts into a step as there is room for."""
    template = next(t for t in templates_of_role("prefill") if t.nodes[0].node == "1xH100-SXM")
    for demand, capacity in zip(ASK.buckets, template.capacity, strict=True):
        rates, _ = stage_rates(
            ASK.model,
            [PROBLEM.by_name["1xH100-SXM"]],
            ASK.slo,
            demand.new_tokens,
            demand.output_tokens,
            max_stages=1,
        )
        tokens_per_s = rates.units[0, 0, -1] / UNITS_PER_TOKEN
        if capacity.prefill_per_s and not demand.cached_tokens:
            assert capacity.prefill_per_s * demand.new_tokens == pytest.approx(tokens_per_s, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["2xA100-80", "4xA100-40", "4xA6000", "8xL4", "4xL40S", "2xH100"]),
    st.integers(200, 12_000),
    st.booleans(),
)
def test_prefill_capacity_is_bounded_by_kv_memory(name: str, prompt: int, staged: bool) -> None:
    """Weights that leave room for a token may not for a prompt, whole or the first part of one."""
    ask = a_demand(model="Llama-3.1-70B", slo=Slo(60.0, 0.5), lengths=((prompt, 100, 1.0),))
    node = nodes.node_type(name)
    layout = single(node.name, node.gpus, ask.model.layer_count)
    if staged:
        half = ask.model.layer_count // 2
        members = (StageNode(node.name, max(1, node.gpus // 2)),)
        layout = Layout((Stage(half, members), Stage(ask.model.layer_count - half, members)))
    try:
        room = layout_requests(ask.model, layout, {node.name: node}, float(prompt))
    except CapacityError:
        room = 0
    assert fits(ask, layout, {node.name: node}) == (room > 0)
    if room > 0:
        (capacity,) = replica_capacity(ask, layout, {node.name: node}, "prefill", 0.8)
        alone_s = float(prefill_s(layout_timer(ask, layout, {node.name: node}), prompt)[0])
        assert capacity.prefill_per_s <= room / alone_s * (1 + 1e-9)


def test_prefill_capacity_is_zero_for_lengths_that_do_not_fit() -> None:
    ask = a_demand(model="Llama-3.1-70B", slo=Slo(60.0, 0.5), lengths=((500, 100, 0.5), (6000, 100, 0.5)))
    node = nodes.node_type("2xA100-80")
    rates = replica_capacity(
        ask, single(node.name, 2, ask.model.layer_count), {node.name: node}, "prefill", 0.8
    )
    assert [rate.prefill_per_s > 0 for rate in rates] == [True, False]


def test_tight_objective_leaves_only_templates_that_meet_it() -> None:
    tight = a_demand(slo=Slo(0.12, 0.02))
    names = {
        t.nodes[0].node
        for t in homogeneous(a_problem(tight), tight, memory_rate_cache(tight))
        if t.replicas[0].role == "decode"
    }
    assert names == {"1xH100-SXM"}


def test_combo_capacity_is_that_of_its_slower_side() -> None:
    two_sided = [t for t in combos(PROBLEM, ASK, SINGLE, PRICES) if len({r.role for r in t.replicas}) == 2]
    assert two_sided
    for template in two_sided:
        for claimed, real in zip(template.capacity, retimed(PROBLEM, ASK, template), strict=True):
            assert claimed.closed_per_s == pytest.approx(real.closed_per_s)


def test_combos_keep_only_the_better_direction_of_a_type_pair() -> None:
    result = combos(PROBLEM, ASK, SINGLE, PRICES)
    directions: dict[frozenset[str], set[str]] = {}
    for template in result:
        if "->" in template.name:
            first, second = (part.split()[-1] for part in template.name.split(": combo ")[1].split(" -> "))
            if first != second:
                directions.setdefault(frozenset((first, second)), set()).add(first)
    assert directions
    assert all(len(firsts) == 1 for firsts in directions.values())


def test_efficiency_is_tokens_per_dollar() -> None:
    template = templates_of_role("mixed")[0]
    rate = served_per_s(ASK, template)
    time = sum(
        bucket.rate_per_s / c.closed_per_s for bucket, c in zip(ASK.buckets, template.capacity, strict=True)
    )
    assert rate == pytest.approx(ASK.rate_per_s / time)
    tokens = ASK.tokens_per_s / ASK.rate_per_s
    want = rate * tokens * 3600 / PRICES[template.nodes[0].node]
    assert efficiency_tokens_per_usd(ASK, template, PRICES) == pytest.approx(want)


def test_pair_capacity_is_never_below_its_high_end_replica_alone() -> None:
    alone = {t.nodes[0].node: t for t in templates_of_role("mixed")}
    result = pairs(PROBLEM, ASK, SINGLE, memory_rate_cache(ASK))
    assert result
    better = 0
    for template in result:
        for mine, other_capacity in zip(
            template.capacity, alone[template.nodes[1].node].capacity, strict=True
        ):
            if mine.closed_per_s:
                assert mine.closed_per_s >= other_capacity.closed_per_s * (1 - 1e-9)
                better += mine.closed_per_s > other_capacity.closed_per_s * 1.01
                assert not ASK.buckets[mine.bucket].promised or mine.ttft_s <= ASK.slo.ttft_s * (1 + 1e-9)
                assert mine.tpot_s <= ASK.slo.tpot_s * (1 + 1e-9)
    assert better, "a low-end GPU should relieve at least one high-end one"


def test_pipelines_serve_a_model_that_fits_no_single_node() -> None:
    big = a_demand("big", "Qwen3-32B", 0.5, Slo(6.0, 0.15))
    problem = a_problem(big, offers={"east": {"1xL40S": (1.86, 8), "1xA10G": (1.0, 16)}})
    prices = {"1xL40S": 1.86, "1xA10G": 1.0}
    assert not homogeneous(problem, big, memory_rate_cache(big))
    result = pipelines(problem, big, prices, few=20)
    assert {t.replicas[0].role for t in result} == {"prefill", "decode"}
    for template in result:
        layout = template.replicas[0].layout
        assert layout.layer_count == big.model.layer_count
        assert {n.node: n.count for n in template.nodes} == layout.node_counts
    assert [t for t in result if len(t.nodes) > 1], "pipelines of unlike nodes are the point"
    both = list(aggregated(problem, big, result, memory_rate_cache(big)))
    assert both
    assert len({t.name for t in both}) == len({t.replicas[0].layout for t in both}) == len(both)
    for template in both:
        assert template.replicas[0].role == "mixed"
        assert retimed(problem, big, template) == template.capacity
        for capacity in template.capacity:
            assert capacity.prefill_per_s == capacity.decode_per_s == 0.0
            assert capacity.tpot_s <= MAX_TPOT_SHARE * big.slo.tpot_s


@settings(max_examples=15)
@given(st.floats(0.3, 5.0), st.floats(0.02, 0.2), st.floats(1.05, 3.0))
def test_looser_objective_never_lowers_capacity(ttft_s: float, tpot_s: float, looser: float) -> None:
    few = {"east": {"1xL40S": (1.86, 8), "2xL4": (1.6, 8)}}
    tight, loose = a_demand(slo=Slo(ttft_s, tpot_s)), a_demand(slo=Slo(ttft_s * looser, tpot_s * looser))
    before = {t.name: t for t in homogeneous(a_problem(tight, offers=few), tight, memory_rate_cache(tight))}
    best: dict[tuple[str, str, int], float] = {}
    for template in homogeneous(a_problem(loose, offers=few), loose, memory_rate_cache(loose)):
        for c in template.capacity:
            key = (template.nodes[0].node, template.replicas[0].role, c.bucket)
            best[key] = max(best.get(key, 0.0), c.prefill_per_s + c.decode_per_s + c.closed_per_s)
    for template in before.values():
        for c in template.capacity:
            key = (template.nodes[0].node, template.replicas[0].role, c.bucket)
            assert best.get(key, 0.0) >= (c.prefill_per_s + c.decode_per_s + c.closed_per_s) * (1 - 1e-9)


def test_mixed_pipeline_keeps_its_objective_and_gains_from_stages() -> None:
    """Two halves on two nodes have twice the memory and turn about: more than one node, at most about twice it."""
    problem = a_problem(a_demand(lengths=((1000, 200, 1.0),)), offers={"east": {"1xL40S": (1.9, 2)}})
    ask, name = problem.demands[0], "1xL40S"
    whole = Layout((Stage(32, (StageNode(name, 1),)),))
    halves = Layout(tuple(Stage(16, (StageNode(name, 1),)) for _ in range(2)))
    capacity = replica_capacity(ask, whole, problem.by_name, "mixed", 0.8)[0]
    two = replica_capacity(ask, halves, problem.by_name, "mixed", 0.8)[0]
    assert capacity.closed_per_s < two.closed_per_s < 2.6 * capacity.closed_per_s
    assert 0 < two.tpot_s <= ask.slo.tpot_s
    assert 0 < two.ttft_s <= ask.slo.ttft_s
    tight = replace(ask, slo=Slo(ask.slo.ttft_s, two.tpot_s / 2))
    less = replica_capacity(tight, halves, problem.by_name, "mixed", 0.8)[0]
    assert less.closed_per_s < two.closed_per_s
    assert less.tpot_s <= MARGIN * tight.slo.tpot_s  # its turns are as long when it has little to do
