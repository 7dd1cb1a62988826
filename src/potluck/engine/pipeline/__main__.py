"""A worker as a process. The secret comes on the first line of standard input, never as an argument; the port goes
out on the first line of standard output."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from potluck.core.errors import PotluckError
from potluck.engine.pipeline.pipeline_connection import TlsPair
from potluck.engine.pipeline.worker import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m potluck.engine.pipeline", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 is any that is free")
    parser.add_argument(
        "--tls",
        nargs=3,
        type=Path,
        metavar=("CERTIFICATE", "KEY", "AUTHORITY"),
        help="speak TLS with the engine and the other stages; both sides show a certificate",
    )
    parser.add_argument("--stay", action="store_true", help="wait for the next driver when one is gone")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    secret = sys.stdin.readline().strip().encode()
    if not host or not port.isdecimal() or len(secret) < 16:
        sys.stderr.write("worker: needs --listen HOST:PORT and a secret of 16 characters or more on stdin\n")
        return 2
    try:
        tls = TlsPair.of(*options.tls) if options.tls else None
        listener = socket.create_server((host, int(port)))
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"worker: cannot listen on {host}:{port} ({error})\n")
        return 2
    except PotluckError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    # Behind the port, which is the first line also where both go to one file.
    if tls is None and host not in ("127.0.0.1", "localhost", "::1"):
        sys.stderr.write(f"worker: {host} is served in clear; give --tls where the network is not your own\n")
    serve(listener, secret, options.stay, tls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
