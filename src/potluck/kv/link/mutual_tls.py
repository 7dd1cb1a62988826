"""TLS between sites: both sides show a certificate of the fleet's own authority, or there is no connection."""

from __future__ import annotations

import ssl
from pathlib import Path

from potluck.core.errors import InputError


def server_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    return _context(ssl.Purpose.CLIENT_AUTH, certificate, key, authority)


def client_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """The sender's certificate must also name the host that was asked for."""
    return _context(ssl.Purpose.SERVER_AUTH, certificate, key, authority)


def _context(purpose: ssl.Purpose, certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if purpose is ssl.Purpose.CLIENT_AUTH else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=str(authority))
        context.load_cert_chain(str(certificate), str(key))
    except (OSError, ssl.SSLError) as error:
        raise InputError("tls", f"cannot use {certificate}, {key} and {authority} ({error})") from error
    return context
