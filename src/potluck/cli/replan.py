"""`potluck replan`: something happened; what are the answers, from cheap to dear?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.plan import load_problem, node_name, read_spec
from potluck.cli.progress import progress
from potluck.cli.render import emit_json, percent, seconds, table, usd
from potluck.core.errors import CapacityError, InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.core.plan import Plan
    from potluck.plan.ladder import Answer
    from potluck.plan.problem import Problem

_LOSE = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>\d+)\Z")
_PRICE = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>[0-9.]+)\Z")
_LINK = re.compile(r"(?P<source>[^:=]+):(?P<target>[^:=]+)=(?P<value>[0-9.]+)(gbps)?\Z", re.IGNORECASE)
_RATE = re.compile(r"(?P<model>[^=]+)=(?P<value>[0-9.]+)(?P<times>x?)\Z")


@click.command()
@click.argument("plan_path", metavar="PLAN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("spec_path", metavar="SPEC", type=click.Path(path_type=Path))
@click.option("--lose", multiple=True, help="REGION:NODE=COUNT: so many of these nodes are gone.")
@click.option("--rate", multiple=True, help="MODEL=REQUESTS_PER_S, or MODEL=1.5x for so many times as many.")
@click.option("--link", multiple=True, help="FROM:TO=GBPS: a link's bandwidth is now this.")
@click.option("--price", multiple=True, help="REGION:NODE=USD_PER_H: a node's price is now this.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the best answer's plan here."
)
@click.option(
    "--time-limit", "time_limit_s", type=float, default=30.0, show_default=True, help="Seconds a solve."
)
@click.option("--init-penalty", type=float, default=0.1, show_default=True, help="CORAL's K, against churn.")
@click.option("--headroom", type=float, default=0.8, show_default=True, help="How busy replicas may be.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replan(
    plan_path: Path,
    spec_path: Path,
    lose: tuple[str, ...],
    rate: tuple[str, ...],
    link: tuple[str, ...],
    price: tuple[str, ...],
    out: Path | None,
    time_limit_s: float,
    init_penalty: float,
    headroom: float,
    as_json: bool,
) -> None:
    """Answers to trouble for a running PLAN: new routing, role flips, a new allocation.

    \b
    Examples:
      potluck replan plan.json potluck.yaml --lose us-east-1:4xL40S=1
      potluck replan plan.json potluck.yaml --rate chat=2x --link us-east-1:lab=1gbps
    """
    from potluck.core.plan import plan_from_json, plan_to_json
    from potluck.plan.ladder import best_answer, ladder
    from potluck.plan.strategies import STRATEGIES, Settings
    from potluck.plan.verify import verify

    running = plan_from_json(plan_path.read_text(encoding="utf-8"))
    problem = load_problem(read_spec(spec_path), headroom, None, (), init_penalty)
    problem = _changed(problem, running, lose, rate, link, price)
    if not 0 < time_limit_s < float("inf"):
        raise InputError("time-limit", f"must be positive, is {time_limit_s:g}")
    with progress(3) as said:
        said("rerouting, flipping, reallocating")
        answers = ladder(problem, running, STRATEGIES["auto"], Settings(time_limit_s=time_limit_s))
        for answer in answers:
            violations = verify(problem, answer.plan)
            if violations:
                raise CapacityError(f"the answer {answer.step!r} failed its own check: {violations[0]}")
    best = best_answer(answers)
    if out is not None:
        out.write_text(plan_to_json(best.plan), encoding="utf-8")
    if as_json:
        from potluck.core.codec import encode

        emit_json({"best": best.step, "answers": [encode(answer) for answer in answers]})
    else:
        _show(answers, best)


def _changed(
    problem: Problem,
    running: Plan,
    lose: tuple[str, ...],
    rate: tuple[str, ...],
    link: tuple[str, ...],
    price: tuple[str, ...],
) -> Problem:
    for text in lose:
        region, node, value = _node_change(problem, "lose", _LOSE, text)
        problem = _with_offer(problem, region, node, lose=int(value))
    for text in price:
        region, node, value = _node_change(problem, "price", _PRICE, text)
        problem = _with_offer(problem, region, node, price_usd_per_h=float(value))
    for text in link:
        problem = _with_link(problem, text)
    for text in rate:
        problem = _with_rate(problem, text)
    return problem


def _match(field: str, pattern: re.Pattern[str], text: str, form: str) -> re.Match[str]:
    match = pattern.match(text)
    if match is None:
        raise InputError(field, f"{text!r} is not {form}")
    return match


def _node_change(problem: Problem, field: str, pattern: re.Pattern[str], text: str) -> tuple[str, str, str]:
    match = _match(field, pattern, text, "REGION:NODE=NUMBER, such as us-east-1:4xL40S=1")
    regions = [region.name for region in problem.regions]
    if match["region"] not in regions:
        raise UnknownNameError(f"{field}: region", match["region"], regions)
    return match["region"], node_name(problem, match["node"], field), match["value"]


def _with_offer(
    problem: Problem, region: str, node: str, *, lose: int = 0, price_usd_per_h: float | None = None
) -> Problem:
    regions = []
    for each in problem.regions:
        offers = []
        for offer in each.offers:
            if (each.name, offer.node) == (region, node):
                if lose > offer.available:
                    raise InputError("lose", f"{region} has only {offer.available} {node}")
                money = offer.price_usd_per_h if price_usd_per_h is None else price_usd_per_h
                offer = replace(offer, available=offer.available - lose, price_usd_per_h=money)
            offers.append(offer)
        regions.append(replace(each, offers=tuple(offers)))
    return replace(problem, regions=tuple(regions))


def _with_link(problem: Problem, text: str) -> Problem:
    match = _match("link", _LINK, text, "FROM:TO=GBPS, such as us-east-1:lab=20")
    ends = (match["source"], match["target"])
    known = {(each.source, each.target) for each in problem.links}
    if ends not in known:
        raise UnknownNameError("link", ":".join(ends), (":".join(each) for each in known))
    links = tuple(
        replace(each, gbps=float(match["value"])) if (each.source, each.target) == ends else each
        for each in problem.links
    )
    return replace(problem, links=links)


def _with_rate(problem: Problem, text: str) -> Problem:
    match = _match("rate", _RATE, text, "MODEL=REQUESTS_PER_S or MODEL=1.5x")
    names = [ask.name for ask in problem.asks]
    if match["model"] not in names:
        raise UnknownNameError("rate: model", match["model"], names)
    asks = []
    for ask in problem.asks:
        if ask.name == match["model"]:
            wanted = float(match["value"])
            factor = wanted if match["times"] else wanted / ask.rate_per_s if ask.rate_per_s else 0.0
            demands = tuple(replace(d, rate_per_s=d.rate_per_s * factor) for d in ask.demands)
            ask = replace(ask, demands=demands)
        asks.append(ask)
    return replace(problem, asks=tuple(asks))


def _show(answers: tuple[Answer, ...], best: Answer) -> None:
    rows = [
        (
            f"{answer.step} (best)" if answer is best else answer.step,
            percent(answer.served_fraction),
            usd(answer.cost_usd_per_h),
            seconds(answer.time_s) if answer.time_s else "at once",
            usd(answer.start_cost_usd),
            answer.flips,
            answer.starts,
            answer.stops,
        )
        for answer in answers
    ]
    columns = ("answer", "served", "USD/h", "in force after", "start-up USD", "flips", "starts", "stops")
    table("Answers, from cheap to dear", columns, rows)
    table(
        f"With {best.step}",
        ("region", "copies", "template"),
        [(each.region, each.count, each.template) for each in best.plan.deployments],
    )
