"""What the search found, in the planner's words: templates of the kind `group` on named machines.

Groups that share a machine or hand KV to one another become one template of whole machines (`templates.group`), timed
again by `replica_rates`, bucket by bucket.

D_ij can also be had by trying each pair of replicas, as THUNDERSERVE prints it. A trial knows what queues, links and
batches do with real arrivals and lengths, but takes a good part of a second. So the search goes by the closed form
(`evaluate`); of the states that it ends with, the best few that differ are weighed again with trials at the rate
min(h P_i, h Q_j, R), and routed anew. What tries a pair is handed in (`Estimate`): planning knows no simulator.
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
    return tuple(
        PlannedReplica(NAMES[group.phase], layout_of(pool, mine))
        for group, mine in zip(search_result.state.groups, search_result.configurations, strict=True)
    )


def to_templates(
    problem: PlanningProblem,
    demand: ModelDemand,
    pool: Pool,
    search_result: SearchResult,
    attained: Attained | None = None,
) -> tuple[Template, ...]:
    """One template per set of groups that hang together; those that serve nothing are left out."""
    return templates_of(problem, demand, replicas_of(pool, search_result), attained)


def templates_of(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    attained: Attained | None = None,
) -> tuple[Template, ...]:
    """Replicas as templates. Who hands KV to whom is decided with all of them at hand, in every bucket.

    KV crosses in the smallest codec that is allowed: four bits, if the owner lets it be as in THUNDERSERVE.
    """
    codec = problem.codecs[-1]
    routed = route(problem, demand, replicas, codec, attained)
    flows = {(i, j) for routed_bucket in routed for i, j, _ in routed_bucket.flows}
    busy = {place for flow in flows for place in flow}
    kept = [place for place in range(len(replicas)) if place in busy]
    places = {place: number for number, place in enumerate(kept)}
    members = [replicas[place] for place in kept]
    joined = [(places[i], places[j]) for i, j in flows]
    made = [
        group_template(problem, demand, [members[place] for place in component], codec, attained)
        for component in components(members, joined)
    ]
    return tuple(template for template in made if template is not None)


def layout_of(pool: Pool, group_configuration: GroupConfiguration) -> Layout:
    stages = []
    for stage in group_configuration.stages:
        node = pool.nodes[stage.node]
        stages.append(Stage(stage.layers, (StageNode(node.type.name, stage.tp, node.name),)))
    return Layout(tuple(stages))


def found_of(pool: Pool, replicas: Sequence[PlannedReplica]) -> SearchResult:
    """Replicas that run, as the search speaks of them: what `reschedule` starts from. Nothing in it is scored."""
    groups, configurations = [], []
    for replica in replicas:
        stages = tuple(
            StageTake(pool.index(stage.nodes[0].machine), stage.nodes[0].tp, stage.layers)
            for stage in replica.layout.stages
        )
        groups.append(GpuGroup(_takes(stages), PHASES[replica.role]))
        configurations.append(GroupConfiguration(stages, 0.0, 0.0, 0.0, 0, 0.0))
    used = _takes([stage for mine in configurations for stage in mine.stages])
    everything = tuple((place, node.gpus) for place, node in enumerate(pool.nodes) if node.gpus)
    state = PoolUse(tuple(groups), without(everything, used))
    nothing = PoolScore(0.0, 0.0, 0.0)
    return SearchResult(state, nothing, tuple(configurations), Orchestration(()), (), 0, 0, converged=True)


def attainment_trace(search_result: SearchResult) -> tuple[tuple[float, float], ...]:
    """(seconds, attainment) whenever the search found better, without the tie-break in its score."""
    # A score is attained + w * attainable; the two are the same until all that is offered is attained.
    return tuple(
        (at_s, min(1.0, max(0.0, value) / (1.0 + TIE_WEIGHT))) for at_s, value in search_result.trace
    )


def _takes(stages: Sequence[StageTake]) -> Takes:
    counts: dict[int, int] = {}
    for stage in stages:
        counts[stage.node] = counts.get(stage.node, 0) + stage.tp
    return tuple(sorted(counts.items()))


Estimate = Callable[[PlannedReplica, PlannedReplica, float], float]
"""(who prefills, who decodes or the same one, requests a second) to the share within the objective."""
SHORTLIST = 6


def of_state(evaluator: PoolEvaluator, search_result: SearchResult, pool_use: PoolUse) -> SearchResult:
    """The same search with another of the states that it ended with."""
    made = tuple(item for group in pool_use.groups if (item := evaluator.deduced(group)) is not None)
    routed, score = evaluator.orchestrated(pool_use.groups), evaluator.score(pool_use.groups)
    return replace(search_result, state=pool_use, score=score, configurations=made, orchestration=routed)


def tried(
    evaluator: PoolEvaluator, search_result: SearchResult, estimate: Estimate
) -> tuple[SearchResult, Attained]:
    """The best of what a search ended with when every pair is tried, and what was seen of its pairs."""
    known: dict[tuple[PlannedReplica, PlannedReplica], float] = {}
    best, seen = search_result, None
    for state in (search_result.state, *search_result.others)[:SHORTLIST]:
        matrix = _matrix(evaluator, state, estimate, known)
        score, routed = evaluator.weighed(state.groups, matrix)
        if seen is None or score > best.score:
            best = replace(of_state(evaluator, search_result, state), score=score, orchestration=routed)
            replicas = _replicas(evaluator, state)
            seen = {(replicas[i].layout, replicas[j].layout): share for (i, j), share in matrix.items()}
    return best, seen or {}


def _matrix(
    evaluator: PoolEvaluator,
    pool_use: PoolUse,
    estimate: Estimate,
    known: dict[tuple[PlannedReplica, PlannedReplica], float],
) -> dict[tuple[int, int], float]:
    """D by places of the groups; pairs that the closed form leaves no hope are not tried."""
    replicas, closed = _replicas(evaluator, pool_use), evaluator.attained(pool_use.groups)
    work = evaluator.deducer.work
    matrix = {}
    for (i, j), hope in closed.items():
        pair = (replicas[i], replicas[j])
        if hope > 0.0 and pair not in known:
            slower = min(_rate(evaluator, pool_use, place) for place in (i, j))
            known[pair] = estimate(*pair, min(work.headroom * slower, work.rate_per_s))
        matrix[i, j] = known[pair] if hope > 0.0 else 0.0
    return matrix


def _rate(evaluator: PoolEvaluator, pool_use: PoolUse, place: int) -> float:
    configuration = evaluator.deduced(pool_use.groups[place])
    return 0.0 if configuration is None else configuration.rate_per_s


def _replicas(evaluator: PoolEvaluator, pool_use: PoolUse) -> list[PlannedReplica]:
    made = []
    for group in pool_use.groups:
        configuration = evaluator.deduced(group)
        assert configuration is not None, "a state with a score has configurations"
        made.append(PlannedReplica(NAMES[group.phase], layout_of(evaluator.deducer.pool, configuration)))
    return made
