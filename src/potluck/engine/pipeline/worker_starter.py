"""Workers while they get ready: reached, given their layers, joined to the stage behind; when they return, too."""

from __future__ import annotations

import queue
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck.core.errors import InputError, PotluckError
from potluck.engine.compute.runner import RunnerSize
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import groups_of
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers.exactness import Exactness
from potluck.engine.numbers.row_padding import together
from potluck.engine.pipeline import spawn
from potluck.engine.pipeline.pipeline_connection import LinkError, TlsPair, connect
from potluck.engine.pipeline.pipeline_messages import (
    CommandDone,
    CommandFailed,
    ConnectStage,
    EmulatedGpu,
    WorkerInit,
    WorkerReady,
    error_of,
)
from potluck.engine.pipeline.remote_worker import Event, RemoteWorker, WorkerReturned
from potluck.engine.pipeline.worker_listener import DRIVER

LOAD_S = 600.0
"""Reading weights and making room for caches takes a while."""
Reached = tuple[tuple[str, int], subprocess.Popen[bytes] | None]
"""Where a worker listens, and its process if it is ours."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What every worker is set up with."""

    directory: str | None
    seed: int
    threads: int
    device: str
    wait_s: float
    key: bytes
    tls: TlsPair | None = None
    """For workers that run elsewhere."""


class WorkerStarter:
    """`emulate` says what a worker acts as; `devices` where those of this machine compute."""

    def __init__(
        self,
        config: EngineModelConfig,
        layers: Sequence[range],
        size: RunnerSize,
        means: WorkerOptions,
        emulate: Callable[[int, int], EmulatedGpu | None],
        devices: Callable[[str, int], list[str]],
    ) -> None:
        self._config, self._layers, self._size, self._means = config, layers, size, means
        self._emulate, self._devices = emulate, devices
        self._addresses: list[list[Reached]] = []
        self._device: dict[tuple[int, int], str] = {}
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.remotes: list[list[RemoteWorker]] = []

    def reach(self, addresses: list[list[Reached]]) -> None:
        """Connect to every worker."""
        self._addresses = addresses
        for stage, row in enumerate(addresses):
            self.remotes.append([])
            for place, reached in enumerate(row):
                self.remotes[-1].append(self._remote(stage, place, reached, self.inbox))
        mine = [
            (s, p) for s, row in enumerate(addresses) for p, each in enumerate(row) if each[1] is not None
        ]
        self._device = dict(zip(mine, self._devices(self._means.device, len(mine)), strict=True))

    def set_up(self) -> tuple[str, Exactness]:
        """Give each worker its layers; the fingerprint that all of them must have, and how exact they are."""
        every = [remote for row in self.remotes for remote in row]
        for number, remote in enumerate(every, 1):
            remote.post(self._setup(number, remote))
        ready = [answer for answer in _answers(self.inbox, len(every)) if isinstance(answer, WorkerReady)]
        prints = {answer.fingerprint for answer in ready}
        if len(prints) != 1:
            raise InputError("workers", "do not have the same weights; is the directory the same everywhere?")
        return prints.pop(), together([Exactness(each.exact, each.products) for each in ready])

    def join(self) -> None:
        """Connect each stage to the next."""
        asked = [remote for row in self.remotes[:-1] for remote in row]
        for number, remote in enumerate(asked, 1):
            remote.post(self._connect(number, remote.stage))
        _answers(self.inbox, len(asked))

    def again(self, lost: RemoteWorker, fingerprint: str) -> tuple[RemoteWorker, WorkerReturned]:
        """Another worker in the place of one that is lost."""
        (address, process), inbox = self._addresses[lost.stage][lost.place], queue.SimpleQueue[Event]()
        if process is not None:
            process = spawn.start(self._means.key)
            address = ("127.0.0.1", spawn.port_of(process))
        try:
            remote = self._remote(lost.stage, lost.place, (address, process), inbox)
        except PotluckError:
            if process is not None:
                spawn.end(process)
            raise
        try:
            remote.post(self._setup(1, remote))
            (ready,) = _answers(inbox, 1)
            if not isinstance(ready, WorkerReady) or ready.fingerprint != fingerprint:
                raise InputError(remote.name, "has other weights than the pipeline")
            if lost.stage + 1 < len(self.remotes):
                remote.post(self._connect(2, lost.stage))
                _answers(inbox, 1)
        except PotluckError:
            remote.stop()
            raise
        self._addresses[lost.stage][lost.place] = address, process
        return remote, WorkerReturned(*address)

    def _remote(
        self, stage: int, place: int, reached: Reached, inbox: queue.SimpleQueue[Event]
    ) -> RemoteWorker:
        size, layers = self._size, self._layers[stage]
        groups = groups_of(
            self._config.model,
            layers.start,
            layers.stop,
            blocks=size.blocks,
            rows=size.rows,
            max_chunk_tokens=size.max_chunk_tokens,
        )
        name = f"stage {stage} worker {place}"
        tls = self._means.tls if reached[1] is None else None
        link = connect(reached[0], self._means.key, DRIVER, name, tls)
        tables = BlockTables(groups, size.rows, size.max_tokens)
        return RemoteWorker(name, stage, place, link, tables, inbox, reached[1])

    def _setup(self, call: int, remote: RemoteWorker) -> WorkerInit:
        stage, place, size, means = remote.stage, remote.place, self._size, self._means
        return WorkerInit(
            call,
            stage,
            place,
            self._config,
            means.directory,
            means.seed,
            self._layers[stage].start,
            self._layers[stage].stop,
            size.rows,
            size.blocks,
            size.max_tokens,
            size.max_chunk_tokens,
            means.wait_s,
            means.threads,
            self._device.get((stage, place), means.device),
            self._emulate(stage, place),
        )

    def _connect(self, call: int, stage: int) -> ConnectStage:
        """To all workers of the stage behind that are there."""
        there = [
            address if remote.gone is None else ("", 0)
            for (address, _), remote in zip(self._addresses[stage + 1], self.remotes[stage + 1], strict=True)
        ]
        hosts, ports = zip(*there, strict=True)
        return ConnectStage(call, tuple(hosts), tuple(ports))


def _answers(inbox: queue.SimpleQueue[Event], count: int) -> list[WorkerReady | CommandDone]:
    deadline = time.monotonic() + LOAD_S
    found: list[WorkerReady | CommandDone] = []
    while len(found) < count:
        try:
            _, answer, _ = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LinkError(f"workers: {count - len(found)} are not ready after {LOAD_S:g} s") from None
        if isinstance(answer, str):
            raise LinkError(f"{answer} while it was set up; does it serve another driver?")
        if isinstance(answer, CommandFailed):
            raise error_of(answer)
        if isinstance(answer, WorkerReady | CommandDone):
            found.append(answer)
    return found
