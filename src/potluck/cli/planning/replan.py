"""`potluck replan`: something happened; what are the answers, from cheap to dear?"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import EXISTING, FILE, PATH, OutputFiles, positive, require_writable
from potluck.cli.common.inputs import (
    NODE_COUNT,
    NODE_PRICE,
    for_style,
    load_problem,
    node_change,
    read_plan,
    read_spec,
    require_runnable,
)
from potluck.cli.common.render import emit_json, missed, paragraph, percent, progress, table, table_of, usd
from potluck.cli.fleet.service import nothing, opened, state_option, with_gateway
from potluck.cli.planning.estimate import measured
from potluck.cli.planning.plan_show import show_groups
from potluck.cli.planning.rehearsal import (
    ReportStage,
    averages_option,
    evidence_line,
    rehearsing,
    simulated_briefly,
)
from potluck.core.errors import CapacityError, InputError, UnknownNameError, did_you_mean
from potluck.core.figures import seconds
from potluck.core.state.facts import spoken
from potluck.core.values.types import LengthBin

if TYPE_CHECKING:
    from potluck.control.service_view import ServiceView
    from potluck.core.state.facts import ObservedSpeed
    from potluck.core.values.plan import Plan, Tried
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.replan_options import ReplanOption
    from potluck.plan.strategies import SolveSettings
    from potluck.spec.spec_values import ModelSpec, Spec


SERVES_AS_MUCH = 1e-6
VERDICTS = ("holds", "unsure", "misses")


def best_tried(
    answers: Sequence[ReplanOption], spec: Spec, problem: PlanningProblem, report_stage: ReportStage
) -> tuple[ReplanOption, tuple[Tried, ...]]:
    """Of the options that serve most, the first that meets its SLOs in simulation, else the closest."""
    most = max(replan_option.served_fraction for replan_option in answers)
    seen: dict[object, tuple[Tried, ...]] = {}
    result: list[tuple[int, ReplanOption, tuple[Tried, ...]]] = []
    for replan_option in answers:
        if replan_option.served_fraction < most - SERVES_AS_MUCH:
            continue
        key = (replan_option.plan.deployments, replan_option.plan.shares, replan_option.plan.flows)
        if key not in seen:
            seen[key] = simulated_briefly(spec, problem, replan_option.plan, report_stage)
        worst = max((VERDICTS.index(tried.verdict) for tried in seen[key]), default=0)
        result.append((worst, replan_option, seen[key]))
        if worst == 0:
            break
    _, best_option, shown = min(result, key=lambda item: item[0])
    return best_option, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRequest:
    """Options of `replan` that describe what happened and how to plan."""

    anyway: bool
    averages: bool
    state: Path | None
    lose: tuple[str, ...]
    rate: tuple[str, ...]
    workload: tuple[str, ...]
    link: tuple[str, ...]
    price: tuple[str, ...]
    time_limit_s: float
    init_penalty: float
    headroom: float
    seed: int


REFUSED = "not applied: SLOs are missed in simulation. Add nodes, or apply it with --yes"


@click.command()
@argument("plan_path", metavar="[PLAN]", required=False, type=EXISTING)
@argument("spec_path", metavar="[SPEC]", required=False, type=PATH)
@option("--live", is_flag=True, help="Use plan and spec of the running service.")
@option("--apply", "applied", is_flag=True, help="With --live: apply the best option, if it meets its SLOs.")
@option("--yes", "anyway", is_flag=True, help="With --apply: apply it even if it misses SLOs.")
@averages_option
@state_option
@option("--lose", multiple=True, help="REGION:NODE=COUNT nodes are lost; or NAME,NAME: machines of a pool.")
@option("--rate", multiple=True, help="MODEL=REQ_PER_S, or MODEL=1.5x to multiply the rate.")
@option("--workload", multiple=True, help="[MODEL=]LENGTHS: 2048/28, a trace file or a catalog workload.")
@option(
    "--link", multiple=True, help="FROM:TO=GBPS: bandwidth in one direction, between regions or machines."
)
@option("--price", multiple=True, help="REGION:NODE=USD_PER_H: new price of a node type.")
@option("--out", type=FILE, help="Write the plan of the best option.")
@option("--time-limit", "time_limit_s", type=float, default=30.0, help="CPU-seconds per solve.")
@option(
    "--init-penalty", type=float, default=0.1, help="Node start-up time over time between plans (CORAL's K)."
)
@option("--headroom", type=float, default=0.8, help="Maximum planned utilization of replicas.")
@option("--seed", type=click.IntRange(min=0), default=0, help="Random seed.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def replan(
    plan_path: Path | None,
    spec_path: Path | None,
    live: bool,
    applied: bool,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Options for a running PLAN after losses or changed demand: new routing, role flips, a new allocation.

    \b
    Examples:
      potluck replan plan.json potluck.yaml --lose us-east-1:4xL40S=1
      potluck replan plan.json potluck.yaml --rate chat=2x --link us-east-1:lab=1gbps
      potluck replan plan.json pool.yaml --lose node3,node7 --workload coding
      potluck replan --live --rate words=2x --apply
    """
    from potluck.core.values.plan import plan_to_json
    from potluck.plan.current_problem import observed
    from potluck.plan.strategies import SolveSettings

    asked = ReplanRequest(**options)
    settings = SolveSettings(positive("time-limit", asked.time_limit_s), seed=asked.seed)
    if applied and not live:
        raise InputError("--apply", "is for a service that runs; add --live")
    require_writable("--out", out)
    saves = OutputFiles()
    live_service: LiveService | None = None
    with ExitStack() as stack:
        if live:
            if plan_path is not None:
                raise InputError("--live", "takes plan and spec from the service; leave them out")
            service = stack.enter_context(opened(asked.state))
            live_service = live_of(service)
            running_plan, spec = live_service.plan, read_spec(live_service.spec)
            # Rates of --rate override the observed ones, so they come last.
            asked = replace(asked, rate=(*live_service.rates, *asked.rate))
        elif plan_path is None or spec_path is None:
            raise InputError("PLAN SPEC", "are needed, or --live")
        else:
            running_plan, spec = read_plan(plan_path), read_spec(spec_path)
        spec = for_style(changed_spec(spec, asked.workload), live_service.style if live_service else "")
        require_runnable(running_plan, spec, str(plan_path or "the plan in force"))
        problem = load_problem(spec, asked.headroom, None, (), asked.init_penalty)
        if live_service is not None:
            day = datetime.now(UTC).date().isoformat()
            problem = observed(measured(problem, live_service.profiles), live_service.paces, day)
        running_plan, problem = after_losses(problem, running_plan, asked.lose)
        problem = changed_problem(problem, asked)
        answered = _answered(problem, running_plan, spec, settings, asked.averages)
        saves.text("--out", out, lambda: plan_to_json(answered.best.plan))
        refused = applied and answered.misses and not asked.anyway
        done = REFUSED if refused else ""
        if live_service is not None and applied and not refused:
            done = apply(service, live_service, answered.best)
    _print(answered, live_service, done, as_json)
    saves.complain()
    if refused:
        missed()


