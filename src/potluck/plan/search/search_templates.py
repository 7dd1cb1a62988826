"""Convert the result of the tabu search to templates of the kind `group` on named machines.

Groups that share a machine or transfer KV to one another become one template of whole machines (`templates.group`),
timed again by `replica_rates` for each bucket.

THUNDERSERVE estimates D_ij by simulating each pair of replicas, which covers queues, links and batches with real
arrivals and lengths but takes most of a second. So the search uses the closed form (`evaluate`), and only the best
few distinct states it ends with are evaluated again by simulation, at the rate min(h P_i, h Q_j, R), and routed anew.
The simulation is passed in as an `Estimate`, as `plan` does not import the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck.core.values.layout import Layout, Pool, Stage, StageNode
from potluck.core.values.plan import PlannedReplica, Template
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.search.deduce import NAMES, PHASES, GroupConfiguration, StageTake, Takes
from potluck.plan.search.evaluate import (
    TIE_WEIGHT,
    GpuGroup,
    Orchestration,
    PoolEvaluator,
    PoolScore,
    PoolUse,
)
from potluck.plan.search.moves import without
from potluck.plan.search.tabu import SearchResult
from potluck.plan.templates.group import Attained, components, group_template, route


def replicas_of(pool: Pool, search_result: SearchResult) -> tuple[PlannedReplica, ...]:
    """The replicas of a search result, on named machines."""
    return tuple(
        PlannedReplica(NAMES[group.phase], layout_of(pool, configuration))
        for group, configuration in zip(search_result.state.groups, search_result.configurations, strict=True)
    )


def to_templates(
    problem: PlanningProblem,
    demand: ModelDemand,
    pool: Pool,
    search_result: SearchResult,
    attained: Attained | None = None,
) -> tuple[Template, ...]:
    """One template for each connected set of groups; sets that serve nothing are left out."""
    return templates_of(problem, demand, replicas_of(pool, search_result), attained)


def templates_of(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    attained: Attained | None = None,
) -> tuple[Template, ...]:
    """One template for each connected set of replicas, by the routing over all replicas in every bucket.

    KV is sent in the smallest allowed codec: 4 bits, as in THUNDERSERVE, if the spec allows it.
    """
    codec = problem.codecs[-1]
    routed_buckets = route(problem, demand, replicas, codec, attained)
    flows = {(i, j) for routed_bucket in routed_buckets for i, j, _ in routed_bucket.flows}
    active = {index for flow in flows for index in flow}
    active_indices = [index for index in range(len(replicas)) if index in active]
    new_index = {index: position for position, index in enumerate(active_indices)}
    members = [replicas[index] for index in active_indices]
    edges = [(new_index[i], new_index[j]) for i, j in flows]
    templates = [
        group_template(problem, demand, [members[index] for index in component], codec, attained)
        for component in components(members, edges)
    ]
    return tuple(template for template in templates if template is not None)


def layout_of(pool: Pool, group_configuration: GroupConfiguration) -> Layout:
    """The layout of a group's configuration on the pool's machines."""
    stages = []
    for stage in group_configuration.stages:
        node = pool.nodes[stage.node]
        stages.append(Stage(stage.layers, (StageNode(node.type.name, stage.tp, node.name),)))
    return Layout(tuple(stages))


def result_of_replicas(pool: Pool, replicas: Sequence[PlannedReplica]) -> SearchResult:
    """Running replicas as an unscored search result, the start of `reschedule`."""
    groups, configurations = [], []
    for replica in replicas:
        stages = tuple(
            StageTake(pool.index(stage.nodes[0].machine), stage.nodes[0].tp, stage.layers)
            for stage in replica.layout.stages
        )
        groups.append(GpuGroup(_takes(stages), PHASES[replica.role]))
        configurations.append(GroupConfiguration(stages, 0.0, 0.0, 0.0, 0, 0.0))
    used_gpus = _takes([stage for configuration in configurations for stage in configuration.stages])
    all_gpus = tuple((index, node.gpus) for index, node in enumerate(pool.nodes) if node.gpus)
    state = PoolUse(tuple(groups), without(all_gpus, used_gpus))
    no_score = PoolScore(0.0, 0.0, 0.0)
    return SearchResult(state, no_score, tuple(configurations), Orchestration(()), (), 0, 0, converged=True)


def attainment_trace(search_result: SearchResult) -> tuple[tuple[float, float], ...]:
    """(seconds, attainment) of each improvement of the search, without the tie-break of its score."""
    # A score is attained + w * attainable; both are equal until the whole demand is attained.
    return tuple(
        (at_s, min(1.0, max(0.0, value) / (1.0 + TIE_WEIGHT))) for at_s, value in search_result.trace
    )


def _takes(stages: Sequence[StageTake]) -> Takes:
    """GPUs by node of these stages."""
    counts: dict[int, int] = {}
    for stage in stages:
        counts[stage.node] = counts.get(stage.node, 0) + stage.tp
    return tuple(sorted(counts.items()))


Estimate = Callable[[PlannedReplica, PlannedReplica, float], float]
"""(prefill replica, decode or the same replica, requests/s) to the SLO attainment."""
MAX_ESTIMATED_STATES = 6  # States of a search that are evaluated by simulation.


def result_with_state(
    evaluator: PoolEvaluator, search_result: SearchResult, pool_use: PoolUse
) -> SearchResult:
    """The search result with another one of its final states."""
    configurations = tuple(
        item for group in pool_use.groups if (item := evaluator.deduced(group)) is not None
    )
    orchestration, score = evaluator.orchestrated(pool_use.groups), evaluator.score(pool_use.groups)
    return replace(
        search_result, state=pool_use, score=score, configurations=configurations, orchestration=orchestration
    )


def evaluate_with(
    evaluator: PoolEvaluator, search_result: SearchResult, estimate: Estimate
) -> tuple[SearchResult, Attained]:
    """(the search result with the best final state by `estimate`, the attainment of its pairs)."""
    attainment_of_pairs: dict[tuple[PlannedReplica, PlannedReplica], float] = {}
    best_result, best_attainments = search_result, None
    for state in (search_result.state, *search_result.others)[:MAX_ESTIMATED_STATES]:
        attainments = _matrix(evaluator, state, estimate, attainment_of_pairs)
        score, orchestration = evaluator.weighed(state.groups, attainments)
        if best_attainments is None or score > best_result.score:
            best_result = replace(
                result_with_state(evaluator, search_result, state), score=score, orchestration=orchestration
            )
            replicas = _replicas(evaluator, state)
            best_attainments = {
                (replicas[i].layout, replicas[j].layout): share for (i, j), share in attainments.items()
            }
    return best_result, best_attainments or {}


def _matrix(
    evaluator: PoolEvaluator,
    pool_use: PoolUse,
    estimate: Estimate,
    attainment_of_pairs: dict[tuple[PlannedReplica, PlannedReplica], float],
) -> dict[tuple[int, int], float]:
    """D by indices of groups; pairs with no attainment in closed form are not simulated."""
    replicas, closed_form = _replicas(evaluator, pool_use), evaluator.attained(pool_use.groups)
    pool_workload = evaluator.deducer.work
    attainments = {}
    for (i, j), closed_attainment in closed_form.items():
        pair = (replicas[i], replicas[j])
        if closed_attainment > 0.0 and pair not in attainment_of_pairs:
            slower_rate = min(_rate(evaluator, pool_use, place) for place in (i, j))
            attainment_of_pairs[pair] = estimate(
                *pair, min(pool_workload.headroom * slower_rate, pool_workload.rate_per_s)
            )
        attainments[i, j] = attainment_of_pairs[pair] if closed_attainment > 0.0 else 0.0
    return attainments


def _rate(evaluator: PoolEvaluator, pool_use: PoolUse, place: int) -> float:
    """Requests/s of a group; 0 without a configuration."""
    configuration = evaluator.deduced(pool_use.groups[place])
    return 0.0 if configuration is None else configuration.rate_per_s


def _replicas(evaluator: PoolEvaluator, pool_use: PoolUse) -> list[PlannedReplica]:
    """The replicas of a state."""
    replicas = []
    for group in pool_use.groups:
        configuration = evaluator.deduced(group)
        assert configuration is not None, "a state with a score has configurations"
        replicas.append(PlannedReplica(NAMES[group.phase], layout_of(evaluator.deducer.pool, configuration)))
    return replicas
