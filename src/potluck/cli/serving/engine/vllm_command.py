"""`potluck engine vllm`: stock vLLM behind the face of an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from potluck.api.http import server_tls
from potluck.cli.serving.engine.listening import announce, key_for, kv_tls_option, tls_option
from potluck.core.errors import InputError


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--model", required=True, help="A model's directory, or its name on the hub.")
@click.option("--name", help="The model's name for clients; else its directory's.")
@click.option("--python", default=sys.executable, help="Of the environment that vLLM is in; else this one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name under which clients reach it.")
@click.option("--role", type=click.Choice(["prefill", "decode", "mixed"]), default="mixed", show_default=True)
@click.option(
    "--tensor-parallel", default=1, show_default=True, type=click.IntRange(1), help="GPUs per stage."
)
@click.option("--expert-parallel", is_flag=True, help="Each expert of a mixture whole on one GPU.")
@click.option("--stages", help="A pipeline: layers of each stage, such as 20,12.")
@click.option("--token-budget", type=click.IntRange(1), help="Of one step; else vLLM's choice.")
@click.option("--max-running", type=click.IntRange(1), help="Requests at once; else vLLM's choice.")
@click.option("--max-tokens", type=click.IntRange(2), help="Longest request; else the model's context.")
@click.option("--block-tokens", type=click.IntRange(1), help="Of a KV block; else vLLM's choice.")
@click.option(
    "--memory-share", type=click.FloatRange(0.05, 1.0), help="Of each GPU's memory; else vLLM's choice."
)
@click.option(
    "--kv-port", default=0, type=click.IntRange(0, 65535), help="Where others fetch KV; a port per worker."
)
@click.option(
    "--kv-from", multiple=True, metavar="HOST[:PORT]", help="Where KV may come from, beside PUT /peers."
)
@kv_tls_option
@click.option(
    "--deadline-s", default=600.0, show_default=True, type=click.FloatRange(1), help="Of a request."
)
@click.option("--lease-s", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Of a handle.")
@click.option("--start-s", default=900.0, show_default=True, help="How long vLLM may take to start.")
@click.option("--any-version", is_flag=True, help="Try a vLLM that this was not tested with.")
@tls_option
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Clients' key; else $POTLUCK_API_KEY.")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
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
