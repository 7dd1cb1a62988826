"""An executor that computes nothing: a row has a hash of its tokens in place of KV, and blocks that are only counted.

A hand-over transfers that hash, in chunks of a few bytes; the receiver computes it from the tokens and refuses any
other. A step's tokens are drawn when it begins. It ends when the emulated GPU would be done, and nothing sleeps here:
`due_s` is when the next chunk or step is due, and `loop_thread.TimerLoop` waits for it.

    after(h, t) = h x FACTOR + (t + 1) x SPREAD        modulo 2^64

can be continued from any token, one by one or many at once, with the same result, as KV can. Tokens are drawn from
`mixed` of it: ordinary words, and sometimes the end token. Greedy requests draw by the hash alone, others by
their seed as well, and JSON from what its grammar allows; other sampling options change nothing, and probabilities
are made up.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.emulated import Clock, StepPacer
from potluck.engine.compute.executor import (
    CacheExport,
    Deliver,
    Executor,
    IncomingCache,
    RunnerSize,
    SequenceWork,
    StepInputs,
    TokenDraw,
    check_manifest,
)
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers import Exactness
from potluck.kv.assembly import MissingParts
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import sizes

BITS = 64
MASK = (1 << BITS) - 1
EMPTY_HISTORY = 0x243F6A8885A308D3  # The hash of no tokens.
FACTOR, SPREAD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
LOOPED_HASH_MAX_TOKENS = 12  # Up to so many tokens a Python loop is faster than NumPy.


def after(history: int, tokens: Sequence[int]) -> int:
    if len(tokens) <= LOOPED_HASH_MAX_TOKENS:
        for token in tokens:
            history = (history * FACTOR + (token + 1) * SPREAD) & MASK
        return history
    count = len(tokens)
    spread = (np.asarray(tokens, np.uint64) + np.uint64(1)) * np.uint64(SPREAD)
    added = int(np.dot(spread[::-1], _powers(1 << (count - 1).bit_length())[:count]))
    return (history * pow(FACTOR, count, 1 << BITS) + added) & MASK


@lru_cache(maxsize=32)
def _powers(count: int) -> npt.NDArray[np.uint64]:
    powers = np.full(count, FACTOR, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def mixed(number: int) -> int:
    """Another number of 64 bits, each of whose bits depends on all of this one's (the end of splitmix64)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


# A layer's KV on the wire: the hash of its tokens, and when the real KV would have arrived.

WORD = struct.Struct("<QIII")
"""Hash at the end, mixed with the layer; first, stop; where the hand-over that ends here began, or PART_FOLLOWS."""
CONTENT = struct.Struct("<QIIIddd")  # The same, and the times.
TIMES = struct.Struct("<ddd")
PART_FOLLOWS = (1 << 32) - 1  # More of the same layer follows.
DTYPE = "float32"
SHAPE = (1, 16)
"""Of each chunk on the wire, unless real bytes are sent: room for the content, under any codec."""
RAW_BYTES = 64


class ChunkTimes(NamedTuple):
    """The executor writes when the layers that a chunk stands for were computed, by its own clock; the sender's card
    how long ago their first byte left, the last layer's first byte, and all of it."""

    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0


NO_TIMES = ChunkTimes()


def chunk_of(
    history: int, layer: int, start: int, stop: int, since: int | None = None, times: ChunkTimes = NO_TIMES
) -> KvChunk:
    """What stands for a layer's KV of the tokens [start, stop), which have this hash at their end. They end a
    hand-over that began at `since`, by default at `start`; or it is PART_FOLLOWS."""
    content = CONTENT.pack(mixed(history ^ layer), start, stop, start if since is None else since, *times)
    return KvChunk(layer, "latent", start, stop, DTYPE, SHAPE, content.ljust(RAW_BYTES, b"\0"))


def since_of(chunk: KvChunk) -> int:
    """Where the hand-over began that a chunk ends, or PART_FOLLOWS. What is lent goes whole."""
    content = _content(chunk)
    if content is None:
        return chunk.first
    since: int = WORD.unpack_from(content)[3]
    return since


def times_of(chunk: KvChunk) -> ChunkTimes | None:
    """None where it says nothing: it is lent."""
    content = _content(chunk)
    return None if content is None else ChunkTimes(*TIMES.unpack_from(content, WORD.size))


