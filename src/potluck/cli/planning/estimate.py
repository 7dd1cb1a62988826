"""`potluck estimate`: performance and cost of one model on one node for requests of one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click import option

from potluck.cli.common.files import PATH, named, positive
from potluck.cli.common.render import bytes_, count, emit_json, table, usd
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.core.values.model import format_named, in_format
from potluck.core.values.types import NodeType, Slo

if TYPE_CHECKING:
    from potluck.core.values.model import Model
    from potluck.perf.error_bars import ErrorBar
    from potluck.perf.estimate import Estimate
    from potluck.perf.timers.profile import Profile
    from potluck.plan.problem import PlanningProblem


profile_option = option(
    "--profile", "profile_paths", multiple=True, type=PATH, help="Measured step times (`potluck profile`)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Options of `estimate` beside model, node and lengths."""

    tp: int | None
    ep: Literal["none", "tp", "dp"]
    ttft_ms: float | None
    tpot_ms: float | None
    weights_in: str | None
    role: Literal["mixed", "prefill", "decode"]
    price_usd_per_h: float | None
    region: str | None
    profile_paths: tuple[Path, ...]


@click.command()
@option("--model", "model_name", required=True, help="Catalog model, or a Hugging Face directory.")
@option("--node", "node_name", required=True, help="Node type, such as 2xL40S, H100 or L40S:2.")
@option("--tp", "--tensor-parallel-size", type=int, help="GPUs per replica. Default: the best.")
@option(
    "--ep",
    type=click.Choice(["none", "tp", "dp"]),
    default="none",
    help="Expert parallelism, with tensor- or data-parallel attention.",
)
@option("--input", "--isl", "input_tokens", type=int, required=True, help="Prompt tokens.")
@option("--output", "--osl", "output_tokens", type=int, required=True, help="Output tokens.")
@option("--ttft-ms", type=float, help="TTFT limit.")
@option("--tpot-ms", type=float, help="TPOT limit.")
@option("--weights", "weights_in", help="Weight format: bf16, fp8, fp8_block, int8, ... Default: as stored.")
@option("--role", type=click.Choice(["mixed", "prefill", "decode"]), default="mixed")
@option("--price", "price_usd_per_h", type=float, help="Price of the node in USD/h. Default: the catalog's.")
@option("--region", help="Region of the catalog's price, such as aws/us-east-1.")
@profile_option
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    model_name: str, node_name: str, input_tokens: int, output_tokens: int, as_json: bool, **options: Any
) -> None:
    """Estimate latency, capacity and cost per million tokens of a model on a node.

    \b
    Examples:
      potluck estimate --model Llama-3.1-8B --node 2xL40S --input 1024 --output 256
      potluck estimate --model Qwen3-32B --node 4xL40S --tp 4 --input 2000 --output 300 \\
                       --ttft-ms 2000 --tpot-ms 80
      potluck estimate --model GPT-OSS-120B --node 8xH100 --tp 8 --ep tp --input 2000 --output 300
      potluck estimate --model Llama-3.1-70B --node 4xL40S --weights fp8 --input 2000 --output 300
      potluck estimate --model ./my-model --node H100 --input 512 --output 512 --role decode --json
    """
    from potluck.catalog import nodes
    from potluck.perf.estimate import estimate as estimate_node

    asked = EstimateOptions(**options)
    node, model = nodes.node_type(node_name), find_model(model_name)
    if asked.weights_in is not None:
        model = in_format(model, format_named(asked.weights_in, "--weights"))
    price, price_from = _price(node.name, asked.price_usd_per_h, asked.region)
    estimate = estimate_node(
        model,
        node,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tp=asked.tp,
        ep=asked.ep,
        slo=_slo(asked.ttft_ms, asked.tpot_ms),
        price_usd_per_h=price,
        role=asked.role,
        profiles=read_profiles(asked.profile_paths, [model], [node]),
    )
    formats = _formats(model, node)
    if as_json:
        body = encode(estimate)
        assert isinstance(body, dict)
        body.pop("type")
        lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        emit_json({**lengths, "price_from": price_from, **body, **formats})
    else:
        _show(estimate, input_tokens, output_tokens, price_from)
        click.echo("; ".join((f"Weights in {formats['weights_are']}", *formats["said"])))


def read_profiles(
    paths: Sequence[Path], models: Sequence[Model], nodes: Sequence[NodeType]
) -> tuple[Profile, ...]:
    """The profiles in some files; one that is of no model or GPU in question is an error, not ignored."""
    if not paths:
        return ()
    from potluck.perf.timers.profile import profile_for, profile_from_json

    profiles = []
    for path in paths:
        profile = named(path, profile_from_json, "--profile")
        if not any(profile_for([profile], model, node, profile.tp) for model in models for node in nodes):
            raise InputError(
                "--profile", f"{path} is of {profile.model} on {profile.gpu}, which the command does not use"
            )
        profiles.append(profile)
    return tuple(profiles)


def measured(problem: PlanningProblem, paths: tuple[Path, ...]) -> PlanningProblem:
    """With the step times in profiles, where they apply."""
    if paths and (open_ := [demand.name for demand in problem.demands if len(demand.formats) > 1]):
        raise InputError("--profile", f"was measured in one format; name one `precision` for {open_[0]}")
    result = read_profiles(paths, [demand.model for demand in problem.demands], problem.nodes)
    return replace(problem, demands=tuple(replace(demand, profiles=result) for demand in problem.demands))


