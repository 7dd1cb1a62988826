"""A hand-over into a pipeline: each layer's parcels go to the worker that has the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from potluck.core.errors import FormatError, PotluckError
from potluck.engine.memory.handover import KvChunk, KvManifest
from potluck.engine.memory.layer_parts import MissingParts, ranges
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline.pipeline_connection import Bytes
from potluck.engine.pipeline.pipeline_messages import (
    AcceptPart,
    BeginHandover,
    Command,
    FinishHandover,
    label_of,
    numbers,
)
from potluck.engine.pipeline.remote_worker import RemoteWorker


class PipelineWorkers(Protocol):
    """What a hand-over needs of the pipeline's driver."""

    @property
    def config(self) -> EngineModelConfig: ...

    def workers(self, row: int) -> Sequence[tuple[RemoteWorker, int]]:
        """Who has the row in each stage, and under which number."""

    def stage_of(self, layer: int) -> int: ...

    def ask(
        self, row: int, remote: RemoteWorker, command: Callable[[int], Command], bodies: Sequence[Bytes] = ()
    ) -> object: ...


class PipelineHandover:
    """An `Incoming`. The workers check everything; the driver only knows where a layer lives."""

    def __init__(self, driver: PipelineWorkers, row: int, about: KvManifest, tokens: Sequence[int]) -> None:
        self._driver, self._row, self._about = driver, row, about
        self._workers = driver.workers(row)
        self._pieces = MissingParts(ranges(driver.config.model, about.start, about.stop))
        begun: list[tuple[RemoteWorker, int]] = []
        try:
            for remote, local in self._workers:
                self._ask(remote, lambda call, at=local: BeginHandover(call, at, about), [numbers(tokens)])  # type: ignore[misc]
                remote.tables.grow(local, about.stop, since=about.stop)
                begun.append((remote, local))
        except PotluckError:
            for remote, local in begun:
                if remote.lost is None:
                    self._ask(remote, lambda call, at=local: FinishHandover(call, at, False))  # type: ignore[misc]
            raise

    @property
    def missing(self) -> int:
        return self._pieces.missing

    def accept(self, parcel: KvChunk) -> None:
        layers = self._driver.config.model.layer_count
        if not 0 <= parcel.layer < layers:
            raise FormatError(f"hand-over: layer {parcel.layer}", f"is not one of the model's {layers}")
        remote, local = self._workers[self._driver.stage_of(parcel.layer)]
        self._ask(remote, lambda call: AcceptPart(call, local, label_of(parcel)), [parcel.data])
        self._pieces.take(parcel)

    def finish(self) -> None:
        self._pieces.must_be_whole()
        for remote, local in self._workers:
            self._ask(remote, lambda call, at=local: FinishHandover(call, at, True))  # type: ignore[misc]
            remote.tables.advance(local, self._about.stop)
            remote.tables.trim(local)

    def _ask(
        self, remote: RemoteWorker, command: Callable[[int], Command], bodies: Sequence[Bytes] = ()
    ) -> None:
        self._driver.ask(self._row, remote, command, bodies)
