"""The tensors behind the blocks: what the layers keep of every running sequence.

Full and window layers keep a key and a value per token and head, latent layers one vector per token, linear layers a
state per sequence: a matrix per head and the last inputs of the short convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.memory.block_tables import BlockTables, WindowGroup
from potluck.engine.numbers.exact import LANE


@dataclass(frozen=True, slots=True)
class Pages:
    """What one layer keeps per token: `entries` is [blocks x 16, parts x heads x dim].

    With `keys` [blocks, heads, dim, 16], as kernels/attention.py wants them, `entries` has the values only.
    """

    group: int
    parts: int
    """2 for keys and values, 1 where one vector is both."""
    heads: int
    dim: int
    entries: Tensor
    keys: Tensor | None = None

    def read(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """[slots, parts x heads x dim]; on a GPU into `out`, if it is given."""
        if self.keys is None:
            return torch.index_select(self.entries, 0, slots, out=out)
        from potluck.engine.numbers.kernels.attention import collect

        size = self.heads * self.dim
        out = torch.empty(len(slots), 2 * size)
        collect(slots.numpy(), size, self.keys.data_ptr(), self.entries.data_ptr(), out.data_ptr())
        return out

    def write(self, slots: Tensor, rows: Tensor) -> None:
        if self.keys is not None:
            size = self.heads * self.dim
            keys = rows[:, :size].view(-1, self.heads, self.dim)
            self.keys[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS] = keys
            rows = rows[:, size:]
        self.entries.index_copy_(0, slots, rows)


@dataclass(frozen=True, slots=True)
class LinearStates:
    conv: Tensor
    """[rows, taps - 1, channels]: the latest inputs of the convolution, the oldest first."""
    memory: Tensor
    """[rows, heads, key dim, value dim], always float32: it is added to at every token."""


Kept = Pages | LinearStates


def windows_of(model: Model) -> tuple[int | None, ...]:
    """The attention windows of a model's layers, each once: None (no window) first, then by size."""
    numbers: set[int | None] = set()
    for layer in model.layers:
        if isinstance(layer.attention, FullAttention):
            numbers.add(layer.attention.window)
        elif isinstance(layer.attention, LatentAttention):
            numbers.add(None)
    return tuple(sorted(numbers, key=lambda window: (window is not None, window or 0)))


def groups_of(model: Model, size: RunnerSize) -> tuple[WindowGroup, ...]:
    """Groups with their blocks: all where everything is kept, and for windows what all rows can need at once."""

    def blocks(window: int | None) -> int:
        most = ((window or 0) + size.max_chunk_tokens) // BLOCK_TOKENS + 2
        return size.blocks if window is None else min(size.blocks, most * size.rows)

    return tuple(WindowGroup(window, blocks(window)) for window in windows_of(model))


def _zeros(*shape: int) -> Tensor:
    """numpy asks the system for large pages, which are faster to read here and there; torch does not."""
    return torch.from_numpy(np.zeros(shape, np.float32))


class LayerCaches:
    """The storage of a model's layers. Only the layers and hand-overs write to it."""

    def __init__(
        self,
        model: Model,
        tables: BlockTables,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.tables, self.device, self.dtype = tables, device, dtype
        windows = [group.window for group in tables.groups]
        self.layers: list[Kept] = []
        for layer in model.layers:
            attention = layer.attention
            if isinstance(attention, LinearAttention):
                conv = torch.zeros(
                    tables.rows,
                    attention.conv_kernel - 1,
                    attention.conv_channels,
                    device=device,
                    dtype=dtype,
                )
                shape = (tables.rows, attention.value_heads, attention.key_head_dim, attention.value_head_dim)
                self.layers.append(LinearStates(conv, torch.zeros(shape, device=device)))
                continue
            if isinstance(attention, LatentAttention):
                parts, heads, dim, window = 1, 1, attention.kv_lora_rank + attention.qk_rope_head_dim, None
            else:
                parts, heads, dim, window = 2, attention.kv_heads, attention.head_dim, attention.window
            group = windows.index(window)
            slots = (tables.groups[group].blocks + 1) * BLOCK_TOKENS
            keys = None
            if parts == 2 and device.type == "cpu" and dtype == torch.float32 and dim % LANE == 0:
                keys = _zeros(slots // BLOCK_TOKENS, heads, dim, BLOCK_TOKENS)
            width = (parts if keys is None else 1) * heads * dim
            entries = (
                _zeros(slots, width).to(dtype)
                if device.type == "cpu"
                else torch.zeros(slots, width, device=device, dtype=dtype)
            )
            self.layers.append(Pages(group, parts, heads, dim, entries, keys))
        self.followed = device.type == "cuda"
        """Whether full layers read pages where they lie, by tables (`KeyLocations`)."""
        self.drawn = torch.zeros(tables.rows, dtype=torch.int64, device=device)  # What rows drew last.
        self.states = [
            linear_states for linear_states in self.layers if isinstance(linear_states, LinearStates)
        ]

    def layer(self, index: int) -> Kept:
        if not 0 <= index < len(self.layers):
            raise InputError("layer", f"{index} is not one of the model's 0 to {len(self.layers) - 1}")
        return self.layers[index]

    def in_pieces(self, group: int) -> bool:
        """Whether steps of a group must be cut into pieces."""
        own = (pages for pages in self.layers if isinstance(pages, Pages) and pages.group == group)
        return any(pages.keys is None and not (self.followed and pages.parts == 2) for pages in own)

    def clear_states(self, rows: list[int]) -> None:
        """Sequences that begin have no past."""
        for linear_states in self.states:
            linear_states.conv[rows] = 0
            linear_states.memory[rows] = 0
