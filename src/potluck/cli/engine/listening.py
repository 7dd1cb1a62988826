"""Before an engine serves: who may ask it, and the line that says where it listens."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import click
from click import option

from potluck.api.http import server_tls
from potluck.cli.common.files import PATH, read_text
from potluck.core.errors import InputError

KEY_VARIABLE = "POTLUCK_API_KEY"
MIN_SECRET_BYTES = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def announce(name: str, role: str, as_json: bool, host: str) -> Callable[[str], None]:
    def ready(address: str) -> None:
        if address.startswith("http:"):
            warn_of_clear(host)
        if as_json:
            # On one line, as the parent process reads it while the engine runs.
            click.echo(json.dumps({"url": address, "model": name, "role": role}))
        else:
            click.echo(f"Serving {name} at {address}  (try {address}/v1/models; Ctrl-C ends)")

    return ready


def key_for(host: str, file: Path | None) -> str | None:
    """The clients' key, with a warning where others can reach the engine and there is none."""
    key = api_key(file)
    if host not in LOOPBACK and key is None:
        click.echo(f"potluck: warning: {host} is open to others and no key is set", err=True)
    return key


kv_tls_option = option(
    "--kv-tls",
    nargs=3,
    type=PATH,
    metavar="CERTIFICATE KEY AUTHORITY",
    help="TLS for KV transfers between engines; both sides show a certificate.",
)
tls_option = option("--tls", nargs=2, type=PATH, metavar="CERTIFICATE KEY", help="Serve HTTPS.")


def tls_for(host: str, files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    """What a server shows, with a warning where others can reach it and listen in on the way."""
    if files is None:
        warn_of_clear(host)
        return None
    return server_tls(*files)


def warn_of_clear(host: str) -> None:
    if host not in LOOPBACK:
        click.echo(
            f"potluck: warning: {host} is served in clear; give --tls where the network is not your own",
            err=True,
        )


def api_key(file: Path | None, option: str = "--api-key-file") -> str | None:
    """The clients' key, from a file or the environment; never shown."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    return key_in(file, option)


def key_in(file: Path, field: str) -> str:
    text = read_text(file, field).strip()
    if not text:
        raise InputError(field, f"{file} is empty")
    return text


def secret_in(file: Path, field: str) -> bytes:
    text = read_text(file, field).strip().encode()
    if len(text) < MIN_SECRET_BYTES:
        raise InputError(field, f"{file} must have at least {MIN_SECRET_BYTES} random bytes")
    return text
