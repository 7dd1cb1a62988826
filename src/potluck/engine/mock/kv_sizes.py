"""What the KV of a large model would weigh, where what is there is only a word about it.

A pretended model has a few layers, each of which stands for a run of the large model's; so a parcel of layer l of n
has the weight of the layers [l N / n, (l + 1) N / n).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from potluck.core.replica.blocks import pool_layout
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Attention, FullAttention, LatentAttention, Model
from potluck.kv.codec_layout import COLUMN_GROUP, Codec, Part, sizes
from potluck.perf.sizes.memory import kv_bytes_per_token, state_bytes, window_bytes_per_token

MOST_LAYERS = 4
"""Of a pretended model: parcels go out while a step is under way, a quarter of its KV at a time. When each of the
large model's layers would be there is reckoned (`freight.py`), so few are enough."""


class SizedPart(Protocol):
    """What says how much a parcel stands for."""

    @property
    def layer(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def codec(self) -> Codec: ...


@dataclass(frozen=True)
class KvSizes:
    """The KV of a model."""

    model: Model

    @cached_property
    def layers(self) -> int:
        """Those of the pretended model."""
        return min(MOST_LAYERS, self.model.layer_count)

    @cached_property
    def exact(self) -> bool:
        """Whether a prefix can only be resumed where a state was kept."""
        return pool_layout(self.model).exact

    @cached_property
    def token_bytes(self) -> float:
        """Of one more token, in layers that keep all."""
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

    def stands_for(self, parcel: SizedPart) -> int:
        """How many layers of the large model."""
        many, few = self.model.layer_count, self.layers
        return (parcel.layer + 1) * many // few - parcel.layer * many // few

    def kv_bytes(self, parcel: SizedPart, since: int | None) -> int:
        """What a parcel would weigh on the wire: its tokens, and at the end of a hand-over that began at `since`
        the windows and states, too."""
        many, few = self.model.layer_count, self.layers
        layers = range(parcel.layer * many // few, (parcel.layer + 1) * many // few)
        tokens = parcel.stop - parcel.first
        ending = None if since is None else parcel.stop - since
        total = 0.0
        for attention, count in self._kinds[layers.start, layers.stop]:
            one_bytes = self._one_bytes(attention, tokens, ending)
            total += count * one_bytes * _share(attention, parcel.codec)
        return round(total)

    @cached_property
    def _kinds(self) -> dict[tuple[int, int], tuple[tuple[Attention, int], ...]]:
        found = {}
        many, few = self.model.layer_count, self.layers
        for place in range(few):
            layers = range(place * many // few, (place + 1) * many // few)
            counts: dict[Attention, int] = {}
            for layer in layers:
                attention = self.model.layers[layer].attention
                counts[attention] = counts.get(attention, 0) + 1
            found[layers.start, layers.stop] = tuple(counts.items())
        return found

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
    """What a codec leaves."""
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
