"""A share of an NVIDIA GPU: processes under CUDA MPS, each with a part of the card's multiprocessors.

A process that is started with `share_environment` computes on so many per cent of the card, beside others; memory is
not divided. The control daemon is started for as long as it is needed, with directories of its own, unless one runs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from potluck.core.errors import InputError

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
ASK_S = 30.0


def share_environment(share: int, daemon: Mapping[str, str]) -> dict[str, str]:
    """What a process with this share, in per cent, is started with beside its other variables."""
    if not 1 <= share <= 100:
        raise InputError("--share", f"must be 1 to 100 per cent of a GPU, is {share}")
    return {**daemon, SHARE: str(share)}


@contextmanager
def mps_daemon(kept: Path | None = None) -> Iterator[dict[str, str]]:
    """Variables that lead to a control daemon: the one that runs, or one of our own until the block ends. One whose
    directories are `kept` is found again by whoever comes after a process that was killed."""
    if _told("get_server_list", {}):
        yield {name: os.environ[name] for name in (PIPES, LOGS) if name in os.environ}
        return
    with tempfile.TemporaryDirectory(prefix="potluck-mps-") as folder:
        where = {PIPES: str(Path(kept or folder, "pipes")), LOGS: str(Path(kept or folder, "logs"))}
        for path in where.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        if kept is None or not _told("get_server_list", where):
            command = [CONTROL, "-d"]
            started = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True)
            if started.returncode:
                line = " ".join((started.stderr or started.stdout).split())[:160] or "it printed nothing"
                raise InputError("--share", f"CUDA MPS cannot be started ({line})")
        try:
            yield where
        finally:
            _told("quit", where)


def run_on_share(share: int, command: Sequence[str], options: Mapping[str, object]) -> int:
    """A command with its options as a process with a share of the GPU; its exit code."""
    given = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    words = [key if value is True else f"{key}={value}" for key, value in given if value not in (None, False)]
    share_environment(share, {})  # A wrong share is said before a daemon is looked for.
    with mps_daemon() as daemon:
        variables = {**os.environ, **share_environment(share, daemon)}
        return subprocess.run([*command, *words], env=variables, check=False).returncode


def _told(command: str, where: Mapping[str, str]) -> bool:
    """Whether a daemon hears a command."""
    variables = {**os.environ, **where}
    try:
        done = subprocess.run(
            [CONTROL], input=f"{command}\n", env=variables, capture_output=True, text=True, timeout=ASK_S
        )
    except FileNotFoundError as error:
        raise InputError("--share", f"needs an NVIDIA GPU with CUDA MPS; {CONTROL} is not here") from error
    except subprocess.TimeoutExpired:
        return False
    return not done.returncode
