"""What the engine's loop needs of an executor: one that computes, or a mock.

The loop is the only caller, from one thread. It opens a row per sequence, grows it before each step, says what to
compute and how to draw tokens, and closes it. Caches go out as chunks, layer by layer while a step runs (`exports`)
or afterwards (`export`), and come in through an `IncomingCache`. Prefix caching is the same: chunks kept for oneself.

Promises that the loop relies on:

- `grow` succeeds as long as the blocks of all rows together, tokens rounded up to whole blocks, are at most
  `size.blocks`, and the rows at most `size.rows`.
- A call that raises an InputError or CapacityError has changed nothing but the rows that it names.
- A step that raises anything else may have changed all of its rows; the loop ends their requests.
- No call waits without a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from potluck.core.errors import InputError
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers import Exactness
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.kv.codec_layout import Codec


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Tokens of one sequence to compute: they come right behind the `start` tokens that its row holds."""

    row: int
    start: int
    tokens: Sequence[int]
    logits: Literal["last", "all", "none"] = "last"


def last_drawn(row: int) -> int:
    """Stands for the token that a row drew last, where only the executor knows it yet."""
    return -1 - row


@dataclass(frozen=True, slots=True)
class RunnerSize:
    """How much a runner can hold at once."""

    rows: int
    """Sequences."""
    blocks: int
    """Blocks of 16 tokens, of each layer that keeps everything."""
    max_tokens: int
    """Of one sequence."""
    max_chunk_tokens: int = 2048
    """Of one sequence in one step: windows need room for so many beside themselves."""


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
    codec: Codec = "raw"

    @property
    def end(self) -> int:
        """Of the whole hand-over."""
        return self.stop if self.of is None else self.of[1]

    @property
    def last(self) -> bool:
        return self.stop == self.end


Deliver = Callable[[int, tuple[KvChunk, ...]], None]
"""(row, the chunks of one layer). Called from the loop's thread, before the step's end was awaited."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step computes. `draws` are for the works that ask for their last logits, in the order of the works; what
    `exports` names is delivered layer by layer, each as soon as it can be."""

    works: Sequence[SequenceWork]
    draws: Sequence[TokenDraw]
    exports: Sequence[CacheExport] = ()
    deliver: Deliver | None = None


def check_manifest(manifest: KvManifest, fingerprint: str, held: int, tokens: Sequence[int]) -> None:
    """Whether a cache on its way goes on from the `held` tokens of this model; InputError if not."""
    if manifest.fingerprint != fingerprint:
        raise InputError("hand-over: fingerprint", "is of another model or other weights")
    if not 0 <= manifest.start < manifest.stop <= len(tokens) or manifest.start > held:
        span = f"[{manifest.start}, {manifest.stop})"
        raise InputError("hand-over: tokens", f"{span} does not go on from the {held} tokens held")
    if manifest.token_hash != token_hash(tokens[: manifest.stop]):
        raise InputError("hand-over: token_hash", "is of other tokens")


class IncomingCache(Protocol):
    """A cache on its way into a row. Whatever is wrong with a chunk is an InputError; the row can then be closed."""

    beside: bool = False
    """Whether chunks may come in any thread, beside steps."""

    def accept(self, chunk: KvChunk) -> None: ...

    def finish(self) -> None:
        """All are there: the row holds the tokens [0, stop)."""


class Executor(Protocol):
    config: EngineModelConfig
    size: RunnerSize
    fingerprint: str
    """Of the model with its weights; caches of different ones never mix."""
    kv_dtype: str
    """What keys and values are kept as; empty where there are none."""
    exact: Exactness
    """Whether tokens stay the same to the last bit however the work is cut."""
    shapes: Sequence[tuple[int, int]] = ((1, 2),)
    """Steps that are made ready when one such is first run: single tokens, and tokens of a chunk beside them."""
    ordered: bool = False
    """Steps, and what reads and writes caches between them, are computed in the order in which they were begun: rows
    may be closed and used again meanwhile, and the next step may be begun before it is known what this one drew."""

    def open(self) -> int: ...

    def close(self, row: int) -> None: ...

    def held(self, row: int) -> int:
        """Tokens whose cache entries the row has."""

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        """Room for `tokens`; windows need none for what no query from `since` on can see."""

    def step(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        return self.begin(StepInputs(works, draws))()

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        """What is returned waits for the step's end. Until then its rows must not be touched, unless it is `ordered`;
        other rows may, and deliveries may be made meanwhile, whatever is called."""

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        """What a layer has of a row that is not being stepped."""

    def exports(self, row: int, start: int, stop: int, codec: Codec = "raw") -> Iterable[tuple[KvChunk, ...]]:
        """The same, layer by layer; under a codec where that is made on the way."""
        return (self.export(row, layer, start, stop) for layer in range(self.config.model.layer_count))

    def arrival(self, row: int, manifest: KvManifest, tokens: Sequence[int]) -> IncomingCache: ...

    def check(self) -> None:
        """Raise AssertionError when a block is leaked; called when idle."""

    def notes(self) -> Mapping[str, float]:
        """Figures of its own for /status, such as steps that an emulation could not keep up with."""
        return {}
