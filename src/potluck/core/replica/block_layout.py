"""How a model's layers share one pool of blocks: groups by what they keep, and what a block and a checkpoint take.

    tokens    layers that keep something for every token (full attention, latents): a block is 16 tokens of them all
    window    layers that keep the last tokens; resumed only where these were put aside
    state     linear layers with a state of fixed size; likewise

What windows and states need at one length is a checkpoint. Its size is rounded up to whole blocks, so that all groups
take from one pool and give back to it (PrfaaS 3.2, Figure 4). Without layers of the first kind, a block is as large
as a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from potluck.core.replica.block_values import PrefixHit
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Attention, FullAttention, LatentAttention, Model

Kind = Literal["tokens", "window", "state"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same kind of thing."""

    kind: Kind
    layers: tuple[int, ...]
    bytes_per_token: int = 0
    """Of all its layers together; 0 for states."""
    state_bytes: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Groups over one pool."""

    groups: tuple[LayerGroup, ...]
    block_tokens: int

    @property
    def exact(self) -> bool:
        """Whether a prefix can be resumed only where there is a checkpoint."""
        return any(group.kind != "tokens" for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """What every block of the pool holds."""
        per_token = sum(group.bytes_per_token for group in self.groups if group.kind == "tokens")
        return per_token * self.block_tokens or self.checkpoint_bytes(self.block_tokens)

    def checkpoint_bytes(self, tokens: int) -> int:
        """To resume after so many tokens, which end with a block: of windows what a query there can still see."""
        return sum(
            group.state_bytes + group.bytes_per_token * min(tokens, (group.window or 1) - 1)
            for group in self.groups
            if group.kind != "tokens"
        )

    def checkpoint_blocks(self, tokens: int) -> int:
        return -(-self.checkpoint_bytes(tokens) // self.block_bytes)


def pool_layout(model: Model, element_bytes: int = 2, block_tokens: int = BLOCK_TOKENS) -> PoolLayout:
    """The groups of a model whose KV has elements of so many bytes."""
    found: dict[tuple[Kind, int | None], list[int]] = {}
    for place, layer in enumerate(model.layers):
        found.setdefault(_kind(layer.attention), []).append(place)
    groups = []
    for (kind, window), places in found.items():
        sizes = [_sizes(model.layers[place].attention, element_bytes) for place in places]
        per_token, state = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        groups.append(LayerGroup(kind, tuple(places), per_token, state, window))
    return PoolLayout(tuple(groups), block_tokens)


def checkpoints_at(found: PrefixHit, blocks: int) -> tuple[int, ...]:
    """After how many blocks a prompt of so many whole ones, of which `found` was there, should leave checkpoints.

    At its end, where its own continuation will look; and where it left a way that others had come: what two prompts
    share a third is likely to share, and nobody put a state aside there.
    """
    branch = {found.shared_blocks} if found.shared_blocks > found.blocks else set()
    return tuple(sorted(branch | ({blocks} if blocks else set())))


def _kind(attention: Attention) -> tuple[Kind, int | None]:
    if isinstance(attention, LatentAttention):
        return "tokens", None
    if isinstance(attention, FullAttention):
        return ("tokens", None) if attention.window is None else ("window", attention.window)
    return "state", None


def _sizes(attention: Attention, element_bytes: int) -> tuple[int, int]:
    """Bytes per token, bytes whatever the length."""
    if isinstance(attention, FullAttention):
        return attention.kv_heads * (attention.head_dim + attention.v_head_dim) * element_bytes, 0
    if isinstance(attention, LatentAttention):
        return (attention.kv_lora_rank + attention.qk_rope_head_dim) * element_bytes, 0
    conv = max(attention.conv_kernel - 1, 0) * attention.conv_channels * element_bytes
    return 0, attention.state_elements * attention.state_bytes_per_element + conv
