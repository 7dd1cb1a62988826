"""D_ij by trying each pair of replicas, in place of the closed form: the orchestration as THUNDERSERVE prints it.

The closed form (`evaluate`) knows the wait for a prefill and the time of a hand-over on idle links, and takes for
granted that a decoding replica keeps its pace. A trial of the pair knows what its queue, links and batches do with
real arrivals and lengths, but takes a good part of a second where the form takes a microsecond. So the search
itself goes by the form; of the states that it ends with, the best few that differ are weighed again with

    D_ij   the share of requests within the objective when i prefills and j decodes, at the rate
           min(h P_i, h Q_j, R) at which the pair would be used;      D_k  likewise, of a replica that does both

and routed anew over the same rows. What tries a pair is handed in (`Estimate`): planning knows no simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from potluck.core.values.plan import PlannedReplica
from potluck.plan.search.deduce import NAMES
from potluck.plan.search.evaluate import PoolEvaluator, PoolUse
from potluck.plan.search.search_templates import layout_of
from potluck.plan.search.tabu import SearchResult
from potluck.plan.templates.group import Attained

Estimate = Callable[[PlannedReplica, PlannedReplica, float], float]
"""(who prefills, who decodes or the same one, requests a second) to the share within the objective."""
SHORTLIST = 6
"""States that are tried."""


def tried(evaluator: PoolEvaluator, found: SearchResult, estimate: Estimate) -> tuple[SearchResult, Attained]:
    """The best of what a search ended with when every pair is tried, and what was seen of its pairs."""
    known: dict[tuple[PlannedReplica, PlannedReplica], float] = {}
    best, seen = found, None
    for state in (found.state, *found.others)[:SHORTLIST]:
        matrix = _matrix(evaluator, state, estimate, known)
        score, routed = evaluator.weighed(state.groups, matrix)
        if seen is None or score > best.score:
            configurations = tuple(evaluator.deduced(group) for group in state.groups)
            best = replace(
                found,
                state=state,
                score=score,
                configurations=tuple(each for each in configurations if each is not None),
                orchestration=routed,
            )
            replicas = _replicas(evaluator, state)
            seen = {(replicas[i].layout, replicas[j].layout): share for (i, j), share in matrix.items()}
    return best, seen or {}


def _matrix(
    evaluator: PoolEvaluator,
    state: PoolUse,
    estimate: Estimate,
    known: dict[tuple[PlannedReplica, PlannedReplica], float],
) -> dict[tuple[int, int], float]:
    """D by places of the groups; pairs that the closed form leaves no hope are not tried."""
    replicas, closed = _replicas(evaluator, state), evaluator.attained(state.groups)
    work = evaluator.deducer.work
    found = {}
    for (i, j), hope in closed.items():
        pair = (replicas[i], replicas[j])
        if hope > 0.0 and pair not in known:
            slower = min(_rate(evaluator, state, place) for place in (i, j))
            known[pair] = estimate(*pair, min(work.headroom * slower, work.rate_per_s))
        found[i, j] = known[pair] if hope > 0.0 else 0.0
    return found


def _rate(evaluator: PoolEvaluator, state: PoolUse, place: int) -> float:
    found = evaluator.deduced(state.groups[place])
    return 0.0 if found is None else found.rate_per_s


def _replicas(evaluator: PoolEvaluator, state: PoolUse) -> list[PlannedReplica]:
    made = []
    for group in state.groups:
        found = evaluator.deduced(group)
        assert found is not None, "a state with a score has configurations"
        made.append(PlannedReplica(NAMES[group.phase], layout_of(evaluator.deducer.pool, found)))
    return made
