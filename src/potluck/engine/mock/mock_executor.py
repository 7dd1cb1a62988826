"""What the loop needs of whoever computes, without computing: histories for KV, and steps that end when they are due.

A row has a history (`history.py`) instead of KV, and blocks that are only counted. What a row hands on is the history
of its tokens, in parcels of a few bytes; the receiver knows the tokens, and takes no history that is not theirs.

A step's tokens are known as soon as it begins. It ends when the GPU in question would be done, and nothing sleeps
here: `due_s` says when something is due, and whoever turns the loop waits for that (`loop/timed.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.emulated import Clock, StepPacer
from potluck.engine.compute.executor import CacheExport, Deliver, IncomingCache, TokenDraw
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.memory.layer_parts import MissingParts
from potluck.engine.mock.history import NOTHING, after
from potluck.engine.mock.mock_chunks import DTYPE, MORE, SHAPE, ChunkTimes, parcel_of, same_word
from potluck.engine.mock.vocabulary import Vocabulary
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers.exactness import Exactness
from potluck.kv.chunks import KvChunk, KvManifest, token_hash


@dataclass(slots=True)
class _Row:
    tokens: int = 0
    blocks: int = 0
    history: int = NOTHING


class OutgoingLayer(NamedTuple):
    """A layer's KV that goes out when it is computed."""

    when_s: float
    began_s: float
    layer: int
    export: CacheExport


