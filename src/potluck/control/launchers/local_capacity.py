"""Whether a machine can act as the GPUs of a plan: what its engines would compute, in CPU-seconds a second.

Engines that act as GPUs compute a small model for real. For model m with r requests/s, prompts of I and answers of O
tokens, D replicas that answer and a step of S seconds on their GPUs, with this machine's c_p for a prompt token, c_0
for a step and c_1 for each sequence in it:

    CPUs = sum over m of  r I c_p  +  min(D / S, r O) c_0  +  r O c_1

A step makes a token of each sequence in it, so there are no more steps than tokens.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

from potluck.core.errors import CapacityError
from potluck.core.figures import digits
from potluck.core.values.plan import Plan
from potluck.core.values.types import Traffic

SLOW = 1.25  # Times as many CPUs as there are that may be asked for before it is said.
HALVINGS = 12


@dataclass(frozen=True, slots=True)
class CpuCost:
    prompt_token_s: float
    step_s: float  # Of a step of answers, however many are in it ...
    sequence_s: float  # ... and of each of them.


def cost_of(said: object) -> CpuCost | None:
    """As a fork server says it; None where it does not."""
    if not isinstance(said, Mapping):
        return None
    result = [said.get(field.name) for field in fields(CpuCost)]
    numbers = [item for item in result if isinstance(item, int | float) and isfinite(item) and item >= 0]
    return CpuCost(*numbers) if len(numbers) == len(result) else None


def needed_cpus(plan: Plan, traffic: Iterable[Traffic], cost: CpuCost) -> float:
    step_s = {prediction.model: prediction.tpot_s for prediction in plan.predictions}
    answering: dict[str, int] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        decoders = sum(replica.role != "prefill" for replica in template.replicas)
        answering[template.model] = answering.get(template.model, 0) + decoders * deployment.count
    total = 0.0
    for asked in traffic:
        prompts = asked.rate_per_s * asked.mean_input_tokens
        answers = asked.rate_per_s * asked.mean_output_tokens
        length_s = step_s.get(asked.model, 0.0)
        steps = min(answers, answering.get(asked.model, 0) / length_s) if length_s > 0 else answers
        total += prompts * cost.prompt_token_s + steps * cost.step_s + answers * cost.sequence_s
    return total


def slow_line(plan: Plan, traffic: Iterable[Traffic], cost: CpuCost, cpus: int) -> str:
    """What is said of a machine that is too slow for it; nothing where it is not."""
    asked = tuple(traffic)
    times = needed_cpus(plan, asked, cost) / max(1, cpus)
    if times < SLOW:
        return ""
    rate = sum(item.rate_per_s for item in asked)
    low, high = 0.0, 1.0  # shares of that rate; what is needed grows with it, and not evenly
    for _ in range(HALVINGS):
        share = (low + high) / 2
        less = (replace(item, rate_per_s=share * item.rate_per_s) for item in asked)
        low, high = (share, high) if needed_cpus(plan, less, cost) <= cpus else (low, share)
    return (
        f"this machine would have to compute {times:.1f} times faster to stand for these GPUs at the planned "
        f"{digits(rate)} requests/s: beyond about {digits(rate * low)} requests/s latencies are the CPU's, not the "
        "plan's (`--engine mock` computes nothing, and keeps their pace)"
    )


def cpu_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # elsewhere than on Linux
        return os.cpu_count() or 1


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
ENGINE_BYTES = {
    "emulated": 400_000_000,
    "forked": 200_000_000,
    "mock": 150_000_000,
    "gpu": 1_500_000_000,
    "vllm": 1_500_000_000,
}
"""Of one engine of a style, of the host's memory: as measured, with some more for what comes with requests."""
GATEWAY_BYTES = 150_000_000
Free = Callable[[], int | None]


def free_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What can still be taken: of the machine, and within the limit of a container; None where unknown."""
    numbers = [number for number in (_of_machine(meminfo), _of_container(cgroup)) if number is not None]
    return min(numbers) if numbers else None


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
        "or plan for fewer nodes" + (" (--engine mock takes a third)" if style == "emulated" else "")
    )


NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class LocalGpu:
    index: int
    uuid: str  # The same whatever the order in which chips are counted.
    name: str
    memory_bytes: int
    share: int | None = None  # In per cent, of a GPU that is several.


def find_chips(environment: Mapping[str, str] | None = None) -> tuple[LocalGpu, ...]:
    variables = os.environ if environment is None else environment
    try:
        done = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, env=dict(variables)
        )
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapacityError(f"nvidia-smi does not answer ({error}); is the driver well?") from error
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())[:200]
        raise CapacityError(f"nvidia-smi failed with {done.returncode}: {message or 'it printed nothing'}")
    lines = tuple(_chip(line) for line in done.stdout.splitlines() if line.strip())
    return _visible(lines, variables.get(VISIBLE))


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
        gpu
        for part in wanted
        for gpu in chips
        if (part == str(gpu.index) if part.isdecimal() else gpu.uuid.startswith(part))
    )
