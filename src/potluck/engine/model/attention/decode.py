"""One query each of several sequences over their pages, where the step's shapes must not change (graphs.py).

A GPU runs one program for each sequence and key head: it follows the sequence's table through memory, 64 keys at a
time, with a running maximum and sum. Nothing is gathered, padded or masked beyond those 64. Elsewhere the same is
done with gathered keys, to check by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.batch_layout import KeyLocations
from potluck.engine.memory.kv_cache import Pages


def attend(queries: Tensor, pages: Pages, followed: KeyLocations, scale: float) -> Tensor:
    """[sequences, G, heads, dim] queries to [sequences, G x heads x dim]."""
    if queries.device.type == "cuda":
        from potluck.engine.model.attention import triton_decode  # only torch's builds for GPUs have Triton

        return triton_decode.attend(
            queries, pages.entries, followed.table, followed.positions, scale, followed.window or 0
        )
    count = followed.table.shape[1] * BLOCK_TOKENS
    places = torch.arange(count)
    slots = followed.table.repeat_interleave(BLOCK_TOKENS, 1) * BLOCK_TOKENS + places % BLOCK_TOKENS
    kept = pages.entries[slots].view(len(slots), count, 2, pages.heads, pages.dim)
    seen = places <= followed.positions[:, None]
    if followed.window is not None:
        seen &= places > followed.positions[:, None] - followed.window
    scores = torch.einsum("bghd,bkhd->bghk", queries, kept[:, :, 0]) * scale
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bghk,bkhd->bghd", weights, kept[:, :, 1]).flatten(1)
