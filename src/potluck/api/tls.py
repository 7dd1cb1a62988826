"""TLS of HTTP: what a server shows, and whom a client believes. Who may ask is for keys to say."""

from __future__ import annotations

import ssl
from pathlib import Path

from potluck.core.errors import InputError


def server_tls(certificate: Path, key: Path, field: str = "--tls") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(field, f"{certificate} and {key} cannot be used ({error})") from error
    return context


def client_tls(authority: Path, field: str) -> ssl.SSLContext:
    """Servers must show a certificate of this authority, for the name they were asked by."""
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise InputError(field, f"{authority} cannot be used ({error})") from error
