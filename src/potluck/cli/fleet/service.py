"""Which running service a command uses: `--state DIR`, or the only one that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from click import option

from potluck.cli.common.files import FILE, PATH, option_group
from potluck.cli.up.run_service import STATE
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.control.gateway_client import GatewayClient
    from potluck.control.service_view import ServiceView


state_option = option("--state", type=PATH, help="State folder of the service. Default: the running one.")
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")


at_options = option_group(
    option(
        "--at", metavar="URL", help="Operator address of a gateway. Default: the service on this machine."
    ),
    option("--key-file", type=FILE, help="With --at: file of the operator key."),
    option("--ca", type=FILE, help="With --at: CA certificate of an https:// gateway."),
)


def client_at(at: str, *, key_file: Path | None, ca: Path | None, state: Path | None) -> GatewayClient:
    from potluck.api.http import client_tls
    from potluck.cli.engine.listening import key_in
    from potluck.control.gateway_client import GatewayClient

    if state is not None:
        raise InputError("--at", "names a gateway; leave out --state")
    if urlsplit(at).scheme not in ("http", "https") or not urlsplit(at).hostname:
        raise InputError("--at", f"{at!r} is no address, such as http://127.0.0.1:8001")
    key = None if key_file is None else key_in(key_file, "--key-file")
    return GatewayClient(at.rstrip("/"), key, None if ca is None else client_tls(ca, "--ca"))


def nothing(line: str) -> click.exceptions.Exit:
    """One line and exit code 1: the question was sound, the answer is no."""
    click.echo(f"potluck: {line}", err=True)
    return click.exceptions.Exit(1)


def with_gateway(service: ServiceView) -> ServiceView:
    if not service.gateway_lives:
        raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
    return service


@contextmanager
def opened(state: Path | None, *, running: bool = True, left: bool = False) -> Iterator[ServiceView]:
    """With `running` something must be alive; with `left`, engines that were never seen to end count as that."""
    from potluck.control.service_view import ServiceView

    with closing(ServiceView(_folder(state, running or left, left))) as service:
        if running and not service.runs:
            raise nothing(f"nothing runs in {service.folder}; start it with `potluck up`")
        yield service


def running_url() -> str | None:
    """Where clients ask the only service that runs here; None where there is none, or several."""
    from potluck.control.service_view import ServiceView

    urls = []
    for folder in _known():
        with closing(ServiceView(folder)) as service:
            urls += [service.url] if service.gateway_lives else []
    return urls[0] if len(urls) == 1 else None


def _known() -> list[Path]:
    return sorted(path.parent for path in STATE.glob("*/state.db")) if STATE.is_dir() else []


def _folder(state: Path | None, running: bool, left: bool) -> Path:
    """Those that run are the choices; those that ended only for what may be asked of them too, where none runs."""
    if state is not None:
        if not (state / "state.db").is_file():
            raise nothing(f"nothing runs in {state}: it has no state.db")
        return state
    known = _known()
    if not known:
        raise nothing("nothing runs; start it with `potluck up`, or name its folder with --state")
    alive = [folder for folder in known if _runs(folder, left)]
    if len(alive) > 1:
        raise InputError("--state", f"is needed, several run: {', '.join(map(str, alive))}")
    if not alive and running:
        raise nothing("nothing runs; start it with `potluck up`")
    paths = alive or known
    if len(paths) > 1:
        several = ", ".join(map(str, paths))
        raise InputError("--state", f"is needed: nothing runs now, and several have ended: {several}")
    return paths[0]


def _runs(folder: Path, left: bool) -> bool:
    from potluck.control.service_view import ServiceView

    with closing(ServiceView(folder)) as service:
        return service.runs or (left and bool(service.store.instances()))
