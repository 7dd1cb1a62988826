"""The GPUs of this machine, as their driver names them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from potluck.core.errors import CapacityError

ASK = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
ASK_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class LocalGpu:
    index: int
    uuid: str
    """The same whatever the order in which chips are counted."""
    name: str
    memory_bytes: int


def find_chips(environment: Mapping[str, str] | None = None) -> tuple[LocalGpu, ...]:
    """All that may be used here; none where there is no driver."""
    variables = os.environ if environment is None else environment
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_S, env=dict(variables))
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapacityError(f"nvidia-smi does not answer ({error}); is the driver well?") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise CapacityError(f"nvidia-smi failed with {done.returncode}: {said or 'it printed nothing'}")
    found = tuple(_chip(line) for line in done.stdout.splitlines() if line.strip())
    return _visible(found, variables.get(VISIBLE))


def _chip(line: str) -> LocalGpu:
    parts = [part.strip() for part in line.split(",")]
    try:
        index, uuid, name, mib = parts
        return LocalGpu(int(index), uuid, name, int(float(mib)) * 1024 * 1024)
    except ValueError as error:
        raise CapacityError(f"nvidia-smi said {line!r}, which is not index, uuid, name, MiB") from error


def _visible(chips: tuple[LocalGpu, ...], said: str | None) -> tuple[LocalGpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by index or by the beginning of a uuid; all where it says nothing."""
    if said is None:
        return chips
    wanted = [part.strip() for part in said.split(",") if part.strip()]
    return tuple(
        chip
        for part in wanted
        for chip in chips
        if (part == str(chip.index) if part.isdecimal() else chip.uuid.startswith(part))
    )
