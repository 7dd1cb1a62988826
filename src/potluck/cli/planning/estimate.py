"""`potluck estimate`: one node, one model, one kind of request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import PATH, named
from potluck.cli.common.render import bytes_, count, emit_json, table, usd
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.core.values.layout import Ep
from potluck.core.values.model import format_named, in_format
from potluck.core.values.types import NodeType, Role, Slo

if TYPE_CHECKING:
    from potluck.core.values.model import Model
    from potluck.perf.error_bars import ErrorBar
    from potluck.perf.estimate import Estimate
    from potluck.perf.timers.profile import Profile
    from potluck.plan.problem import PlanningProblem


profile_option = option(
    "--profile",
    "profile_paths",
    multiple=True,
    type=PATH,
    help="Step times that `potluck profile` measured; may be repeated.",
)


@click.command()
@option("--model", "model_name", required=True, help="Catalog name, or a Hugging Face directory.")
@option("--node", "node_name", required=True, help="Such as 2xL40S, H100 or L40S:2.")
@option("--tp", "--tensor-parallel-size", type=int, help="GPUs per replica; the best one by default.")
@option(
    "--ep",
    type=click.Choice(["none", "tp", "dp"]),
    default="none",
    help="Spread a mixture's experts over the GPUs, with tensor- or data-parallel attention.",
)
@option("--input", "--isl", "input_tokens", type=int, required=True, help="Prompt tokens.")
@option("--output", "--osl", "output_tokens", type=int, required=True, help="Output tokens.")
@option("--ttft-ms", type=float, help="Time to first token that must hold.")
@option("--tpot-ms", type=float, help="Time per output token that must hold.")
@option(
    "--weights", "weights_in", help="As if stored in another format: bf16, fp8, fp8_block, int8, int4, ..."
)
@option("--role", type=click.Choice(["mixed", "prefill", "decode"]), default="mixed")
@option("--price", "price_usd_per_h", type=float, help="USD per hour of the node; else the catalog's.")
@option("--region", help="Take the catalog's price of this region, such as aws/us-east-1.")
@profile_option
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    model_name: str,
    node_name: str,
    tp: int | None,
    ep: Ep,
    input_tokens: int,
    output_tokens: int,
    ttft_ms: float | None,
    tpot_ms: float | None,
    weights_in: str | None,
    role: Role,
    price_usd_per_h: float | None,
    region: str | None,
    profile_paths: tuple[Path, ...],
    as_json: bool,
) -> None:
    """How fast a node serves a model, how much fits, and what a million tokens cost.

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

    node, model = nodes.node_type(node_name), find_model(model_name)
    if weights_in is not None:
        model = in_format(model, format_named(weights_in, "--weights"))
    price, price_from = _price(node.name, price_usd_per_h, region)
    result = estimate_node(
        model,
        node,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tp=tp,
        ep=ep,
        slo=_slo(ttft_ms, tpot_ms),
        price_usd_per_h=price,
        role=role,
        profiles=read_profiles(profile_paths, [model], [node]),
    )
    if as_json:
        emit_json({**_as_json(result, input_tokens, output_tokens, price_from), **_formats(model, node)})
    else:
        _show(result, input_tokens, output_tokens, price_from)
        formats = _formats(model, node)
        click.echo(
            "; ".join(str(words) for words in (f"Weights in {formats['weights_are']}", *formats["said"]))
        )


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
                "--profile", f"{path} is of {profile.model} on {profile.gpu}, which is not asked about"
            )
        profiles.append(profile)
    return tuple(profiles)


def measured(problem: PlanningProblem, paths: tuple[Path, ...]) -> PlanningProblem:
    """With the step times in profiles, where they apply."""
    if paths and (open_ := [ask.name for ask in problem.asks if len(ask.formats) > 1]):
        raise InputError("--profile", f"was measured in one format; name one `precision` for {open_[0]}")
    result = read_profiles(paths, [ask.model for ask in problem.asks], problem.nodes)
    return replace(problem, asks=tuple(replace(ask, profiles=result) for ask in problem.asks))


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
        if value is not None and not value > 0:
            raise InputError(name, f"must be positive, is {value:g}")
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
        price_usd = prices.price_usd_per_h(node, region)
    except InputError:
        if region is not None:
            raise
        return None, "none known; give one with --price"
    return (
        price_usd.price_usd_per_h,
        f"{price_usd.cloud}/{price_usd.region}, {price_usd.date}, {price_usd.basis}",
    )


