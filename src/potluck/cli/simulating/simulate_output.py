"""What a simulated run looks like in a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.cli.common.render import bytes_, count, listing, percent, short, table, usd
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.sim.results.records import OUTCOMES, REASONS, ROUTES, SimResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from potluck.sim.results.metrics import LatencySpread, ModelSummary, RunSummary, ScaleScan
    from potluck.sim.results.plan_comparison import PlanDeviation
    from potluck.sim.results.records import SimResult


MOST_ROWS = 12


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


def show_planned(plan_deviations: Sequence[PlanDeviation]) -> None:
    """Where the plan and the run disagree; nothing where they do not."""
    from potluck.sim.results.plan_comparison import described, disagreements

    wrong = disagreements(plan_deviations)
    rows = [
        (str(plan_deviation.what), *described(plan_deviation), plan_deviation.name)
        for plan_deviation in wrong[:MOST_ROWS]
    ]
    if len(wrong) > MOST_ROWS:
        rows.append(("", "", "", f"and {len(wrong) - MOST_ROWS} more (--json has all)"))
    if rows:
        listing("Not as planned", ("what", "planned", "ran", "of"), rows)


def show_scan(scale_scan: ScaleScan) -> None:
    """Attainment against SLO scale, and from which scale on it is enough."""
    names = [part.name for part in scale_scan.parts]
    rows = []
    for place, scale in enumerate(scale_scan.scales):
        shares = [part.attainment[place] for part in scale_scan.parts]
        rows.append((f"x {scale:g}", *map(percent, shares)))
        if min(shares) == 1.0:
            break
    table("Within objectives of this scale", ("SLO scale", *names), rows)
    least = [
        (
            percent(level),
            *("none" if s is None else f"x {s:.3g}" for s in (p.least[i] for p in scale_scan.parts)),
        )
        for i, level in enumerate(scale_scan.levels)
    ]
    table("Least SLO scale", ("to attain", *names), least)


def _latencies(models: list[ModelSummary]) -> None:
    rows = []
    for model in models:
        for name, spread in (
            ("TTFT", model.ttft_s),
            ("TPOT", model.tpot_s),
            ("TBT", model.tbt_s),
            ("E2E", model.e2e_s),
        ):
            rows.append((model.model, name, *_spread(spread)))
    table("Latencies", ("model", "", "mean", "p50", "p90", "p99"), rows)


def _spread(spread: LatencySpread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 4
    return tuple(seconds(value) for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def _refusals(models: list[ModelSummary]) -> None:
    rows = [
        (model.model, reason.replace("_", " "), count(number), percent(number / model.requests))
        for model in models
        for reason, number in model.outcomes.refusals.items()
    ]
    if rows:
        table("Refused", ("model", "why", "requests", "of all"), rows)


def _promises(title: str, what: str, models: list[ModelSummary]) -> None:
    rows = []
    for model in models:
        ends = model.outcomes
        promised = None if model.slo is None else model.slo.attainment
        kept = "-" if model.attainment is None else percent(model.attainment, promised)
        if model.holds is not None and model.slo is not None:
            kept += f" ({'holds' if model.holds else 'misses'} {percent(model.slo.attainment)})"
        rows.append(
            (
                model.model,
                count(model.requests),
                f"{model.rate_per_s:.3g}",
                kept,
                "-" if model.goodput_per_s is None else f"{model.goodput_per_s:.3g}",
                "-" if model.goodput_tokens_per_s is None else short(model.goodput_tokens_per_s),
                short(model.output_tokens_per_s),
                count(ends.refused),
                count(ends.cancelled),
                count(ends.retried),
                count(ends.preempted),
            )
        )
    columns = (
        what,
        "requests",
        "a second",
        "within objective",
        "goodput/s",
        "in tokens/s",
        "tokens/s",
        "refused",
        "cancelled",
        "retried",
        "put back",
    )
    table(title, columns, rows)


def _use(summary: RunSummary) -> None:
    rows = [
        (use.nodes, use.replicas, use.gpus, percent(use.busy_share), use.lost) for use in summary.hardware
    ]
    table("Hardware", ("node", "replicas", "GPUs", "busy", "lost"), rows)
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
        ("output tokens per dollar", "-" if tokens is None else short(tokens)),
        ("requests within objective per dollar", "-" if met is None else count(met)),
    ]
    table("Money", ("what", ""), money)


ROWS = 65536


def require_kind(path: Path) -> None:
    """Say before a long run that its records could not be written."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError("--records", f"{path.name} must end in .jsonl or .parquet")
    if path.suffix == ".parquet":
        _pyarrow()


def write_records(path: Path, result: SimResult) -> None:
    require_kind(path)
    if path.suffix == ".jsonl":
        _write_lines(path, result)
    else:
        _write_parquet(path, result)


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


def _write_lines(path: Path, result: SimResult) -> None:
    words = _words(result)
    columns = result.records.columns()
    with path.open("w", encoding="utf-8") as out:
        for start in range(0, len(result.records), ROWS):
            part = {name: _plain(column[start : start + ROWS]) for name, column in columns.items()}
            for name, known in words.items():
                part[name] = [known[code] for code in part[name]]
            for row in zip(*part.values(), strict=True):
                out.write(json.dumps(dict(zip(part, row, strict=True)), ensure_ascii=False) + "\n")


def _plain(column: NDArray[np.generic]) -> list[Any]:
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        return [None if value != value else value for value in values]
    return values


def _write_parquet(path: Path, result: SimResult) -> None:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    words = _words(result)
    arrays = {}
    for name, column in result.records.columns().items():
        if name in words:
            known = words[name]
            codes = column.astype(np.int32)
            nobody = np.array([word is None for word in known])[codes]
            keys = pa.array(np.where(nobody, 0, codes), pa.int32(), mask=nobody)
            arrays[name] = pa.DictionaryArray.from_arrays(keys, pa.array([word or "" for word in known]))
        else:
            arrays[name] = pa.array(column, from_pandas=True)  # nan becomes null
    pq.write_table(pa.table(arrays), path)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError("--records", "Parquet needs pyarrow: pip install 'potluck[measure]'") from error
    return pyarrow
