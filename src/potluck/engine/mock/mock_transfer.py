"""A mock engine's KV on the network: it takes the time, and is reported with the bytes, of a large model's KV.

Both ends have a card, and the slower one says how long it takes: chunks leave the sender's one behind the other, and
are there when the receiver's, which takes them one behind the other as well, has them. A chunk stands for several
layers, computed one after the other, each of which leaves as soon as it is computed (`perf.delays.transfer`):

    F_m = max(F_m-1, C_m) + t        so, with C_1 .. C_k evenly apart,  F_k = max(F_0 + k t, C_1 + k t, C_k + t)

The receiver takes layer m from when its first byte left, F_m - t, at its own rate. What comes from one sender comes
in order; a sender over a thin link holds up no other. All of this is reckoned from the times that chunks carry: they
themselves, a few bytes, go at once over real connections, and wait at the receiver until they would be there. Or
nothing is reckoned (`bytes_per_real`): one real byte crosses for so many, over whatever network there is.

The prefix cache holds names of blocks in the memory that running requests leave over, as the simulator's does
(`core.replica.spare_cache`); beside each name is the history that its KV would stand for.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from potluck.core.errors import FormatError
from potluck.core.replica.blocks import CacheChanges
from potluck.core.replica.spare_cache import SpareCache
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Attention, FullAttention, LatentAttention, Model
from potluck.engine.compute.emulated import Clock
from potluck.engine.memory.prefix_cache import PrefixCache, Read
from potluck.engine.mock import mock_executor
from potluck.engine.mock.mock_executor import EMPTY_HISTORY, MockExecutor, after, chunk_of
from potluck.engine.server.kv_connector import KvTransfer
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import COLUMN_GROUP, Codec, Part, sizes
from potluck.kv.peer_connections import LinkReport
from potluck.perf.memory import kv_bytes_per_token, state_bytes, window_bytes_per_token
from potluck.perf.transfer import AlphaBeta

KEPT_S = 10.0  # What was busy longer ago is forgotten: nothing that comes now began so early.


class NicSchedule:
    """State: spans that are busy, apart from each other, in order."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def book(self, from_s: float, for_s: float, now_s: float) -> float:
        """Take so many seconds of what is free from then on; when the last of them is over."""
        kept = [span for span in self._spans if span[1] > now_s - KEPT_S]
        at_s, left_s, taken = from_s, for_s, []
        for begin_s, end_s in kept:
            if end_s <= at_s:
                continue
            free_s = min(left_s, max(0.0, begin_s - at_s))
            if free_s > 0:
                taken.append((at_s, at_s + free_s))
                left_s -= free_s
            if left_s <= 0:
                break
            at_s = end_s
        if left_s > 0:
            taken.append((at_s, at_s + left_s))
        for span in taken:
            insort(kept, span)
        self._spans = _joined(kept)
        return taken[-1][1] if taken else from_s


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that touch become one."""
    joined: list[tuple[float, float]] = []
    for begin_s, end_s in spans:
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((begin_s, end_s))
    return joined


@dataclass(slots=True)
class _LinkTotals:
    moved_bytes: int = 0
    busy_s: float = 0.0


class MockKvTransfer(KvTransfer):
    """Used from the event loop, but for `here_s`."""

    light = True

    def __init__(
        self,
        sizes_of: KvSizes,
        alpha_beta: AlphaBeta,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
        bytes_per_real: float = 0.0,
    ) -> None:
        super().__init__()
        self._bytes_per_real = bytes_per_real
        self._sizes, self._speed_up, self._clock = sizes_of, speed_up, clock
        self._bytes_per_s = alpha_beta.beta_bytes_per_s * speed_up
        self._alpha_s = alpha_beta.alpha_s / speed_up
        self._free_s = -float("inf")
        self._taken_s: dict[str, float] = {}  # When the last chunk that came from a sender is here.
        self._card = NicSchedule()
        self._taking = threading.Lock()
        self._totals: dict[str, _LinkTotals] = {}

    def change_rate(self, gbps: float) -> None:
        """From now on what crosses here has so much of the way; what is on its way was reckoned before."""
        self._bytes_per_s = gbps * 1e9 / 8 * self._speed_up

    def kv_bytes(self, chunk: KvChunk) -> int:
        since = mock_executor.since_of(chunk)
        return self._sizes.kv_bytes(chunk, None if since == mock_executor.PART_FOLLOWS else since)

    def packed(self, chunk: KvChunk, codec: Codec) -> KvChunk:
        return mock_executor.resized(replace(chunk, codec=codec), chunk.shape[1])

    def restored(self, chunk: KvChunk, whole: bool = False) -> KvChunk:
        if chunk.codec == "raw":
            return mock_executor.resized(chunk, mock_executor.SHAPE[1])
        content = bytes(chunk.parameters) + bytes(chunk.data)
        if len(content) < mock_executor.CONTENT.size or content[mock_executor.CONTENT.size :].strip(b"\0"):
            raise FormatError(f"hand-over: layer {chunk.layer}", "is not what a mock engine sends")
        data = content[: mock_executor.CONTENT.size].ljust(mock_executor.RAW_BYTES, b"\0")
        return replace(chunk, codec="raw", shape=mock_executor.SHAPE, parameters=b"", data=data)

    def leaves(self, peer: str, chunk: KvChunk) -> KvChunk:
        if self._bytes_per_real:
            column_bytes = sizes(chunk.part, chunk.dtype, (1, 1024), chunk.codec).total_bytes / 1024
            columns = round(self.kv_bytes(chunk) / self._bytes_per_real / column_bytes)
            return mock_executor.resized(chunk, max(columns, mock_executor.SHAPE[1]))
        now_s, took_s = self._clock(), self._took_s(chunk)
        self._moved(peer, self.kv_bytes(chunk), took_s)
        computed = mock_executor.times_of(chunk) or mock_executor.ChunkTimes(now_s, now_s, now_s)
        count = self._sizes.stands_for(chunk)
        one_s = took_s / count
        first_s = computed.first_s + (computed.last_s - computed.first_s) / count
        began_s = max(self._free_s, first_s)
        self._free_s = max(began_s + took_s, computed.last_s + one_s)
        away_s = now_s - self._alpha_s
        return mock_executor.with_times(
            chunk,
            mock_executor.ChunkTimes(
                away_s - began_s, away_s - (self._free_s - one_s), away_s - self._free_s
            ),
        )

    def here_s(self, peer: str, chunk: KvChunk) -> float | None:
        if self._bytes_per_real:
            return None
        now_s, took_s = self._clock(), self._took_s(chunk)
        left = mock_executor.times_of(chunk) or mock_executor.ChunkTimes(took_s, 0.0, 0.0)
        one_s = took_s / self._sizes.stands_for(chunk)
        with self._taking:
            begins_s = max(self._taken_s.get(peer, -float("inf")), now_s - left.first_s)
            booked_s = self._card.book(begins_s, took_s, now_s)
            self._taken_s[peer] = max(booked_s, now_s - left.last_s + one_s, now_s - left.end_s)
            return self._taken_s[peer]

    def fetched(self, peer: str, kv_bytes: int, wall_s: float) -> None:
        self._moved(peer, kv_bytes, wall_s)

    def told(self, report: LinkReport) -> LinkReport:
        if real := self._bytes_per_real:
            return replace(
                report,
                moved_bytes=round(report.moved_bytes * real),
                goodput_bytes_per_s=report.goodput_bytes_per_s * real,
                queue_bytes=round(report.queue_bytes * real),
                retransmits=round(report.retransmits * real),
            )
        total = self._totals.get(report.peer, _LinkTotals())
        rate = total.moved_bytes / total.busy_s if total.busy_s > 0 else 0.0
        waiting_s = max(0.0, self._free_s - self._clock())
        return replace(
            report,
            moved_bytes=total.moved_bytes,
            goodput_bytes_per_s=rate,
            queue_bytes=round(waiting_s * self._bytes_per_s) if report.queue_bytes or waiting_s else 0,
        )

    def _took_s(self, chunk: KvChunk) -> float:
        return self.kv_bytes(chunk) / self._bytes_per_s

    def _moved(self, peer: str, kv_bytes: int, busy_s: float) -> None:
        total = self._totals.setdefault(peer, _LinkTotals())
        total.moved_bytes += kv_bytes
        total.busy_s += busy_s


MOST_LAYERS = 4
"""Of a mock model: chunks go out while a step is under way, a quarter of its KV at a time. When each of the
large model's layers would be there is reckoned below, so few are enough."""


