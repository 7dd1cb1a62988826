"""A private authority and certificates of hosts, by the lines of docs/deploy.md."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

AUTHORITY = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=potluck"
    " -keyout ca.key -out ca.pem"
)
REQUEST = (
    "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=HOST"
    " -addext subjectAltName=IP:HOST -keyout HOST.key -out HOST.csr"
)
SIGN = (
    "openssl x509 -req -in HOST.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 825 -copy_extensions copy"
    " -out HOST.pem"
)


def make_certificates(folder: Path, hosts: Iterable[str]) -> Path:
    """HOST.pem and HOST.key for each address, all signed by `ca.pem`, which is returned."""
    _run(AUTHORITY, folder)
    for host in hosts:
        _run(REQUEST.replace("HOST", host), folder)
        _run(SIGN.replace("HOST", host), folder)
    return folder / "ca.pem"


def _run(line: str, folder: Path) -> None:
    subprocess.run(shlex.split(line), cwd=folder, check=True, capture_output=True)
