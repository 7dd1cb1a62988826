"""From a description of stages to a running pipeline: reach the workers, give them their layers, join them."""

from __future__ import annotations

import queue
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from potluck.core.errors import InputError, PotluckError
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import groups_of
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers import Exactness
from potluck.engine.numbers.exact import together
from potluck.engine.pipeline import pipeline_messages as msg
from potluck.engine.pipeline.pipeline_connection import LinkError, TlsPair, connect
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.pipeline.remote_worker import (
    Event,
    RemoteWorker,
    WorkerReturned,
    end_worker,
    start_worker,
    worker_port,
)
from potluck.engine.pipeline.worker import DRIVER

LOAD_S = 600.0  # Reading weights and making room for caches takes a while.
Reached = tuple[tuple[str, int], subprocess.Popen[bytes] | None]
"""Where a worker listens, and its process if it is ours."""
WAIT_S = 60.0
WORTH_TOKENS = 128  # From so many tokens on, a GPU's or a CPU's time for a step grows with them.


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker of a stage: where it listens (None: it is started here), and its share of the stage's requests."""

    address: tuple[str, int] | None = None
    weight: float = 1.0
    emulate: msg.EmulatedGpu | None = None


@dataclass(frozen=True, slots=True)
class PipelineStage:
    layers: int
    places: tuple[WorkerPlace, ...] = (WorkerPlace(),)


def parse_stages(text: str) -> tuple[PipelineStage, ...]:
    """Stages as a person writes them: `3,5x2` is one worker with 3 layers, then two that share 5 layers;
    `3@10.0.0.5:7000,5@10.0.0.6:7000+10.0.0.7:7000` names workers that listen elsewhere."""
    pipeline_stages = []
    for part in text.split(","):
        count, at, addresses = part.strip().partition("@")
        layers, times, workers = count.partition("x")
        if not layers.isdecimal() or (times and (at or not workers.isdecimal())) or len(count) > 12:
            raise InputError("stages", f"{part!r} is not like 5, 5x2 or 5@host:port+host:port")
        if at:
            places = tuple(WorkerPlace(_address(name)) for name in addresses.split("+"))
        else:
            places = (WorkerPlace(),) * int(workers or "1")
        if not int(layers) or not 1 <= len(places) <= 64:
            raise InputError("stages", f"{part!r} needs at least one layer and 1 to 64 workers")
        pipeline_stages.append(PipelineStage(int(layers), places))
    return tuple(pipeline_stages)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise InputError("stages", f"{text!r} is not like host:port")
    return host, int(port)


class WorkerStarter:
    def __init__(
        self,
        stages: Sequence[PipelineStage],
        settings: msg.WorkerSettings,
        device: str,
        key: bytes,
        tls: TlsPair | None,
    ) -> None:
        """`tls` is for workers that run elsewhere."""
        self._stages, self._settings, self._device = stages, settings, device
        self._key, self._tls = key, tls
        self.layers = _ranges(settings.config, stages)
        self._addresses: list[list[Reached]] = []
        self._devices: dict[tuple[int, int], str] = {}
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.remotes: list[list[RemoteWorker]] = []

    def reach(self, addresses: list[list[Reached]]) -> None:
        self._addresses = addresses
        for stage, row in enumerate(addresses):
            self.remotes.append([])
            for place, reached in enumerate(row):
                self.remotes[-1].append(self._remote(stage, place, reached, self.inbox))
        mine = [
            (s, p) for s, row in enumerate(addresses) for p, item in enumerate(row) if item[1] is not None
        ]
        self._devices = dict(zip(mine, devices_of(self._device, len(mine)), strict=True))

    def set_up(self) -> tuple[str, str, Exactness]:
        """Give each worker its layers; fingerprint and format that all of them must have, and how exact they are."""
        every = [remote for row in self.remotes for remote in row]
        for number, remote in enumerate(every, 1):
            remote.post(self._setup(number, remote))
        ready = [answer for answer in _answers(self.inbox, len(every)) if isinstance(answer, msg.WorkerReady)]
        prints = {(answer.fingerprint, answer.dtype) for answer in ready}
        if len(prints) != 1:
            raise InputError(
                "workers", "do not have the same weights and format; is the directory the same everywhere?"
            )
        return *prints.pop(), together([Exactness(answer.exact, answer.products) for answer in ready])

    def join(self) -> None:
        asked = [remote for row in self.remotes[:-1] for remote in row]
        for number, remote in enumerate(asked, 1):
            remote.post(self._connect(number, remote.stage))
        _answers(self.inbox, len(asked))

    def again(self, lost_worker: RemoteWorker, fingerprint: str) -> tuple[RemoteWorker, WorkerReturned]:
        (address, process), inbox = (
            self._addresses[lost_worker.stage][lost_worker.place],
            queue.SimpleQueue[Event](),
        )
        if process is not None:
            process = start_worker(self._key)
            address = ("127.0.0.1", worker_port(process))
        try:
            remote = self._remote(lost_worker.stage, lost_worker.place, (address, process), inbox)
        except PotluckError:
            if process is not None:
                end_worker(process)
            raise
        try:
            remote.post(self._setup(1, remote))
            (ready,) = _answers(inbox, 1)
            if not isinstance(ready, msg.WorkerReady) or ready.fingerprint != fingerprint:
                raise InputError(remote.name, "has other weights than the pipeline")
            if lost_worker.stage + 1 < len(self.remotes):
                remote.post(self._connect(2, lost_worker.stage))
                _answers(inbox, 1)
        except PotluckError:
            remote.stop()
            raise
        self._addresses[lost_worker.stage][lost_worker.place] = address, process
        return remote, WorkerReturned(*address)

    def _remote(
        self, stage: int, place: int, reached: Reached, inbox: queue.SimpleQueue[Event]
    ) -> RemoteWorker:
        size, layers = self._settings.size, self.layers[stage]
        groups = groups_of(self._settings.config.model, layers.start, layers.stop, size)
        name = f"stage {stage} worker {place}"
        connection = connect(reached[0], self._key, DRIVER, name, self._tls if reached[1] is None else None)
        tables = BlockTables(groups, size.rows, size.max_tokens)
        return RemoteWorker(name, stage, place, connection, tables, inbox, reached[1])

    def _setup(self, call: int, remote: RemoteWorker) -> msg.WorkerInit:
        stage, place = remote.stage, remote.place
        device, layers = self._devices.get((stage, place), self._device), self.layers[stage]
        like = self._stages[stage].places[place].emulate
        return msg.WorkerInit(call, stage, place, layers.start, layers.stop, device, self._settings, like)

    def _connect(self, call: int, stage: int) -> msg.ConnectStage:
        """To all workers of the stage behind that are there."""
        workers = zip(self._addresses[stage + 1], self.remotes[stage + 1], strict=True)
        there = (address if remote.gone is None else ("", 0) for (address, _), remote in workers)
        return msg.ConnectStage(call, tuple(there))


