"""`potluck replan`: something happened; what are the answers, from cheap to dear?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.exits import missed
from potluck.cli.common.files import OutputFiles, require_writable
from potluck.cli.common.problem_options import load_problem, read_plan, read_spec
from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json, paragraph, percent, table, usd
from potluck.cli.planning.change_options import ChangeOptions, changed_problem, changed_spec
from potluck.cli.planning.estimate_command import measured
from potluck.cli.planning.evidence import evidence_line
from potluck.cli.planning.plan_show import show_groups
from potluck.cli.planning.rehearsal_options import averages_option
from potluck.cli.planning.replan_live import LiveService, apply, for_engines, live_of, said_of, with_paces
from potluck.cli.planning.replan_rehearsed import best_tried, rehearsing
from potluck.cli.serving.operate.which_service import opened, state_option
from potluck.core.errors import CapacityError, InputError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Tried
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.replan.replan_options import ReplanOption
    from potluck.plan.strategies import SolveSettings
    from potluck.spec.spec_values import Spec

REFUSED = "not applied: this misses in rehearsal. `--yes` applies it all the same; more nodes may help"


@click.command()
@click.argument(
    "plan_path",
    metavar="[PLAN]",
    required=False,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.argument("spec_path", metavar="[SPEC]", required=False, type=click.Path(path_type=Path))
@click.option("--live", is_flag=True, help="For the service that runs here, without PLAN and SPEC.")
@click.option(
    "--apply",
    "applied",
    is_flag=True,
    help="With --live: put the best answer into force, unless a short rehearsal shows that it misses.",
)
@click.option("--yes", "anyway", is_flag=True, help="With --apply: also one that misses.")
@averages_option
@state_option
@click.option(
    "--lose",
    multiple=True,
    help="REGION:NODE=COUNT: so many of these nodes are gone; or NAME,NAME: these machines of a pool.",
)
@click.option("--rate", multiple=True, help="MODEL=REQUESTS_PER_S, or MODEL=1.5x for so many times as many.")
@click.option(
    "--workload",
    multiple=True,
    help="[MODEL=]LENGTHS: requests are now as long as 2048/28, a trace file or a workload of the catalog.",
)
@click.option(
    "--link",
    multiple=True,
    help="FROM:TO=GBPS: a link's bandwidth is now this; between regions or machines, one direction.",
)
@click.option("--price", multiple=True, help="REGION:NODE=USD_PER_H: a node's price is now this.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the best answer's plan here."
)
@click.option(
    "--time-limit", "time_limit_s", type=float, default=30.0, show_default=True, help="Seconds a solve."
)
@click.option("--init-penalty", type=float, default=0.1, show_default=True, help="CORAL's K, against churn.")
@click.option("--headroom", type=float, default=0.8, show_default=True, help="How busy replicas may be.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of a search.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replan(
    plan_path: Path | None,
    spec_path: Path | None,
    live: bool,
    applied: bool,
    anyway: bool,
    averages: bool,
    state: Path | None,
    lose: tuple[str, ...],
    rate: tuple[str, ...],
    workload: tuple[str, ...],
    link: tuple[str, ...],
    price: tuple[str, ...],
    out: Path | None,
    time_limit_s: float,
    init_penalty: float,
    headroom: float,
    seed: int,
    as_json: bool,
) -> None:
    """Answers to trouble for a running PLAN: new routing, role flips, a new allocation.

    \b
    Examples:
      potluck replan plan.json potluck.yaml --lose us-east-1:4xL40S=1
      potluck replan plan.json potluck.yaml --rate chat=2x --link us-east-1:lab=1gbps
      potluck replan plan.json pool.yaml --lose node3,node7 --workload coding
      potluck replan --live --rate words=2x --apply
    """
    from potluck.core.values.plan import plan_to_json
    from potluck.plan.strategies import SolveSettings

    if not 0 < time_limit_s < float("inf"):
        raise InputError("time-limit", f"must be positive, is {time_limit_s:g}")
    if applied and not live:
        raise InputError("--apply", "is for a service that runs; add --live")
    require_writable("--out", out)
    changes, saves = ChangeOptions(lose, rate, workload, link, price), OutputFiles()
    now: LiveService | None = None
    with ExitStack() as stack:
        if live:
            if plan_path is not None:
                raise InputError("--live", "takes plan and spec from the service; leave them out")
            service = stack.enter_context(opened(state))
            now = live_of(service)
            running, spec = now.plan, read_spec(now.spec)
            # What is said here counts more than what was seen, so it comes last.
            changes = replace(changes, rate=(*now.rates, *rate))
        elif plan_path is None or spec_path is None:
            raise InputError("PLAN SPEC", "are needed, or --live")
        else:
            running, spec = read_plan(plan_path), read_spec(spec_path)
        spec = changed_spec(spec, changes)
        problem = load_problem(spec, headroom, None, (), init_penalty)
        if now is not None:
            problem = with_paces(measured(problem, now.profiles), now)
        problem = changed_problem(problem, running, changes)
        settings = SolveSettings(time_limit_s=time_limit_s, seed=seed)
        found = _answered(problem, running, spec, settings, averages, now.style if now else "")
        saves.text("--out", out, lambda: plan_to_json(found.best.plan))
        refused = applied and found.misses and not anyway
        done = REFUSED if refused else ""
        if now is not None and applied and not refused:
            done = apply(service, now, found.best)
    _print(found, now, done, as_json)
    saves.complain()
    if refused:
        missed()


@dataclass(frozen=True, slots=True)
class Answered:
    """All answers, the best of them, and what a rehearsal showed of that one."""

    answers: tuple[ReplanOption, ...]
    best: ReplanOption
    tried: tuple[Tried, ...] | None
    """None: on averages alone."""

    @property
    def misses(self) -> bool:
        return any(each.verdict == "misses" for each in self.tried or ())


def _print(found: Answered, now: LiveService | None, done: str, as_json: bool) -> None:
    if as_json:
        from potluck.core.codec import encode

        body: dict[str, object] = {
            "best": found.best.step,
            "answers": [encode(answer) for answer in found.answers],
            "rehearsed": [{**asdict(each), "verdict": each.verdict} for each in found.tried or ()],
        }
        emit_json(body | ({} if now is None else {"version": now.version, "done": done}))
        return
    if now is not None:
        said_of(now)
    _show(found)
    for each in found.tried or ():
        paragraph(f"{evidence_line(each)}.")
    if done:
        paragraph(done)


def _answered(
    problem: PlanningProblem, running: Plan, spec: Spec, settings: SolveSettings, averages: bool, style: str
) -> Answered:
    """All answers, each checked, and the best of them."""
    from potluck.core.values.terms import ModelTerms
    from potluck.plan.check.verify import verify
    from potluck.plan.replan.replan_options import best_answer, ladder
    from potluck.plan.strategies import STRATEGIES

    with progress(3) as said:
        said("rerouting, flipping, reallocating")
        auto = for_engines(STRATEGIES["auto"], style)
        planner = auto if averages else rehearsing(auto, spec)
        answers = ladder(problem, running, planner, settings)
        # New routes and roles use what is left as well as they can; only a new plan keeps its owner's terms.
        plain = replace(problem, asks=tuple(replace(ask, terms=ModelTerms()) for ask in problem.asks))
        for answer in answers:
            violations = verify(problem if answer.step == "reallocate" else plain, answer.plan)
            if violations:
                raise CapacityError(f"the answer {answer.step!r} failed its own check: {violations[0]}")
        best = best_answer(answers)
        if best.served_fraction <= 0 and any(ask.rate_per_s > 0 for ask in problem.asks):
            raise CapacityError(
                "nothing that is left can serve the demand within its objective; add nodes or relax it"
            )
        if averages:
            return Answered(answers, best, None)
        return Answered(answers, *best_tried(answers, spec, problem, said))


def _show(found: Answered) -> None:
    best = found.best
    rows = [
        (
            f"{answer.step} (best)" if answer is best else answer.step,
            percent(answer.served_fraction),
            usd(answer.cost_usd_per_h),
            f"in {seconds(answer.time_s)}" if answer.time_s else "at once",
            usd(answer.start_cost_usd),
            answer.flips,
            answer.starts,
            answer.stops,
        )
        for answer in found.answers
    ]
    columns = ("answer", "served", "USD/h", "in force", "to start", "flips", "starts", "stops")
    judged = (
        "served on averages, not rehearsed"
        if found.tried is None
        else "served on averages, the best rehearsed"
    )
    table(f"Answers, from cheap to dear; {judged}", columns, rows)
    table(
        f"With {best.step}",
        ("region", "copies", "template"),
        [(each.region, each.count, each.template) for each in best.plan.deployments],
    )
    show_groups(best.plan)
