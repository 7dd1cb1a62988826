"""`potluck engine serve`: one engine behind HTTP."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.api.http import server_tls
from potluck.cli.common.files import PATH
from potluck.cli.engine.emulate import executor_maker, pretence
from potluck.cli.engine.listening import KEY_VARIABLE, announce, key_for, kv_tls_option, tls_option
from potluck.core.errors import InputError
from potluck.core.values.model import Model

if TYPE_CHECKING:
    from potluck.api.model_files import GenerationConfig
    from potluck.engine.serve import EngineSettings
    from potluck.engine.server.engine_service import EngineService
    from potluck.engine.server.http_connection import RequestLimits
    from potluck.engine.server.kv_connector import KvSettings


MB = 1_000_000
PREFIX_CACHE_MB = 64
MAX_RUNNING, TOKEN_BUDGET = 32, 1024
"""Of engines that compute, where nothing is said."""
MOST_PRETENDED = 256
COMPUTED_ONLY = ("random_weights", "stages", "secret_file", "prefix_cache_dir", "threads")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What all engines have."""

    directory: Path
    name: str
    limits: RequestLimits
    kv: KvSettings
    generation: GenerationConfig | None


def computing(common: EngineOptions, options: dict[str, Any]) -> EngineService:
    """One that computes, as its flags say."""
    from potluck.engine.serve import assemble

    for flag, without in (("count", 1), ("mean_output", 0)):
        if options[flag] != without:
            raise InputError(f"--{flag.replace('_', '-')}", "is only for engines that --pretend")
    directory = common.directory
    make = executor_maker(
        options["emulate"],
        options["speed_up"],
        options["stages"],
        options["secret_file"],
        tls=common.kv.identity,
        directory=directory,
        random_seed=options["random_weights"],
        threads=options["threads"],
        kv_blocks=options["kv_blocks"],
    )
    return assemble(
        directory,
        described(directory),
        _settings(options, MAX_RUNNING, TOKEN_BUDGET),
        name=common.name,
        random_seed=options["random_weights"],
        limits=common.limits,
        kv=common.kv,
        make=make,
        generation=common.generation,
    )


def pretending(common: EngineOptions, options: dict[str, Any]) -> list[EngineService]:
    """Those that pretend, in one process."""
    from potluck.api.tokenizer import ModelTokenizer
    from potluck.engine.mock.mock_engine import mock_engine
    from potluck.perf.phases import CHUNK_TOKENS
    from potluck.perf.throughput import MAX_BATCH

    if options["emulate"] is None:
        raise InputError("--pretend", "needs --emulate, such as A100:llama-3.1-8b: what to pretend to be")
    for flag in COMPUTED_ONLY:
        if options[flag] is not None:
            raise InputError(f"--{flag.replace('_', '-')}", "is not for engines that --pretend")
    count = options["count"]
    if not 1 <= count <= MOST_PRETENDED:
        raise InputError("--count", f"must be 1 to {MOST_PRETENDED}, is {count}")
    what = pretence(options["emulate"], options["speed_up"], options["mean_output"])
    given_mb = options["prefix_cache_mb"]
    # What the planner and the simulator count with, so that what is pretended is what was planned.
    # Rows cost nothing here, and what is planned with knows no bound on hand-overs.
    budget = options["token_budget"] or CHUNK_TOKENS
    options = {**options, "chunk_tokens": options["chunk_tokens"] or budget}
    options["token_budget"] = max(budget, options["max_running"] or MAX_BATCH)
    settings = replace(_settings(options, MAX_BATCH, CHUNK_TOKENS), handover_rows=2 * MAX_BATCH)
    text = ModelTokenizer.read(common.directory)
    return [
        mock_engine(
            common.directory,
            what,
            settings,
            name=common.name,
            limits=common.limits,
            kv=replace(common.kv, port=common.kv.port and common.kv.port + place),
            generation=common.generation,
            prefix_bytes=None if given_mb is None else given_mb * MB,
            text=text,
        )
        for place in range(count)
    ]


def _settings(options: dict[str, Any], max_running: int, token_budget: int) -> EngineSettings:
    """As the flags say; the two figures hold where they say nothing."""
    from potluck.engine.serve import EngineSettings

    given_mb = options["prefix_cache_mb"]
    names = "max_tokens kv_blocks chunk_tokens prefix_cache_dir device threads role"
    return EngineSettings(
        max_running=options["max_running"] or max_running,
        token_budget=options["token_budget"] or token_budget,
        prefix_cache_bytes=(PREFIX_CACHE_MB if given_mb is None else given_mb) * MB,
        prefix_cache_disk_bytes=options["prefix_cache_disk_mb"] * MB,
        **{name: options[name] for name in names.split()},
    )


def described(directory: Path) -> Model | None:
    """The core.Model of a Hugging Face directory; None for one of our own kind, which describes itself."""
    from potluck.catalog.huggingface import read_model

    try:
        own = json.loads((directory / "config.json").read_text("utf-8"))["model_type"] == "potluck"
    except (OSError, ValueError, KeyError, TypeError):
        own = False  # whoever reads the file next says what is wrong with it
    return None if own else read_model(directory)