def with_times(chunk: KvChunk, times: ChunkTimes) -> KvChunk:
    content = _content(chunk)
    if content is None:
        return chunk
    whole = content[: WORD.size] + TIMES.pack(*times) + content[CONTENT.size :]
    cut = len(chunk.parameters)
    return replace(chunk, parameters=whole[:cut], data=whole[cut:])


def resized(chunk: KvChunk, columns: int) -> KvChunk:
    """So much wider or narrower on the wire; what it says stays. What is lent goes as it is."""
    content = _content(chunk)
    if content is None:
        return chunk
    size = sizes(chunk.part, chunk.dtype, (1, columns), chunk.codec)
    cut, whole = size.parameter_bytes, content[: size.total_bytes].ljust(size.total_bytes, b"\0")
    return replace(chunk, shape=(1, columns), parameters=whole[:cut], data=whole[cut:])


def _content(chunk: KvChunk) -> bytes | None:
    rows, columns = chunk.shape
    content = bytes(chunk.parameters) + bytes(chunk.data)
    return None if rows != 1 or columns < SHAPE[1] or len(content) < CONTENT.size else content


MIN_PROBABILITY, PROBABILITY_RANGE = 0.5, 0.4
"""Logprobs are made up: a drawn token has a probability of 0.5 to 0.9."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    vocab: int
    ordinary: tuple[int, ...]
    end: int | None = None  # A token that ends the output ...
    mean_tokens: int = 0  # ... once in so many draws; 0: never, so that outputs are as long as they may be.

    def __post_init__(self) -> None:
        if not self.ordinary:
            raise InputError("--model", "its tokenizer has no token of plain text")
        if self.mean_tokens and self.end is None:
            raise InputError("--mean-output", "this model has no token that ends its output")

    @property
    def digest(self) -> str:
        """A hash of everything that tokens are drawn from."""
        numbers = (self.vocab, -1 if self.end is None else self.end, self.mean_tokens, *self.ordinary)
        return hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()

    def draw(
        self, history: int, sampling: Sampling, position: int, edit: LogitEdit | None = None
    ) -> SampledToken:
        number = mixed(history)
        if sampling.temperature > 0:
            number = mixed(number ^ mixed((sampling.seed + 1) & MASK))
        token = self._token(number)
        if edit is not None and edit.allowed:
            allowed = edit.allows(self.vocab).nonzero()[0]
            token = int(allowed[number % len(allowed)])
        if sampling.barred and position < sampling.barred_before and token in sampling.barred:
            token = self._allowed(number, sampling.barred)
        return (
            SampledToken(token)
            if sampling.logprobs is None
            else self._likely(number, token, sampling.logprobs)
        )

    def _token(self, number: int) -> int:
        if self.mean_tokens and self.end is not None and (number >> 32) % self.mean_tokens == 0:
            return self.end
        return self.ordinary[(number & 0xFFFFFFFF) % len(self.ordinary)]

    def _allowed(self, number: int, barred: tuple[int, ...]) -> int:
        """The next plain word that is not barred; any token if all of them are."""
        first = number % len(self.ordinary)
        words: list[int] = [*self.ordinary[first:], *self.ordinary[:first], *range(self.vocab)]
        return next(token for token in words if token not in barred)

    def _likely(self, number: int, token: int, most: int) -> SampledToken:
        """With probabilities as a model might have them: the token's, and then each half of what was left."""
        share = MIN_PROBABILITY + PROBABILITY_RANGE * (mixed(number) >> 11) / (1 << 53)
        chosen = log(share)
        top = [(token, chosen)]
        place = number % len(self.ordinary)
        while len(top) < min(most, len(self.ordinary)):
            place = (place + 1) % len(self.ordinary)
            if self.ordinary[place] != token:
                top.append((self.ordinary[place], log((1 - share) / 2 ** len(top))))
        return SampledToken(token, chosen, tuple(top[:most]))


@dataclass(slots=True)
class _MockRow:
    tokens: int = 0
    blocks: int = 0
    history: int = EMPTY_HISTORY


class OutgoingLayer(NamedTuple):
    when_s: float
    began_s: float
    layer: int
    export: CacheExport


