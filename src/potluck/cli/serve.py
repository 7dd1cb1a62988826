"""`potluck serve`: the gateway, one OpenAI endpoint over a plan's fleet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, FOLDER, read_text
from potluck.cli.common.inputs import read_plan
from potluck.cli.engine.listening import LOOPBACK, api_key, key_in, secret_in, tls_for
from potluck.cli.planning.estimate import profile_option
from potluck.cli.simulating.simulation import policy_of, read_inputs, scene_of
from potluck.core.errors import InputError, UnknownNameError
from potluck.spec.spec_values import SHIPPED, Spec

if TYPE_CHECKING:
    from potluck.core.state.policy import Policy
    from potluck.runtime.resolved_plan import ResolvedPlan

ADMIN_VARIABLE = "POTLUCK_ADMIN_KEY"
SETTINGS = "engines keys usage log engine_ca gateways state takeover mock_engines why plan_version attached"
"""Options that `GatewaySettings` has by the same names."""


@click.command()
@argument("plan", type=FILE)
@argument("spec", type=FILE, required=False)
@option("--engines", type=FILE, help="File of running engines; see docs/gateway.md.")
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="Port for clients; 0: any free one.")
@option("--admin-host", default="127.0.0.1", help="Operator address to listen on.")
@option("--admin-port", default=8001, type=click.IntRange(0, 65535))
@option("--admin-key-file", type=FILE, help=f"File of the operator key. Default: ${ADMIN_VARIABLE}.")
@option("--engine-key-file", type=FILE, help="Key for engines that PUT /fleet adds.")
@option("--workers", default=1, type=click.IntRange(1, 64), help="Worker processes for client connections.")
@option("--keys", type=FILE, help="API keys (`potluck keys`). Without it only loopback is served.")
@option(
    "--secret-file",
    type=FILE,
    help="Secret of tenants' prefix-cache salts. Default: new at each start, which empties the caches.",
)
@option("--usage", type=FILE, help="Append one usage record per request.")
@option("--log", type=FILE, help="Write every policy event and action, for `potluck replay`.")
@option(
    "--files", multiple=True, metavar="MODEL=DIR", help="Tokenizer directory of a model; overrides the spec."
)
@option("--mock", "mock_engines", is_flag=True, help="Engines are mocks: the spec alone limits lengths.")
@option("--tls", nargs=2, type=FILE, metavar="CERTIFICATE KEY", help="Serve HTTPS.")
@option("--engine-ca", type=FILE, help="CA certificate of engines. Default: the system's.")
@option(
    "--gateways",
    default=1,
    type=click.IntRange(1, 1000),
    help="Number of gateways that share clients and key limits.",
)
@option("--state", type=FOLDER, help="Folder that keeps engines and answers over a restart.")
@option(
    "--takeover",
    type=FILE,
    metavar="SOCKET",
    help="Take over the ports of a running gateway without downtime.",
)
@option("--policy", multiple=True, help="NAME=VALUE: override a policy of the spec.")
@option("--history", type=FILE, help="JSON of past rates for forecasts: model to req/s per 10 min.")
@option("--why", default="", metavar="TEXT", help="Reason for this plan, for the page.")
@option("--plan-version", default=1, type=click.IntRange(1), help="Version of the plan, for the page.")
@option("--attached", is_flag=True, hidden=True, help="Nothing starts engines: refuse at once without one.")
@profile_option
@option("--json", "as_json", is_flag=True, help="Print addresses as JSON.")
def serve(
    plan: Path,
    spec: Path | None,
    host: str,
    admin_host: str,
    tls: tuple[Path, Path] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve a PLAN's models at one OpenAI address, over engines that were started for it.

    SPEC may be left out with a plan of `potluck up --attach`, which has servers on unknown hardware.

    \b
    Examples:
      potluck serve plan.json potluck.yaml --engines engines.yaml
      curl localhost:8000/v1/models
    """
    from potluck.gateway.serve import serve_forever
    from potluck.gateway.values import GatewaySettings, ListenAddresses

    asked = SimpleNamespace(**options)
    if host not in LOOPBACK and asked.keys is None:
        raise InputError("--host", f"{host} is open to others; give --keys, or listen on 127.0.0.1")
    if asked.takeover is not None and asked.workers > 1:
        raise InputError("--takeover", "is for a gateway of one process; leave out --workers")
    tls_for(host, tls)
    if spec is None:
        resolved, policy, files = _attached(plan, asked)
    else:
        inputs, policy = read_inputs(
            (plan, spec), 0.0, print, lambda read: policy_of(asked.policy, read.policy), asked.profile_paths
        )
        files = files_of(inputs.spec, asked.files)
        resolved = replace(scene_of(inputs), history=_history(asked.history, inputs.spec))
    regions = {deployment.region for deployment in resolved.plan.deployments}
    if policy.home and policy.home not in regions:
        raise UnknownNameError("--policy.home", policy.home, sorted(regions))
    engine_key, secret = asked.engine_key_file, asked.secret_file
    settings = GatewaySettings(
        ListenAddresses(host, asked.port, admin_host, asked.admin_port, asked.workers),
        tls=tls,
        admin_key=_admin_key(asked.admin_key_file, admin_host),
        files=files,
        engine_key="" if engine_key is None else api_key(engine_key, "--engine-key-file") or "",
        secret=token_bytes(32) if secret is None else secret_in(secret, "--secret-file"),
        **{name: options[name] for name in SETTINGS.split()},
    )
    serve_forever(resolved, policy, settings, announced(as_json))


