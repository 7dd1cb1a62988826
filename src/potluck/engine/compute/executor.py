"""What the engine's loop needs of whatever computes: one process, a pipeline of them, or one that is slowed down.

The loop is the only caller, from one thread. It opens a row per sequence, grows it before each step, says what to
compute and how to draw tokens, and closes it. Caches go out as parcels, layer by layer while a step runs (`exports`)
or afterwards (`export`), and come in through an `IncomingCache`. Prefix caching is the same: parcels kept for
oneself.

Promises that the loop relies on:

- `grow` succeeds as long as the blocks of all rows together, tokens rounded up to whole blocks, are at most
  `size.blocks`, and the rows at most `size.rows`. (Where requests are spread over several workers, each of them
  must be able to hold the whole.)
- A call that raises an InputError or CapacityError has changed nothing but the rows that it names.
- A step that cannot be completed raises `WorkerLost` with every row that is not as it was before the step; the
  loop fails those and runs the step again with the others.
- No call waits without a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from potluck.core.errors import PotluckError
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers.exactness import Exactness
from potluck.kv.chunks import KvChunk, KvManifest

__all__ = ["CacheExport", "Deliver", "Executor", "IncomingCache", "TokenDraw", "WorkerLost"]


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """How the token behind a work is drawn; `position` is the place that it will take."""

    way: Sampling
    position: int
    edit: LogitEdit | None = None


@dataclass(frozen=True, slots=True)
class CacheExport:
    """A row whose cache of [start, stop) goes out with the step that computes up to `stop`.

    It is a piece of a hand-over of the tokens `of`, by default all of it.
    """

    row: int
    start: int
    stop: int
    of: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """Of the whole hand-over."""
        return self.stop if self.of is None else self.of[1]

    @property
    def last(self) -> bool:
        return self.stop == self.end


Deliver = Callable[[int, tuple[KvChunk, ...]], None]
"""(row, the parcels of one layer). Called from the thread that called `step`, before `step` returns."""


class WorkerLost(PotluckError):
    """A process that computed is gone, with the rows that it had."""

    def __init__(self, rows: Sequence[int], why: str) -> None:
        self.rows = tuple(rows)
        super().__init__(why)


class IncomingCache(Protocol):
    """A cache on its way into a row. Whatever is wrong with a parcel is an InputError; the row can then be closed."""

    @property
    def missing(self) -> int:
        """Parcels that have not come."""

    def accept(self, parcel: KvChunk) -> None: ...

    def finish(self) -> None:
        """All are there: the row holds the tokens [0, stop)."""


class Executor(Protocol):
    @property
    def config(self) -> EngineModelConfig: ...

    @property
    def size(self) -> RunnerSize: ...

    @property
    def fingerprint(self) -> str:
        """Of the model with its weights; caches of different ones never mix."""

    @property
    def exact(self) -> Exactness:
        """Whether tokens stay the same to the last bit however the work is cut."""

    @property
    def microbatches(self) -> int:
        """Steps that may be under way at once, of different rows, with something to gain."""

    def open(self) -> int: ...

    def close(self, row: int) -> None: ...

    def held(self, row: int) -> int:
        """Tokens whose cache entries the row has."""

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        """Room for `tokens`; windows need none for what no query from `since` on can see."""

    def step(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> list[SampledToken]:
        """Compute all works and draw a token for each that asks for its last logits, in the order of the works.
        What `exports` names is delivered layer by layer, each as soon as it can be."""

    def begin(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> Callable[[], list[SampledToken]]:
        """`step` in two halves: what is returned waits for its end. Until then its rows must not be touched;
        other rows may, and deliveries may be made meanwhile, whatever is called."""

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        """What a layer has of a row that is not being stepped."""

    def arrival(self, row: int, about: KvManifest, tokens: Sequence[int]) -> IncomingCache: ...

    def check(self) -> None:
        """Raise AssertionError when a block is leaked; called when idle."""

    def health(self) -> str:
        """Why it cannot go on, in one line; empty when it can. Any thread may ask, as for the two below."""

    def degraded(self) -> str:
        """What is missing though it goes on, in one line; empty when nothing is."""

    def notes(self) -> Mapping[str, float]:
        """Figures of its own for /status, such as steps that an emulation could not keep up with."""

    def shutdown(self) -> None: ...