@click.group()
def engine() -> None:
    """Run an engine on this machine."""


@engine.command()
@option("--model", type=PATH, help="A model's directory; else the one that ships.")
@option("--name", help="The model's name for clients; else its directory's.")
@option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="none: take no defaults from generation_config.json.",
)
@option("--random-weights", type=int, metavar="SEED", help="Do not read weights; make them up.")
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="0: a free one.")
@option("--allow-host", multiple=True, metavar="NAME", help="A name under which clients reach it.")
@option("--role", type=click.Choice(["prefill", "decode", "mixed"]), default="mixed")
@option("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
@option("--threads", type=click.IntRange(1), help="Threads on a CPU; else 1 for a small model.")
@option("--max-running", type=click.IntRange(1), help="Requests at once; else 32, or with --pretend 1024.")
@option("--max-tokens", type=click.IntRange(2), help="Longest request; else the model's context.")
@option("--kv-blocks", type=click.IntRange(1), help="KV blocks of 16 tokens; else a quarter context each.")
@option("--token-budget", type=click.IntRange(1), help="Tokens of a step; else 1024, or with --pretend 2048.")
@option("--chunk-tokens", type=click.IntRange(1), help="Of one prompt in one step; else the budget.")
@option("--prefix-cache-mb", type=click.IntRange(0), help="0: none; else 64, or with --pretend what is left.")
@option("--prefix-cache-dir", type=PATH, help="Further prefixes go to files here.")
@option("--prefix-cache-disk-mb", default=1000, type=click.IntRange(1))
@option("--deadline-s", default=600.0, type=click.FloatRange(1), help="Of a request.")
@option("--lease-s", default=60.0, type=click.FloatRange(0.1), help="Of a handle.")
@option("--stages", help="A pipeline of processes: layers of each, such as 3,5x2 or 3@host:port,5@...")
@option("--secret-file", type=PATH, help="Of pipeline workers elsewhere.")
@option("--emulate", metavar="GPU:MODEL", help="Act as a GPU, such as A10:llama-3.1-8b.")
@option("--speed-up", default=1.0, help="With --emulate: so many times faster.")
@option("--pretend", is_flag=True, help="With --emulate: draw tokens by a hash, and compute nothing.")
@option("--count", default=1, help="With --pretend: so many, on ports in a row.")
@option(
    "--mean-output",
    default=0,
    type=click.IntRange(0),
    help="With --pretend: mean output; else by max_tokens.",
)
@option("--kv-port", default=0, type=click.IntRange(0, 65535), help="For caches; else a free one.")
@option(
    "--kv-from", multiple=True, metavar="HOST[:PORT]", help="Where caches may come from, beside PUT /peers."
)
@kv_tls_option
@option("--end-when-drained", is_flag=True, help="So that whoever looks after it starts the next release.")
@tls_option
@option("--api-key-file", type=PATH, help=f"Clients' key; else ${KEY_VARIABLE}.")
@option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
def serve(
    model: Path | None,
    name: str | None,
    generation_config: str,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    as_json: bool,
    api_key_file: Path | None,
    deadline_s: float,
    lease_s: float,
    kv_port: int,
    kv_from: tuple[str, ...],
    kv_tls: tuple[Path, Path, Path] | None,
    tls: tuple[Path, Path] | None,
    end_when_drained: bool,
    pretend: bool,
    **options: object,
) -> None:
    """Serve one model: OpenAI's API, segments, status, roles, metrics.

    \b
    Examples:
      potluck engine serve
      potluck engine serve --model ~/models/Llama-3.2-1B --device cuda --port 8001
      potluck engine serve --emulate A100:llama-3.1-8b --pretend --count 4
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
           -d '{"model": "words", "prompt": "Once upon a time"}'
    """
    try:
        import asyncio

        from potluck.engine.serve import serve_all
        from potluck.engine.server.http_connection import RequestLimits
        from potluck.engine.shipped_model import shipped_model
    except ModuleNotFoundError as error:
        raise InputError("engine", f"needs {error.name}; install potluck[engine]") from error
    key, secure = key_for(host, api_key_file), None if tls is None else server_tls(*tls)
    directory = model or shipped_model()
    common = EngineOptions(
        directory,
        name or directory.resolve().name,
        RequestLimits(deadline_s=deadline_s, lease_s=lease_s),
        kv_settings(host, kv_port, kv_from, kv_tls),
        generation_of(directory) if generation_config == "auto" else None,
    )
    services = pretending(common, options) if pretend else [computing(common, options)]
    for service in services:
        service.ends_drained = end_when_drained
    ready = announce(common.name, services[0].role, as_json, host)
    asyncio.run(
        serve_all(services, host, port, api_key=key, ready=ready, names=frozenset(allow_host), tls=secure)
    )


def kv_settings(
    host: str, port: int, kv_from: tuple[str, ...], tls: tuple[Path, Path, Path] | None
) -> KvSettings:
    """Where caches come from and go to."""
    from potluck.engine.server.kv_connector import KvSettings, address_of
    from potluck.kv.peer_connections import ANY_PORT

    fleet = tuple(address_of(text, "--kv-from", ANY_PORT) for text in kv_from)
    return KvSettings(host, port, fleet, identity=tls)


def generation_of(directory: Path) -> GenerationConfig:
    """What the model's makers say about drawing tokens, with a warning where it cannot be done."""
    from potluck.api.model_files import FILE, read_generation

    generation = read_generation(directory)
    if generation.left_out:
        click.echo(f"potluck: warning: {FILE}: left out: {', '.join(generation.left_out)}", err=True)
    return generation


@engine.command(context_settings={"ignore_unknown_options": True})
@option("--model", required=True, help="A model's directory, or its name on the hub.")
@option("--name", help="The model's name for clients; else its directory's.")
@option(
    "--python",
    default=sys.executable,
    show_default=False,
    help="Of the environment that vLLM is in; else this one.",
)
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="0: a free one.")
@option("--allow-host", multiple=True, metavar="NAME", help="A name under which clients reach it.")
@option("--role", type=click.Choice(["prefill", "decode", "mixed"]), default="mixed")
@option("--tensor-parallel", default=1, type=click.IntRange(1), help="GPUs per stage.")
@option("--expert-parallel", is_flag=True, help="Each expert of a mixture whole on one GPU.")
@option("--stages", help="A pipeline: layers of each stage, such as 20,12.")
@option("--token-budget", type=click.IntRange(1), help="Of one step; else vLLM's choice.")
@option("--max-running", type=click.IntRange(1), help="Requests at once; else vLLM's choice.")
@option("--max-tokens", type=click.IntRange(2), help="Longest request; else the model's context.")
@option("--block-tokens", type=click.IntRange(1), help="Of a KV block; else vLLM's choice.")
@option("--memory-share", type=click.FloatRange(0.05, 1.0), help="Of each GPU's memory; else vLLM's choice.")
@option("--kv-port", default=0, type=click.IntRange(0, 65535), help="For KV; a port per worker.")
@option("--kv-from", multiple=True, metavar="HOST[:PORT]", help="Where KV may come from, beside PUT /peers.")
@kv_tls_option
@option("--deadline-s", default=600.0, type=click.FloatRange(1), help="Of a request.")
@option("--lease-s", default=60.0, type=click.FloatRange(0.1), help="Of a handle.")
@option("--start-s", default=900.0, help="How long vLLM may take to start.")
@option("--any-version", is_flag=True, help="Try a vLLM that this was not tested with.")
@tls_option
@option("--api-key-file", type=PATH, help="Clients' key; else $POTLUCK_API_KEY.")
@option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
@argument("more", nargs=-1, type=click.UNPROCESSED)
def vllm(
    model: str,
    name: str | None,
    python: str,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    role: str,
    tensor_parallel: int,
    expert_parallel: bool,
    stages: str | None,
    kv_port: int,
    kv_from: tuple[str, ...],
    kv_tls: tuple[Path, Path, Path] | None,
    deadline_s: float,
    lease_s: float,
    start_s: float,
    api_key_file: Path | None,
    tls: tuple[Path, Path] | None,
    as_json: bool,
    more: tuple[str, ...],
    **options: object,
) -> None:
    """Start stock vLLM with Potluck's connector, and serve it as any engine. What stands behind -- is vLLM's.

    \b
    Examples:
      potluck engine vllm --model ~/models/Llama-3.1-8B --tensor-parallel 2 --kv-port 9000
      potluck engine vllm --model tiny --python .venv-vllm/bin/python -- --dtype float32 --enforce-eager
    """
    try:
        import asyncio

        from potluck.vllm.adapter.adapter_service import AdapterLimits
        from potluck.vllm.adapter.serve import serve
        from potluck.vllm.adapter.vllm_process import GpuShape, VllmSettings
        from potluck.vllm.transfer_scheduler import address_of
    except ModuleNotFoundError as error:
        raise InputError("engine vllm", f"needs {error.name}; install potluck[gateway]") from error

    shape = GpuShape(tensor_parallel, _layers(stages), expert_parallel)
    if shape.workers > 1 and not kv_port:
        raise InputError(
            "--kv-port", f"is needed for {shape.workers} workers: each takes one port from there on"
        )
    shown = name or Path(model).name
    kv = {"kv_host": host, "kv_port": kv_port, "kv_tls": kv_tls or ()}
    settings = VllmSettings(model, shown, python, shape, more=more, **kv, **options)  # type: ignore[arg-type]
    always = frozenset(address_of(text if ":" in text else f"{text}:0") for text in kv_from)
    asyncio.run(
        serve(
            settings,
            host,
            port,
            api_key=key_for(host, api_key_file),
            always=always,
            limits=AdapterLimits(deadline_s=deadline_s, lease_s=lease_s, start_s=start_s),
            ready=announce(shown, role, as_json, host),
            role=role,
            names=frozenset(allow_host),
            tls=None if tls is None else server_tls(*tls),
        )
    )


def _layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError("--stages", f"must be layers of each stage, such as 20,12, is {text!r}")
    return tuple(map(int, parts))