@dataclass(frozen=True, slots=True)
class Answered:
    """All options, the best of them, and its SLO attainment in simulation."""

    answers: tuple[ReplanOption, ...]
    best: ReplanOption
    tried: tuple[Tried, ...] | None
    """None: not simulated."""

    @property
    def misses(self) -> bool:
        return any(item.verdict == "misses" for item in self.tried or ())


def _print(answered: Answered, service: LiveService | None, done: str, as_json: bool) -> None:
    if as_json:
        from potluck.core.codec import encode

        body: dict[str, object] = {
            "best": answered.best.step,
            "answers": [encode(replan_option) for replan_option in answered.answers],
            "rehearsed": [{**asdict(entry), "verdict": entry.verdict} for entry in answered.tried or ()],
        }
        emit_json(body | ({} if service is None else {"version": service.version, "done": done}))
        return
    if service is not None:
        rates = ", ".join(service.rates) or "those of the spec (less than ten minutes observed)"
        click.echo(f"running plan {service.version}, ${service.plan.total_usd_per_h:.2f}/h; req/s: {rates}")
        if paces := spoken(service.paces):
            click.echo(paces)
    _show(answered)
    for item in answered.tried or ():
        paragraph(f"{evidence_line(item)}.")
    if done:
        paragraph(done)


