"""Planning again while a fleet runs (CORAL 4.3, 5.1): the demand, prices and nodes of now, and what starts cost.

    K = node initialisation time / cluster adjustment interval

so that a copy that is not there yet costs its price times 1 + K for one interval: what it is paid while it starts,
spread over the time it is expected to stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.core.errors import CapacityError
from potluck.core.state.actions import SeenLengths
from potluck.core.values.types import LengthBin, Region, Traffic
from potluck.perf.delays.startup import DEFAULT_COSTS, StartupCosts, startup_s
from potluck.perf.sizes.memory import weight_bytes
from potluck.plan.problem import ModelDemand, PlanningProblem, ask
from potluck.plan.strategies.template_factory import TemplateFactory
from potluck.plan.templates.mixed import Timed

INTERVAL_S = 3600.0
"""Over which starts are spread: CORAL amortises initialisation over 60 minutes (its 6.1)."""
DRIFT = 0.2
"""Mean lengths that differ by more from the spec's are planned by."""
KEPT = 4
"""TemplateFactories; prices that come back find their templates made."""


Startups = Mapping[str, StartupCosts]
"""What a start costs, by model, where its weights lie in some place of their own."""


def start_share(
    problem: PlanningProblem, interval_s: float = INTERVAL_S, startups: Startups | None = None
) -> float:
    """CORAL's K: the longest start-up of any model over the interval."""
    return longest_start_s(problem, startups) / interval_s


def longest_start_s(problem: PlanningProblem, startups: Startups | None = None) -> float:
    """Of any model, on one node."""
    costs = startups or {}
    return max(
        startup_s(weight_bytes(each.model), costs=costs.get(each.name, DEFAULT_COSTS)).total_s
        for each in problem.asks
    )


def problem_now(
    problem: PlanningProblem,
    rates_per_s: Mapping[str, float],
    lengths: Sequence[SeenLengths] = (),
    regions: tuple[Region, ...] | None = None,
    interval_s: float = INTERVAL_S,
    startups: Startups | None = None,
) -> PlanningProblem:
    """A problem for the rates and lengths now seen, at the prices and with the nodes of now; starts cost K."""
    seen = {each.model: each for each in lengths}
    asks = tuple(ask_now(each, rates_per_s.get(each.name), seen.get(each.name)) for each in problem.asks)
    regions = problem.regions if regions is None else regions
    if not any(offer.available for region in regions for offer in region.offers):
        raise CapacityError("no region has any node at present")
    return replace(
        problem, asks=asks, regions=regions, init_penalty=start_share(problem, interval_s, startups)
    )


def ask_now(known: ModelDemand, rate_per_s: float | None, seen: SeenLengths | None) -> ModelDemand:
    """One model's demand at the rate that is seen, and with lengths that are, where they have drifted."""
    rate = known.rate_per_s if rate_per_s is None else rate_per_s
    if seen is not None and drifted(known, seen):
        made = ask(known.name, known.model, known.slo, _traffic(known, rate, seen), known.terms)
        return replace(known, slo=made.slo, demands=made.demands)
    if known.rate_per_s <= 0:
        return known
    factor = rate / known.rate_per_s
    demands = tuple(replace(each, rate_per_s=each.rate_per_s * factor) for each in known.demands)
    return replace(known, demands=demands)


def drifted(known: ModelDemand, seen: SeenLengths) -> bool:
    """Whether requests are so much longer or shorter than the spec has them that plans must follow."""
    count = sum(each for _, each in seen.prompts)
    if count <= 0 or known.rate_per_s <= 0:
        return False
    prompt = sum(tokens * each for tokens, each in seen.prompts) / count
    planned_prompt = sum(d.new_tokens * d.rate_per_s for d in known.demands) / known.rate_per_s
    planned_output = sum(d.output_tokens * d.rate_per_s for d in known.demands) / known.rate_per_s
    off = max(abs(prompt / planned_prompt - 1), abs(seen.output_tokens / planned_output - 1))
    return off > DRIFT


def _traffic(known: ModelDemand, rate_per_s: float, seen: SeenLengths) -> Traffic:
    count = sum(each for _, each in seen.prompts)
    bins = tuple(
        LengthBin(max(1.0, tokens), max(1.0, seen.output_tokens), each / count)
        for tokens, each in seen.prompts
    )
    return Traffic(known.name, rate_per_s, bins)


@dataclass(slots=True)
class TemplateFactories:
    """One for each market and lengths that were seen: templates depend on these, not on rates or how many nodes."""

    _kept: dict[object, TemplateFactory] = field(default_factory=dict)
    """By prices and lengths, the newest last."""
    _timed: tuple[object, Timed] = field(default_factory=lambda: ((), {}))
    """Rates of pipelines for the lengths last seen."""

    def at(self, problem: PlanningProblem) -> TemplateFactory:
        lengths = tuple(
            (each.name, d.input_tokens, d.longest_tokens, d.output_tokens, d.promised)
            for each in problem.asks
            for d in each.demands
        )
        prices = tuple(
            (r.name, o.node, o.price_usd_per_h) for r in problem.regions for o in r.offers if o.available
        )
        if self._timed[0] != lengths:
            self._timed = (lengths, {})
        found = self._kept.pop((prices, lengths), None) or TemplateFactory(problem, timed=self._timed[1])
        self._kept[prices, lengths] = found
        for old in list(self._kept)[:-KEPT]:
            del self._kept[old]
        return replace(found, problem=problem)
