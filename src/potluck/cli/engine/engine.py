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
from potluck.cli.common.files import PATH, option_group
from potluck.cli.engine.emulate import executor_maker, mock_model
from potluck.cli.engine.listening import KEY_VARIABLE, LOOPBACK, announce, key_for, kv_tls_option, tls_option
from potluck.core.errors import InputError
from potluck.core.values.model import Model

if TYPE_CHECKING:
    from potluck.api.model_files import GenerationConfig
    from potluck.engine.serve import EngineSettings
    from potluck.engine.server.engine_service import EngineService
    from potluck.engine.server.http_connection import RequestLimits
    from potluck.engine.server.kv_connector import KvSettings
    from potluck.vllm.adapter.vllm_process import VllmSettings


MB = 1_000_000
PREFIX_CACHE_MB = 64
MAX_RUNNING, TOKEN_BUDGET = 32, 1024  # Of engines that compute, where nothing is said.
MAX_MOCKS = 256
VLLM_SETTINGS = "token_budget max_running max_tokens kv_port any_version more"
"""Options that `VllmSettings` has by the same names."""
VLLM_START_S = 900.0
COMPUTED_ONLY = ("random_weights", "prefix_cache_dir", "threads")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    directory: Path
    name: str
    limits: RequestLimits
    kv: KvSettings
    generation: GenerationConfig | None


def computing(engine_options: EngineOptions, options: dict[str, Any]) -> EngineService:
    from potluck.engine.serve import assemble

    for flag, without in (("count", 1), ("mean_output", 0), ("bytes_per_real", 0.0), ("profile", ())):
        if options[flag] != without:
            raise InputError(f"--{flag.replace('_', '-')}", "is only for mock engines")
    if str(options["device"]).startswith("cuda"):
        click.echo("loading weights and recording steps (up to a minute after they are there)", err=True)
    return assemble(
        engine_options.directory,
        described(engine_options.directory),
        _settings(options, MAX_RUNNING, TOKEN_BUDGET),
        name=engine_options.name,
        random_seed=options["random_weights"],
        limits=engine_options.limits,
        kv=engine_options.kv,
        make=executor_maker(options["emulate"], options["speed_up"], options["kv_blocks"]),
        generation=engine_options.generation,
    )