def _answered(
    problem: PlanningProblem, running_plan: Plan, spec: Spec, settings: SolveSettings, averages: bool
) -> Answered:
    from potluck.core.values.service import ModelTerms
    from potluck.plan.replan_options import best_answer, ladder
    from potluck.plan.strategies import STRATEGIES
    from potluck.plan.verify import verify

    with progress(3) as progress_bar:
        progress_bar("rerouting, flipping, reallocating")
        auto = STRATEGIES["auto"]
        planner = auto if averages else rehearsing(auto, spec)
        answers = ladder(problem, running_plan, planner, settings)
        # New routes and roles use what is left as well as they can; only a new plan keeps its owner's terms, and one
        # without copies says that none can.
        plain = replace(
            problem, demands=tuple(replace(demand, terms=ModelTerms()) for demand in problem.demands)
        )
        for replan_option in answers:
            keeps_terms = replan_option.step == "reallocate" and bool(replan_option.plan.deployments)
            violations = verify(problem if keeps_terms else plain, replan_option.plan)
            if violations:
                raise CapacityError(f"option {replan_option.step!r} failed verification: {violations[0]}")
        best_option = best_answer(answers)
        if best_option.served_fraction <= 0 and any(demand.rate_per_s > 0 for demand in problem.demands):
            raise CapacityError(
                "the remaining nodes cannot serve the demand within its SLOs; add nodes or relax the SLOs"
            )
        if averages:
            return Answered(answers, best_option, None)
        return Answered(answers, *best_tried(answers, spec, problem, progress_bar))


def _show(answered: Answered) -> None:
    best_option = answered.best
    columns: dict[str, Callable[[ReplanOption], object]] = {
        "option": lambda replan_option: (
            f"{replan_option.step} (best)" if replan_option is best_option else replan_option.step
        ),
        "demand served": lambda replan_option: percent(replan_option.served_fraction),
        "USD/h": lambda replan_option: usd(replan_option.cost_usd_per_h),
        "ready": lambda replan_option: (
            f"in {seconds(replan_option.time_s)}" if replan_option.time_s else "at once"
        ),
        "start-up cost": lambda replan_option: usd(replan_option.start_cost_usd),
        "flips": lambda replan_option: replan_option.flips,
        "starts": lambda replan_option: replan_option.starts,
        "stops": lambda replan_option: replan_option.stops,
    }
    judged = "none simulated" if answered.tried is None else "best one simulated"
    table_of(
        f"Options, least disruptive first (demand served for mean traffic; {judged})",
        answered.answers,
        columns,
    )
    copies = [(item.region, item.count, item.template) for item in best_option.plan.deployments]
    table(f"Deployments after {best_option.step}", ("region", "copies", "template"), copies)
    show_groups(best_option.plan)


_LINK = re.compile(r"(?P<source>[^:=]+):(?P<target>[^:=]+)=(?P<value>[0-9.]+)(gbps)?\Z", re.IGNORECASE)
_RATE = re.compile(r"(?P<model>[^=]+)=(?P<value>[0-9.]+)(?P<times>x?)\Z")
_LENGTHS = re.compile(r"(?P<input>[0-9]{1,8})/(?P<output>[0-9]{1,8})\Z")


def changed_spec(spec: Spec, workloads: Sequence[str]) -> Spec:
    """The spec with other lengths; rates stay what they are."""
    models = list(spec.models)
    for text in workloads:
        name, _, workload = text.rpartition("=")
        known = [model.name for model in models]
        if name and name not in known:
            raise UnknownNameError("workload: model", name, known)
        bins = _workload(workload)
        models = [_with_lengths(m, bins, workload) if name in ("", m.name) else m for m in models]
    return replace(spec, models=tuple(models))


def after_losses(
    problem: PlanningProblem, running_plan: Plan, losses: Sequence[str]
) -> tuple[Plan, PlanningProblem]:
    """The copies that are left, and the nodes: those that are rented are lost before those that are not."""
    from potluck.plan.replan_options import deployments_held_by
    from potluck.plan.timing.named_machines import named

    used = {machine for template in running_plan.templates for machine in template.machines}
    if used:
        problem = named(problem)
    for text in losses:
        if NODE_COUNT.match(text) is None or used:
            problem = _with_loss(problem, _names(problem, used, text))
            continue
        region, node, value = node_change(problem, "lose", text)
        problem = _with_offer(problem, region, node, lose=int(value))
        held = {
            **running_plan.nodes,
            (region, node): max(0, running_plan.nodes.get((region, node), 0) - int(value)),
        }
        running_plan = replace(running_plan, deployments=deployments_held_by(held, running_plan))
    return running_plan, problem


def _names(problem: PlanningProblem, used: set[str], text: str) -> str:
    """So many machines of a type as names, those that a plan uses first; names as they are."""
    if NODE_COUNT.match(text) is None or problem.pool is None:
        return text
    region, node, value = node_change(problem, "lose", text)
    there = [m.name for m in problem.pool.nodes if m.gpus and (m.region, m.type.name) == (region, node)]
    if len(there) < int(value):
        raise InputError("lose", f"{region} has only {len(there)} {node}")
    return ",".join(sorted(there, key=lambda name: name not in used)[: int(value)])