class MockExecutor(Executor):
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
        self.config, self.size, self.fingerprint, self.kv_dtype = config, size, fingerprint, ""
        self.grown: Callable[[], None] = lambda: None  # Called when rows have taken more blocks.
        self.used_blocks = 0
        self._words, self._step_duration_s = words, lasts
        self._speed_up, self._clock = speed_up, clock
        self._pacer = StepPacer(None, speed_up, clock)
        self._rows: dict[int, _MockRow] = {}
        self._free = list(range(size.rows))
        self._unpaced_s = 0.0  # Duration of steps done at once, added to the next paced step.
        self._under_way = False
        self._outgoing_layers: deque[OutgoingLayer] = deque()  # Sent while the step is under way.
        self._step_s = 0.0, 0.0  # When the step under way began, and how long it takes.
        self._deliver: Deliver | None = None

    def change_pace(self, pace: float) -> None:
        """Steps take so many times as long as those of the emulated GPU."""
        self._pacer.change(self._speed_up / pace)

    # Rows.

    def open(self) -> int:
        if not self._free:
            raise CapacityError(f"all {self.size.rows} rows are taken")
        row = heappop(self._free)
        self._rows[row] = _MockRow()
        return row

    def close(self, row: int) -> None:
        self.used_blocks -= self._rows.pop(row).blocks
        heappush(self._free, row)

    def held(self, row: int) -> int:
        return self._rows[row].tokens

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        mock_row = self._rows[row]
        more = -(-tokens // BLOCK_TOKENS) - mock_row.blocks
        if more <= 0:
            return
        if tokens > self.size.max_tokens or self.used_blocks + more > self.size.blocks:
            raise CapacityError(f"no room for {tokens} tokens beside the {self.used_blocks} blocks in use")
        mock_row.blocks += more
        self.used_blocks += more
        self.grown()

    @property
    def free_blocks(self) -> int:
        return self.size.blocks - self.used_blocks

    # Steps.

    @property
    def due_s(self) -> float | None:
        """When the next chunk is to be delivered or the step ends, by the clock; None without a step."""
        if not self._under_way:
            return None
        return self._outgoing_layers[0].when_s if self._outgoing_layers else self._pacer.due_s

    def step(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        """Do a step at once; its duration is added to the next paced step."""
        drawn_tokens = self._advance(works, draws)
        self._unpaced_s += self._step_duration_s(works)
        return drawn_tokens

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        drawn_tokens = self._advance(step.works, step.draws)
        self._step_s = self._pacer.start(self._unpaced_s + self._step_duration_s(step.works))
        self._unpaced_s, self._under_way, self._deliver = 0.0, True, step.deliver
        if step.exports and step.deliver is not None:
            self._outgoing_layers.extend(self._due(step.exports))

        def land() -> list[SampledToken]:
            self.deliver(inf)
            self._under_way = False
            self._pacer.landed()
            return drawn_tokens

        return land

    def join(self, export: CacheExport) -> bool:
        """A receiver came while a row's step is under way: layers that are computed go at once, the others as they
        are. Whether they will."""
        if not self._under_way or self._deliver is None:
            return False
        now_s = self._clock()
        due = [
            OutgoingLayer(max(when_s, now_s), max(began_s, now_s), layer, export)
            for when_s, began_s, layer, _ in self._due([export])
        ]
        self._outgoing_layers = deque(
            sorted([*self._outgoing_layers, *due], key=lambda leaving: leaving.when_s)
        )
        return True

    def _due(self, exports: Sequence[CacheExport]) -> list[OutgoingLayer]:
        (start_s, length_s), layers = self._step_s, self.config.model.layer_count
        ends_s = [start_s + length_s * place / layers for place in range(layers + 1)]
        return [
            OutgoingLayer(ends_s[layer + 1], ends_s[layer], layer, export)
            for layer in range(layers)
            for export in exports
        ]

    def deliver(self, now_s: float) -> None:
        leaving = self._outgoing_layers
        while leaving and leaving[0].when_s <= now_s:
            when_s, began_s, layer, export = leaving.popleft()
            assert self._deliver is not None
            self._deliver(export.row, self._part(export, layer, ChunkTimes(began_s, when_s, when_s)))

    def _advance(self, works: Sequence[SequenceWork], draws: Sequence[TokenDraw]) -> list[SampledToken]:
        self._check(works)
        drawn_tokens, next_draw = [], iter(draws)
        for work in works:
            mock_row = self._rows[work.row]
            mock_row.history = after(mock_row.history, work.tokens)
            mock_row.tokens += len(work.tokens)
            if work.logits == "last":
                draw = next(next_draw)
                drawn_tokens.append(self._words.draw(mock_row.history, draw.way, draw.position, draw.edit))
        return drawn_tokens

    def _check(self, works: Sequence[SequenceWork]) -> None:
        if not works or len({work.row for work in works}) != len(works):
            raise InputError("step", "has nothing to do, or two works for one row")
        for work in works:
            mock_row, stop = self._rows[work.row], work.start + len(work.tokens)
            if not work.tokens or work.start != mock_row.tokens or stop > mock_row.blocks * BLOCK_TOKENS:
                held = f"holds {mock_row.tokens} tokens and {mock_row.blocks} blocks"
                raise InputError(f"row {work.row}", f"{held}, the step goes from {work.start} to {stop}")

    # Hand-overs.

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        mock_row = self._rows[row]
        if not 0 <= start < stop or stop != mock_row.tokens:
            raise InputError(
                f"row {row}", f"holds {mock_row.tokens} tokens; it cannot give [{start}, {stop})"
            )
        return (chunk_of(mock_row.history, layer, start, stop, times=self._now()),)

    def _now(self) -> ChunkTimes:
        now_s = self._clock()
        return ChunkTimes(now_s, now_s, now_s)

    def _part(self, export: CacheExport, layer: int, times: ChunkTimes) -> tuple[KvChunk, ...]:
        mock_row = self._rows[export.row]
        if export.stop != mock_row.tokens:
            raise InputError(f"row {export.row}", f"holds {mock_row.tokens} tokens, not {export.stop}")
        since = PART_FOLLOWS if not export.last else export.start if export.of is None else export.of[0]
        return (chunk_of(mock_row.history, layer, export.start, export.stop, since, times),)

    def arrival(self, row: int, manifest: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        return MockHandover(self, row, manifest, tokens)

    def put(self, row: int, tokens: int, history: int) -> None:
        """A row holds these many tokens, with this hash."""
        self._rows[row].tokens, self._rows[row].history = tokens, history

    # What else is asked.

    def check(self) -> None:
        if self._rows or self.used_blocks or len(self._free) != self.size.rows:
            raise AssertionError(f"{len(self._rows)} rows and {self.used_blocks} blocks are taken by nobody")

    def notes(self) -> Mapping[str, float]:
        return self._pacer.notes()


class MockHandover(IncomingCache):
    """A hand-over on its way into a row, which must hold the tokens [0, start) already."""

    def __init__(self, executor: MockExecutor, row: int, manifest: KvManifest, tokens: Sequence[int]) -> None:
        check_manifest(manifest, executor.fingerprint, executor.held(row), tokens)
        executor.grow(row, manifest.stop)
        self._executor, self._row, self._about, self._tokens = executor, row, manifest, tokens
        self._histories: dict[int, int] = {}
        layers = range(executor.config.model.layer_count)
        self._missing = MissingParts({(layer, "latent"): (manifest.start, manifest.stop) for layer in layers})

    def accept(self, chunk: KvChunk) -> None:
        where = f"hand-over: layer {chunk.layer} {chunk.part}"
        since = self._about.start if chunk.stop == self._about.stop else PART_FOLLOWS
        self._missing.take(chunk)
        expected = chunk_of(self._history(chunk.stop), chunk.layer, chunk.first, chunk.stop, since)
        if (chunk.part, chunk.dtype, chunk.shape) != (expected.part, expected.dtype, expected.shape):
            raise FormatError(where, f"is {chunk.dtype} {list(chunk.shape)}, expected {DTYPE} {list(SHAPE)}")
        came, same = bytes(chunk.data), bytes(expected.data)
        if len(came) != len(same) or came[: WORD.size] != same[: WORD.size]:  # whenever it was computed
            raise FormatError(where, "is not the KV of these tokens")

    def _history(self, stop: int) -> int:
        """At the end of a part; all layers have the same parts."""
        if stop not in self._histories:
            self._histories[stop] = after(EMPTY_HISTORY, self._tokens[:stop])
        return self._histories[stop]

    def finish(self) -> None:
        self._missing.must_be_whole()
        self._executor.put(self._row, self._about.stop, self._history(self._about.stop))