def mock_engines(engine_options: EngineOptions, options: dict[str, Any]) -> list[EngineService]:
    from potluck.api.tokenizer import ModelTokenizer
    from potluck.cli.planning.estimate import read_profiles
    from potluck.engine.mock.mock_engine import mock_engine
    from potluck.perf.phases import CHUNK_TOKENS
    from potluck.perf.throughput import MAX_BATCH

    if options["emulate"] is None:
        raise InputError("--mock", "needs --emulate, such as A100:llama-3.1-8b: what to act as")
    for flag in COMPUTED_ONLY:
        if options[flag] is not None:
            raise InputError(f"--{flag.replace('_', '-')}", "is not for mock engines")
    count = options["count"]
    if not 1 <= count <= MAX_MOCKS:
        raise InputError("--count", f"must be 1 to {MAX_MOCKS}, is {count}")
    what = mock_model(options["emulate"], options["speed_up"], options["mean_output"])
    profiles = read_profiles(options["profile"], [what.model], what.nodes)
    what = replace(what, profiles=profiles, bytes_per_real=options["bytes_per_real"])
    given_mb = options["prefix_cache_mb"]
    # What the planner and the simulator count with, so that what is mocked is what was planned.
    # Rows cost nothing here, and what is planned with knows no bound on hand-overs.
    budget = options["token_budget"] or CHUNK_TOKENS
    options = {**options, "chunk_tokens": options["chunk_tokens"] or budget}
    options["token_budget"] = max(budget, options["max_running"] or MAX_BATCH)
    settings = replace(_settings(options, MAX_BATCH, CHUNK_TOKENS), handover_rows=2 * MAX_BATCH)
    tokenizer = ModelTokenizer.read(engine_options.directory)
    return [
        mock_engine(
            engine_options.directory,
            what,
            settings,
            name=engine_options.name,
            limits=engine_options.limits,
            kv=replace(engine_options.kv, port=engine_options.kv.port and engine_options.kv.port + place),
            generation=engine_options.generation,
            prefix_bytes=None if given_mb is None else given_mb * MB,
            tokenizer=tokenizer,
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
        **{name: options[name] for name in names.split()},
    )


def described(directory: Path) -> Model | None:
    """The core.Model of a Hugging Face directory; None for one of our own kind, which describes itself."""
    from potluck.catalog.huggingface import read_model

    try:
        own = json.loads((directory / "config.json").read_text("utf-8"))["model_type"] == "potluck"
    except (OSError, ValueError, KeyError, TypeError):
        own = False  # the next reader of the file reports the error
    return None if own else read_model(directory)


serving_options = option_group(
    option("--name", help="Model name for clients. Default: the directory's."),
    option("--host", default="127.0.0.1", help="Address to listen on."),
    option("--port", default=8000, type=click.IntRange(0, 65535), help="HTTP port; 0: any free one."),
    option("--allow-host", multiple=True, metavar="NAME", help="Further allowed Host header."),
    option("--role", type=click.Choice(["prefill", "decode", "mixed"]), default="mixed"),
    option(
        "--kv-port",
        default=0,
        type=click.IntRange(0, 65535),
        help="First port for KV transfers, one per worker; 0: any.",
    ),
    option("--kv-from", multiple=True, metavar="HOST[:PORT]", help="Allowed KV sources, beside PUT /peers."),
    kv_tls_option,
    option("--deadline-s", default=600.0, type=click.FloatRange(1), help="Time limit per request in s."),
    option(
        "--lease-s",
        default=60.0,
        type=click.FloatRange(0.1),
        help="How long KV is held for a transfer, in s.",
    ),
    tls_option,
    option("--api-key-file", type=PATH, help=f"File of the API key. Default: ${KEY_VARIABLE}."),
    option("--json", "as_json", is_flag=True, help="Print addresses as JSON."),
)


@click.group()
def engine() -> None:
    """Run an engine on this machine."""


@engine.command()
@option("--model", type=PATH, help="Model directory. Default: the bundled model.")
@option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="none: ignore generation_config.json.",
)
@option("--random-weights", type=int, metavar="SEED", help="Use random weights.")
@option("--device", default="cpu", help="Torch device: cpu, cuda, cuda:1, ...")
@option("--threads", type=click.IntRange(1), help="CPU threads. Default for a small model: 1.")
@option("--max-running", type=click.IntRange(1), help="Maximum batch size. Default: 32, mock 1024.")
@option(
    "--max-tokens",
    type=click.IntRange(2),
    help="Maximum prompt and output tokens of a request. Default: the context.",
)
@option(
    "--kv-blocks",
    type=click.IntRange(1),
    help="KV blocks of 16 tokens. Default: a quarter context per request.",
)
@option("--token-budget", type=click.IntRange(1), help="Maximum tokens per step. Default: 1024, mock 2048.")
@option(
    "--chunk-tokens",
    type=click.IntRange(1),
    help="Maximum prefill tokens per prompt and step. Default: the budget.",
)
@option(
    "--prefix-cache-mb", type=click.IntRange(0), help="Prefix cache size; 0: off. Default: 64, mock: free KV."
)
@option("--prefix-cache-dir", type=PATH, help="Folder of a prefix cache on disk.")
@option("--emulate", metavar="GPU:MODEL", help="Run at the speed of a GPU, such as A10:llama-3.1-8b.")
@option("--speed-up", default=1.0, help="With --emulate: factor on the speed.")
@option("--mock", is_flag=True, help="With --emulate: return random tokens without computing.")
@option("--count", default=1, help="With --mock: number of engines, on consecutive ports.")
@option(
    "--mean-output", default=0, type=click.IntRange(0), help="With --mock: mean output length. 0: max_tokens."
)
@option("--profile", multiple=True, type=PATH, help="With --mock: measured step times.")
@option(
    "--bytes-per-real", default=0.0, help="With --mock: KV bytes represented by one sent byte; 0: send no KV."
)
@option(
    "--end-when-drained",
    is_flag=True,
    help="Exit once drained, so that a supervisor starts the next release.",
)
@serving_options
def serve(
    model: Path | None, host: str, port: int, tls: tuple[Path, Path] | None, as_json: bool, **options: Any
) -> None:
    """Serve one model with the embedded or mock engine.

    \b
    Examples:
      potluck engine serve
      potluck engine serve --model ~/models/Llama-3.2-1B --device cuda --port 8001
      potluck engine serve --emulate A100:llama-3.1-8b --mock --count 4
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
           -d '{"model": "words", "prompt": "Once upon a time"}'
    """
    try:
        import asyncio

        from potluck.engine import shipped_model
        from potluck.engine.serve import serve_all
        from potluck.engine.server.http_connection import RequestLimits
    except ModuleNotFoundError as error:
        raise InputError("engine", f"needs {error.name}; install potluck[engine]") from error
    key = key_for(host, options["api_key_file"])
    directory = model or shipped_model()
    engine_options = EngineOptions(
        directory,
        options["name"] or directory.resolve().name,
        RequestLimits(deadline_s=options["deadline_s"], lease_s=options["lease_s"]),
        kv_settings(host, options["kv_port"], options["kv_from"], options["kv_tls"]),
        generation_of(directory) if options["generation_config"] == "auto" else None,
    )
    services = (
        mock_engines(engine_options, options) if options["mock"] else [computing(engine_options, options)]
    )
    for service in services:
        service.ends_drained = options["end_when_drained"]
    asyncio.run(
        serve_all(
            services,
            host,
            port,
            api_key=key,
            ready=announce(engine_options.name, services[0].role, as_json, host),
            names=frozenset(options["allow_host"]),
            tls=None if tls is None else server_tls(*tls),
        )
    )