def _answers(inbox: queue.SimpleQueue[Event], count: int) -> list[msg.WorkerReady | msg.CommandDone]:
    deadline = time.monotonic() + LOAD_S
    answers: list[msg.WorkerReady | msg.CommandDone] = []
    while len(answers) < count:
        try:
            _, answer, _ = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LinkError(f"workers: {count - len(answers)} are not ready after {LOAD_S:g} s") from None
        if isinstance(answer, str):
            raise LinkError(f"{answer} while it was set up; does it serve another driver?")
        if isinstance(answer, msg.CommandFailed):
            raise msg.error_of(answer)
        if isinstance(answer, msg.WorkerReady | msg.CommandDone):
            answers.append(answer)
    return answers


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
    key = secrets.token_hex(32).encode() if secret is None else secret
    processes: list[subprocess.Popen[bytes]] = []
    settings = msg.WorkerSettings(config, size, directory, seed, threads, wait_s)
    starter = WorkerStarter(stages, settings, device, key, tls)
    try:
        starter.reach(_addresses(stages, key, processes))
        fingerprint, dtype, exact = starter.set_up()
        starter.join()
    except BaseException:
        for remote in chain.from_iterable(starter.remotes):
            remote.stop()
        for process in processes:
            end_worker(process)
        raise
    return PipelineExecutor(
        config,
        fingerprint,
        size,
        starter.remotes,
        [[place.weight for place in stage.places] for stage in stages],
        starter.inbox,
        layers=starter.layers,
        wait_s=wait_s,
        batches=batches or len(stages),
        worth_tokens=worth_tokens,
        microbatches=microbatches_for(stages),
        exact=exact,
        kv_dtype=dtype,
        reach=partial(starter.again, fingerprint=fingerprint) if returns else None,
    )


def microbatches_for(stages: Sequence[PipelineStage]) -> int:
    """Batches that may go round at once, as long as none waits for another at the slowest stage: one alone takes the
    sum of its stages' times, n of them at least n times the slowest stage's."""
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
    ranges, first = [], 0
    for stage in stages:
        ranges.append(range(first, first + stage.layers))
        first += stage.layers
    return ranges


def _addresses(
    stages: Sequence[PipelineStage], key: bytes, processes: list[subprocess.Popen[bytes]]
) -> list[list[Reached]]:
    """Where each worker listens; those without an address are started, all at once."""
    started = [[None if place.address else start_worker(key) for place in stage.places] for stage in stages]
    processes += [process for stage in started for process in stage if process is not None]
    return [
        [
            (place.address or ("127.0.0.1", worker_port(process)), process)  # type: ignore[arg-type]
            for place, process in zip(stage.places, row, strict=True)
        ]
        for stage, row in zip(stages, started, strict=True)
    ]
