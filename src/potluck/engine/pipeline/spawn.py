"""Workers as processes of this machine."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from typing import IO

from potluck.engine.pipeline.pipeline_connection import LinkError

START_S = 120.0
"""Importing torch on a busy machine takes its time."""
END_S = 5.0


def start(secret: bytes) -> subprocess.Popen[bytes]:
    """A worker that listens on a loopback port; `port_of` waits for it."""
    command = [sys.executable, "-m", "potluck.engine.pipeline", "--listen", "127.0.0.1:0"]
    # In a session of its own: Ctrl-C is for the driver, which then stops its workers in order.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(secret + b"\n")
        process.stdin.close()
    except OSError as error:
        end(process)
        raise LinkError(f"worker: did not start ({error})") from error
    return process


def port_of(process: subprocess.Popen[bytes], within_s: float = START_S) -> int:
    """The port that a worker listens on, once it does."""
    assert process.stdout is not None
    line = _line(process.stdout, time.monotonic() + within_s)
    if not line.strip().isdigit():
        end(process)
        raise LinkError(f"worker: did not start (exit code {process.returncode})")
    return int(line)


def _line(stream: IO[bytes], deadline_s: float) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < 16:
        left = deadline_s - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return b""
        byte = stream.read(1)
        if not byte:
            return b""
        found += byte
    return found


def end(process: subprocess.Popen[bytes], within_s: float = 0.0) -> None:
    """Wait for a process that was told to stop; then make it."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
