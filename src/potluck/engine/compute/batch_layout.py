"""One step of a batch, laid out once and used by every layer.

A step computes some new tokens of some sequences: one each of those that decode, a chunk each of those that prefill.
All tokens are packed into one matrix, single tokens first and by row, then the chunks. For each group of layers the
step says where the new entries go (`slots`) and which keys each query looks at (`pieces`). A piece is one call of
attention: either one query each of several sequences, or several queries of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import LayerCaches
from potluck.engine.numbers import TILE_TOKENS, KeyLocations
from potluck.engine.numbers.exact import LANE, LONGEST_SUM, PART, padded_columns

MOST_PADDING = 2.0
"""Sequences share a call as long as it looks at no more than this many times the keys that there are."""

SHORT_WINDOW = 128  # Whose tokens are always in one sum (exact.py).

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention. Keys are read in place from slot `base` on, or gathered from `blocks`."""

    first: int
    """Its first query among the packed tokens."""
    sequences: int
    queries: int
    """Of each sequence; one of the two numbers is 1."""
    columns: int
    mask: Tensor
    """[sequences, 1, queries, columns]: 0 where a query may look, minus infinity elsewhere."""
    base: int = 0
    stride: int = 0
    """Slots from one sequence to the next."""
    blocks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupStep:
    slots: Tensor
    pieces: tuple[AttentionCall, ...]
    """None where kernels read the tables themselves."""
    places: np.ndarray
    """The slots again, for kernels/attention.py."""
    table: np.ndarray
    followed: KeyLocations | None = None
    """Instead of pieces, for full layers on a GPU."""


@dataclass(frozen=True, slots=True)
class LinearStep:
    """How linear layers walk through the tokens: all sequences at once, one token of each at a time."""

    rows: Tensor
    """Longest chunk first, so that those with a t-th token are always the leading ones."""
    by_time: Tensor | None
    """Order of the packed tokens by place in their chunk, or None when it is the order that they have."""
    packed: Tensor | None
    """The way back."""
    counts: list[int]
    """Sequences with a t-th token, for each t."""
    taps: Tensor
    """[taps, tokens]: rows of (old inputs, new inputs) that each token's convolution reads."""
    tails: Tensor
    """The rows to keep for the next step, all sequences' one after the other."""
    sequences: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Rows, first packed tokens and numbers of tokens, as packed, for kernels/rows.py."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    tokens: Tensor
    positions: Tensor
    groups: tuple[GroupStep, ...]
    linear: LinearStep | None
    wanted: Tensor | None
    """Packed tokens whose logits are asked for, work by work; None: of all, as they lie."""
    begins: list[int]
    """Rows that start from nothing."""
    rows: np.ndarray
    places: np.ndarray
    """Row and position of each packed token, for compiled kernels."""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Works as they are packed: single tokens first."""

    works: Sequence[SequenceWork]
    sizes: list[int]
    firsts: np.ndarray
    """Each work's first token, and the number of all."""
    tokens: np.ndarray
    rows: np.ndarray
    """Of the works."""
    positions: np.ndarray

    @classmethod
    def of(cls, works: Sequence[SequenceWork]) -> PackedTokens:
        count, sizes = len(works), [len(work.tokens) for work in works]
        firsts = np.zeros(count + 1, np.int64)
        np.array(sizes).cumsum(out=firsts[1:])
        tokens = np.fromiter(chain.from_iterable([work.tokens for work in works]), np.int64, firsts[-1])
        rows = np.fromiter([work.row for work in works], np.int64, count)
        starts = np.fromiter([work.start for work in works], np.int64, count)
        positions = np.arange(firsts[-1]) + np.repeat(starts - firsts[:-1], sizes)
        return cls(works, sizes, firsts, tokens, rows, positions)

    def slots(self, table: np.ndarray) -> np.ndarray:
        blocks, places = np.divmod(self.positions, BLOCK_TOKENS)
        return np.asarray(table[np.repeat(self.rows, self.sizes), blocks] * BLOCK_TOKENS + places)

    def tiles(self) -> np.ndarray:
        return np.array(
            [
                (index, self.firsts[index] + first, min(TILE_TOKENS, size - first))
                for index, size in enumerate(self.sizes)
                if size > 1
                for first in range(0, size, TILE_TOKENS)
            ],
            np.int64,
        ).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class StepRoom:
    """How much a step of fixed shape holds, of which some may be left over."""

    tokens: int
    works: int
    tiles: int


