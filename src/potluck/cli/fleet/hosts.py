"""`potluck hosts`: what hosts have and what goes over the network between them, as a pool to plan with."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import argument, option

from potluck import __version__
from potluck.api.http import client_tls, server_tls
from potluck.cli.common import render
from potluck.cli.common.files import FILE, write_text
from potluck.cli.engine.listening import key_in, tls_for, tls_option
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.control.host_agent import HostLink, HostReport
    from potluck.control.launchers.local_capacity import LocalGpu


PORT = 7300
_key = option("--key-file", type=FILE, required=True, help="What agents and whoever asks them share.")
_ca = option("--ca", type=FILE, help="Authority of the others' certificates, for https:// addresses.")


@click.group()
def hosts() -> None:
    """Find out what several hosts have, and how fast the network between them is."""


@hosts.command()
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=PORT, type=click.IntRange(0, 65535), help="0: a free one.")
@option("--name", help="Its name in the pool; else the machine's.")
@option("--region", default="pool")
@_key
@_ca
@tls_option
@option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
def serve(
    host: str,
    port: int,
    name: str | None,
    region: str,
    key_file: Path,
    ca: Path | None,
    tls: tuple[Path, Path] | None,
    as_json: bool,
) -> None:
    """Say what this host has to whoever shows the key, and measure ways to others when asked."""
    from potluck.control.host_agent import HostAgent
    from potluck.control.launchers.local_capacity import find_chips

    gpus = [_name(gpu) for gpu in find_chips()]
    about = {"name": name or socket.gethostname(), "region": region, "gpus": gpus, "version": __version__}
    tls_for(host, tls)
    secure = None
    if tls is not None:
        secure = server_tls(*tls), None if ca is None else client_tls(ca, "--ca")
    try:
        server = HostAgent((host, port), about, key_in(key_file, "--key-file"), secure)
    except OSError as error:
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error
    url = f"{'https' if tls else 'http'}://{host}:{server.server_address[1]}"
    click.echo(json.dumps({"url": url}) if as_json else f"At {url}, with {len(gpus)} GPUs; Ctrl-C ends")
    server.serve_forever()


def _name(gpu: LocalGpu) -> str:
    from potluck.cli.up.gpus import gpu_of

    try:
        return gpu_of(gpu)
    except InputError:
        return gpu.name


@hosts.command()
@argument("urls", metavar="URL...", nargs=-1, required=True)
@_key
@_ca
@option("--out", type=FILE, help="Write the pool here, as a part of a spec.")
@option("--json", "as_json", is_flag=True, help="For machines.")
def find(urls: tuple[str, ...], key_file: Path, ca: Path | None, out: Path | None, as_json: bool) -> None:
    """Ask the agents at these URLs what they have, and measure every way between them.

    \b
    Examples:
      potluck hosts find http://10.0.0.5:7300 http://10.0.0.6:7300 --key-file key --out pool.yaml
    """
    from potluck.control.host_agent import HostClient, matrix

    host_client = HostClient(key_in(key_file, "--key-file"), None if ca is None else client_tls(ca, "--ca"))
    host_reports = [host_client.host(url.rstrip("/")) for url in urls]
    names = [report.name for report in host_reports]
    if len(set(names)) != len(names):
        raise InputError("--name", f"two hosts have the same one: {', '.join(sorted(names))}")
    ways = matrix(host_client, [report.url for report in host_reports])
    if out is not None:
        write_text("--out", out, pool_text(host_reports, ways))
    if as_json:
        render.emit_json(_as_json(host_reports, ways))
        return
    for report in host_reports:
        gpus = ", ".join(report.gpus) or "no GPU"
        click.echo(f"{report.name} in {report.region}: {gpus}; version {report.version}")
    names_of = {report.url: report.name for report in host_reports}
    for (source, target), way in ways.items():
        click.echo(f"{names_of[source]} -> {names_of[target]}: {way.gbps:.3g} Gbit/s, {way.rtt_ms:.2g} ms")


def _as_json(host_reports: list[HostReport], ways: dict[tuple[str, str], HostLink]) -> dict[str, object]:
    names = {host_report.url: host_report.name for host_report in host_reports}
    fields = ("name", "region", "gpus", "version")
    return {
        "hosts": [{field: getattr(report, field) for field in fields} for report in host_reports],
        "links": [
            {"from": names[source], "to": names[target], "gbps": way.gbps, "rtt_ms": way.rtt_ms}
            for (source, target), way in ways.items()
        ],
    }


def pool_text(host_reports: list[HostReport], ways: dict[tuple[str, str], HostLink]) -> str:
    """The `pool:` of a spec. A host's GPUs must be alike; one without any is left out."""
    having = [report for report in host_reports if report.gpus]
    lines = ["pool:", "  machines:"]
    for report in having:
        if len(set(report.gpus)) > 1:
            unlike = ", ".join(sorted(set(report.gpus)))
            raise InputError(report.name, f"has unlike GPUs ({unlike}); list it by hand")
        node = f"{len(report.gpus)}x{report.gpus[0]}"
        lines.append(f"    - {json.dumps({'name': report.name, 'node': node, 'region': report.region})}")
    if not having:
        raise InputError("URL", "none of these hosts has a GPU; there is nothing to plan with")
    for key, digits in (("gbps", 3), ("rtt_ms", 2)):
        rows = [
            [
                0.0 if here is there else _rounded(getattr(ways[here.url, there.url], key), digits)
                for there in having
            ]
            for here in having
        ]
        lines.append(f"  {key}: {json.dumps(rows)}")
    return "\n".join(lines) + "\n"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
