"""What a simulated run looks like in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.cli.common.render import bytes_, count, percent, short, table, table_of, usd
from potluck.core.figures import seconds
from potluck.sim.results.records import ANSWERED, OUTCOMES, REASONS, ROUTES, SimResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from potluck.core.values.plan import Plan
    from potluck.plan.load import ModelLoad
    from potluck.plan.problem import PlanningProblem
    from potluck.sim.results.metrics import ModelSummary, RunSummary, ScaleScan
    from potluck.sim.results.plan_comparison import PlanDeviation
    from potluck.sim.results.records import SimResult


MOST_ROWS = 12
SAME_ANSWERS = 0.1
"""How far the mean answer may be from the planned one for capacities of the plan to apply."""


def show_summary(summary: RunSummary, result: SimResult) -> None:
    models = [*summary.models, *([summary.total] if len(summary.models) > 1 else [])]
    _latencies(models)
    _promises("Objectives", "model", models)
    for title, what, groups in (
        ("Tenants", "tenant", summary.tenants),
        ("Classes", "class", summary.classes),
    ):
        if groups:
            _promises(title, what, list(groups))
    _refusals(models)
    _use(summary)
    if result.faults:
        rows = [(seconds(fault.at_s), fault.what) for fault in result.faults[:MOST_ROWS]]
        if len(result.faults) > MOST_ROWS:
            rows.append(("", f"and {len(result.faults) - MOST_ROWS} more"))
        table("What went wrong", ("at", "what"), rows)
    notes = [(what, count(number)) for what, number in result.counts.items() if number]
    if notes:
        table("Also", ("what", "how often"), notes)


def simulated_loads(
    problem: PlanningProblem, plan: Plan, result: SimResult, summary: RunSummary
) -> tuple[ModelLoad, ...]:
    """Each model's load by the plan's definition. None of a fleet that changed, as a plan has one capacity; nor of
    models whose answers are of other lengths than was planned for."""
    from potluck.plan.load import load_at

    records, loads = result.records, []
    span_s = (float(records.arrival_s[-1]) if len(records) else 0.0) - summary.start_s
    if len(result.cost_rates) > 1 or span_s <= 0:
        return ()
    answered = (records.outcome == ANSWERED) & (records.arrival_s >= summary.start_s)
    for index, name in enumerate(records.models):
        model_demand, chosen = problem.ask(name), answered & (records.model == index)
        if model_demand is None or not model_demand.rate_per_s > 0 or not chosen.any():
            continue
        planned = (
            sum(demand.rate_per_s * demand.output_tokens for demand in model_demand.demands)
            / model_demand.rate_per_s
        )
        if abs(float(records.output_tokens[chosen].mean()) / planned - 1) > SAME_ANSWERS:
            continue
        edges = [demand.longest_tokens for demand in model_demand.demands]
        bucket = np.minimum(np.searchsorted(edges, records.prompt_tokens[chosen]), len(edges) - 1)
        rates = np.bincount(bucket, minlength=len(edges)) / span_s
        loads.append(load_at(problem, plan, model_demand, rates.tolist()))
    return tuple(loads)


def show_loads(loads: Sequence[ModelLoad]) -> None:
    columns: dict[str, Callable[[ModelLoad], object]] = {
        "model": lambda item: item.model,
        "answered/s": lambda item: f"{item.answered_per_s:.3g}",
        "if always busy/s": lambda item: f"{item.capacity_per_s:.3g}",
        "load": lambda item: percent(item.load),
    }
    if loads:
        table_of("Load of the plan's copies", loads, columns)


def show_planned(plan_deviations: Sequence[PlanDeviation]) -> None:
    """Where the plan and the run disagree; nothing where they do not."""
    from potluck.sim.results.plan_comparison import described, disagreements

    wrong = disagreements(plan_deviations)
    rows = [(str(item.what), *described(item), item.name) for item in wrong[:MOST_ROWS]]
    if len(wrong) > MOST_ROWS:
        rows.append(("", "", "", f"and {len(wrong) - MOST_ROWS} more (--json has all)"))
    if rows:
        table("Not as planned", ("what", "planned", "ran", "of"), rows)


def show_scan(scale_scan: ScaleScan) -> None:
    names = [part.name for part in scale_scan.parts]
    rows = []
    for place, scale in enumerate(scale_scan.scales):
        shares = [part.attainment[place] for part in scale_scan.parts]
        rows.append((f"x {scale:g}", *map(percent, shares)))
        if min(shares) == 1.0:
            break
    table("Within objectives of this scale", ("SLO scale", *names), rows)
    least = []
    for place, level in enumerate(scale_scan.levels):
        scales = [part.least[place] for part in scale_scan.parts]
        least.append((percent(level), *("none" if scale is None else f"x {scale:.3g}" for scale in scales)))
    table("Least SLO scale", ("to attain", *names), least)


def _latencies(models: list[ModelSummary]) -> None:
    rows = []
    for model in models:
        spreads = {"TTFT": model.ttft_s, "TPOT": model.tpot_s, "TBT": model.tbt_s, "E2E": model.e2e_s}
        for name, spread in spreads.items():
            values = () if spread is None else (spread.mean, spread.p50, spread.p90, spread.p99)
            rows.append((model.model, name, *(map(seconds, values) if values else "----")))
    table("Latencies", ("model", "", "mean", "p50", "p90", "p99"), rows)


def _refusals(models: list[ModelSummary]) -> None:
    rows = [
        (model.model, reason.replace("_", " "), count(number), percent(number / model.requests))
        for model in models
        for reason, number in model.outcomes.refusals.items()
    ]
    if rows:
        table("Refused", ("model", "why", "requests", "of all"), rows)


def _promises(title: str, what: str, models: list[ModelSummary]) -> None:
    def kept(model: ModelSummary) -> str:
        promised = None if model.slo is None else model.slo.attainment
        kept = "-" if model.attainment is None else percent(model.attainment, promised)
        if model.holds is None or promised is None:
            return kept
        return f"{kept} ({'holds' if model.holds else 'misses'} {percent(promised)})"

    columns: dict[str, Callable[[ModelSummary], object]] = {
        what: lambda model: model.model,
        "requests": lambda model: count(model.requests),
        "a second": lambda model: f"{model.rate_per_s:.3g}",
        "within objective": kept,
        "goodput/s": lambda model: "-" if (rate := model.goodput_per_s) is None else f"{rate:.3g}",
        "goodput tokens/s": lambda model: (
            "-" if (rate := model.goodput_tokens_per_s) is None else short(rate)
        ),
        "output tokens/s": lambda model: short(model.output_tokens_per_s),
        "refused": lambda model: count(model.outcomes.refused),
        "cancelled": lambda model: count(model.outcomes.cancelled),
        "retried": lambda model: count(model.outcomes.retried),
        "put back": lambda model: count(model.outcomes.preempted),
    }
    table_of(title, models, columns)


def _use(summary: RunSummary) -> None:
    used = [(u.nodes, u.replicas, u.gpus, percent(u.busy_share), u.lost) for u in summary.hardware]
    table("Hardware", ("node", "replicas", "GPUs", "time with a step running", "lost"), used)
    links = [
        (f"{use.source} -> {use.target}", f"{use.gbps:g}", bytes_(use.sent_bytes), percent(use.mean_share))
        for use in summary.links
        if use.kind == "link"
    ]
    if links:
        table("Links", ("link", "Gbps", "sent", "used"), links)
    tokens = summary.output_tokens_per_usd
    met = summary.met_per_usd
    money = [
        ("simulated", seconds(summary.end_s)),
        ("cost", f"{usd(summary.cost_usd)} ({usd(summary.cost_usd_per_h)}/h)"),
        ("of it for nodes that were starting", usd(summary.start_usd)),
        *([("of it for egress", usd(summary.egress_usd))] if summary.egress_usd else []),
        ("output tokens per dollar", "-" if tokens is None else short(tokens)),
        ("requests within objective per dollar", "-" if met is None else count(met)),
    ]
    table("Money", ("what", ""), money)


ROWS = 65536


def write_records(path: Path, result: SimResult) -> None:
    words = _words(result)
    columns = result.records.columns()
    with path.open("w", encoding="utf-8") as out:
        for start in range(0, len(result.records), ROWS):
            part = {name: _plain(column[start : start + ROWS]) for name, column in columns.items()}
            for name, known in words.items():
                part[name] = [known[code] for code in part[name]]
            for row in zip(*part.values(), strict=True):
                out.write(json.dumps(dict(zip(part, row, strict=True)), ensure_ascii=False) + "\n")


def _words(result: SimResult) -> dict[str, list[str | None]]:
    """Coded columns and the words of their codes; replica -1 is nobody."""
    replicas: list[str | None] = [*(replica.id for replica in result.replicas), None]
    labels = result.records.labels
    who: dict[str, list[str | None]] = {}
    if labels is not None:
        who = {"tenant": [*labels.tenants], "request_class": [*labels.classes]}
    return who | {
        "model": list(result.records.models),
        "outcome": list(OUTCOMES),
        "reason": [reason or None for reason in REASONS],
        "route": list(ROUTES),
        "prefill_replica": replicas,
        "decode_replica": replicas,
    }


def _plain(column: NDArray[np.generic]) -> list[Any]:
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        return [None if value != value else value for value in values]
    return values