def told(
    packed: PackedTokens, tables: BlockTables, wanted: np.ndarray, room: StepRoom | None = None
) -> list[np.ndarray]:
    """What a step is told whose layers follow tables: tokens, positions, rows, wanted tokens, tiles, the number of
    single tokens, slots for each group, then for each where the works' tables begin among the last array."""
    tiles, groups = packed.tiles(), range(len(tables.groups))
    asked = len(wanted) if room is None or not room.tiles else room.works
    room = room or StepRoom(len(packed.tokens), len(packed.works), len(tiles))
    width = int(packed.positions.max()) // BLOCK_TOKENS + 1
    count = len(packed.rows) * width
    slots = [packed.slots(tables.table(group)) for group in groups]
    starts = [np.arange(0, count, width) + group * count for group in groups]
    blocks = [tables.table(group)[packed.rows, :width].ravel() for group in groups]
    return [
        # Tokens that are left over are kept in block 0, which is nobody's.
        *(_filled(array, room.tokens) for array in (packed.tokens, packed.positions)),
        _filled(packed.rows, room.works),
        _filled(wanted, asked),
        _filled(tiles, room.tiles),
        np.array([packed.sizes.count(1)]),
        *(_filled(array, room.tokens) for array in slots),
        *(_filled(array, room.works) for array in starts),
        np.concatenate([NOTHING, *blocks]),
    ]


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    if len(array) == size:
        return array
    out = np.zeros((size, *array.shape[1:]), np.int64)
    out[: len(array)] = array
    return out


def followed(numbers: Sequence[Tensor], tables: BlockTables, singles: int) -> list[GroupStep]:
    """Of what was told, as tensors, with at most so many single tokens."""
    positions, tiles, count, blocks = numbers[1], numbers[4], numbers[5], numbers[-1]
    groups = len(tables.groups)
    steps = []
    for group, (slots, starts) in enumerate(
        zip(numbers[6 : 6 + groups], numbers[6 + groups : -1], strict=True)
    ):
        window = tables.groups[group].window
        keys = KeyLocations(blocks, starts, positions, (singles, count), tiles, window)
        steps.append(GroupStep(slots, (), NOTHING, NOTHING, keys))
    return steps


def lay_out(works: Sequence[SequenceWork], cache: LayerCaches, taps: int) -> BatchLayout:
    """The step of `works`; `taps` is the linear layers' convolution, 0 where there are none."""
    tables, device = cache.tables, cache.device
    order = sorted(range(len(works)), key=lambda i: (len(works[i].tokens) > 1, works[i].row))
    packed = PackedTokens.of([works[i] for i in order])
    groups = range(len(tables.groups))
    wanted = wanted_tokens(works, order, packed.firsts)
    all_wanted = len(wanted) == len(packed.tokens) and bool((wanted == np.arange(len(wanted))).all())
    if cache.followed:
        arrays = told(packed, tables, wanted)
        numbers = views_of(joined(arrays, device).to(device, non_blocking=True), arrays)
        steps = followed(numbers, tables, packed.sizes.count(1))
    else:
        arrays = [packed.tokens, packed.positions, packed.rows, wanted]
        numbers = [on_device(array, device) for array in arrays]
        slots = [packed.slots(tables.table(group)) for group in groups]
        steps = [GroupStep(on_device(slots[g], device), (), slots[g], tables.table(g)) for g in groups]
    for group in groups:
        if cache.in_pieces(group):
            steps[group] = replace(steps[group], pieces=tuple(_Calls(cache, group).all(packed)))
    return BatchLayout(
        tokens=numbers[0],
        positions=numbers[1],
        groups=tuple(steps),
        rows=np.repeat(packed.rows, packed.sizes),
        places=packed.positions,
        linear=linear_step(numbers[2], packed.sizes, taps) if taps else None,
        wanted=None if all_wanted else numbers[3],
        begins=[work.row for work in packed.works if not work.start],
    )


def known(tokens: Tensor, cache: LayerCaches) -> Tensor:
    """Tokens with those in their place that rows drew last."""
    if cache.device.type == "cpu" and int(tokens.min()) >= 0:
        return tokens
    return torch.where(tokens < 0, cache.drawn[(-1 - tokens).clamp(min=0)], tokens)


