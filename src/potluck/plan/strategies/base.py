"""What strategies share: templates made once per problem, the settings of a solve, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from potluck.core.values.plan import Deployment, Plan, Template
from potluck.plan.allocate.result import Allocation
from potluck.plan.codecs import solved
from potluck.plan.columns import Columns, plan_of
from potluck.plan.problem import Ask, Problem
from potluck.plan.search.tabu import Found
from potluck.plan.strategies.pools import machines_key, search_groups
from potluck.plan.templates.combo import combos
from potluck.plan.templates.homogeneous import homogeneous
from potluck.plan.templates.mixed import pipelines
from potluck.plan.templates.pair import pairs


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to search, how close to the best, and what is there already."""

    time_limit_s: float = 30.0
    gap_target: float = 1e-4
    running: Plan | None = None
    pins: tuple[Deployment, ...] = ()
    clock: Callable[[], float] = time.monotonic
    seed: int = 0
    """Of the search on a pool; the program needs none."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A plan, the allocation behind it and the columns it chose from."""

    plan: Plan
    allocation: Allocation
    columns: Columns


@dataclass(slots=True)
class Workshop:
    """Makes a problem's templates, each kind once, whoever asks for them."""

    problem: Problem
    made: dict[tuple[str, str], list[Template]] = field(default_factory=dict)
    """(kind, model) to templates."""
    said: Callable[[str], None] = lambda _: None
    """Told what is being made, for a progress bar."""
    searched: dict[str, Found] = field(default_factory=dict)
    """Region to what the search of its pool found."""
    running: tuple[Template, ...] = ()
    """Groups that run already, to be chosen beside those that are found."""

    @property
    def prices(self) -> dict[str, float]:
        """The lowest price of each node type over regions that have some: what efficiency is judged by."""
        found: dict[str, float] = {}
        for region in self.problem.regions:
            for offer in region.offers:
                if offer.available > 0:
                    found[offer.node] = min(found.get(offer.node, float("inf")), offer.price_usd_per_h)
        return found

    def homogeneous(self, ask: Ask) -> list[Template]:
        return self._once("homogeneous", ask, lambda: homogeneous(self.problem, ask))

    def mixed(self, ask: Ask) -> list[Template]:
        """Aggregated single-node templates only."""
        return [t for t in self.homogeneous(ask) if t.replicas[0].role == "mixed"]

    def phased(self, ask: Ask) -> list[Template]:
        """Single-node templates that do one phase."""
        return [t for t in self.homogeneous(ask) if t.replicas[0].role != "mixed"]

    def combos(self, ask: Ask) -> list[Template]:
        return self._once("combo", ask, lambda: combos(self.problem, ask, self.homogeneous(ask), self.prices))

    def pairs(self, ask: Ask) -> list[Template]:
        return self._once("pair", ask, lambda: pairs(self.problem, ask, self.homogeneous(ask)))

    def pipelines(self, ask: Ask) -> list[Template]:
        return self._once("pipeline", ask, lambda: pipelines(self.problem, ask, self.prices))

    def groups(self, ask: Ask, settings: Settings) -> list[Template]:
        """Groups of the pool's machines, found by search in each region.

        The first search takes half of the time there is. Others, on a pool that lacks a machine or two, answer
        what that would mean, and are short.
        """
        key = f"group of {machines_key(self.problem)}"
        first = not any(kind.startswith("group of ") for kind, _ in self.made)
        share = 0.5 if first else 0.1

        def make() -> list[Template]:
            made, self.searched = search_groups(
                self.problem, ask, settings.time_limit_s * share, settings.seed
            )
            known = {template.name for template in made}
            return made + [t for t in self.running if t.model == ask.name and t.name not in known]

        return self._once(key, ask, make)

    def _once(self, kind: str, ask: Ask, make: Callable[[], list[Template]]) -> list[Template]:
        key = (kind, ask.name)
        if key not in self.made:
            self.said(f"{kind.split(' of ')[0]} templates of {ask.name}")
            self.made[key] = make()
        return self.made[key]


def allocated(
    workshop: Workshop, settings: Settings, strategy: str, templates: Mapping[str, Sequence[Template]]
) -> Outcome:
    """Solve the program over some templates and turn the answer into a plan."""
    found, answer = solved(
        workshop.problem,
        templates,
        running=settings.running,
        pins=settings.pins,
        time_limit_s=settings.time_limit_s,
        gap_target=settings.gap_target,
        clock=settings.clock,
    )
    return Outcome(plan_of(found, answer, strategy), answer, found)
