"""Terminal output and record files of a simulated run."""

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


MAX_ROWS = 12
OUTPUT_LENGTH_TOLERANCE = 0.1
"""Relative deviation of the mean output length up to which the plan's capacities apply."""


def show_summary(summary: RunSummary, result: SimResult) -> None:
    models = [*summary.models, *([summary.total] if len(summary.models) > 1 else [])]
    _latencies(models)
    _slo_table("SLO attainment", "model", models)
    for title, what, groups in (
        ("Tenants", "tenant", summary.tenants),
        ("Classes", "class", summary.classes),
    ):
        if groups:
            _slo_table(title, what, list(groups))
    _refusals(models)
    _use(summary)
    if result.faults:
        rows = [(seconds(fault.at_s), fault.what) for fault in result.faults[:MAX_ROWS]]
        if len(result.faults) > MAX_ROWS:
            rows.append(("", f"and {len(result.faults) - MAX_ROWS} more"))
        table("Faults", ("at", "fault"), rows)
    notes = [(what, count(number)) for what, number in result.counts.items() if number]
    if notes:
        table("Other events", ("event", "count"), notes)


def simulated_loads(
    problem: PlanningProblem, plan: Plan, result: SimResult, summary: RunSummary
) -> tuple[ModelLoad, ...]:
    """Utilization of each model's copies by the plan's definition.

    Nothing for a fleet that changed, as a plan has one capacity, nor for models whose outputs have other lengths than
    the plan assumes.
    """
    from potluck.plan.load import load_at

    records, loads = result.records, []
    span_s = (float(records.arrival_s[-1]) if len(records) else 0.0) - summary.start_s
    if len(result.cost_rates) > 1 or span_s <= 0:
        return ()
    answered = (records.outcome == ANSWERED) & (records.arrival_s >= summary.start_s)
    for index, name in enumerate(records.models):
        demand, chosen = problem.demand_of(name), answered & (records.model == index)
        if demand is None or not demand.rate_per_s > 0 or not chosen.any():
            continue
        planned = (
            sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets) / demand.rate_per_s
        )
        if abs(float(records.output_tokens[chosen].mean()) / planned - 1) > OUTPUT_LENGTH_TOLERANCE:
            continue
        edges = [bucket.longest_tokens for bucket in demand.buckets]
        bucket = np.minimum(np.searchsorted(edges, records.prompt_tokens[chosen]), len(edges) - 1)
        rates = np.bincount(bucket, minlength=len(edges)) / span_s
        loads.append(load_at(problem, plan, demand, rates.tolist()))
    return tuple(loads)


def show_loads(loads: Sequence[ModelLoad]) -> None:
    columns: dict[str, Callable[[ModelLoad], object]] = {
        "model": lambda item: item.model,
        "completed req/s": lambda item: f"{item.answered_per_s:.3g}",
        "capacity req/s": lambda item: f"{item.capacity_per_s:.3g}",
        "utilization": lambda item: percent(item.load),
    }
    if loads:
        table_of("Utilization of the plan's copies", loads, columns)


def show_planned(plan_deviations: Sequence[PlanDeviation]) -> None:
    """Deviations of the run from the plan; nothing where they agree."""
    from potluck.sim.results.plan_comparison import described, disagreements

    deviations = disagreements(plan_deviations)
    rows = [(item.name, str(item.what), *described(item)) for item in deviations[:MAX_ROWS]]
    if len(deviations) > MAX_ROWS:
        rows.append((f"and {len(deviations) - MAX_ROWS} more (--json has all)", "", "", ""))
    if rows:
        table("Deviations from the plan", ("of", "quantity", "planned", "simulated"), rows)


def show_scan(scale_scan: ScaleScan) -> None:
    """SLO attainment at multiples of the SLO latencies, and the least multiple for each attainment level."""
    names = [part.name for part in scale_scan.parts]
    rows = []
    for place, scale in enumerate(scale_scan.scales):
        shares = [part.attainment[place] for part in scale_scan.parts]
        rows.append((f"x {scale:g}", *map(percent, shares)))
        if min(shares) == 1.0:
            break
    table("SLO attainment by SLO scale", ("SLO scale", *names), rows)
    least = []
    for place, level in enumerate(scale_scan.levels):
        scales = [part.least[place] for part in scale_scan.parts]
        least.append((percent(level), *("none" if scale is None else f"x {scale:.3g}" for scale in scales)))
    table("Smallest SLO scale", ("for attainment", *names), least)