def joined(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """All in one, from where a copy to the device need not be waited for."""
    # Each begins at 16 bytes: kernels are compiled for that.
    whole = torch.empty(
        sum(array.size + array.size % 2 for array in arrays),
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    )
    numbers, first = whole.numpy(), 0
    for array in arrays:
        numbers[first : first + array.size] = array.ravel()
        first += array.size + array.size % 2
    return whole


def views_of(whole: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The way back."""
    parts, first = [], 0
    for array in arrays:
        parts.append(whole[first : first + array.size].view(array.shape))
        first += array.size + array.size % 2
    return parts


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """There when it is its turn: nobody waits for what the device computes meanwhile."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def check(works: Sequence[SequenceWork], tables: BlockTables) -> None:
    """Whether the works go on from what their rows hold, with room; InputError if not."""
    if not works:
        raise InputError("step", "has nothing to do")
    if len({work.row for work in works}) != len(works):
        raise InputError("step", "has two works for one row")
    groups = range(len(tables.groups))
    for work in works:
        row, start, stop = work.row, work.start, work.start + len(work.tokens)
        if start != tables.lengths[row] or start == stop:
            held = tables.lengths[row]
            raise InputError(f"row {row}", f"holds {held} tokens, the step goes from {start} to {stop}")
        for group in groups:
            if stop > tables.room(group, row):
                raise InputError(f"row {row}", f"has no blocks for {stop} tokens; grow it first")


def wanted_tokens(works: Sequence[SequenceWork], order: Sequence[int], firsts: np.ndarray) -> np.ndarray:
    """Packed tokens whose logits are asked for, work by work."""
    place = dict(zip(order, firsts.tolist(), strict=False))
    numbers: list[int] = []
    for index, work in enumerate(works):
        first, size = place[index], len(work.tokens)
        if work.logits == "last":
            numbers.append(first + size - 1)
        elif work.logits == "all":
            numbers.extend(range(first, first + size))
    return np.array(numbers, np.int64)


def _span(window: int | None, first: int, last: int) -> tuple[int, int]:
    """(first column, columns) for queries `first` to `last`, so that sums over keys are cut alike; see exact.py.

    A window of at most 128 tokens is one sum, wherever it begins; `_next_stop` keeps it that short. A longer one
    begins at a multiple of 512, as a sum over everything does.
    """
    if window is None:
        return 0, padded_columns(last + 1)
    begin = max(0, first - window + 1)
    if window <= SHORT_WINDOW:
        low = begin // LANE * LANE
        return low, -(-(last + 1 - low) // LANE) * LANE
    low = begin // PART * PART
    return low, padded_columns(last + 1 - low)


def _next_stop(window: int | None, start: int, exact: bool) -> int:
    """Where the queries from `start` on are cut at the latest. More, shorter pieces look at fewer masked keys."""
    if window is not None and window <= SHORT_WINDOW:
        # Where sums need not be cut alike, as on a GPU, fewer calls count for more.
        return start + (LONGEST_SUM if exact else PART) - window - 2 * LANE
    return (start // PART + 1) * PART


class _Calls:
    def __init__(self, cache: LayerCaches, group: int) -> None:
        tables = cache.tables
        self._window = tables.groups[group].window
        self._tables, self._group, self._device, self._dtype = tables, group, cache.device, cache.dtype
        self._table = tables.table(group)
        self._slots = (tables.groups[group].blocks + 1) * BLOCK_TOKENS

    def all(self, packed: PackedTokens) -> list[AttentionCall]:
        """Of single tokens, which come first, then of the chunks."""
        singles = packed.sizes.count(1)
        calls = [self._decodes(first, batch) for first, batch in self._batches(packed.works[:singles])]
        for work, first in zip(packed.works[singles:], packed.firsts[singles:].tolist(), strict=False):
            start, end = work.start, work.start + len(work.tokens)
            while start < end:
                stop = min(end, _next_stop(self._window, start, self._device.type == "cpu"))
                calls.append(self._chunk(first - work.start + start, work.row, start, stop))
                start = stop
        return calls

    def _batches(self, singles: Sequence[SequenceWork]) -> list[tuple[int, list[SequenceWork]]]:
        """Sequences that can go together: keys of similar number, all in place at even distances or all gathered."""
        result: list[tuple[int, list[SequenceWork]]] = []
        used = most = stride = base = 0
        for index, work in enumerate(singles):
            columns = _span(self._window, work.start, work.start)[1]
            here = self._base(work.row)
            batch = result[-1][1] if result else []
            padded, present = (len(batch) + 1) * max(most, columns), used + columns
            fits = bool(batch) and padded <= MOST_PADDING * present
            step = here - base
            even = here < 0 or (step > 0 and (len(batch) == 1 or step == stride))
            if fits and (here < 0) == (base < 0) and even:
                batch.append(work)
                used, most, stride, base = used + columns, max(most, columns), here - base, here
            else:
                result.append((index, [work]))
                used, most, stride, base = columns, columns, 0, here
        return result

    def _base(self, row: int) -> int:
        """The slot of the row's first token, or -1 when its blocks must be gathered."""
        if not self._tables.whole(self._group, row):
            return -1
        return int(self._table[row, 0]) * BLOCK_TOKENS

    def _decodes(self, first: int, batch: list[SequenceWork]) -> AttentionCall:
        spans = [_span(self._window, work.start, work.start) for work in batch]
        columns = max(span[1] for span in spans)
        ends = np.array([work.start - span[0] for work, span in zip(batch, spans, strict=True)])
        mask = self._mask(on_device(ends, self._device).view(-1, 1, 1, 1), columns)
        rows = [work.row for work in batch]
        base, stride = self._base(rows[0]), self._base(rows[-1]) - self._base(rows[0])
        stride = stride // (len(rows) - 1) if len(rows) > 1 else 0
        if base >= 0 and max(base, base + stride * (len(rows) - 1)) + columns <= self._slots:
            return AttentionCall(first, len(rows), 1, columns, mask, base, stride)
        lows = np.array([span[0] for span in spans]) // BLOCK_TOKENS
        blocks = self._gather(np.array(rows), lows, columns)
        return AttentionCall(first, len(rows), 1, columns, mask, blocks=blocks)

    def _chunk(self, first: int, row: int, start: int, stop: int) -> AttentionCall:
        low, columns = _span(self._window, start, stop - 1)
        ends = torch.arange(start - low, stop - low, device=self._device).view(1, 1, -1, 1)
        mask, base = self._mask(ends, columns), self._base(row)
        if 0 <= base <= self._slots - columns:
            return AttentionCall(first, 1, stop - start, columns, mask, base + low)
        blocks = self._gather(np.array([row]), np.array([low // BLOCK_TOKENS]), columns)
        return AttentionCall(first, 1, stop - start, columns, mask, blocks=blocks)

    def _gather(self, rows: np.ndarray, lows: np.ndarray, columns: int) -> Tensor:
        index = np.minimum(lows[:, None] + np.arange(columns // BLOCK_TOKENS), self._table.shape[1] - 1)
        return on_device(self._table[rows[:, None], index].ravel(), self._device)

    def _mask(self, ends: Tensor, columns: int) -> Tensor:
        """`ends` is each query's own column."""
        keys = torch.arange(columns, device=self._device)
        hidden = keys > ends
        if self._window is not None:
            hidden |= keys <= ends - self._window
        return torch.zeros(hidden.shape, device=self._device, dtype=self._dtype).masked_fill_(
            hidden, -torch.inf
        )


def linear_step(rows: Tensor, sizes: list[int], taps: int) -> LinearStep:
    """`rows` are the sequences as packed, with so many tokens each."""
    device, firsts = rows.device, np.concatenate(([0], np.cumsum(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    count, total = len(sizes), int(firsts[-1])
    ranks = np.empty(count, np.int64)
    ranks[by_size] = np.arange(count)
    sequence = np.repeat(np.arange(count), sizes)
    place = np.arange(total) - firsts[sequence]
    past = taps - 1
    # Rows of the convolution's input: the old ones of all sequences by rank, then the new ones as packed.
    source = place[None, :] - past + np.arange(taps)[:, None]
    old = ranks[sequence] * past + past + source
    reads = np.where(source < 0, old, count * past + firsts[sequence] + source)
    order = np.array(by_size)
    kept = np.array(sizes)[order][:, None] - past + np.arange(past)[None, :]
    tails = np.where(
        kept < 0, ranks[order][:, None] * past + past + kept, count * past + firsts[order][:, None] + kept
    )
    by_time = np.lexsort((ranks[sequence], place))
    same = bool((by_time == np.arange(total)).all())
    counts = np.bincount(place).tolist()
    return LinearStep(
        rows=rows if by_size == sorted(by_size) else rows[on_device(order, device)],
        by_time=None if same else on_device(by_time, device),
        packed=None if same else on_device(np.argsort(by_time), device),
        counts=counts,
        taps=on_device(reads, device),
        tails=on_device(tails.ravel(), device),
        sequences=(rows.numpy() if device.type == "cpu" else order, firsts[:-1], np.array(sizes)),
    )
