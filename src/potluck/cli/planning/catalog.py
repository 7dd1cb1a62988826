"""`potluck catalog`: the catalog's entries, with the source, date and doubt of every figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, write_text
from potluck.cli.common.inputs import read_spec
from potluck.cli.common.render import emit_json, table
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.catalog.figure_sources import EntryFacts
    from potluck.catalog.prices import Price, SkyPilotPrices
    from potluck.spec.spec_values import Spec


_json_option = option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def catalog() -> None:
    """List the known GPUs, node types, models, prices and workloads, with their sources."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of catalog entries and its table."""

    module: str
    """Of `potluck.catalog`."""
    all_of_them: str
    title: str
    heads: tuple[str, ...]
    row: Callable[[Any, str], tuple[str, ...]]
    """Of the catalog's module and a name."""
    notes: tuple[str, ...] = ()
    totals: Callable[[str], dict[str, float] | None] = lambda name: None


def _gpu_row(gpus: Any, key: str) -> tuple[str, ...]:
    gpu, facts = gpus.gpu(key), gpus.facts(key)
    recalled = sum(figure.source.kind == "recall" for figure in facts.figures)
    mark = ("!" if facts.doubt else "") + (f"~{recalled}" if recalled else "")
    figures = (gpu.fp16_tflops, gpu.fp8_tflops, gpu.memory_gb, gpu.bandwidth_gb_per_s, gpu.tdp_w or None)
    return (key, gpu.architecture, *("-" if item is None else f"{item:g}" for item in figures), mark)


def _node_row(nodes: Any, key: str) -> tuple[str, ...]:
    node = nodes.node_type(key)
    link = node.interconnect
    speed = "-" if link.kind == "none" else f"{link.gb_per_s:.4g}"
    return (key, link.kind, speed, f"{link.latency_s * 1e6:g}", f"{node.network_gbps:g}")


def _model_row(models: Any, key: str) -> tuple[str, ...]:
    sums, context = _totals(key), models.model(key).max_context_tokens
    billions = (sums["parameters"], sums["active_parameters"], sums["weight_bytes"])
    figures = (*(f"{billion / 1e9:.1f}" for billion in billions), f"{sums['kv_bytes_per_token'] / 2**10:.2f}")
    state = f"{sums['state_bytes'] / 2**20:.1f}"
    return (key, str(sums["layers"]), *figures, state, str(context), "!" if models.facts(key).doubt else "")


def _workload_row(workloads: Any, key: str) -> tuple[str, ...]:
    entry = workloads.workload(key)
    means = (f"{item.mean_tokens:,.0f}" for item in (entry.lengths.prompt, entry.lengths.output))
    rate = "-" if entry.rate_per_s is None else f"{entry.rate_per_s:g}"
    mark = "!" if workloads.facts(key).assumed else ""
    return (key, *means, rate, f"{entry.gap_cv:g}", entry.about, mark)


def _totals(name: str) -> dict[str, float]:
    from potluck.catalog import models
    from potluck.perf import memory

    model = models.model(name)
    return {
        "layers": model.layer_count,
        "parameters": memory.parameters(model),
        "active_parameters": memory.active_parameters(model),
        "weight_bytes": memory.weight_bytes(model),
        "kv_bytes_per_token": memory.kv_bytes_per_token(model),
        "state_bytes": memory.state_bytes(model),
    }


