"""From a description of stages to a running pipeline: reach the workers, give them their layers, join them."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from potluck.core.errors import InputError
from potluck.engine.compute.runner import RunnerSize
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline import spawn
from potluck.engine.pipeline.pipeline_connection import TlsPair
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.pipeline.pipeline_messages import EmulatedGpu
from potluck.engine.pipeline.worker_starter import Reached, WorkerOptions, WorkerStarter

WAIT_S = 60.0
WORTH_TOKENS = 128
"""From so many tokens on, a GPU's or a CPU's time for a step grows with them."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker of a stage: where it listens (None: it is started here), and its share of the stage's requests."""

    address: tuple[str, int] | None = None
    weight: float = 1.0
    emulate: EmulatedGpu | None = None


@dataclass(frozen=True, slots=True)
class PipelineStage:
    layers: int
    places: tuple[WorkerPlace, ...] = (WorkerPlace(),)


def parse_stages(text: str) -> tuple[PipelineStage, ...]:
    """Stages as a person writes them: `3,5x2` is one worker with 3 layers, then two that share 5 layers;
    `3@10.0.0.5:7000,5@10.0.0.6:7000+10.0.0.7:7000` names workers that listen elsewhere."""
    found = []
    for part in text.split(","):
        count, at, addresses = part.strip().partition("@")
        layers, times, workers = count.partition("x")
        if not layers.isdecimal() or (times and (at or not workers.isdecimal())) or len(count) > 12:
            raise InputError("stages", f"{part!r} is not like 5, 5x2 or 5@host:port+host:port")
        if at:
            places = tuple(WorkerPlace(_address(each)) for each in addresses.split("+"))
        else:
            places = (WorkerPlace(),) * int(workers or "1")
        if not int(layers) or not 1 <= len(places) <= 64:
            raise InputError("stages", f"{part!r} needs at least one layer and 1 to 64 workers")
        found.append(PipelineStage(int(layers), places))
    return tuple(found)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise InputError("stages", f"{text!r} is not like host:port")
    return host, int(port)


def launch(
    config: EngineModelConfig,
    stages: Sequence[PipelineStage],
    size: RunnerSize,
    *,
    directory: str | None = None,
    seed: int = 0,
    secret: bytes | None = None,
    tls: TlsPair | None = None,
    threads: int = 0,
    device: str = "cpu",
    wait_s: float = WAIT_S,
    batches: int | None = None,
    worth_tokens: int = WORTH_TOKENS,
    returns: bool = True,
) -> PipelineExecutor:
    """A pipeline that is ready to run. Weights come from a directory that every worker can read, or from a seed.

    A step is cut into at most `batches` micro-batches, by default one per stage, of at least `worth_tokens` each.
    Workers that are lost come back unless `returns` is False. `tls` is for those that run elsewhere.
    """
    layers = _ranges(config, stages)
    key = secrets.token_hex(32).encode() if secret is None else secret
    processes: list[subprocess.Popen[bytes]] = []
    means = WorkerOptions(directory, seed, threads, device, wait_s, key, tls)
    starter = WorkerStarter(
        config, layers, size, means, lambda stage, place: stages[stage].places[place].emulate, devices_of
    )
    try:
        starter.reach(_addresses(stages, key, processes))
        fingerprint, exact = starter.set_up()
        starter.join()
    except BaseException:
        for remote in (each for row in starter.remotes for each in row):
            remote.stop()
        for process in processes:
            spawn.end(process)
        raise
    return PipelineExecutor(
        config,
        fingerprint,
        size,
        starter.remotes,
        [[place.weight for place in stage.places] for stage in stages],
        starter.inbox,
        layers=layers,
        wait_s=wait_s,
        batches=batches or len(stages),
        worth_tokens=worth_tokens,
        microbatches=lanes_of(stages),
        exact=exact,
        reach=partial(starter.again, fingerprint=fingerprint) if returns else None,
    )


def lanes_of(stages: Sequence[PipelineStage]) -> int:
    """Batches that may go round at once, as long as none waits for another at the slowest stage.

    A batch that goes round alone takes the sum of its stages' times. With n of them a round takes n times the slowest
    stage's if that is more; and their steps are hardly shorter where weights are what takes the time.
    """
    times = [
        stage.layers
        if stage.places[0].emulate is None
        else sum(1 / place.weight for place in stage.places) / len(stage.places)
        for stage in stages
    ]
    return max(1, int(sum(times) / max(times) + 0.05))


def devices_of(device: str, workers: int) -> list[str]:
    """Where workers of this machine compute: with `cuda` one after the other on each of the GPUs that are visible."""
    if device != "cuda":
        return [device] * workers
    import torch

    there = max(1, torch.cuda.device_count())
    return [f"cuda:{number % there}" for number in range(workers)]


def _ranges(config: EngineModelConfig, stages: Sequence[PipelineStage]) -> list[range]:
    total = sum(stage.layers for stage in stages)
    if total != config.model.layer_count:
        raise InputError("stages", f"have {total} layers, the model has {config.model.layer_count}")
    found, first = [], 0
    for stage in stages:
        found.append(range(first, first + stage.layers))
        first += stage.layers
    return found


def _addresses(
    stages: Sequence[PipelineStage], key: bytes, processes: list[subprocess.Popen[bytes]]
) -> list[list[Reached]]:
    """Where each worker listens; those without an address are started, all at once."""
    started = [[None if place.address else spawn.start(key) for place in stage.places] for stage in stages]
    processes += [process for stage in started for process in stage if process is not None]
    return [
        [
            (place.address or ("127.0.0.1", spawn.port_of(process)), process)  # type: ignore[arg-type]
            for place, process in zip(stage.places, row, strict=True)
        ]
        for stage, row in zip(stages, started, strict=True)
    ]
