"""A hand-over into a pipeline: each layer's parcels go to the worker that has the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from potluck.core.errors import FormatError, PotluckError
from potluck.engine.memory.handover import Manifest, Parcel
from potluck.engine.memory.pieces import Pieces, ranges
from potluck.engine.model.config import Config
from potluck.engine.pipeline.messages import Accept, Arrive, Command, Finish, label_of, numbers
from potluck.engine.pipeline.remote import Remote
from potluck.engine.pipeline.wire import Bytes


class Workers(Protocol):
    """What a hand-over needs of the pipeline's driver."""

    @property
    def config(self) -> Config: ...

    def workers(self, row: int) -> Sequence[tuple[Remote, int]]:
        """Who has the row in each stage, and under which number."""

    def stage_of(self, layer: int) -> int: ...

    def ask(
        self, row: int, remote: Remote, command: Callable[[int], Command], bodies: Sequence[Bytes] = ()
    ) -> object: ...


class PipelineArrival:
    """An `Incoming`. The workers check everything; the driver only knows where a layer lives."""

    def __init__(self, driver: Workers, row: int, about: Manifest, tokens: Sequence[int]) -> None:
        self._driver, self._row, self._about = driver, row, about
        self._workers = driver.workers(row)
        self._pieces = Pieces(ranges(driver.config.model, about.start, about.stop))
        begun: list[tuple[Remote, int]] = []
        try:
            for remote, local in self._workers:
                self._ask(remote, lambda call, at=local: Arrive(call, at, about), [numbers(tokens)])  # type: ignore[misc]
                remote.tables.grow(local, about.stop, since=about.stop)
                begun.append((remote, local))
        except PotluckError:
            for remote, local in begun:
                if remote.lost is None:
                    self._ask(remote, lambda call, at=local: Finish(call, at, False))  # type: ignore[misc]
            raise

    @property
    def missing(self) -> int:
        return self._pieces.missing

    def accept(self, parcel: Parcel) -> None:
        layers = self._driver.config.model.layer_count
        if not 0 <= parcel.layer < layers:
            raise FormatError(f"hand-over: layer {parcel.layer}", f"is not one of the model's {layers}")
        remote, local = self._workers[self._driver.stage_of(parcel.layer)]
        self._ask(remote, lambda call: Accept(call, local, label_of(parcel)), [parcel.data])
        self._pieces.take(parcel)

    def finish(self) -> None:
        self._pieces.must_be_whole()
        for remote, local in self._workers:
            self._ask(remote, lambda call, at=local: Finish(call, at, True))  # type: ignore[misc]
            remote.tables.advance(local, self._about.stop)
            remote.tables.trim(local)

    def _ask(self, remote: Remote, command: Callable[[int], Command], bodies: Sequence[Bytes] = ()) -> None:
        self._driver.ask(self._row, remote, command, bodies)