GPUS = _Kind(
    "gpus",
    "all GPUs",
    "GPUs (dense rates, per GPU)",
    ("GPU", "architecture", "FP16\nTFLOPS", "FP8\nTFLOPS", "memory\nGB", "GB/s", "W", "doubt"),
    _gpu_row,
    (
        "!  sources disagree or are incomplete; see `potluck catalog gpus NAME`.",
        "~N N figures have no data sheet as their source.",
    ),
)
NODES = _Kind(
    "nodes",
    "all node types with their links",
    "Node types",
    ("node", "link", "GB/s per GPU\none direction", "latency\nus", "network\nGbps"),
    _node_row,
)
MODELS = _Kind(
    "models",
    "all models",
    "Models",
    (
        *("model", "layers", "params\nB", "active\nB", "weights\nGB", "KV\nKiB/token", "state\nMiB"),
        *("context\ntokens", "doubt"),
    ),
    _model_row,
    ("! assumed or disputed figures; see `potluck catalog models NAME`.",),
    _totals,
)
WORKLOADS = _Kind(
    "named_workloads",
    "named workloads to simulate with",
    "Workloads (mean lengths)",
    ("workload", "input\ntokens", "output\ntokens", "req/s", "arrival\nCV", "description", "assumed"),
    _workload_row,
    ("! partly assumed; see `potluck catalog workloads NAME`.",),
)


def _add_command(name: str, kind: _Kind) -> None:
    @catalog.command(name, help=f"List {kind.all_of_them}, or show NAME with its figures' sources.")
    @argument("entry", metavar="[NAME]", required=False)
    @_json_option
    def command(entry: str | None, as_json: bool) -> None:
        module = import_module(f"potluck.catalog.{kind.module}")
        if entry is not None:
            _show(module.facts(entry), as_json, kind.totals(entry))
        elif as_json:
            emit_json([_facts_json(module.facts(key), kind.totals(key)) for key in module.names()])
        else:
            table(kind.title, kind.heads, [kind.row(module, key) for key in module.names()])
            for note in kind.notes:
                click.echo(note)


_add_command("gpus", GPUS)
_add_command("nodes", NODES)
_add_command("models", MODELS)
_add_command("workloads", WORKLOADS)


