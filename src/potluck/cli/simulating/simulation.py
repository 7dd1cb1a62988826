"""Wiring for commands that simulate: files and options become a problem, requests, a policy and a planner."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from potluck.cli.common.files import read_text
from potluck.cli.common.inputs import load_problem, read_plan, read_spec, require_runnable, scaled
from potluck.cli.planning.estimate import measured
from potluck.core.codec import decode
from potluck.core.errors import CapacityError, FormatError, InputError, UnknownNameError, did_you_mean
from potluck.core.routing.balance import BALANCES
from potluck.core.scaling.autoscaler import SCALERS
from potluck.core.state.policy import LISTS, Policy
from potluck.core.values.kv import lossy_crossings
from potluck.core.values.plan import Plan

if TYPE_CHECKING:
    from potluck.core.values.types import Region
    from potluck.perf.startup import StartupCosts
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import TemplateFactory
    from potluck.runtime.resolved_plan import ResolvedPlan
    from potluck.sim.load.workload import Workload
    from potluck.sim.world.faults import Faults
    from potluck.sim.world.sim_fleet import Planner, PlanQuestion
    from potluck.spec.spec_values import Spec


@dataclass(frozen=True, slots=True)
class SimulationInputs:
    spec: Spec
    problem: PlanningProblem
    plan: Plan
    market: Faults | None = None
    """Prices and nodes over time, where a file has them; those of the beginning are in the spec already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options that `simulate` and `goodput` share."""

    paths: tuple[Path, ...]
    workload: tuple[str, ...]
    logs: tuple[Path, ...]
    rate_per_s: float | None
    count: int | None
    """Number of requests; None: that of the source."""
    seed: int
    cv: float | None
    time_limit_s: float
    policy: tuple[str, ...]
    slo_scale: float
    profile_paths: tuple[Path, ...]
    as_json: bool


Made = TypeVar("Made")


def read_inputs(
    paths: tuple[Path, ...],
    time_limit_s: float,
    said: Callable[[str], None],
    make: Callable[[Spec], Made],
    profiles: tuple[Path, ...] = (),
    market: Path | None = None,
    slo_scale: float = 1.0,
) -> tuple[SimulationInputs, Made]:
    """`PLAN SPEC`, or a SPEC (or the bundled example), which is planned first. `make` checks the spec before that."""
    if len(paths) > 2:
        raise InputError("files", "takes a SPEC, or a PLAN and its SPEC")
    if len(paths) == 2:
        read_plan(paths[0])  # before the spec: files in the wrong order are told by it
        spec, changes = _at_first(scaled(read_spec(paths[1]), slo_scale), market)
        return replace(read_plan_and_spec(paths[0], spec, profiles), market=changes), make(spec)
    spec, changes = _at_first(scaled(read_one_spec(paths), slo_scale), market)
    made = make(spec)
    problem = measured(load_problem(spec, 0.8, None, (), 0.0), profiles)
    said("planning")
    return SimulationInputs(spec, problem, _first_plan(problem, time_limit_s), changes), made


def _first_plan(problem: PlanningProblem, time_limit_s: float) -> Plan:
    """For what can be served at all; what cannot is said, and refused when it comes."""
    from potluck.plan.explain import planned_rest
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    factory, settings = TemplateFactory(problem), SolveSettings(time_limit_s)
    _, outcome, notes = planned_rest(STRATEGIES["auto"], factory, settings)
    for note in notes:
        click.echo(f"potluck: note: {note}", err=True)
    if outcome.allocation.status == "unknown" or not outcome.plan.deployments:
        raise CapacityError("no plan was found to simulate; see `potluck plan`")
    return outcome.plan


def _at_first(spec: Spec, market: Path | None) -> tuple[Spec, Faults | None]:
    """A spec at the prices and with the nodes that a market file begins with, and what the file has in store."""
    if market is None:
        return spec, None
    regions, changes = market_over_time(read_text(market), str(market), spec.regions)
    return replace(spec, regions=regions), changes


def market_over_time(text: str, where: str, regions: tuple[Region, ...]) -> tuple[tuple[Region, ...], Faults]:
    from potluck.control import market
    from potluck.sim.world.faults import NOTICE_S, Fault, Faults, PriceChange, SupplyChange

    timed, live = {"at_s", "notice_s"}, {"engine", "at"}
    lines = market.market_lines(text, where, market.OFFER_KEYS | timed, market.NOTICE_KEYS - live | timed)
    if not any(lines):
        raise InputError(where, "has no offers and no notices")
    at_first, prices, supply, leaving = regions, [], [], []
    for item, at in lines[0]:
        at_s, notice_s = _seconds(item, "at_s", 0.0, at), _seconds(item, "notice_s", NOTICE_S, at)
        quote = market.quote_of(item, at, regions)
        if at_s == 0:
            at_first = market.Market((quote,)).regions(at_first)
            continue
        if quote.price_usd_per_h is not None:
            prices.append(PriceChange(at_s, quote.region, quote.node, quote.price_usd_per_h))
        if quote.available is not None:
            supply.append(SupplyChange(at_s, quote.region, quote.node, quote.available, notice_s))
    for item, at in lines[1]:
        at_s, notice_s = _seconds(item, "at_s", None, at), _seconds(item, "notice_s", NOTICE_S, at)
        region, node = market.place_of(item, at, regions)
        told_s, count = max(0.0, at_s - notice_s), market.count_of(item, at)
        leaving.append(Fault(told_s, "spot", region=region, node=node, count=count, notice_s=notice_s))
    return at_first, Faults(tuple(leaving), prices=tuple(prices), availability=tuple(supply))


def _seconds(item: dict[str, Any], name: str, default: float | None, at: str) -> float:
    value = item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise InputError(f"{at}.{name}", f"must be seconds of the simulation, from 0, is {value!r}")
    return float(value)


def read_plan_and_spec(plan: Path, spec: Spec, profiles: tuple[Path, ...] = ()) -> SimulationInputs:
    problem = measured(load_problem(spec, 0.8, None, (), 0.0), profiles)
    inputs = SimulationInputs(spec, problem, read_plan(plan))
    require_runnable(inputs.plan, spec, str(plan))
    for lossy in lossy_crossings(inputs.plan):
        if lossy.codec not in spec.kv_codecs:
            what = f"sends KV {lossy.where} in {lossy.codec}, which the spec does not allow"
            raise InputError(str(plan), f"{what}; plan again, or write kv_codecs: [raw, {lossy.codec}] in it")
    return inputs


def read_one_spec(paths: tuple[Path, ...]) -> Spec:
    """The spec that is named last; the bundled example where none is."""
    if len(paths) > 2:
        raise InputError("files", "takes a SPEC, or a PLAN and its SPEC")
    if len(paths) == 1 and read_text(paths[0]).lstrip().startswith("{") and _is_plan(paths[0]):
        raise InputError(str(paths[0]), f"is a plan; name its spec too: {paths[0].name} potluck.yaml")
    return read_spec(paths[-1] if paths else None)


def planned(
    problem: PlanningProblem,
    time_limit_s: float,
    running_plan: Plan | None = None,
    factory: TemplateFactory | None = None,
    candidates: bool = False,
) -> Plan:
    """The plan of `auto`, or of the strategy that made the one that runs; with what scaling may start."""
    from potluck.plan.current_problem import with_candidates
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    strategy = STRATEGIES.get("auto" if running_plan is None else running_plan.strategy, STRATEGIES["auto"])
    factory = factory or TemplateFactory(problem)
    outcome = strategy(factory, SolveSettings(time_limit_s=time_limit_s, running=running_plan))
    if outcome.allocation.status == "unknown" or not outcome.plan.deployments:
        raise CapacityError("no plan was found to simulate; see `potluck plan`")
    return with_candidates(factory, outcome.plan) if candidates else outcome.plan


def offered(
    inputs: SimulationInputs, policy: Policy, factory: TemplateFactory | None = None
) -> SimulationInputs:
    """With what scaling may start beside the plan's own copies, where the policy's rule would start something."""
    if policy.scaling != "cauchy" or inputs.plan.candidates:
        return inputs
    from potluck.plan.current_problem import with_candidates
    from potluck.plan.strategies import TemplateFactory

    return replace(inputs, plan=with_candidates(factory or TemplateFactory(inputs.problem), inputs.plan))


def startups_of(spec: Spec) -> dict[str, StartupCosts]:
    """What a start costs of models whose weights lie somewhere that the spec names."""
    from potluck.perf.startup import from_place

    return {
        m.name: from_place(m.weights.place, m.weights.gb_per_s) for m in spec.models if m.weights is not None
    }


def scene_of(inputs: SimulationInputs) -> ResolvedPlan:
    from potluck.runtime.resolved_plan import ResolvedPlan

    spec, pool = inputs.spec, inputs.spec.pool
    links = () if pool is None else pool.links
    machines = {(source, target): (gbps, rtt_s) for source, target, gbps, rtt_s in links}
    for template in inputs.plan.templates:
        if template.model not in {model.name for model in spec.models}:
            raise UnknownNameError("plan: model", template.model, [model.name for model in spec.models])
    return ResolvedPlan(
        inputs.plan,
        {model.name: model.model for model in spec.models},
        inputs.problem.by_name,
        spec.regions,
        spec.links,
        {model.name: model.slo for model in spec.models},
        {m.name: (m.traffic.mean_input_tokens, m.traffic.mean_output_tokens) for m in spec.models},
        machines,
        {node.name: node.zone for node in pool.nodes if node.zone} if pool is not None else {},
        startups=startups_of(spec),
        idle_s={m.name: m.idle_s for m in spec.models if m.idle_s is not None},
        survive={m.name: (m.terms.survive, m.terms.survive_share) for m in spec.models if m.terms.survive},
        profiles={demand.name: demand.profiles for demand in inputs.problem.demands if demand.profiles},
        rtt_s={(name, region): rtt_s for name, far in spec.origins for region, rtt_s in far},
    )


def requests(spec: Spec, asked: RunOptions, said: Callable[[str], None]) -> Workload:
    """The spec's own traffic, or for each model what `--workload` names, `NAME` or `MODEL=NAME`, or a log's."""
    from potluck.cli.common.workloads import DEFAULT_REQUESTS, WorkloadOptions, load
    from potluck.sim.load.workload import merge, of_traffic

    if asked.logs:
        if asked.workload or asked.cv is not None:
            raise InputError("--from-log", "has its own requests and times; leave --workload and --cv out")
        return _logged(spec, asked, said)
    if not asked.workload:
        traffic = [model.traffic for model in spec.models]
        total = sum(item.rate_per_s for item in traffic)
        if asked.rate_per_s is not None and total > 0:
            factor = asked.rate_per_s
            traffic = [replace(item, rate_per_s=item.rate_per_s * factor / total) for item in traffic]
        cv = 1.0 if asked.cv is None else asked.cv
        return of_traffic(traffic, asked.count or DEFAULT_REQUESTS, asked.seed, cv)
    names = [model.name for model in spec.models]
    parts = []
    for place, text in enumerate(asked.workload):
        model, what = _named(text, names)
        rate_per_s = _rate(spec, model, len(asked.workload), asked.rate_per_s)
        wanted = WorkloadOptions(rate_per_s, asked.count, asked.seed + place, asked.cv)
        parts.append(load(what, model, wanted))
    return parts[0] if len(parts) == 1 else merge(parts)


def _logged(spec: Spec, asked: RunOptions, said: Callable[[str], None]) -> Workload:
    from potluck.runtime.replay import log_lines
    from potluck.sim.load.workload import at_rate, first, from_log

    with log_lines(asked.logs) as lines:
        log = from_log(lines, lambda seen: said(f"{seen:,} requests of the log"))
    show_cuts(log.cuts)
    workload = log.workload
    for name in workload.models:
        if name not in {model.name for model in spec.models}:
            raise UnknownNameError("log: model", name, [model.name for model in spec.models])
    if asked.rate_per_s is not None:
        workload = at_rate(workload, asked.rate_per_s)
    return workload if asked.count is None else first(workload, asked.count)


def show_cuts(lines: Sequence[int]) -> None:
    for number in lines:
        click.echo(f"potluck: note: line {number} of the log is cut off and was passed over", err=True)


def _named(text: str, names: list[str]) -> tuple[str, str]:
    model, _, what = text.partition("=")
    if what and model in names:
        return model, what
    if len(names) > 1:
        form = f"must say for which model, as MODEL=NAME; models are {', '.join(names)}"
        raise InputError("--workload", f"{text!r} {form}")
    return names[0], text


def _rate(spec: Spec, model: str, parts: int, rate_per_s: float | None) -> float | None:
    """One workload takes the rate whole; several share it as the spec's traffic does."""
    if rate_per_s is None or parts == 1:
        return rate_per_s
    total = sum(model_spec.traffic.rate_per_s for model_spec in spec.models)
    return rate_per_s * spec.model(model).traffic.rate_per_s / total if total > 0 else rate_per_s / parts


