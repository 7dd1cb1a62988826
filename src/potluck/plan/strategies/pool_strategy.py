"""Groups of a problem's machines, found by THUNDERSERVE's tabu search in every region's pool.

No template spans two regions, so each region is searched as if it had to serve the whole demand; the integer program
then chooses among the groups. At a `headroom` of 1 no queue is stable, so the search uses at most MAX_HEADROOM.
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

MAX_GPUS = 256  # GPUs of a pool; the search takes too long on larger ones.
AUTO_MAX_GPUS = 16
"""GPUs up to which `auto` searches a fleet without a written pool; such a search takes a second or two."""
MAX_HEADROOM = 0.99
MIN_TIMED_SHARE = 0.9
"""Share of the searched goodput that the timed templates must reach; below it, the runner-up states are timed too."""


def require_pool(problem: PlanningProblem, strategy: str = "thunderserve") -> ModelDemand:
    """The one model to search for; raises InputError for several models or too many GPUs."""
    if len(problem.demands) > 1:
        names = ", ".join(demand.name for demand in problem.demands)
        raise InputError("strategy", f"{strategy} plans one model at a time, not {names}; use auto")
    gpus = gpus_of(problem)
    if gpus > MAX_GPUS:
        fix = "lower `available`, or write the machines you have as `pool:`"
        if problem.pool is not None:
            fix = "split the pool"
        raise InputError("strategy", f"{strategy} takes at most {MAX_GPUS} GPUs, there are {gpus}; {fix}")
    return problem.demands[0]


def is_searchable(problem: PlanningProblem) -> bool:
    """Whether `auto` searches for groups of machines too."""
    max_gpus = AUTO_MAX_GPUS if problem.pool is None else MAX_GPUS
    return len(problem.demands) == 1 and problem.demands[0].rate_per_s > 0 and gpus_of(problem) <= max_gpus


def machines_key(problem: PlanningProblem) -> str:
    """Cache key of a search: a hash of the pools, the KV codec and the largest group."""
    pools = [region_pool(problem, region.name) for region in problem.regions]
    return hashlib.sha256(repr((pools, problem.codecs[-1], problem.max_group_gpus)).encode()).hexdigest()[:16]


APART: tuple[Role, ...] = ("prefill", "decode")
ALL_PHASES: tuple[Role, ...] = (*APART, "mixed")


def phases_of(engine: EngineKind, phases: tuple[Role, ...] = ALL_PHASES) -> tuple[Role, ...]:
    """The roles that groups may have: `phases`, or mixed alone for an engine that cannot hand KV over."""
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
    """(templates, search result of each region); a region that cannot serve the model is left out.

    With an `estimate`, the pairs of replicas in the best states are evaluated by it (`plan.search.search_templates`).
    """
    # Imported here: numba is slow to load, and most plans search no pool.
    from potluck.plan.search.deduce import deducer
    from potluck.plan.search.evaluate import PoolEvaluator
    from potluck.plan.search.search_templates import evaluate_with, result_with_state, to_templates
    from potluck.plan.search.tabu import SearchLimits, SearchSettings, search_with
    from potluck.plan.search.workload import workload_of

    templates: list[Template] = []
    searched: dict[str, SearchResult] = {}
    if not demand.rate_per_s > 0:
        return templates, searched
    pool_workload = workload_of(
        demand, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM), problem.engine
    )
    for region in problem.regions:
        pool = region_pool(problem, region.name)
        if pool is None:
            continue
        limits = SearchLimits(time_limit_s=time_limit_s / len(problem.regions))
        search_settings = SearchSettings(phases, problem.max_group_gpus, seed, limits)
        evaluator = PoolEvaluator(deducer(pool, pool_workload, search_settings.timing))
        try:
            search_result = search_with(evaluator, search_settings)
        except CapacityError:
            continue
        attained = None
        if estimate is not None:
            search_result, attained = evaluate_with(evaluator, search_result, estimate)
        groups = to_templates(problem, demand, pool, search_result, attained)
        # The search scores mean lengths; timed per bucket, its best state may serve far less.
        required_per_s = MIN_TIMED_SHARE * len(demand.buckets) * search_result.score.goodput_per_s
        for state in () if _closed_per_s(groups) >= required_per_s else search_result.others:
            other_result = result_with_state(evaluator, search_result, state)
            other_groups = to_templates(problem, demand, pool, other_result)
            search_result, groups = (
                (other_result, other_groups)
                if _closed_per_s(other_groups) > _closed_per_s(groups)
                else (search_result, groups)
            )
        searched[region.name] = search_result
        templates += groups
    return templates, searched
