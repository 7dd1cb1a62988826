"""Groups of layers over one pool: sizes worked out by hand, and where checkpoints are wanted."""

from __future__ import annotations

import pytest

from potluck.catalog.models import model, names
from potluck.core.replica.block_layout import checkpoints_at, pool_layout
from potluck.core.replica.blocks import PrefixHit
from potluck.core.values.model import DenseFfn, FullAttention, LatentAttention, Layer, LinearAttention, Model

FULL = FullAttention(4, 2, 16, 24)
SHORT = FullAttention(4, 2, 16, 16, window=24)
LATENT = LatentAttention(4, 16, 12, 8, 20)
LINEAR = LinearAttention("gated_delta", 2, 4, 16, 24, conv_kernel=4)


def of(*attentions: FullAttention | LatentAttention | LinearAttention) -> Model:
    return Model("m", 64, 100, tuple(Layer(each, DenseFfn(8)) for each in attentions), 1000)


def test_sizes_by_hand() -> None:
    layout = pool_layout(of(LINEAR, FULL, SHORT, LATENT, LINEAR))
    assert [(group.kind, group.layers) for group in layout.groups] == [
        ("state", (0, 4)),
        ("tokens", (1, 3)),
        ("window", (2,)),
    ]
    assert layout.block_bytes == 16 * (2 * (16 + 24) + (16 + 8)) * 2
    state = 4 * 16 * 24 * 4 + 3 * (2 * 2 * 16 + 4 * 24) * 2
    assert layout.checkpoint_bytes(16) == 2 * state + 16 * 2 * 32 * 2
    assert layout.checkpoint_bytes(1000) == 2 * state + 23 * 2 * 32 * 2
    assert layout.checkpoint_blocks(1000) == -(-layout.checkpoint_bytes(1000) // layout.block_bytes)
    assert layout.exact


def test_without_layers_that_keep_everything_a_block_is_a_checkpoint() -> None:
    layout = pool_layout(of(LINEAR, SHORT))
    assert layout.block_bytes == layout.checkpoint_bytes(16)
    assert not pool_layout(of(FULL, LATENT)).exact
    assert pool_layout(of(FULL)).checkpoint_blocks(500) == 0


def test_llama_keeps_131072_bytes_a_token() -> None:
    """Llama 3.1 8B: 32 layers x 2 x 8 heads x 128 x 2 bytes."""
    assert pool_layout(model("llama-3.1-8b")).block_bytes == 16 * 131072


@pytest.mark.parametrize("name", names())
def test_every_model_of_the_catalog_has_a_layout(name: str) -> None:
    found = pool_layout(model(name))
    assert sorted(place for group in found.groups for place in group.layers) == list(
        range(model(name).layer_count)
    )
    assert found.block_bytes > 0
    assert found.exact == (found.checkpoint_blocks(4096) > 0)


def test_checkpoints_are_wanted_at_the_end_and_where_prompts_part() -> None:
    assert checkpoints_at(PrefixHit(0, 0, None, 0), 9) == (9,)
    assert checkpoints_at(PrefixHit(32, 2, None, 5), 9) == (5, 9)
    assert checkpoints_at(PrefixHit(80, 5, None, 5), 9) == (9,)
    assert checkpoints_at(PrefixHit(0, 0, None, 0), 0) == ()
