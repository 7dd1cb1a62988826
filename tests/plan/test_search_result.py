"""Rescheduling of loaded groups, and search results as templates and a plan."""

from __future__ import annotations

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from plan_problems import pool_problem
from search_pools import CODING, catalog_node, paper_pool, workload

from potluck.catalog import models
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.types import LengthBin, Slo, Traffic
from potluck.plan.problem import ModelDemand, model_demand
from potluck.plan.search.moves import joined
from potluck.plan.search.search_templates import (
    attainment_trace,
    replicas_of,
    result_of_replicas,
    to_templates,
)
from potluck.plan.search.tabu import (
    SearchLimits,
    SearchResult,
    SearchSettings,
    flipped,
    groups_left,
    reschedule,
    search,
)
from potluck.plan.search.workload import CalibratedCosts, Pool, uniform_pool, workload_of

QUICK = SearchSettings(
    timing=PeakCosts(), limits=SearchLimits(walks=4, patience=30), phases=("prefill", "decode")
)


@pytest.fixture(scope="module")
def conversation() -> SearchResult:
    return search(paper_pool(), workload(), SearchSettings(**{**_fields(QUICK), "max_group_gpus": 4}))


def _fields(settings: SearchSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__slots__}


def test_rescheduling_after_a_node_loss_flips_roles_without_reloading(conversation: SearchResult) -> None:
    pool, work = paper_pool(), workload()
    survivors = groups_left(pool, conversation, {"A6000-0": 4})
    next_result = reschedule(survivors, conversation, work, QUICK)
    loaded = [mine.stages for mine in conversation.configurations]
    assert all(mine.stages in loaded for mine in next_result.configurations)
    assert all(node != 0 for group in next_result.state.groups for node, _ in group.takes)
    for mine in next_result.configurations:
        assert all(stage.node != 0 for stage in mine.stages)
    everything = joined([*(group.takes for group in next_result.state.groups), next_result.state.idle])
    assert everything == tuple((i, node.gpus) for i, node in enumerate(survivors.pool.nodes) if node.gpus)
    assert next_result.score.attainment <= conversation.score.attainment
    stay = reschedule(
        survivors, conversation, work, SearchSettings(**{**_fields(QUICK), "limits": SearchLimits(steps=0)})
    )
    assert next_result.score.value >= stay.score.value


def test_rescheduling_for_coding_traffic_flips_roles_towards_prefill(conversation: SearchResult) -> None:
    nothing_lost = groups_left(paper_pool(), conversation, {})
    next_result = reschedule(nothing_lost, conversation, workload(lengths=CODING), QUICK)
    changes = flipped(conversation, next_result)
    assert changes
    assert sum(new == 0 for _, _, new in changes) > sum(new == 1 for _, _, new in changes)


def test_rescheduling_after_random_losses_serves_or_is_refused(conversation: SearchResult) -> None:
    pool, work = paper_pool(), workload()
    rng = np.random.default_rng(5)
    served = refused = 0
    for _ in range(40):
        lost = {node.name: int(rng.integers(0, node.gpus + 1)) for node in pool.nodes}
        survivors = groups_left(pool, conversation, lost)
        used = joined(conversation.state.groups[place].takes for place in survivors.kept)
        assert all(count <= survivors.pool.nodes[node].gpus for node, count in used)
        try:
            next_result = reschedule(survivors, conversation, work, QUICK)
        except CapacityError:
            refused += 1
            continue
        served += 1
        assert 0 < next_result.score.attainment <= 1
        assert next_result.orchestration.goodput_per_s == pytest.approx(
            next_result.score.attainment * work.rate_per_s
        )
    assert served
    assert refused
    nearly_all = groups_left(
        pool, conversation, {node.name: node.gpus for node in pool.nodes[1:]} | {"A6000-0": 3}
    )
    with pytest.raises(CapacityError, match="no group that is left"):
        reschedule(nearly_all, conversation, work, QUICK)


def test_rescheduling_accepts_named_dead_groups(conversation: SearchResult) -> None:
    pool = paper_pool()
    node = conversation.state.groups[0].takes[0][0]
    assert 0 not in groups_left(pool, conversation, {pool.nodes[node].name: 1}, dead=[0]).kept
    with pytest.raises(InputError, match="beyond the"):
        groups_left(pool, conversation, {}, dead=[99])


def chat_problem() -> tuple[Pool, ModelDemand]:
    pool = uniform_pool([catalog_node("a", "A40", 4), catalog_node("b", "RTX3090Ti", 4)], 40.0)
    traffic = Traffic("chat", 6.0, (LengthBin(300, 250, 0.6), LengthBin(1500, 200, 0.4)))
    return pool, model_demand("chat", models.model("Llama-3.1-8B"), Slo(2.0, 0.06), traffic)


@pytest.mark.parametrize("phases", [("prefill", "decode"), ("prefill", "decode", "mixed")])
def test_search_result_templates_use_whole_machines(phases: tuple[str, ...]) -> None:
    pool, wanted = chat_problem()
    settings = SearchSettings(
        phases=phases, timing=CalibratedCosts(), limits=SearchLimits(walks=3, patience=30)
    )
    result = search(pool, workload_of(wanted, "int4"), settings)
    templates = to_templates(pool_problem(pool, wanted), wanted, pool, result)
    assert {template.kind for template in templates} == {"group"}
    stood = [machine for template in templates for machine in template.machines]
    assert len(stood) == len(set(stood)), "two templates share a machine"
    for template in templates:
        assert sum(node.count for node in template.nodes) == len(template.machines)
        assert {replica.layout.layer_count for replica in template.replicas} == {wanted.model.layer_count}
        for machine, gpus in template.machines.items():
            assert gpus <= pool.nodes[pool.index(machine)].gpus


def test_running_replicas_convert_back_to_the_search_state() -> None:
    pool, wanted = chat_problem()
    result = search(
        pool, workload_of(wanted, "int4"), SearchSettings(limits=SearchLimits(walks=2, patience=20))
    )
    again = result_of_replicas(pool, replicas_of(pool, result))
    assert again.state == result.state
    assert [c.stages for c in again.configurations] == [c.stages for c in result.configurations]


def test_search_trace_is_attainment_and_never_falls() -> None:
    pool, wanted = chat_problem()
    result = search(
        pool, workload_of(wanted, "int4"), SearchSettings(limits=SearchLimits(walks=2, patience=20))
    )
    values = [value for _, value in attainment_trace(result)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(result.score.attainment, abs=1e-3)
    assert all(0 <= value <= 1 for value in values)
