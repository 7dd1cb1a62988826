"""`potluck check` and `init`: validate a spec; write an example spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import click
from click import argument, option

from potluck.cli.common.files import PATH
from potluck.cli.common.render import bytes_, count, emit_json, percent, short, table, table_of, usd
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.core.values.types import NodeOffer
from potluck.perf.memory import parameters, weight_bytes
from potluck.spec.load_spec import load_spec
from potluck.spec.spec_problems import SpecError
from potluck.spec.spec_values import ModelSpec, Spec


@click.command()
@argument("spec", type=PATH, default=Path("potluck.yaml"))
@option("--json", "as_json", is_flag=True, help="Print JSON, also when the spec is not valid.")
@click.pass_context
def check(context: click.Context, spec: Path, as_json: bool) -> None:
    """Validate SPEC (potluck.yaml when left out) and show models, fleet and links.

    Every problem is one line with file, line and field. Exit code 0 when valid, 2 when not.

    \b
    Examples:
      potluck check
      potluck check examples/two-regions.yaml
      potluck check prod.yaml --json | jq .errors
    """
    try:
        loaded_spec = load_spec(spec)
    except SpecError as error:
        if not as_json:
            raise
        errors = [asdict(problem) for problem in error.problems]
        emit_json({"valid": False, "file": str(spec), "errors": errors, "warnings": []})
        context.exit(2)
    if as_json:
        emit_json(summary(loaded_spec, str(spec)))
    else:
        show(loaded_spec, str(spec))


def summary(spec: Spec, file: str) -> dict[str, Any]:
    return {
        "valid": True,
        "file": file,
        "errors": [],
        "warnings": warnings(spec),
        "notes": list(spec.notes),
        "models": [_model_row(model) for model in spec.models],
        "fleet": [
            {
                "region": region.name,
                "gpus": spec.node_type(offer.node).gpus,
                "price_source": spec.price_source(region.name, offer.node),
                **asdict(offer),
            }
            for region in spec.regions
            for offer in region.offers
        ],
        "links": [asdict(link) for link in spec.links],
        "budget_usd_per_h": spec.budget_usd_per_h,
        "engine": spec.engine,
    }


TRAFFIC = ("rate_per_s", "mean_input_tokens", "mean_output_tokens", "prefix_hit_share")


def _model_row(model: ModelSpec) -> dict[str, Any]:
    traffic = model.traffic
    return {
        "name": model.name,
        "model": model.model.name,
        "parameters": parameters(model.model),
        "weight_bytes": weight_bytes(model.model),
        **{name: getattr(model.slo, name) for name in ("ttft_s", "tpot_s", "e2e_s", "attainment")},
        **{name: getattr(traffic, name) for name in TRAFFIC},
        "length_bins": len(traffic.lengths),
        "lengths_from": model.lengths_from,
        "asked": model.terms.asked,
        "priority": model.terms.priority,
        "classes": dict(traffic.classes),
        "origins": dict(traffic.origins),
    }


def show(spec: Spec, file: str) -> None:
    models: dict[str, Callable[[dict[str, Any]], object]] = {
        "name": lambda m: m["name"],
        "model": lambda m: m["model"],
        "params": lambda m: short(m["parameters"]),
        "TTFT": lambda m: seconds(m["ttft_s"]),
        "TPOT": lambda m: seconds(m["tpot_s"]),
        "E2E": lambda m: "-" if m["e2e_s"] is None else seconds(m["e2e_s"]),
        "SLO target": lambda m: f"{100 * m['attainment']:g} %",
        "req/s": lambda m: count(m["rate_per_s"]),
        "input tokens": lambda m: count(round(m["mean_input_tokens"])),
        "output tokens": lambda m: count(round(m["mean_output_tokens"])),
        "prefix hits": lambda m: percent(m["prefix_hit_share"]),
        "length distribution": lambda m: m["lengths_from"],
    }
    table_of("Models", map(_model_row, spec.models), models)
    fleet: dict[str, Callable[[tuple[str, NodeOffer]], object]] = {
        "region": lambda item: item[0],
        "node": lambda item: item[1].node,
        "available": lambda item: count(item[1].available),
        "USD/h": lambda item: usd(item[1].price_usd_per_h),
        "kind": lambda item: _kind(item[1]),
        "price source": lambda item: spec.price_source(item[0], item[1].node),
    }
    table_of("Fleet", [(region.name, offer) for region in spec.regions for offer in region.offers], fleet)
    if spec.links:
        links = [(k.source, k.target, f"{k.gbps:g} Gbps", seconds(k.rtt_s)) for k in spec.links]
        table("Links", ("from", "to", "bandwidth", "RTT"), links)
    for model in spec.models:
        for words in model.terms.asked.values():
            click.echo(f"term of {model.name}: {words}")
    if spec.engine != "vllm":
        click.echo(f"engine: {spec.engine}")
    if spec.budget_usd_per_h is not None:
        click.echo(f"budget: {usd(spec.budget_usd_per_h)} per hour")
    for note in spec.notes:
        click.echo(f"note: {note}")
    for warning in warnings(spec):
        click.echo(f"warning: {warning}")
    click.echo(f"{file} is valid.")


def _kind(offer: NodeOffer) -> str:
    parts = [f"spot, {offer.preemptions_per_h:g} preemptions/h" if offer.spot else "on demand"]
    if offer.reserved:
        parts.append(f"{offer.reserved} reserved")
    if offer.zone:
        parts.append(f"zone {offer.zone}")
    return ", ".join(parts)


def warnings(spec: Spec) -> list[str]:
    """Lines about a valid spec that is probably not as intended."""
    texts = [text for model in spec.models for text in _model_warnings(model, spec)]
    linked = {(link.source, link.target) for link in spec.links}
    for a, b in combinations([region.name for region in spec.regions], 2):
        if linked.isdisjoint(((a, b), (b, a))):
            texts.append(f"no link between {a} and {b}: no KV transfers between them")
    offers = [offer for region in spec.regions for offer in region.offers if offer.available]
    cheapest = min(offer.price_usd_per_h for offer in offers)
    if spec.budget_usd_per_h is not None and spec.budget_usd_per_h < cheapest:
        texts.append(f"the budget is below {usd(cheapest)} per hour, the price of the cheapest node")
    return texts


def _model_warnings(model: ModelSpec, spec: Spec) -> list[str]:
    problems = []
    weights = weight_bytes(model.model)
    memory_bytes = {node.name: node.gpus * node.gpu.memory_bytes for node in spec.node_types}
    per_region = [
        [(memory_bytes[offer.node], offer.available) for offer in region.offers if offer.available]
        for region in spec.regions
    ]
    largest_node = max(memory for region in per_region for memory, _ in region)
    largest_region = max(sum(memory * number for memory, number in region) for region in per_region)
    held = f"holds its {bytes_(weights)} of weights"
    if weights > largest_region:
        problems.append(f"no region {held}, the largest has {bytes_(largest_region)}")
    elif weights > largest_node:
        problems.append(f"no single node {held}, it needs a pipeline over several")
    most = max(bin_.input_tokens + bin_.output_tokens for bin_ in model.traffic.lengths)
    limit = model.model.max_context_tokens
    if most > limit:
        problems.append(f"some requests have {count(round(most))} tokens, its context ends at {count(limit)}")
    if model.traffic.rate_per_s == 0:
        problems.append("rate_per_s is 0, so no nodes are planned for it")
    return [f"{model.name}: {problem}" for problem in problems]


@click.command()
@argument("path", type=PATH, default=Path("potluck.yaml"))
@option("--force", is_flag=True, help="Overwrite a file that exists.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def init(path: Path, force: bool, as_json: bool) -> None:
    """Write a commented example spec to PATH (potluck.yaml when left out).

    \b
    Examples:
      potluck init
      potluck init fleet/prod.yaml --force
    """
    text = resources.files("potluck.spec").joinpath("data", "example.yaml").read_text(encoding="utf-8")
    if path.is_dir():
        path = path / "potluck.yaml"
    try:
        # "x" leaves the decision to the system, so that a file made meanwhile is safe too.
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InputError(str(path), "exists already; use --force to overwrite it") from error
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}") from error
    if as_json:
        emit_json({"written": str(path)})
    else:
        click.echo(f"Wrote {path}. Edit it, then run: potluck check {path}")