def policy_of(pairs: tuple[str, ...], base_policy: Policy | None = None) -> Policy:
    """`--policy balance=goodput --policy opportunistic=false`, over the spec's rules."""
    known = [item.name for item in fields(Policy) if item.name not in LISTS]
    values: dict[str, object] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise InputError("--policy", f"{pair!r} is not NAME=VALUE; names are {', '.join(known)}")
        if name not in known:
            raise UnknownNameError("--policy", name, known)
        values[name] = _plain(text)
    try:
        body = decode(Policy, values, "--policy")
    except FormatError as error:
        raise InputError(error.field, error.problem) from error
    for name, rules in (("balance", tuple(BALANCES)), ("scaling", tuple(SCALERS))):
        if getattr(body, name) not in rules:
            hint = did_you_mean(getattr(body, name), rules)
            raise InputError(f"--policy.{name}", f"{getattr(body, name)!r} is not one of its values{hint}")
    return replace(base_policy or Policy(), **{name: getattr(body, name) for name in values})


def planner_of(inputs: SimulationInputs, policy: Policy, time_limit_s: float) -> Planner | None:
    """Answers a Replan at the rates seen, for the prices and nodes of the moment; None for policies that never ask.
    It pays for what it starts: CORAL's K is the longest start-up over the time between two plans."""
    from potluck.plan.current_problem import TemplateFactories, problem_now

    if policy.scaling == "none":
        return None
    factories, startups = TemplateFactories(), startups_of(inputs.spec)

    def plan(plan_question: PlanQuestion) -> Plan | None:
        rates = dict(plan_question.rates_per_s)
        try:
            problem = problem_now(
                inputs.problem, rates, plan_question.lengths, plan_question.regions, policy.replan_s, startups
            )
            factory, offers = factories.at(problem), policy.scaling == "cauchy"
            return planned(problem, time_limit_s, plan_question.running, factory, offers)
        except CapacityError:
            return None

    return plan


def read_faults(path: Path | None) -> Faults | None:
    from potluck.sim.world.faults import parse_faults

    return None if path is None else parse_faults(read_text(path), path.name)


def with_market(faults: Faults | None, market_faults: Faults | None) -> Faults | None:
    """Trouble of both kinds."""
    if faults is None or market_faults is None:
        return faults or market_faults
    return replace(
        faults,
        faults=(*faults.faults, *market_faults.faults),
        prices=(*faults.prices, *market_faults.prices),
        availability=(*faults.availability, *market_faults.availability),
    )


def _plain(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _is_plan(path: Path) -> bool:
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == "potluck.plan"
