"""From a problem to groups of its machines: THUNDERSERVE's search in every region's pool.

No template spans two regions, so each region is searched by itself, as if it had to serve everything; the
program then says how much of which group is used. With `headroom` at its limit of 1 no queue would be stable,
so the search plans for a little less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.engine_abilities import EngineKind
from potluck.core.values.plan import Template
from potluck.core.values.types import Role
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.named_machines import gpus_of, region_pool

if TYPE_CHECKING:
    from potluck.plan.search.search_templates import Estimate
    from potluck.plan.search.tabu import SearchResult

MAX_GPUS = 256  # Beyond, a search takes too long to be of use.
AUTO_GPUS = 16
"""Without a written pool, `auto` searches only fleets of so few GPUs, where it takes a second or two."""
MAX_HEADROOM = 0.99
KEPT_SHARE = 0.9  # Of what a search says of its best state: with less, other states are timed too.


def require_pool(problem: PlanningProblem, strategy: str = "thunderserve") -> ModelDemand:
    """The model to search for; an error when there are several, or too many GPUs."""
    if len(problem.asks) > 1:
        names = ", ".join(demand.name for demand in problem.asks)
        raise InputError("strategy", f"{strategy} plans one model at a time, not {names}; use auto")
    gpus = gpus_of(problem)
    if gpus > MAX_GPUS:
        fix = "lower `available`, or write the machines you have as `pool:`"
        if problem.pool is not None:
            fix = "split the pool"
        raise InputError("strategy", f"{strategy} takes at most {MAX_GPUS} GPUs, there are {gpus}; {fix}")
    return problem.asks[0]


def worth_searching(problem: PlanningProblem) -> bool:
    """Whether `auto` looks for groups too."""
    most = AUTO_GPUS if problem.pool is None else MAX_GPUS
    return len(problem.asks) == 1 and problem.asks[0].rate_per_s > 0 and gpus_of(problem) <= most


def machines_key(problem: PlanningProblem) -> str:
    """Tells searches apart: of other pools, in other groups, or with KV in another codec."""
    pools = [region_pool(problem, region.name) for region in problem.regions]
    return hashlib.sha256(repr((pools, problem.codecs[-1], problem.max_group_gpus)).encode()).hexdigest()[:16]


APART: tuple[Role, ...] = ("prefill", "decode")
ALL_PHASES: tuple[Role, ...] = (*APART, "mixed")


def phases_of(engine: EngineKind, phases: tuple[Role, ...] = ALL_PHASES) -> tuple[Role, ...]:
    """What groups may do: these, but without hand-overs whole requests alone."""
    return phases if engine.hands_over else ("mixed",)


def _closed_per_s(templates: Iterable[Template]) -> float:
    return sum(capacity.closed_per_s for template in templates for capacity in template.capacity)


def search_groups(
    problem: PlanningProblem,
    demand: ModelDemand,
    phases: tuple[Role, ...],
    time_limit_s: float,
    seed: int,
    estimate: Estimate | None = None,
) -> tuple[list[Template], dict[str, SearchResult]]:
    """(templates, what each region's search found); a region where the model cannot be served has neither.

    With an `estimate` the pairs of the best states are tried by it (`plan.search.search_templates`).
    """
    # numba is slow to load, and most plans search no pool
    from potluck.plan.search.deduce import deducer
    from potluck.plan.search.evaluate import PoolEvaluator
    from potluck.plan.search.search_templates import of_state, to_templates, tried
    from potluck.plan.search.tabu import SearchLimits, SearchSettings, search_with
    from potluck.plan.search.workload import workload_of

    templates: list[Template] = []
    searched: dict[str, SearchResult] = {}
    if not demand.rate_per_s > 0:
        return templates, searched
    work = workload_of(demand, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM), problem.engine)
    for region in problem.regions:
        pool = region_pool(problem, region.name)
        if pool is None:
            continue
        limits = SearchLimits(time_limit_s=time_limit_s / len(problem.regions))
        how = SearchSettings(phases, problem.max_group_gpus, seed, limits)
        evaluator = PoolEvaluator(deducer(pool, work, how.timing))
        try:
            search_result = search_with(evaluator, how)
        except CapacityError:
            continue
        attained = None
        if estimate is not None:
            search_result, attained = tried(evaluator, search_result, estimate)
        made = to_templates(problem, demand, pool, search_result, attained)
        # Timed bucket by bucket, the best state may do far less than the search says of it.
        much = KEPT_SHARE * len(demand.demands) * search_result.score.goodput_per_s
        for state in () if _closed_per_s(made) >= much else search_result.others:
            other = of_state(evaluator, search_result, state)
            rival = to_templates(problem, demand, pool, other)
            search_result, made = (
                (other, rival) if _closed_per_s(rival) > _closed_per_s(made) else (search_result, made)
            )
        searched[region.name] = search_result
        templates += made
    return templates, searched
