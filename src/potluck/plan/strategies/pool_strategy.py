"""From a problem to groups of its machines: THUNDERSERVE's search in every region's pool.

No template spans two regions, so each region is searched by itself, as if it had to serve everything; the
program then says how much of which group is used. With `headroom` at its limit of 1 no queue would be stable,
so the search plans for a little less.
"""

from __future__ import annotations

import hashlib
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


def require_pool(problem: PlanningProblem) -> ModelDemand:
    """The model to search for; an error when there are several, or too many GPUs."""
    if len(problem.asks) > 1:
        names = ", ".join(ask.name for ask in problem.asks)
        raise InputError("strategy", f"thunderserve plans one model at a time, not {names}; use auto")
    gpus = gpus_of(problem)
    if gpus > MAX_GPUS:
        fix = "lower `available`, or write the machines you have as `pool:`"
        if problem.pool is not None:
            fix = "split the pool"
        raise InputError("strategy", f"thunderserve takes at most {MAX_GPUS} GPUs, there are {gpus}; {fix}")
    return problem.asks[0]


def worth_searching(problem: PlanningProblem) -> bool:
    """Whether `auto` looks for groups too."""
    most = AUTO_GPUS if problem.pool is None else MAX_GPUS
    return len(problem.asks) == 1 and problem.asks[0].rate_per_s > 0 and gpus_of(problem) <= most


def machines_key(problem: PlanningProblem) -> str:
    """Tells searches apart: of other pools, or with KV in another codec."""
    pools = [region_pool(problem, region.name) for region in problem.regions]
    return hashlib.sha256(repr((pools, problem.codecs[-1])).encode()).hexdigest()[:16]


def phases_of(engine: EngineKind) -> tuple[Role, ...]:
    """What groups may do: without hand-overs whole requests alone."""
    return ("prefill", "decode", "mixed") if engine.hands_over else ("mixed",)


def search_groups(
    problem: PlanningProblem,
    ask: ModelDemand,
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
    from potluck.plan.search.search_templates import to_templates, tried
    from potluck.plan.search.tabu import SearchLimits, SearchSettings, search_with
    from potluck.plan.search.workload import workload_of

    templates: list[Template] = []
    searched: dict[str, SearchResult] = {}
    if not ask.rate_per_s > 0:
        return templates, searched
    work = workload_of(ask, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM), problem.engine)
    for region in problem.regions:
        pool = region_pool(problem, region.name)
        if pool is None:
            continue
        limits = SearchLimits(time_limit_s=time_limit_s / len(problem.regions))
        how = SearchSettings(phases_of(problem.engine), seed=seed, limits=limits)
        evaluator = PoolEvaluator(deducer(pool, work, how.timing))
        try:
            search_result = search_with(evaluator, how)
        except CapacityError:
            continue
        attained = None
        if estimate is not None:
            search_result, attained = tried(evaluator, search_result, estimate)
        searched[region.name] = search_result
        templates += to_templates(problem, ask, pool, search_result, attained)
    return templates, searched