def changed_problem(problem: PlanningProblem, asked: ReplanRequest) -> PlanningProblem:
    for text in asked.price:
        region, node, value = node_change(problem, "price", text, NODE_PRICE)
        problem = _with_offer(problem, region, node, price_usd_per_h=float(value))
    for text in asked.link:
        problem = _with_link(problem, text)
    for text in asked.rate:
        problem = _with_rate(problem, text)
    return problem


def _workload(text: str) -> tuple[LengthBin, ...]:
    """Lengths as IN/OUT, from a trace file, or by a name of the catalog, whose means are taken."""
    from potluck.catalog import named_workloads
    from potluck.spec.traces import load_trace
    from potluck.spec.traffic import joint_bins

    match = _LENGTHS.match(text)
    if match is not None:
        return (LengthBin(float(match["input"]), float(match["output"]), 1.0),)
    path = Path(text)
    if path.suffix and path.is_file():
        trace = load_trace(path)
        return joint_bins(trace.input_tokens, trace.output_tokens)
    try:
        laws = named_workloads.workload(text).lengths
    except UnknownNameError as error:
        forms = f"nor lengths such as 1155/211, nor a trace file{did_you_mean(text, named_workloads.names())}"
        raise InputError("workload", f"{text!r} is no workload of the catalog, {forms}") from error
    return (LengthBin(laws.prompt.mean_tokens, laws.output.mean_tokens, 1.0),)


def _with_lengths(model: ModelSpec, bins: Sequence[LengthBin], words: str) -> ModelSpec:
    """A model with other lengths; what its context has no room for is cut, prompts first, and told."""
    most = model.model.max_context_tokens
    cut = 0.0
    kept = []
    for length_bin in bins:
        output = min(length_bin.output_tokens, most - 1.0)
        prompt = min(length_bin.input_tokens, most - output)
        whole = (prompt, output) == (length_bin.input_tokens, length_bin.output_tokens)
        cut += 0.0 if whole else length_bin.share
        kept.append(replace(length_bin, input_tokens=prompt, output_tokens=output))
    if cut > 0:
        note = f"{cut:.0%} of the requests are longer than {model.model.name}'s context of {most:,} tokens"
        click.echo(f"note: {words}: {note} and were cut to it", err=True)
    return replace(model, traffic=replace(model.traffic, lengths=tuple(kept)), lengths_from=words)


def _with_loss(problem: PlanningProblem, text: str) -> PlanningProblem:
    for name in (part.strip() for part in text.split(",")):
        pool = problem.pool
        if pool is None:
            form = "is not REGION:NODE=COUNT, such as us-east-1:4xL40S=1"
            raise InputError("lose", f"{text!r} {form}; machines have names only in a spec with `pool:`")
        machine = pool.node(name)
        if machine is None:
            raise UnknownNameError("lose: machine", name, [node.name for node in pool.nodes if node.gpus])
        if not machine.gpus:
            raise InputError("lose", f"{name!r} is named twice")
        if pool.gpus == machine.gpus:
            raise InputError("lose", "that is every machine of the pool; nothing is left to serve on")
        problem = replace(problem, pool=pool.without({name: machine.gpus}))
        problem = _with_offer(problem, machine.region, machine.type.name, lose=1)
    return problem


def _match(field: str, pattern: re.Pattern[str], text: str, form: str) -> re.Match[str]:
    match = pattern.match(text)
    if match is None:
        raise InputError(field, f"{text!r} is not {form}")
    return match


def _with_offer(
    problem: PlanningProblem, region: str, node: str, *, lose: int = 0, price_usd_per_h: float | None = None
) -> PlanningProblem:
    regions = []
    for item in problem.regions:
        offers = []
        for offer in item.offers:
            if (item.name, offer.node) == (region, node):
                if lose > offer.available:
                    raise InputError("lose", f"{region} has only {offer.available} {node}")
                money = offer.price_usd_per_h if price_usd_per_h is None else price_usd_per_h
                offer = replace(offer, available=offer.available - lose, price_usd_per_h=money)
            offers.append(offer)
        regions.append(replace(item, offers=tuple(offers)))
    return replace(problem, regions=tuple(regions))