def find_model(name: str) -> Model:
    """A catalog model, or the one that a directory or a config.json describes."""
    path = Path(name)
    if path.exists() or name.endswith(".json") or name.startswith((".", "/")):
        from potluck.catalog import huggingface

        return huggingface.read_model(path)
    from potluck.catalog import models

    return models.model(name)


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo | None:
    for name, value in (("ttft-ms", ttft_ms), ("tpot-ms", tpot_ms)):
        if value is not None:
            positive(name, value)
    if ttft_ms is None and tpot_ms is None:
        return None
    return Slo((ttft_ms or 1e9) / 1e3, (tpot_ms or 1e9) / 1e3)


def _price(node: str, given_usd_per_h: float | None, region: str | None) -> tuple[float | None, str]:
    from potluck.catalog import prices

    if given_usd_per_h is not None:
        if not 0 <= given_usd_per_h < float("inf"):
            raise InputError("price", f"must not be negative, is {given_usd_per_h:g}")
        return given_usd_per_h, "given"
    try:
        price = prices.price_usd_per_h(node, region)
    except InputError:
        if region is not None:
            raise
        return None, "unknown; set --price"
    return price.price_usd_per_h, f"{price.cloud}/{price.region}, {price.date}, {price.basis}"


def _formats(model: Model, node: NodeType) -> dict[str, Any]:
    """In which format the weights are taken to be, and what that means on this GPU."""
    from potluck.core.values.model import MoeFfn
    from potluck.perf.operators.layer_seconds import units_for

    kinds = [model.weights_are]
    if any(isinstance(layer.ffn, MoeFfn) for layer in model.layers) and model.experts_are not in kinds:
        kinds.append(model.experts_are)
    saids = [units_for(kind, node.gpu).said for kind in kinds]
    return {"weights_are": " and ".join(kinds), "said": [words for words in saids if words]}


def _show(estimate: Estimate, input_tokens: int, output_tokens: int, price_from: str) -> None:
    attention = "data" if estimate.ep == "dp" else "tensor"
    experts = "" if estimate.ep == "none" else f", experts spread over {estimate.tp}"
    gpus = f"{attention} parallelism {estimate.tp}{experts}, {estimate.replicas} replica(s)"
    lengths = f"{input_tokens} input / {output_tokens} output tokens, {estimate.role}"
    bar = estimate.rate_bar
    rows = [
        ("prefill time, one prompt", *_time(bar, estimate.prefill_s, estimate.prefill_bound)),
        ("decode step, batch 1", *_time(bar, estimate.decode_step_s)),
        ("weights", bytes_(estimate.weight_bytes), "per replica"),
        (
            "KV memory",
            bytes_(estimate.kv_bytes),
            f"room for {count(estimate.max_batch)} requests per replica",
        ),
        *_throughput_rows(estimate),
        ("bottleneck", estimate.binds, ""),
        (
            "price per hour",
            "unknown" if (price := estimate.price_usd_per_h) is None else usd(price),
            price_from,
        ),
    ]
    if (cost := estimate.usd_per_million_tokens) is not None:
        error = "" if bar is None else _between(usd, *bar.around(cost)) + ", "
        rows.append(("cost per million tokens", usd(cost), f"{error}input and output"))
    if (cost := estimate.usd_per_million_output_tokens) is not None:
        rows.append(("cost per million output tokens", usd(cost), ""))
    rows.append(("confidence", estimate.confidence, confidence_words(estimate)))
    table(
        f"{estimate.model} on {estimate.node} ({gpus}), {lengths}",
        ("quantity", "estimate", "80 % interval, notes"),
        rows,
    )


def _throughput_rows(estimate: Estimate) -> list[tuple[str, str, str]]:
    at, rate = estimate.operating, estimate.requests_per_s
    if at is None:
        return []
    chunk = f"{at.chunk_tokens:.0f} prompt tokens per step" if estimate.role == "mixed" else ""
    error = (
        "" if (bar := estimate.rate_bar) is None else _between("{:.3g}".format, *bar.around_rate(rate)) + ", "
    )
    tpot = _time(estimate.tpot_bar, at.tpot_s, estimate.decode_bound) if at.tpot_s else ("-", "")
    rows = [
        ("batch per replica", count(at.batch), chunk),
        ("TTFT, without queueing", *_time(estimate.ttft_bar, at.ttft_s)),
        ("TPOT", *tpot),
        ("requests per second", f"{rate:.3g}", f"{error}whole node"),
        ("tokens per second", count(round(estimate.total_tokens_per_s)), "input and output"),
    ]
    if estimate.output_tokens_per_s:
        rows.append(("output tokens per second", count(round(estimate.output_tokens_per_s)), ""))
    return rows


def _time(error_bar: ErrorBar | None, time_s: float, bound: str = "") -> tuple[str, str]:
    """The time, its 80 % interval and whether compute or bandwidth bounds it."""
    parts = [] if error_bar is None else [_between(seconds, *error_bar.around(time_s))]
    return seconds(time_s), ", ".join([*parts, f"{bound}-bound"] if bound else parts)


def _between(words: Callable[[float], str], low: float, high: float) -> str:
    return f"{words(low)} to {words(high)}"


def confidence_words(estimate: Estimate) -> str:
    if estimate.rate_bar is None:
        return f"{estimate.basis}; error unknown"
    return f"{estimate.basis}; intervals from {estimate.rate_bar.basis}"
