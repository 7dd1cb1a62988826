"""What happened, as options of `potluck replan`: lost machines, other load, other lengths, links and prices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.problem_options import node_name
from potluck.core.errors import InputError, UnknownNameError, did_you_mean
from potluck.core.values.types import LengthBin

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.spec.spec_values import ModelSpec, Spec

_LOSE = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>\d+)\Z")
_PRICE = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>[0-9.]+)\Z")
_LINK = re.compile(r"(?P<source>[^:=]+):(?P<target>[^:=]+)=(?P<value>[0-9.]+)(gbps)?\Z", re.IGNORECASE)
_RATE = re.compile(r"(?P<model>[^=]+)=(?P<value>[0-9.]+)(?P<times>x?)\Z")
_LENGTHS = re.compile(r"(?P<input>[0-9]{1,8})/(?P<output>[0-9]{1,8})\Z")


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options as they were written."""

    lose: tuple[str, ...] = ()
    rate: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    price: tuple[str, ...] = ()


def changed_spec(spec: Spec, changes: ChangeOptions) -> Spec:
    """The spec with other lengths; rates stay what they are."""
    models = list(spec.models)
    for text in changes.workload:
        name, _, workload = text.rpartition("=")
        known = [model.name for model in models]
        if name and name not in known:
            raise UnknownNameError("workload: model", name, known)
        bins = _workload(workload)
        models = [_with_lengths(m, bins, workload) if name in ("", m.name) else m for m in models]
    return replace(spec, models=tuple(models))


def changed_problem(problem: PlanningProblem, running: Plan, changes: ChangeOptions) -> PlanningProblem:
    """The problem after everything else that happened."""
    from potluck.plan.timing.named_machines import named

    if any(template.machines for template in running.templates):
        problem = named(problem)
    for text in changes.lose:
        problem = _with_loss(problem, text)
    for text in changes.price:
        region, node, value = _node_change(problem, "price", _PRICE, text)
        problem = _with_offer(problem, region, node, price_usd_per_h=float(value))
    for text in changes.link:
        problem = _with_link(problem, text)
    for text in changes.rate:
        problem = _with_rate(problem, text)
    return problem


def _workload(text: str) -> tuple[LengthBin, ...]:
    """Lengths as IN/OUT, from a trace file, or by a name of the catalog, whose means are taken."""
    from potluck.catalog import named_workloads
    from potluck.spec import binning
    from potluck.spec.traces import load_trace

    match = _LENGTHS.match(text)
    if match is not None:
        return (LengthBin(float(match["input"]), float(match["output"]), 1.0),)
    path = Path(text)
    if path.suffix and path.is_file():
        try:
            trace = load_trace(path)
        except (OSError, ValueError) as error:
            raise InputError("workload", f"{text!r} cannot be read: {error}") from error
        return binning.joint_bins(trace.input_tokens, trace.output_tokens)
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
    for each in bins:
        output = min(each.output_tokens, most - 1.0)
        prompt = min(each.input_tokens, most - output)
        cut += each.share if (prompt, output) != (each.input_tokens, each.output_tokens) else 0.0
        kept.append(replace(each, input_tokens=prompt, output_tokens=output))
    if cut > 0:
        note = f"{cut:.0%} of the requests are longer than {model.model.name}'s context of {most:,} tokens"
        click.echo(f"note: {words}: {note} and were cut to it", err=True)
    return replace(model, traffic=replace(model.traffic, lengths=tuple(kept)), lengths_from=words)


def _with_loss(problem: PlanningProblem, text: str) -> PlanningProblem:
    """`REGION:NODE=COUNT`, or names of machines with commas between them."""
    if _LOSE.match(text):
        region, node, value = _node_change(problem, "lose", _LOSE, text)
        return _with_offer(problem, region, node, lose=int(value))
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


def _node_change(
    problem: PlanningProblem, field: str, pattern: re.Pattern[str], text: str
) -> tuple[str, str, str]:
    match = _match(field, pattern, text, "REGION:NODE=NUMBER, such as us-east-1:4xL40S=1")
    regions = [region.name for region in problem.regions]
    if match["region"] not in regions:
        raise UnknownNameError(f"{field}: region", match["region"], regions)
    return match["region"], node_name(problem, match["node"], field), match["value"]


def _with_offer(
    problem: PlanningProblem, region: str, node: str, *, lose: int = 0, price_usd_per_h: float | None = None
) -> PlanningProblem:
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


def _with_link(problem: PlanningProblem, text: str) -> PlanningProblem:
    """Between regions, or between two machines of a pool; one direction."""
    match = _match("link", _LINK, text, "FROM:TO=GBPS, such as us-east-1:lab=20")
    ends, gbps = (match["source"], match["target"]), float(match["value"])
    if not gbps > 0:
        raise InputError("link", f"{text!r}: the bandwidth must be positive")
    machines = [] if problem.pool is None else [node.name for node in problem.pool.nodes]
    if problem.pool is not None and set(ends) <= set(machines):
        return replace(problem, pool=problem.pool.with_link(*ends, gbps))
    known = {(each.source, each.target) for each in problem.links}
    if ends not in known:
        names = [":".join(each) for each in known]
        wrong = [end for end in ends if end not in machines]
        if machines and not known:
            raise UnknownNameError("link: machine", wrong[0], machines)
        raise UnknownNameError("link", ":".join(ends), names)
    links = tuple(
        replace(each, gbps=gbps) if (each.source, each.target) == ends else each for each in problem.links
    )
    return replace(problem, links=links)


def _with_rate(problem: PlanningProblem, text: str) -> PlanningProblem:
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