def _attached(plan_file: Path, asked: SimpleNamespace) -> tuple[ResolvedPlan, Policy, dict[str, Path]]:
    """A plan over servers whose hardware is unknown; models are known where `--files` names their configuration."""
    from potluck.catalog import huggingface
    from potluck.runtime.attached_plan import resolved_attached

    plan = read_plan(plan_file)
    if any(template.hardware_known for template in plan.templates):
        raise InputError(
            "SPEC", f"is missing: {plan_file.name} names hardware, and its spec says what that is"
        )
    names = list(dict.fromkeys(template.model for template in plan.templates))
    files = named_files(names, asked.files)
    models = {
        name: huggingface.read_model(folder)
        for name, folder in files.items()
        if (folder / "config.json").is_file()
    }
    return resolved_attached(plan, models), policy_of(asked.policy), files


def announced(as_json: bool) -> Callable[[str, str], None]:
    def ready(url: str, admin: str) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, "admin": admin}))
        else:
            click.echo(
                f"Serving at {url}  (try {url}/v1/models; the page and operators: {admin}; Ctrl-C ends)"
            )

    return ready


def files_of(spec: Spec, pairs: tuple[str, ...]) -> dict[str, Path]:
    """Where each model's tokenizer lies: as the spec says, or stronger, as the command line does."""
    from potluck.engine import shipped_model

    paths = {}
    for model in spec.models:
        if model.files is not None:
            folder = shipped_model() if model.files == SHIPPED else Path(model.files)
            if not folder.is_dir():
                raise InputError(f"models: {model.name}: files", f"{folder} is not a directory that is there")
            paths[model.name] = folder
    return paths | named_files([model.name for model in spec.models], pairs)


def named_files(models: Sequence[str], pairs: tuple[str, ...]) -> dict[str, Path]:
    paths = {}
    for pair in pairs:
        name, sign, given = pair.partition("=")
        if not sign or not Path(given).is_dir():
            raise InputError("--files", f"{pair!r} is not MODEL=DIR with a directory that is there")
        if name not in models:
            raise UnknownNameError("--files", name, models)
        paths[name] = Path(given)
    return paths


def _history(file: Path | None, spec: Spec) -> dict[str, tuple[float, ...]]:
    if file is None:
        return {}
    text = read_text(file, "--history")
    try:
        rates = {str(name): tuple(map(float, listed)) for name, listed in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError("--history", f"{file} is not JSON of lists of rates by model") from error
    if not all(0 <= value < 1e9 for listed in rates.values() for value in listed):
        raise InputError("--history", f"{file}: rates must not be negative")
    known = {model.name for model in spec.models}
    return {name: listed for name, listed in rates.items() if name in known}


def _admin_key(file: Path | None, host: str) -> str | None:
    text = os.environ.get(ADMIN_VARIABLE) or None
    key = text if file is None else key_in(file, "--admin-key-file")
    if host not in LOOPBACK and key is None:
        raise InputError("--admin-host", f"{host} is open to others; give --admin-key-file")
    return key