class MockExecutor:
    microbatches = 1
    exact = Exactness(True, "none")

    def __init__(
        self,
        config: EngineModelConfig,
        size: RunnerSize,
        words: Vocabulary,
        lasts: Callable[[Sequence[SequenceWork]], float],
        *,
        fingerprint: str,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config, self.size, self.fingerprint = config, size, fingerprint
        self.grown: Callable[[], None] = _nobody
        """Told when rows have taken more blocks."""
        self.used_blocks = 0
        self._words, self._lasts = words, lasts
        self._speed_up, self._clock = speed_up, clock
        self._pacer = StepPacer(None, speed_up, clock)
        self._rows: dict[int, _Row] = {}
        self._free = list(range(size.rows))
        self._owed_s = 0.0
        """Of steps that were taken at once, and must still be waited for."""
        self._under_way = False
        self._leaving: deque[OutgoingLayer] = deque()
        """Goes out while the step is under way."""
        self._step_s = 0.0, 0.0
        """When the step under way began, and how long it takes."""
        self._deliver: Deliver | None = None

    def change_pace(self, pace: float) -> None:
        """Steps take so many times as long as those of what is pretended."""
        self._pacer.change(self._speed_up / pace)

    # Rows.

    def open(self) -> int:
        if not self._free:
            raise CapacityError(f"all {self.size.rows} rows are taken")
        row = heappop(self._free)
        self._rows[row] = _Row()
        return row

    def close(self, row: int) -> None:
        self.used_blocks -= self._rows.pop(row).blocks
        heappush(self._free, row)

    def held(self, row: int) -> int:
        return self._rows[row].tokens

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        here = self._rows[row]
        more = -(-tokens // BLOCK_TOKENS) - here.blocks
        if more <= 0:
            return
        if tokens > self.size.max_tokens or self.used_blocks + more > self.size.blocks:
            raise CapacityError(f"no room for {tokens} tokens beside the {self.used_blocks} blocks in use")
        here.blocks += more
        self.used_blocks += more
        self.grown()

    @property
    def free_blocks(self) -> int:
        return self.size.blocks - self.used_blocks

    # Steps.

    @property
    def due_s(self) -> float | None:
        """When there is something to do again, by the clock: a parcel to deliver, or the end of a step."""
        if not self._under_way:
            return None
        return self._leaving[0][0] if self._leaving else self._pacer.due_s

    def step(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> list[SampledToken]:
        """At once; the time that it would take is added to the next step that is waited for."""
        choices = self._advance(works, draws)
        self._owed_s += self._lasts(works)
        if deliver is not None:
            for layer in range(self.config.model.layer_count):
                for each in exports:
                    deliver(each.row, self._piece(each, layer, self._now()))
        return choices

    def begin(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> Callable[[], list[SampledToken]]:
        choices = self._advance(works, draws)
        start_s, length_s = self._pacer.start(self._owed_s + self._lasts(works))
        self._owed_s, self._under_way, self._deliver = 0.0, True, deliver
        self._step_s = start_s, length_s
        if exports and deliver is not None:
            self._leaving.extend(self._due(exports))

        def land() -> list[SampledToken]:
            self.deliver(inf)
            self._under_way = False
            self._pacer.landed()
            return choices

        return land

    def join(self, export: CacheExport) -> bool:
        """Somebody came for a row while its step is under way: layers that are computed go at once, the others as
        they are. Whether they will."""
        if not self._under_way or self._deliver is None:
            return False
        now_s = self._clock()
        due = [
            OutgoingLayer(max(when_s, now_s), max(began_s, now_s), layer, each)
            for when_s, began_s, layer, each in self._due([export])
        ]
        self._leaving = deque(sorted([*self._leaving, *due], key=lambda each: each.when_s))
        return True

    def _due(self, exports: Sequence[CacheExport]) -> list[OutgoingLayer]:
        (start_s, length_s), layers = self._step_s, self.config.model.layer_count
        ends_s = [start_s + length_s * place / layers for place in range(layers + 1)]
        return [
            OutgoingLayer(ends_s[layer + 1], ends_s[layer], layer, each)
            for layer in range(layers)
            for each in exports
        ]

    def deliver(self, now_s: float) -> None:
        """Hand out what is due by now of the step that is under way."""
        leaving = self._leaving
        while leaving and leaving[0][0] <= now_s:
            when_s, began_s, layer, each = leaving.popleft()
            assert self._deliver is not None
            self._deliver(each.row, self._piece(each, layer, ChunkTimes(began_s, when_s, when_s)))

    def _advance(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        rows = self._rows
        self._check(works)
        choices = []
        next_draw = iter(draws)
        for work in works:
            here = rows[work.row]
            here.history = after(here.history, work.tokens)
            here.tokens += len(work.tokens)
            if work.logits == "last":
                draw = next(next_draw)
                choices.append(self._words.draw(here.history, draw.way, draw.position, draw.edit))
        return choices

    def _check(self, works: Sequence[SequenceWork]) -> None:
        if not works or len({work.row for work in works}) != len(works):
            raise InputError("step", "has nothing to do, or two works for one row")
        for work in works:
            here = self._rows[work.row]
            stop = work.start + len(work.tokens)
            if not work.tokens or work.start != here.tokens or stop > here.blocks * BLOCK_TOKENS:
                line = (
                    f"holds {here.tokens} tokens and {here.blocks} blocks, the step goes from {work.start} to"
                )
                raise InputError(f"row {work.row}", f"{line} {stop}")

    # Hand-overs.

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        here = self._rows[row]
        if not 0 <= start < stop or stop != here.tokens:
            raise InputError(f"row {row}", f"holds {here.tokens} tokens; it cannot give [{start}, {stop})")
        return (parcel_of(here.history, layer, start, stop, times=self._now()),)

    def _now(self) -> ChunkTimes:
        now_s = self._clock()
        return ChunkTimes(now_s, now_s, now_s)

    def _piece(self, export: CacheExport, layer: int, times: ChunkTimes) -> tuple[KvChunk, ...]:
        here = self._rows[export.row]
        if export.stop != here.tokens:
            raise InputError(f"row {export.row}", f"holds {here.tokens} tokens, not {export.stop}")
        since = MORE if not export.last else export.start if export.of is None else export.of[0]
        return (parcel_of(here.history, layer, export.start, export.stop, since, times),)

    def arrival(self, row: int, about: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        return MockHandover(self, row, about, tokens)

    def put(self, row: int, tokens: int, history: int) -> None:
        """A row holds these many tokens, with this history."""
        self._rows[row].tokens, self._rows[row].history = tokens, history

    # What else is asked.

    def check(self) -> None:
        if self._rows or self.used_blocks or len(self._free) != self.size.rows:
            raise AssertionError(f"{len(self._rows)} rows and {self.used_blocks} blocks are taken by nobody")

    def health(self) -> str:
        return ""

    def degraded(self) -> str:
        return ""

    def notes(self) -> Mapping[str, float]:
        return self._pacer.notes()

    def shutdown(self) -> None:
        """Nothing to stop."""


def _nobody() -> None:
    """Nobody wants to know."""


class MockHandover:
    """A hand-over on its way into a row, which must hold the tokens [0, start) already."""

    def __init__(self, executor: MockExecutor, row: int, about: KvManifest, tokens: Sequence[int]) -> None:
        if about.fingerprint != executor.fingerprint:
            raise InputError("hand-over: fingerprint", "is of another model or other weights")
        held = executor.held(row)
        if not 0 <= about.start < about.stop <= len(tokens) or about.start > held:
            raise InputError(
                "hand-over: tokens",
                f"[{about.start}, {about.stop}) does not go on from the {held} tokens held",
            )
        if about.token_hash != token_hash(tokens[: about.stop]):
            raise InputError("hand-over: token_hash", "is of other tokens")
        executor.grow(row, about.stop)
        self._executor, self._row, self._about = executor, row, about
        self._tokens = tokens
        self._histories: dict[int, int] = {}
        layers = range(executor.config.model.layer_count)
        self._pieces = MissingParts({(layer, "latent"): (about.start, about.stop) for layer in layers})

    @property
    def missing(self) -> int:
        return self._pieces.missing

    def accept(self, parcel: KvChunk) -> None:
        where = f"hand-over: layer {parcel.layer} {parcel.part}"
        since = self._about.start if parcel.stop == self._about.stop else MORE
        self._pieces.take(parcel)
        history = self._history(parcel.stop)
        expected = parcel_of(history, parcel.layer, parcel.first, parcel.stop, since)
        if (parcel.part, parcel.dtype, parcel.shape) != (expected.part, expected.dtype, expected.shape):
            raise FormatError(
                where, f"is {parcel.dtype} {list(parcel.shape)}, expected {DTYPE} {list(SHAPE)}"
            )
        if not same_word(parcel, expected):
            raise FormatError(where, "is not the KV of these tokens")

    def _history(self, stop: int) -> int:
        """At the end of a piece; all layers have the same pieces."""
        if stop not in self._histories:
            self._histories[stop] = after(NOTHING, self._tokens[:stop])
        return self._histories[stop]

    def finish(self) -> None:
        self._pieces.must_be_whole()
        self._executor.put(self._row, self._about.stop, self._history(self._about.stop))
