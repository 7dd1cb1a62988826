"""What every command that plans has in common: from its options to a spec, a problem, a strategy and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, PATH, Command, option_group, positive, read_text
from potluck.cli.common.inputs import load_problem, read_spec, scale_option, scaled
from potluck.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.spec.spec_values import Spec


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    spec_path: Path | None
    time_limit_s: float
    headroom: float
    sure: float
    budget_usd_per_h: float | None
    what_if: tuple[str, ...]
    slo_scale: float
    seed: int
    market: Path | None = None
    max_group_gpus: int | None = None

    @property
    def limit_s(self) -> float:
        return positive("time-limit", self.time_limit_s)

    def spec(self) -> Spec:
        """The spec file with the SLO scale, group size and prices of the options."""
        spec = scaled(read_spec(self.spec_path), self.slo_scale)
        if self.max_group_gpus is not None and spec.pool is None:
            raise InputError("--max-group-gpus", "is for groups of a `pool:`, and the spec has a fleet")
        spec = replace(spec, max_group_gpus=self.max_group_gpus or spec.max_group_gpus)
        if self.market is None:
            return spec
        from potluck.control.market import read_market

        market = read_market(read_text(self.market), str(self.market), spec.regions)
        if not market.quotes and not market.notices:
            raise InputError(str(self.market), "has no offers and no notices")
        return replace(spec, regions=market.regions(spec.regions))

    def problem(self, spec: Spec, init_penalty: float = 0.0) -> PlanningProblem:
        return load_problem(spec, self.headroom, self.budget_usd_per_h, self.what_if, init_penalty, self.sure)

    def settings(self, **more: Any) -> SolveSettings:
        from potluck.plan.strategies import SolveSettings

        return SolveSettings(self.limit_s, seed=self.seed, **more)


def split_planning_options(options: Mapping[str, Any]) -> tuple[PlanningOptions, dict[str, Any]]:
    """Splits a command's options into planning options and the rest."""
    own = {field.name for field in fields(PlanningOptions)}
    mine = {name: value for name, value in options.items() if name in own}
    return PlanningOptions(**mine), {name: value for name, value in options.items() if name not in own}


def posing_options(
    limit_s: float = 30.0, limit_help: str = "CPU-seconds, including template timing."
) -> Callable[[Command], Command]:
    """The SPEC argument and the options that `PlanningOptions` is made of."""
    return option_group(
        argument("spec_path", metavar="[SPEC]", required=False, type=PATH),
        scale_option,
        option("--market", type=FILE, help="File of prices and node counts that override the spec's."),
        option("--seed", type=click.IntRange(min=0), default=0, help="Random seed of search and simulation."),
        option("--what-if", multiple=True, help="REGION:NODE=COUNT: change a node count."),
        option("--max-group-gpus", type=click.IntRange(1, 256), help="With `pool:`: largest group of GPUs."),
        option("--budget", "budget_usd_per_h", type=float, help="Maximum cost in USD/h."),
        option(
            "--confidence",
            "sure",
            type=float,
            default=0.5,
            help="Quantile of predicted step times to plan for; 0.9 is pessimistic.",
        ),
        option("--headroom", type=float, default=0.8, help="Maximum planned utilization of replicas."),
        option("--time-limit", "time_limit_s", type=float, default=limit_s, help=limit_help),
    )


NAMES = "auto, homo, melange, cauchy, -ce, -mc, -mce, cronus, prfaas, coral, thunderserve, hexgen, distserve, vllm-dp"
strategy_option = option(
    "--strategy", default="auto", help=f"Planning strategy: {NAMES}. `potluck compare` runs all."
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")


def strategy_of(name: str) -> Callable[[TemplateFactory, SolveSettings], PlanOutcome]:
    from potluck.plan.strategies import STRATEGIES

    if name not in STRATEGIES:
        raise UnknownNameError("strategy", name, STRATEGIES)
    return STRATEGIES[name]
