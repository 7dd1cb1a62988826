"""From a description of stages to a running pipeline: reach the workers, give them their layers, join them."""

from __future__ import annotations

import queue
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.errors import InputError
from potluck.engine.compute.runner import Size
from potluck.engine.memory.cache import groups_of
from potluck.engine.memory.tables import Tables
from potluck.engine.model.config import Config
from potluck.engine.numbers.exactness import Exactness
from potluck.engine.numbers.filling import together
from potluck.engine.pipeline import spawn
from potluck.engine.pipeline.driver import PipelineExecutor
from potluck.engine.pipeline.messages import Connect, Done, Emulated, Failed, Ready, Setup, error_of
from potluck.engine.pipeline.remote import Event, Remote
from potluck.engine.pipeline.serving import DRIVER
from potluck.engine.pipeline.wire import LinkError, connect

LOAD_S = 600.0
"""Reading weights and making room for caches takes a while."""
WAIT_S = 60.0
WORTH_TOKENS = 128
"""From so many tokens on, a GPU's or a CPU's time for a step grows with them."""


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of a stage: where it listens (None: it is started here), and its share of the stage's requests."""

    address: tuple[str, int] | None = None
    weight: float = 1.0
    emulate: Emulated | None = None


@dataclass(frozen=True, slots=True)
class PipelineStage:
    layers: int
    places: tuple[Place, ...] = (Place(),)


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
            places = tuple(Place(_address(each)) for each in addresses.split("+"))
        else:
            places = (Place(),) * int(workers or "1")
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
    config: Config,
    stages: Sequence[PipelineStage],
    size: Size,
    *,
    directory: str | None = None,
    seed: int = 0,
    secret: bytes | None = None,
    threads: int = 0,
    device: str = "cpu",
    wait_s: float = WAIT_S,
    batches: int | None = None,
    worth_tokens: int = WORTH_TOKENS,
) -> PipelineExecutor:
    """A pipeline that is ready to run. Weights come from a directory that every worker can read, or from a seed.

    A step is cut into at most `batches` micro-batches, by default one per stage, of at least `worth_tokens` each.
    """
    layers = _ranges(config, stages)
    key = secrets.token_hex(32).encode() if secret is None else secret
    processes: list[subprocess.Popen[bytes]] = []
    starter = _Starter(config, stages, layers, size)
    try:
        starter.reach(_addresses(stages, key, processes), key)
        fingerprint, exact = starter.set_up(directory, seed, threads, device, wait_s)
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
        lanes=lanes_of(stages),
        exact=exact,
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


def _ranges(config: Config, stages: Sequence[PipelineStage]) -> list[range]:
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


Reached = tuple[tuple[str, int], subprocess.Popen[bytes] | None]
"""Where a worker listens, and its process if it is ours."""


class _Starter:
    """The workers while they get ready."""

    def __init__(
        self,
        config: Config,
        stages: Sequence[PipelineStage],
        layers: Sequence[range],
        size: Size,
    ) -> None:
        self._config, self._stages, self._layers, self._size = config, stages, layers, size
        self._addresses: Sequence[Sequence[Reached]] = ()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.remotes: list[list[Remote]] = []

    def reach(self, addresses: Sequence[Sequence[Reached]], key: bytes) -> None:
        """Connect to every worker."""
        self._addresses = addresses
        size, layers = self._size, self._layers
        for stage, row in enumerate(addresses):
            groups = groups_of(
                self._config.model,
                layers[stage].start,
                layers[stage].stop,
                blocks=size.blocks,
                rows=size.rows,
                max_chunk_tokens=size.max_chunk_tokens,
            )
            self.remotes.append([])
            for place, (address, process) in enumerate(row):
                name = f"stage {stage} worker {place}"
                link = connect(address, key, DRIVER, name)
                tables = Tables(groups, size.rows, size.max_tokens)
                self.remotes[-1].append(Remote(name, stage, place, link, tables, self.inbox, process))

    def set_up(
        self, directory: str | None, seed: int, threads: int, device: str, wait_s: float
    ) -> tuple[str, Exactness]:
        """Give each worker its layers; the fingerprint that all of them must have, and how exact they are."""
        size, asked = self._size, 0
        mine = [remote for row in self.remotes for remote in row if remote.process is not None]
        devices = dict(zip(map(id, mine), devices_of(device, len(mine)), strict=True))
        for stage, row in enumerate(self.remotes):
            for place, remote in enumerate(row):
                asked += 1
                remote.post(
                    Setup(
                        asked,
                        stage,
                        place,
                        self._config,
                        directory,
                        seed,
                        self._layers[stage].start,
                        self._layers[stage].stop,
                        size.rows,
                        size.blocks,
                        size.max_tokens,
                        size.max_chunk_tokens,
                        wait_s,
                        threads,
                        devices.get(id(remote), device),
                        self._stages[stage].places[place].emulate,
                    )
                )
        ready = [answer for answer in self._answers(asked) if isinstance(answer, Ready)]
        prints = {answer.fingerprint for answer in ready}
        if len(prints) != 1:
            raise InputError("workers", "do not have the same weights; is the directory the same everywhere?")
        return prints.pop(), together([Exactness(each.exact, each.products) for each in ready])

    def join(self) -> None:
        """Connect each stage to the next."""
        asked = 0
        for row, behind in zip(self.remotes, self._addresses[1:], strict=False):
            for remote in row:
                asked += 1
                hosts, ports = zip(*(address for address, _ in behind), strict=True)
                remote.post(Connect(asked, tuple(hosts), tuple(ports)))
        self._answers(asked)

    def _answers(self, count: int) -> list[Ready | Done]:
        deadline = time.monotonic() + LOAD_S
        found: list[Ready | Done] = []
        while len(found) < count:
            try:
                _, answer, _ = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise LinkError(f"workers: {count - len(found)} are not ready after {LOAD_S:g} s") from None
            if isinstance(answer, str):
                raise LinkError(f"{answer} while it was set up; does it serve another driver?")
            if isinstance(answer, Failed):
                raise error_of(answer)
            if isinstance(answer, Ready | Done):
                found.append(answer)
        return found