def _formats(model: Model, node: NodeType) -> dict[str, Any]:
    """In which format the weights are taken to be, and what that means on this GPU."""
    from potluck.core.values.model import MoeFfn
    from potluck.perf.operators.layer_seconds import units_for

    kinds = [model.weights_are]
    if any(isinstance(layer.ffn, MoeFfn) for layer in model.layers) and model.experts_are not in kinds:
        kinds.append(model.experts_are)
    saids = [units_for(kind, node.gpu).said for kind in kinds]
    return {"weights_are": " and ".join(kinds), "said": [words for words in saids if words]}


def _as_json(result: Estimate, input_tokens: int, output_tokens: int, price_from: str) -> dict[str, Any]:
    from potluck.core.codec import encode

    body = encode(result)
    assert isinstance(body, dict)
    body.pop("type")
    return {"input_tokens": input_tokens, "output_tokens": output_tokens, "price_from": price_from, **body}


def _show(result: Estimate, input_tokens: int, output_tokens: int, price_from: str) -> None:
    at = result.operating
    attention = "data" if result.ep == "dp" else "tensor"
    experts = "" if result.ep == "none" else f", experts spread over {result.tp}"
    gpus = f"{attention} parallelism {result.tp}{experts}, {result.replicas} replica(s)"
    title = (
        f"{result.model} on {result.node} ({gpus}), {input_tokens} in / {output_tokens} out, {result.role}"
    )
    prefill_s, decode_s = result.prefill_s, result.decode_step_s
    rows: list[tuple[str, str, str]] = [
        (
            "prefill of one prompt",
            seconds(prefill_s),
            _time(result.rate_bar, prefill_s, result.prefill_bound),
        ),
        ("decode step, alone", seconds(decode_s), _time(result.rate_bar, decode_s)),
        ("weights", bytes_(result.weight_bytes), "per replica"),
        ("KV memory", bytes_(result.kv_bytes), f"{count(result.max_batch)} such requests per replica"),
    ]
    if at is not None:
        chunk = f"{at.chunk_tokens:.0f} prompt tokens per step" if result.role == "mixed" else ""
        rows += [
            ("batch per replica", count(at.batch), chunk),
            ("TTFT, without queueing", seconds(at.ttft_s), _time(result.ttft_bar, at.ttft_s)),
            ("TPOT", seconds(at.tpot_s), _time(result.tpot_bar, at.tpot_s, result.decode_bound))
            if at.tpot_s
            else ("TPOT", "-", ""),
            (
                "requests per second",
                f"{result.requests_per_s:.3g}",
                _rate(result.rate_bar, result.requests_per_s),
            ),
            ("tokens per second", count(round(result.total_tokens_per_s)), "input and output"),
        ]
        if result.output_tokens_per_s:
            rows.append(("output tokens per second", count(round(result.output_tokens_per_s)), ""))
    rows.append(("what binds", result.binds, ""))
    if result.price_usd_per_h is not None:
        rows.append(("price per hour", usd(result.price_usd_per_h), price_from))
        if result.usd_per_million_tokens is not None:
            cost = result.usd_per_million_tokens
            rows.append(("cost per million tokens", usd(cost), _cost(result.rate_bar, cost)))
        if result.usd_per_million_output_tokens is not None:
            rows.append(("cost per million output tokens", usd(result.usd_per_million_output_tokens), ""))
    else:
        rows.append(("price per hour", "unknown", price_from))
    rows.append(("confidence", result.confidence, confidence_words(result)))
    table(title, ("", "estimate", ""), rows)


def _time(error_bar: ErrorBar | None, time_s: float, bound: str = "") -> str:
    words = f"{bound}-bound" if bound else ""
    if error_bar is None:
        return words
    low_s, high_s = error_bar.around(time_s)
    return ", ".join(part for part in (f"{seconds(low_s)} to {seconds(high_s)}", words) if part)


def _rate(error_bar: ErrorBar | None, rate: float) -> str:
    if error_bar is None:
        return "whole node"
    low, high = error_bar.around_rate(rate)
    return f"{low:.3g} to {high:.3g}, whole node"


def _cost(error_bar: ErrorBar | None, price_usd: float) -> str:
    if error_bar is None:
        return "input and output"
    low, high = error_bar.around(price_usd)
    return f"{usd(low)} to {usd(high)}, input and output"


def confidence_words(result: Estimate) -> str:
    """What the confidence means for this estimate."""
    if result.rate_bar is None:
        return f"{result.basis}; error unknown"
    return f"{result.basis}; 8 in 10 are within the ranges above, by {result.rate_bar.basis}"
