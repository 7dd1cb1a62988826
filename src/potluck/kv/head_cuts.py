"""Chunks cut by layers and heads for a worker that wants some of them, and put together again for one that wants all.

Keys and values lie as tokens x 2 x heads x width, states whose bytes lie head by head as 1 x heads x width: what a
worker gets is a copy of its heads. Latents and other states have no heads to be cut by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from potluck.core.errors import FormatError
from potluck.core.values.kv_layout import KvCut, Span
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import ITEM_BYTES


def cut_chunk(chunk: KvChunk, cut: KvCut) -> KvChunk | None:
    """What a worker gets of a raw chunk: the chunk itself where that is all of it, None where it is nothing."""
    if not cut.layers[0] <= chunk.layer < cut.layers[1]:
        return None
    if cut.heads == (0, 0) or not (chunk.part == "kv" or (chunk.part == "memory" and chunk.dtype == "uint8")):
        return chunk
    *before, heads, width = chunk.shape
    first, stop = max(cut.heads[0], chunk.head), min(cut.heads[1], chunk.head + heads)
    if first >= stop:
        return None
    if (first, stop) == (chunk.head, chunk.head + heads):
        return chunk
    rows = np.frombuffer(chunk.data, np.uint8).reshape(*before, heads, -1)
    data = np.ascontiguousarray(rows[..., first - chunk.head : stop - chunk.head, :])
    return replace(
        chunk, shape=(*before, stop - first, width), data=data.reshape(-1).data.cast("B"), head=first
    )


class HeadJoin:
    """Raw chunks of some heads in, chunks of all heads out, as soon as all heads of some tokens are there."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """The heads that come from each sender."""
        self._heads = sorted(set(spans))
        self._waiting: dict[tuple[int, str], dict[int, list[KvChunk]]] = {}

    def take(self, chunk: KvChunk) -> Iterator[KvChunk]:
        if len(self._heads) < 2 or chunk.part != "kv":
            yield chunk
            return
        if (chunk.head, chunk.head + chunk.shape[2]) not in self._heads:
            raise FormatError(
                f"hand-over: layer {chunk.layer}", f"has heads from {chunk.head} on, not asked for"
            )
        waiting = self._waiting.setdefault((chunk.layer, chunk.part), {first: [] for first, _ in self._heads})
        waiting[chunk.head].append(replace(chunk, data=bytes(chunk.data)))  # it is used again elsewhere
        waiting[chunk.head].sort(key=lambda piece: piece.first)
        while all(waiting.values()):
            first = max(pieces[0].first for pieces in waiting.values())
            if any(pieces[0].first != first for pieces in waiting.values()):
                return  # one that goes before is still under way
            stop = min(pieces[0].stop for pieces in waiting.values())
            yield _joined([_taken(pieces, stop) for pieces in waiting.values()])


def _taken(pieces: list[KvChunk], stop: int) -> KvChunk:
    """The tokens before `stop` of the first piece, which keeps the rest."""
    piece = pieces.pop(0)
    if piece.stop == stop:
        return piece
    tokens, row = stop - piece.first, int(np.prod(piece.shape[1:])) * ITEM_BYTES[piece.dtype]
    data = memoryview(piece.data)
    pieces.insert(
        0,
        replace(
            piece, first=stop, shape=(piece.shape[0] - tokens, *piece.shape[1:]), data=data[tokens * row :]
        ),
    )
    return replace(piece, stop=stop, shape=(tokens, *piece.shape[1:]), data=data[: tokens * row])


def _joined(pieces: Sequence[KvChunk]) -> KvChunk:
    first = pieces[0]
    rows = [np.frombuffer(piece.data, np.uint8).reshape(*piece.shape[:3], -1) for piece in pieces]
    if len({piece.dtype for piece in pieces}) > 1:
        raise FormatError(f"hand-over: layer {first.layer}", "comes in several formats")
    whole = np.concatenate(rows, axis=2)
    shape = (*whole.shape[:3], first.shape[3])
    return replace(first, shape=shape, data=whole.reshape(-1).data.cast("B"), head=0)
