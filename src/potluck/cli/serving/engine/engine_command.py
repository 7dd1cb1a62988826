"""`potluck engine serve`: one engine behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.api.http import server_tls
from potluck.cli.serving.engine.engine_kinds import EngineOptions, computing, pretending
from potluck.cli.serving.engine.listening import KEY_VARIABLE, announce, key_for, kv_tls_option, tls_option
from potluck.cli.serving.engine.vllm_command import vllm
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.api.model_files import GenerationConfig
    from potluck.engine.server.kv_connector import KvSettings


@click.group()
def engine() -> None:
    """Run an engine on this machine."""


engine.add_command(vllm)


@engine.command()
@click.option(
    "--model", type=click.Path(path_type=Path), help="A model's directory; else the one that ships."
)
@click.option("--name", help="The model's name for clients; else its directory's.")
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="none: take no defaults from generation_config.json.",
)
@click.option("--random-weights", type=int, metavar="SEED", help="Do not read weights; make them up.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A name under which clients reach it, such as a proxy's.",
)
@click.option("--role", type=click.Choice(["prefill", "decode", "mixed"]), default="mixed", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, ...")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads on a CPU; else 1 for a small model, else torch's choice.",
)
@click.option(
    "--max-running",
    type=click.IntRange(1),
    help="At once; else 32, or with --pretend what is planned with, 1024.",
)
@click.option("--max-tokens", type=click.IntRange(2), help="Longest request; else the model's context.")
@click.option(
    "--kv-blocks", type=click.IntRange(1), help="KV blocks of 16 tokens; else a quarter context each."
)
@click.option(
    "--token-budget",
    type=click.IntRange(1),
    help="Of one step; else 1024, or with --pretend as planned, 2048.",
)
@click.option("--chunk-tokens", type=click.IntRange(1), help="Of one prompt in one step; else the budget.")
@click.option(
    "--prefix-cache-mb",
    type=click.IntRange(0),
    help="0: none; else 64, or with --pretend what requests leave of the GPU's memory.",
)
@click.option(
    "--prefix-cache-dir", type=click.Path(path_type=Path), help="Further prefixes go to files here."
)
@click.option("--prefix-cache-disk-mb", default=1000, show_default=True, type=click.IntRange(1))
@click.option(
    "--deadline-s", default=600.0, show_default=True, type=click.FloatRange(1), help="Of a request."
)
@click.option("--lease-s", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Of a handle.")
@click.option("--stages", help="A pipeline of processes: layers of each, such as 3,5x2 or 3@host:port,5@...")
@click.option("--secret-file", type=click.Path(path_type=Path), help="Of pipeline workers elsewhere.")
@click.option("--emulate", metavar="GPU:MODEL", help="Act as a GPU, such as A10:llama-3.1-8b.")
@click.option("--speed-up", default=1.0, show_default=True, help="With --emulate: so many times faster.")
@click.option("--pretend", is_flag=True, help="With --emulate: draw tokens by a hash, and compute nothing.")
@click.option("--count", default=1, show_default=True, help="With --pretend: so many, on ports in a row.")
@click.option(
    "--mean-output",
    default=0,
    type=click.IntRange(0),
    help="With --pretend: outputs end after so many tokens on average; else only by max_tokens.",
)
@click.option(
    "--kv-port", default=0, type=click.IntRange(0, 65535), help="Where others fetch caches; else a free one."
)
@click.option(
    "--kv-from",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Where caches may come from, beside what PUT /peers says; 127.0.0.1: any engine of this machine.",
)
@kv_tls_option
@click.option(
    "--end-when-drained", is_flag=True, help="So that whoever looks after it starts the next release."
)
@tls_option
@click.option("--api-key-file", type=click.Path(path_type=Path), help=f"Clients' key; else ${KEY_VARIABLE}.")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
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
        from potluck.engine.server.engine_service import RequestLimits
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
    for each in services:
        each.ends_drained = end_when_drained
    ready = announce(common.name, services[0].role, as_json, host)
    asyncio.run(
        serve_all(services, host, port, api_key=key, ready=ready, names=frozenset(allow_host), tls=secure)
    )


def kv_settings(
    host: str, port: int, kv_from: tuple[str, ...], tls: tuple[Path, Path, Path] | None
) -> KvSettings:
    """Where caches come from and go to."""
    from potluck.engine.server.kv_connector import KvSettings, TlsIdentity
    from potluck.engine.server.kv_peers import address_of
    from potluck.kv.peer_connections import ANY_PORT

    fleet = tuple(address_of(text, "--kv-from", ANY_PORT) for text in kv_from)
    return KvSettings(host, port, fleet, identity=TlsIdentity(*tls) if tls else None)


def generation_of(directory: Path) -> GenerationConfig:
    """What the model's makers say about drawing tokens, with a warning where it cannot be done."""
    from potluck.api.model_files import FILE, read_generation

    found = read_generation(directory)
    if found.left_out:
        click.echo(f"potluck: warning: {FILE}: left out: {', '.join(found.left_out)}", err=True)
    return found
