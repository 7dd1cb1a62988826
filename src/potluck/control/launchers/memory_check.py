"""Memory of this machine: what is free, and what engines are expected to take of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from potluck.core.errors import CapacityError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
ENGINE_BYTES = {
    "emulated": 400_000_000,
    "forked": 200_000_000,
    "pretended": 150_000_000,
    "gpu": 1_500_000_000,
    "vllm": 1_500_000_000,
}
"""Of one engine of a style, of the host's memory: as measured, with some more for what comes with requests."""
GATEWAY_BYTES = 150_000_000
Free = Callable[[], int | None]


def free_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What can still be taken: of the machine, and within the limit of a container; None where nobody says."""
    found = [each for each in (_of_machine(meminfo), _of_container(cgroup)) if each is not None]
    return min(found) if found else None


def _of_machine(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_container(folder: Path) -> int | None:
    """Of the second version of cgroups, or the first."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / most).read_text().strip()
            if limit != "max":
                return max(0, int(limit) - int((folder / used).read_text()))
        except (OSError, ValueError):
            continue
    return None


def must_have_room(style: str, engines: int, free: Free = free_bytes, more_bytes: int = 0) -> None:
    """Refuse to begin what this machine has no memory for: it would end something else instead."""
    there = free()
    needed = engines * ENGINE_BYTES[style] + more_bytes
    if there is None or engines < 1 or needed <= there:
        return
    what = "one more engine needs" if engines == 1 and not more_bytes else f"{engines} engines need"
    raise CapacityError(
        f"{what} about {needed / 1e9:.1f} GB of memory, {there / 1e9:.1f} GB are free; end something else, "
        "or plan for fewer nodes" + (" (--engine pretended takes a third)" if style == "emulated" else "")
    )