@dataclass(frozen=True)
class KvSizes:
    model: Model

    @cached_property
    def layers(self) -> int:
        """Those of the mock model."""
        return min(MOST_LAYERS, self.model.layer_count)

    @cached_property
    def exact(self) -> bool:
        """Whether a prefix can only be resumed where a state was kept."""
        return self.model.exact_prefix

    @cached_property
    def token_bytes(self) -> float:
        return kv_bytes_per_token(self.model)

    @cached_property
    def block_bytes(self) -> float:
        return BLOCK_TOKENS * (self.token_bytes or 1.0)

    @cached_property
    def state_tokens(self) -> float:
        """Room that one kept state takes, in tokens of KV."""
        windows = sum(rate * window for window, rate in window_bytes_per_token(self.model).items())
        state = state_bytes(self.model) + windows
        return state / self.token_bytes if self.token_bytes else float(BLOCK_TOKENS)

    def stands_for(self, chunk: KvChunk) -> int:
        return self._kinds[chunk.layer].total()

    def kv_bytes(self, chunk: KvChunk, since: int | None) -> int:
        """What a chunk would weigh on the wire: its tokens, and at the end of a hand-over that began at `since`
        the windows and states, too."""
        tokens = chunk.stop - chunk.first
        ending = None if since is None else chunk.stop - since
        total = 0.0
        for attention, count in self._kinds[chunk.layer].items():
            total += count * self._one_bytes(attention, tokens, ending) * _share(attention, chunk.codec)
        return round(total)

    @cached_property
    def _kinds(self) -> list[Counter[Attention]]:
        """What each layer of the mock model stands for."""
        many, few = self.model.layer_count, self.layers
        parts = (self.model.layers[n * many // few : (n + 1) * many // few] for n in range(few))
        return [Counter(layer.attention for layer in part) for part in parts]

    def _one_bytes(self, attention: Attention, tokens: int, ending: int | None) -> float:
        """Of one layer of a kind; any such layer of the model will do to ask."""
        place = next(n for n, layer in enumerate(self.model.layers) if layer.attention == attention)
        fixed, rate, window = _rates(self.model, place)
        size = rate * tokens if window is None else 0.0
        if ending is not None:
            size += fixed + (0.0 if window is None else rate * min(ending, window))
        return size


@lru_cache(maxsize=1024)
def _rates(model: Model, place: int) -> tuple[float, float, int | None]:
    """(bytes whatever the length, bytes per token, up to so many tokens) of one layer."""
    one = range(place, place + 1)
    windows = window_bytes_per_token(model, one)
    for window, rate in windows.items():
        return state_bytes(model, one), rate, window
    return state_bytes(model, one), kv_bytes_per_token(model, one), None


@lru_cache(maxsize=256)
def _share(attention: Attention, codec: Codec) -> float:
    part: Part
    shape: tuple[int, ...]
    if isinstance(attention, FullAttention):
        part, shape = "kv", (COLUMN_GROUP, 2, attention.kv_heads, attention.head_dim)
    elif isinstance(attention, LatentAttention):
        part, shape = "latent", (COLUMN_GROUP, 1, attention.kv_lora_rank + attention.qk_rope_head_dim)
    else:
        return 1.0  # a state crosses whole
    return (
        sizes(part, "bfloat16", shape, codec).total_bytes / sizes(part, "bfloat16", shape, "raw").total_bytes
    )


class MockPrefixCache(PrefixCache):
    def __init__(self, executor: MockExecutor, sizes: KvSizes, most_blocks: int | None = None) -> None:
        """`most_blocks`: no more than that, even if there is room; 0: none at all."""
        super().__init__(executor.config, 0, executor.fingerprint)
        self._executor, self._sizes, self._most_blocks = executor, sizes, most_blocks
        self._cache = SpareCache(BLOCK_TOKENS, sizes.exact, sizes.state_tokens if sizes.exact else 0.0)
        self._histories: dict[int, int] = {}
        executor.grown = self._fit

    @property
    def exact(self) -> bool:
        return self._sizes.exact

    @property
    def enabled(self) -> bool:
        return self._most_blocks != 0

    @property
    def used_bytes(self) -> int:
        return round(self._cache.held_tokens * self._sizes.token_bytes)

    def find(self, tokens: Sequence[int], most_tokens: int, salt: str = "") -> tuple[int, list[KvChunk]]:
        if not len(self._cache) or most_tokens < BLOCK_TOKENS:
            return 0, []
        names = self._hashes(tokens[:most_tokens], salt)
        depth = self._cache.match(names)
        if not depth:
            return 0, []
        self._cache.keep(names[:depth])  # It was used just now.
        count, history = depth * BLOCK_TOKENS, self._histories[names[depth - 1]]
        return count, [chunk_of(history, layer, 0, count) for layer in range(self._sizes.layers)]

    def keep(self, tokens: Sequence[int], held: int, read: Read, salt: str = "") -> None:
        if not self.enabled or held < BLOCK_TOKENS or (self.exact and held % BLOCK_TOKENS):
            return  # Where states are kept there must be one, and there is one only at the row's present length.
        names = self._hashes(tokens[:held], salt)
        history, histories = EMPTY_HISTORY, self._histories
        for place, name in enumerate(names):
            known = histories.get(name) if name in self._cache else None
            if known is None:
                known = after(history, tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
                histories[name] = known
            history = known
        self._cache.keep(names)
        self._fit()

    def changes(self) -> CacheChanges:
        return self._cache.changes()

    def everything(self) -> CacheChanges:
        return self._cache.everything()

    def _fit(self) -> None:
        """Rows come first."""
        room = self._executor.free_blocks
        if self._most_blocks is not None:
            room = min(room, self._most_blocks)
        self._cache.shrink(room * BLOCK_TOKENS)
        if len(self._histories) > 2 * len(self._cache) + 1024:
            self._histories = {name: kept for name, kept in self._histories.items() if name in self._cache}
