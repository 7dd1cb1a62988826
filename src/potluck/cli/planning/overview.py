"""`potluck overview`: what each node of a fleet could do for each model, and the cheapest that suffices."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.problem_options import read_spec
from potluck.cli.common.render import emit_json, table, usd
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.perf.estimate import Estimate
    from potluck.spec.spec_values import ModelSpec, Spec

HEADROOM = 0.8
"""Share of a node's rate that is planned with: queues grow without bound as it nears 1."""


@click.command()
@click.argument("spec_path", metavar="[SPEC]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def overview(spec_path: Path | None, as_json: bool) -> None:
    """What a fleet could do for its models: one row per node type, cheapest tokens first.

    Every node serves alone here, as whole replicas. Without SPEC the bundled example is shown.
    """
    spec = read_spec(spec_path)
    found = {model.name: _candidates(spec, model) for model in spec.models}
    if as_json:
        emit_json({name: [_as_json(row) for row in rows] for name, rows in found.items()})
        return
    for model in spec.models:
        _show(model, found[model.name])
    _choice(spec, found)


Row = tuple[str, "Estimate | None", int, int, str]
"""(region, estimate, nodes needed, nodes available, why there is no estimate)."""


def _candidates(spec: Spec, wanted: ModelSpec) -> list[Row]:
    from potluck.core.errors import CapacityError
    from potluck.perf.estimate import estimate

    rows: list[Row] = []
    traffic = wanted.traffic
    for region in spec.regions:
        for offer in region.offers:
            try:
                found = estimate(
                    wanted.model,
                    spec.node_type(offer.node),
                    input_tokens=ceil(traffic.mean_input_tokens),
                    output_tokens=ceil(traffic.mean_output_tokens),
                    slo=wanted.slo.within_e2e(wanted.traffic.mean_output_tokens),
                    price_usd_per_h=offer.price_usd_per_h,
                )
            except CapacityError as error:
                rows.append((region.name, None, 0, offer.available, f"{offer.node}: {_reason(error)}"))
                continue
            if found.operating is None:
                alone = f"{seconds(found.prefill_s)} to prefill, {seconds(found.decode_step_s)} a token"
                reason = f"{offer.node}: objective out of reach (alone: {alone})"
                rows.append((region.name, None, 0, offer.available, reason))
                continue
            needed = ceil(traffic.rate_per_s / (found.requests_per_s * HEADROOM))
            rows.append((region.name, found, needed, offer.available, ""))
    return sorted(rows, key=lambda row: row[1].usd_per_million_tokens or 0.0 if row[1] else float("inf"))


def _reason(error: Exception) -> str:
    text = str(error)
    return "weights do not fit" if "does not fit" in text else text


def _show(wanted: ModelSpec, rows: list[Row]) -> None:
    traffic, slo = wanted.traffic, wanted.slo
    title = (
        f"{wanted.name}: {traffic.rate_per_s:g} requests/s of {traffic.mean_input_tokens:.0f} in / "
        f"{traffic.mean_output_tokens:.0f} out, TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"
        + ("" if slo.e2e_s is None else f", E2E {seconds(slo.e2e_s)}")
    )
    cells = []
    for region, found, needed, available, why in rows:
        if found is None or found.operating is None:
            name, reason = why.split(": ", 1)
            cells.append((region, name, "-", "-", "-", "-", "-", reason))
            continue
        at = found.operating
        assert found.usd_per_million_tokens is not None
        cells.append(
            (
                region,
                f"{found.node} tp{found.tp}",
                f"{found.requests_per_s:.3g}",
                seconds(at.ttft_s),
                seconds(at.tpot_s),
                usd(found.usd_per_million_tokens),
                f"{needed} of {available}",
                f"{found.confidence}; {found.binds}",
            )
        )
    columns = ("region", "node", "req/s", "TTFT", "TPOT", "$/M tokens", "needed", "confidence; what binds")
    table(title, columns, cells)


def _choice(spec: Spec, found: dict[str, list[Row]]) -> None:
    """The cheapest single node type per model; nodes taken by one model are gone for the next."""
    taken: dict[tuple[str, str], int] = {}
    cells, total = [], 0.0
    for name, rows in found.items():
        best: tuple[float, str, Estimate, int] | None = None
        for region, each, needed, available, _ in rows:
            if each is None or each.price_usd_per_h is None:
                continue
            free = available - taken.get((region, each.node), 0)
            cost = needed * each.price_usd_per_h
            if needed <= free and (best is None or cost < best[0]):
                best = (cost, region, each, needed)
        if best is None:
            cells.append((name, "-", "no single node type suffices", "-", "-"))
            continue
        cost, region, each, needed = best
        taken[region, each.node] = taken.get((region, each.node), 0) + needed
        total += cost
        cells.append(
            (name, region, f"{needed} x {each.node} (tp {each.tp})", f"{usd(cost)}/h", each.confidence)
        )
    columns = ("model", "region", "nodes", "cost", "confidence")
    table(f"One node type per model, {HEADROOM:.0%} busy: {usd(total)}/h", columns, cells)


def _as_json(row: Row) -> object:
    from potluck.core.codec import encode

    region, found, needed, available, why = row
    estimate = None if found is None else encode(found)
    return {
        "region": region,
        "needed": needed,
        "available": available,
        "problem": why or None,
        "estimate": estimate,
    }