def _latencies(models: list[ModelSummary]) -> None:
    rows = []
    for model in models:
        spreads = {"TTFT": model.ttft_s, "TPOT": model.tpot_s, "TBT": model.tbt_s, "E2E": model.e2e_s}
        for name, spread in spreads.items():
            values = () if spread is None else (spread.mean, spread.p50, spread.p90, spread.p99)
            rows.append((model.model, name, *(map(seconds, values) if values else "----")))
    table("Latencies", ("model", "metric", "mean", "p50", "p90", "p99"), rows)


def _refusals(models: list[ModelSummary]) -> None:
    rows = [
        (model.model, reason.replace("_", " "), count(number), percent(number / model.requests))
        for model in models
        for reason, number in model.outcomes.refusals.items()
    ]
    if rows:
        table("Refused requests", ("model", "reason", "requests", "share"), rows)


def _slo_table(title: str, group: str, models: list[ModelSummary]) -> None:
    def attainment(model: ModelSummary) -> str:
        target = None if model.slo is None else model.slo.attainment
        attained = "-" if model.attainment is None else percent(model.attainment, target)
        if model.holds is None or target is None:
            return attained
        return f"{attained} ({'met' if model.holds else 'missed'}, target {100 * target:g} %)"

    columns: dict[str, Callable[[ModelSummary], object]] = {
        group: lambda model: model.model,
        "requests": lambda model: count(model.requests),
        "req/s": lambda model: f"{model.rate_per_s:.3g}",
        "SLO attainment": attainment,
        "goodput req/s": lambda model: "-" if (rate := model.goodput_per_s) is None else f"{rate:.3g}",
        "goodput tokens/s": lambda model: (
            "-" if (rate := model.goodput_tokens_per_s) is None else short(rate)
        ),
        "output tokens/s": lambda model: short(model.output_tokens_per_s),
        "refused": lambda model: count(model.outcomes.refused),
        "cancelled": lambda model: count(model.outcomes.cancelled),
        "retried": lambda model: count(model.outcomes.retried),
        "preempted": lambda model: count(model.outcomes.preempted),
    }
    table_of(title, models, columns)


def _use(summary: RunSummary) -> None:
    used = [(u.nodes, u.replicas, u.gpus, percent(u.busy_share), u.lost) for u in summary.hardware]
    table("Hardware", ("node", "replicas", "GPUs", "time busy", "replicas lost"), used)
    links = [
        (f"{use.source} -> {use.target}", f"{use.gbps:g}", bytes_(use.sent_bytes), percent(use.mean_share))
        for use in summary.links
        if use.kind == "link"
    ]
    if links:
        table("Links", ("link", "Gbps", "sent", "utilization"), links)
    tokens = summary.output_tokens_per_usd
    met = summary.met_per_usd
    money = [
        ("simulated time", seconds(summary.end_s)),
        ("cost", f"{usd(summary.cost_usd)} ({usd(summary.cost_usd_per_h)}/h)"),
        ("of which starting nodes", usd(summary.start_usd)),
        *([("of which egress", usd(summary.egress_usd))] if summary.egress_usd else []),
        ("output tokens per dollar", "-" if tokens is None else short(tokens)),
        ("requests within SLO per dollar", "-" if met is None else count(met)),
    ]
    table("Cost", ("quantity", "value"), money)


ROWS_PER_WRITE = 65536


def write_records(path: Path, result: SimResult) -> None:
    words = _words(result)
    columns = result.records.columns()
    with path.open("w", encoding="utf-8") as out:
        for start in range(0, len(result.records), ROWS_PER_WRITE):
            part = {name: _plain(column[start : start + ROWS_PER_WRITE]) for name, column in columns.items()}
            for name, known in words.items():
                part[name] = [known[code] for code in part[name]]
            for row in zip(*part.values(), strict=True):
                out.write(json.dumps(dict(zip(part, row, strict=True)), ensure_ascii=False) + "\n")


def _words(result: SimResult) -> dict[str, list[str | None]]:
    """Coded columns to the names of their codes; replica -1 is None."""
    replicas: list[str | None] = [*(replica.id for replica in result.replicas), None]
    labels = result.records.labels
    tenants: dict[str, list[str | None]] = {}
    if labels is not None:
        tenants = {"tenant": [*labels.tenants], "request_class": [*labels.classes]}
    return tenants | {
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