def _with_link(problem: PlanningProblem, text: str) -> PlanningProblem:
    match = _match("link", _LINK, text, "FROM:TO=GBPS, such as us-east-1:lab=20")
    ends, gbps = (match["source"], match["target"]), float(match["value"])
    if not gbps > 0:
        raise InputError("link", f"{text!r}: the bandwidth must be positive")
    machines = [] if problem.pool is None else [node.name for node in problem.pool.nodes]
    if problem.pool is not None and set(ends) <= set(machines):
        return replace(problem, pool=problem.pool.with_link(*ends, gbps))
    known = {(link.source, link.target) for link in problem.links}
    if ends not in known:
        names = [":".join(item) for item in known]
        wrong = [end for end in ends if end not in machines]
        if machines and not known:
            raise UnknownNameError("link: machine", wrong[0], machines)
        raise UnknownNameError("link", ":".join(ends), names)
    links = tuple(
        replace(link, gbps=gbps) if (link.source, link.target) == ends else link for link in problem.links
    )
    return replace(problem, links=links)


def _with_rate(problem: PlanningProblem, text: str) -> PlanningProblem:
    match = _match("rate", _RATE, text, "MODEL=REQUESTS_PER_S or MODEL=1.5x")
    names = [demand.name for demand in problem.demands]
    if match["model"] not in names:
        raise UnknownNameError("rate: model", match["model"], names)
    demands = []
    for demand in problem.demands:
        if demand.name == match["model"]:
            wanted = float(match["value"])
            factor = wanted if match["times"] else wanted / demand.rate_per_s if demand.rate_per_s else 0.0
            buckets = tuple(
                replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in demand.buckets
            )
            demand = replace(demand, buckets=buckets)
        demands.append(demand)
    return replace(problem, demands=tuple(demands))


MIN_OBSERVED_RATE_PER_S = 1e-3
"""A model that was asked for less keeps the rate that its spec has: a pause is no reason to plan for nothing."""


@dataclass(frozen=True, slots=True)
class LiveService:
    """A service that runs, as far as plans go."""

    version: int
    plan: Plan
    spec: Path
    profiles: tuple[Path, ...]
    rates: tuple[str, ...]
    """What was asked of it in the last ten minutes that are over, as `--rate` has it."""
    paces: tuple[ObservedSpeed, ...] = ()
    """What its replicas really take."""
    style: str = ""
    """Of its engines; empty: of a service that an earlier release started."""


def live_of(service: ServiceView) -> LiveService:
    from potluck.control.decision_history import history_of, paces_of

    newest, known = service.store.plan(), service.store.get("spec files") or {}
    if newest is not None and known.get("path") is None:
        raise nothing(f"{service.folder} has servers on unknown hardware and cannot be planned")
    if newest is None:
        raise nothing(f"there is no plan in {service.folder} yet")
    now_s = time.time()
    seen = history_of(service.store, now_s)
    models = {template.model for template in newest.plan.templates}
    rates = tuple(
        f"{model}={rates[-1]:.6g}"
        for model, rates in sorted(seen.items())
        if model in models and rates[-1] >= MIN_OBSERVED_RATE_PER_S
    )
    profiles = tuple(Path(item) for item in known.get("profiles", ()))
    paces = paces_of(service.store, now_s)
    style = str(known.get("style", ""))
    return LiveService(newest.version, newest.plan, Path(known["path"]), profiles, rates, paces, style)


def apply(service: ServiceView, running_service: LiveService, best_option: ReplanOption) -> str:
    """Put the best plan into force through the gateway; returns a line that says so."""
    from potluck.control.manual_changes import BY_HAND, put_plan

    with_gateway(service)
    if is_no_better(best_option.plan, running_service.plan):
        return f"plan {running_service.version} is already the best option; nothing changed"
    newest = service.store.plan()
    if newest is not None and newest.version != running_service.version:
        raise InputError("--apply", f"plan {newest.version} was applied meanwhile; run the command again")
    why, cost = f"replan --live, {best_option.step}", f"${best_option.cost_usd_per_h:.2f}/h"
    version = put_plan(
        service.store, service.client.set_plan, best_option.plan, f"{BY_HAND}: {why}", time.time()
    )
    service.store.note(time.time(), "plan", f"version {version}, {cost}, {why}", BY_HAND)
    change = f"{cost} (was ${running_service.plan.total_usd_per_h:.2f}/h)"
    return f"applied plan {version}: {best_option.step}, {change}; `potluck fleet scale --auto` undoes it"


def is_no_better(plan: Plan, running_plan: Plan) -> bool:
    """The same copies for the same demand, and no more of it served: other shares alone make no version."""
    asked, before = (
        {(item.model, item.bucket): item.rate_per_s for item in one.buckets} for one in (plan, running_plan)
    )
    same = asked.keys() == before.keys() and all(isclose(asked[k], before[k], rel_tol=0.01) for k in asked)
    copies = set(plan.deployments) == set(running_plan.deployments)
    return same and copies and plan.fraction <= running_plan.fraction + 1e-6