@catalog.command("prices")
@option("--node", help="Only this node type, such as 8xH100 or L4.")
@option("--gpu", help="Only nodes of this GPU, such as L40S.")
@option("--region", help="Only this region or cloud: aws/us-east-1, us-east-1 or runpod.")
@option(
    "--from",
    "source",
    type=(click.Choice(["skypilot"]), str),
    metavar="skypilot FILE|DIR|installed",
    help="Read SkyPilot's catalog (vms.csv); `installed`: the one SkyPilot fetched.",
)
@option("--spec", "spec_path", type=FILE, help="With --from: print a market file for the nodes of this spec.")
@option("--out", type=FILE, help="With --spec: write the market file, for `potluck plan --market`.")
@_json_option
def prices_command(
    node: str | None,
    gpu: str | None,
    region: str | None,
    source: tuple[str, str] | None,
    spec_path: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """List prices per node type and region, with the day they were listed.

    \b
    Examples:
      potluck catalog prices --gpu L4 --region us-east-1
      potluck catalog prices --from skypilot ~/.sky/catalogs/v8/aws/vms.csv --gpu L4
      potluck catalog prices --from skypilot installed --spec potluck.yaml --out market.yaml
    """
    from potluck.catalog import gpus, nodes, prices

    if (spec_path is not None and source is None) or (out is not None and spec_path is None):
        raise InputError("--spec" if out is None else "--out", "goes with --from skypilot and --spec")
    there = None if source is None else listed_from(source[1])
    if there is not None and source is not None and spec_path is not None:
        write_offers(read_spec(spec_path), there.prices, source[1], out)
        return
    placed: Iterable[Price] = prices.prices() if there is None else there.prices
    if region is not None:
        placed = prices.in_region(region, tuple(placed))
    if node is not None:
        wanted = nodes.canonical(node)
        placed = (price for price in placed if price.node == wanted)
    if gpu is not None:
        name = gpus.canonical(gpu)
        placed = (price for price in placed if nodes.parse(price.node)[1] == name)
    chosen = list(placed)
    if as_json:
        rest = [] if there is None else [{"left_out": why, "rows": count} for why, count in there.left_out]
        emit_json([asdict(price) | {"instance_type": price.instance_type or None} for price in chosen] + rest)
        return
    rows = [_price_row(price) for price in chosen]
    head = ("node", "region", "USD/h", "spot USD/h", "instance", "date", "basis")
    table("Prices", head, rows)
    if not rows:
        click.echo("No price matches. Remove a filter, or set price_usd_per_h in the spec.")
    for why, number in () if there is None else there.left_out:
        click.echo(f"left out: {why} ({number} row{'s' if number > 1 else ''})")


def _price_row(price: Price) -> tuple[str, ...]:
    money = (_money(price.price_usd_per_h), _money(price.spot_usd_per_h))
    return (price.node, price.place, *money, price.instance_type or "-", price.date, price.basis)


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _show(facts: EntryFacts, as_json: bool, totals: dict[str, float] | None = None) -> None:
    if as_json:
        emit_json(_facts_json(facts, totals))
        return
    rows = []
    for figure in facts.figures:
        mark = " (assumed)" if figure.assumed else ""
        source = figure.source
        rows.append((figure.field, f"{_plain(figure.value)}{mark}", source.id, source.date, source.kind))
    for field, value in (totals or {}).items():
        rows.append((f"= {field}", f"{value:,.0f}", "derived from the above", "", "derived"))
    table(facts.name, ("figure", "value", "source", "date", "kind"), rows)
    for source in dict.fromkeys(figure.source for figure in facts.figures):
        click.echo(f"{source.id}: {source.title}" + (f" ({source.licence})" if source.licence else ""))
    click.echo(f"Also called: {', '.join(facts.aliases)}" if facts.aliases else "No other names.")
    if facts.doubt:
        click.echo(f"Doubt: {facts.doubt}")
    if facts.assumed:
        click.echo(f"Assumed: {'; '.join(facts.assumed)}")


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _facts_json(facts: EntryFacts, totals: dict[str, float] | None = None) -> dict[str, object]:
    figures = {}
    for figure in facts.figures:
        source = figure.source
        body = {"value": figure.value, "source": source.id, "title": source.title, "date": source.date}
        figures[figure.field] = {**body, "kind": source.kind, "assumed": figure.assumed}
    about = {"name": facts.name, "aliases": list(facts.aliases), "figures": figures}
    derived = {} if totals is None else {"derived": totals}
    return {**about, **derived, "doubt": facts.doubt, "assumed": list(facts.assumed)}


def listed_from(where: str) -> SkyPilotPrices:
    """Prices of a SkyPilot catalog file, of a folder of them, or of the installed one."""
    from potluck.catalog.prices import installed, read, read_all

    if where == "installed":
        return read_all(installed())
    path = Path(where)
    if path.is_dir():
        return read_all(installed(path))
    return read(path)


def write_offers(spec: Spec, prices: Sequence[Price], source: str, out: Path | None) -> None:
    """Write a market file with the listed prices of a spec's nodes; unlisted nodes are named on stderr."""
    from potluck.catalog.prices import offer_price

    types = {node.name: node for node in spec.node_types}
    lines, kept, dates = [], [], set()
    for region in spec.regions:
        for offer in region.offers:
            node = types[offer.node]
            price = offer_price(prices, f"{node.gpus}x{node.gpu.name}", region.name, offer.spot)
            if price is None:
                kept.append(f"{offer.node} in {region.name}" + (" (spot)" if offer.spot else ""))
                continue
            dates.add(price.date)
            usd_per_h = round(price.price_usd_per_h, 6)
            value = {"region": region.name, "node": offer.node, "price_usd_per_h": usd_per_h}
            lines.append(f"  - {json.dumps(value)}  # {price.cloud} {price.instance_type}")
    if not lines:
        raise InputError(
            "--spec", "none of its nodes is listed in its regions; name regions as the catalog does"
        )
    head = f"# Prices of SkyPilot's catalog ({source}, {', '.join(sorted(dates))}), for --market.\noffers:\n"
    text = head + "\n".join(lines) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        write_text("--out", out, text)
        click.echo(f"{out}: {len(lines)} offers, for `potluck plan SPEC --market {out}`")
    for name in kept:
        click.echo(f"not listed, price unchanged: {name}", err=True)