def kv_settings(
    host: str, port: int, kv_from: tuple[str, ...], tls: tuple[Path, Path, Path] | None
) -> KvSettings:
    from potluck.core.values.kv_layout import kv_address
    from potluck.engine.server.kv_connector import KvSettings
    from potluck.kv.peer_connections import ANY_PORT

    fleet = tuple(worker for text in kv_from for worker in kv_address(text, "--kv-from", ANY_PORT).workers)
    return KvSettings(host, port, fleet, identity=tls)


def generation_of(directory: Path) -> GenerationConfig:
    """What the model's makers say about drawing tokens, with a warning where it cannot be done."""
    from potluck.api.model_files import FILE, read_generation

    generation = read_generation(directory)
    if generation.left_out:
        click.echo(f"potluck: warning: {FILE}: left out: {', '.join(generation.left_out)}", err=True)
    return generation


@engine.command(context_settings={"ignore_unknown_options": True})
@option("--model", required=True, help="Model directory, or Hugging Face name.")
@option(
    "--python",
    default=sys.executable,
    show_default=False,
    help="Python interpreter of vLLM. Default: this one.",
)
@option("--tensor-parallel", default=1, type=click.IntRange(1), help="GPUs per stage.")
@option("--expert-parallel", is_flag=True, help="Expert parallelism.")
@option("--stages", help="Pipeline: layers per stage, such as 20,12.")
@option(
    "--nodes", default=1, type=click.IntRange(1), help="Machines of the pipeline; run the command on each."
)
@option("--node-rank", default=0, type=click.IntRange(0), help="Rank of this machine; 0 serves HTTP.")
@option("--master", metavar="HOST:PORT", help="Address and port of node 0 for the others.")
@option("--token-budget", type=click.IntRange(1), help="Maximum tokens per step. Default: vLLM's.")
@option("--max-running", type=click.IntRange(1), help="Maximum batch size. Default: vLLM's.")
@option(
    "--max-tokens",
    type=click.IntRange(2),
    help="Maximum prompt and output tokens of a request. Default: the context.",
)
@option("--any-version", is_flag=True, help="Allow an untested vLLM version.")
@serving_options
@argument("more", nargs=-1, type=click.UNPROCESSED)
def vllm(
    model: str, host: str, port: int, role: str, tls: tuple[Path, Path] | None, as_json: bool, **options: Any
) -> None:
    """Serve one model with stock vLLM and Potluck's KV connector.

    Options after -- go to vLLM.

    \b
    Examples:
      potluck engine vllm --model ~/models/Llama-3.1-8B --tensor-parallel 2 --kv-port 9000
      potluck engine vllm --model tiny --python .venv-vllm/bin/python -- --dtype float32 --enforce-eager
      potluck engine vllm --model M --stages 20,12 --nodes 2 --node-rank 1 --master a:7000 --host b --kv-port 9000
    """
    try:
        import asyncio

        from potluck.core.values.kv_layout import kv_address
        from potluck.vllm.adapter.adapter_service import AdapterLimits
        from potluck.vllm.adapter.node_group import serve_workers
        from potluck.vllm.adapter.serve import DRAIN_S, serve
        from potluck.vllm.adapter.vllm_process import must_have_vllm
    except ModuleNotFoundError as error:
        raise InputError("engine vllm", f"needs {error.name}; install potluck[gateway]") from error

    settings = _vllm_settings(model, host, options)
    key, place = key_for(host, options["api_key_file"]), settings.place
    if place.nodes > 1 and key is None and place.master[0] not in LOOPBACK:
        raise InputError("--api-key-file", "is needed for several machines: by the key they know each other")
    must_have_vllm(settings.python, "--python", any_version=settings.any_version)
    if place.rank:
        text = f"Workers of {settings.name}: node {place.rank} of {options['master']}"
        asyncio.run(
            serve_workers(
                settings, key=key, start_s=VLLM_START_S, ready=lambda: click.echo(text), drain_s=DRAIN_S
            )
        )
        return
    asyncio.run(
        serve(
            settings,
            host,
            port,
            api_key=key,
            always=frozenset(
                worker for text in options["kv_from"] for worker in kv_address(text, "--kv-from", 0).workers
            ),
            limits=AdapterLimits(
                deadline_s=options["deadline_s"], lease_s=options["lease_s"], start_s=VLLM_START_S
            ),
            ready=announce(settings.name, role, as_json, host),
            role=role,
            names=frozenset(options["allow_host"]),
            tls=None if tls is None else server_tls(*tls),
        )
    )


def _vllm_settings(model: str, host: str, options: dict[str, Any]) -> VllmSettings:
    from potluck.core.values.kv_layout import kv_address
    from potluck.vllm.adapter.vllm_process import GpuShape, NodePlace, VllmSettings, address_here

    shape = GpuShape(options["tensor_parallel"], _layers(options["stages"]), options["expert_parallel"])
    if shape.workers > 1 and not options["kv_port"]:
        raise InputError(
            "--kv-port", f"is needed for {shape.workers} workers: each takes one port from there on"
        )
    master = kv_address(options["master"], "--master").stages[0] if options["master"] else ("", 0)
    place = NodePlace(options["nodes"], options["node_rank"], master).checked(shape)
    return VllmSettings(
        model,
        options["name"] or Path(model).name,
        options["python"],
        shape,
        place,
        kv_host=host if place.nodes == 1 else address_here(host, master),
        kv_tls=options["kv_tls"] or (),
        **{name: options[name] for name in VLLM_SETTINGS.split()},
    )


def _layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError("--stages", f"must be layers of each stage, such as 20,12, is {text!r}")
    return tuple(map(int, parts))
