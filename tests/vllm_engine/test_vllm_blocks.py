"""KV in vLLM's blocks, read and written whatever their order; vLLM's own is tried by `make test-vllm`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.kv.handles import directory_mark, model_in, part_in
from potluck.vllm.vllm_blocks import (
    LayerBlocks,
    ModelShard,
    PackedBlocks,
    PlainBlocks,
    VllmLayer,
    check_caches,
    check_version,
    fingerprint,
    keeps_all_of_windows,
    layer_of,
    mark_of,
)

HEADS, WIDTH = 2, 8


def turned(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As a processor may like it: keys channel by channel, values in pairs of tokens."""
    blocks, heads, tokens, content = cache.shape
    halves = cache.view(blocks, heads, 2, tokens * content // 2)
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        block, place = divmod(slot, tokens)
        for channel in range(content // 2):
            halves[block, :, 0, channel * tokens + place] = key[:, channel]
            halves[block, :, 1, (place // 2 * content // 2 + channel) * 2 + place % 2] = value[:, channel]


def kinds(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, LayerBlocks]:
    def cache(content: int, heads: int = HEADS) -> Tensor:
        return torch.zeros(6, heads, tokens, content, dtype=dtype)

    strided = torch.zeros(6, tokens, HEADS, 2 * WIDTH, dtype=dtype).transpose(1, 2)
    return {
        "plain": PlainBlocks(cache(2 * WIDTH), "kv"),
        "strided": PlainBlocks(strided, "kv"),
        "latent": PlainBlocks(cache(WIDTH, 1), "latent"),
        "packed": PackedBlocks(cache(2 * WIDTH), turned),
    }


@pytest.mark.parametrize("kind", ["plain", "strided", "latent", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_is_read_at_any_cut(kind: str, dtype: torch.dtype) -> None:
    blocks = kinds(4, dtype)[kind]
    table = (5, 0, 3)
    values = torch.randn(blocks.shape.of(11)).to(dtype)
    blocks.write(table, 0, values[:6])
    blocks.write(table, 6, values[6:])
    assert torch.equal(blocks.read(table, 0, 11), values)
    assert torch.equal(blocks.read(table, 3, 10), values[3:10])
    blocks.write(table, 2, values[5:7])
    assert torch.equal(blocks.read(table, 1, 5), torch.cat([values[1:2], values[5:7], values[4:5]]))


def test_plain_keys_and_values_lie_side_by_side() -> None:
    cache = torch.zeros(2, HEADS, 4, 2 * WIDTH)
    blocks = PlainBlocks(cache, "kv")
    values = torch.randn(blocks.shape.of(1))
    blocks.write((1,), 2, values)
    assert torch.equal(cache[1, :, 2, :WIDTH], values[0, 0])
    assert torch.equal(cache[1, :, 2, WIDTH:], values[0, 1])


def test_an_order_that_cannot_be_followed_is_refused() -> None:
    def lost(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache[1] = 1

    with pytest.raises(InputError, match="cannot follow"):
        PackedBlocks(torch.zeros(2, 1, 4, 8), lost)


def test_eight_bit_caches_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="float8_e4m3fn cannot be handed over"):
        PlainBlocks(torch.zeros(1, 1, 4, 8, dtype=torch.float8_e4m3fn), "kv")


def test_a_fingerprint_is_of_model_weights_format_and_share_but_not_of_blocks() -> None:
    def mark(tokens: int = 4, dtype: torch.dtype = torch.float32, weights: str = "w", **share: int) -> str:
        return fingerprint(weights, ModelShard(**share), {0: VllmLayer(kinds(tokens, dtype)["plain"])})

    assert mark() == mark(tokens=8)
    others = [mark(dtype=torch.bfloat16), mark(weights="v"), mark(tensor_size=2), mark(stages=2)]
    assert len({mark(), *others}) == 5
    # To a gateway those that are cut otherwise are the same model; whoever fetches is told how they are cut.
    assert model_in(mark()) == model_in(mark(tensor_size=2)) == "w-float32"
    assert part_in(mark(tensor_size=2)) == "tensor 1/2 stage 1/1"


def test_a_directory_has_one_mark_whichever_engine_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "transformers_version": "4"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    before = mark_of(str(tmp_path), None, {}, {})
    (tmp_path / "config.json").write_text('{"transformers_version": "5", "a": 1}')
    assert mark_of(str(tmp_path), "main", {"more": 2}, {}) == before == directory_mark(tmp_path)
    assert mark_of(str(tmp_path), None, {}, {"rope_theta": 2}) != before
    (tmp_path / "model.safetensors").write_bytes(bytes(range(255)) + bytes(1) + bytes(range(256)) * 399)
    assert directory_mark(tmp_path) != before
    assert mark_of("org/name", None, {"a": 1}, {}) != mark_of("org/name", None, {"a": 2}, {})


def test_a_vllm_that_was_not_tried_is_refused_unless_asked_for() -> None:
    assert check_version("0.32.0+cpu") == ""
    with pytest.raises(InputError, match="tried with 0.32.0, not with 0.99"):
        check_version("0.99")
    assert "0.99" in check_version("0.99", anyway=True)


def test_layers_are_known_by_number() -> None:
    assert layer_of("model.layers.13.self_attn.attn") == 13
    with pytest.raises(InputError):
        layer_of("model.layers.3.mixer.2.attn")


def specs(**kinds: dict[str, object]) -> SimpleNamespace:
    """As vLLM tells its groups: a kind of cache each, with what it says of itself."""
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=type(name, (), {"block_size": 4, **kind})())
        for name, kind in kinds.items()
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def test_what_cannot_be_handed_over_is_named_when_vllm_starts() -> None:
    window: dict[str, object] = {"sliding_window": 8}
    assert not check_caches(specs(FullAttentionSpec={}), "auto")
    assert check_caches(specs(FullAttentionSpec={}, SlidingWindowSpec=window), "bfloat16")
    assert not keeps_all_of_windows(specs(FullAttentionSpec={}, SlidingWindowSpec=window))
    assert keeps_all_of_windows(specs(FullAttentionSpec=window))
    with pytest.raises(InputError, match="kv-cache-dtype: fp8_e5m2 cannot"):
        check_caches(specs(FullAttentionSpec={}), "fp8_e5m2")
    with pytest.raises(InputError, match="has caches of ChunkedLocalAttentionSpec, MambaSpec; only"):
        check_caches(specs(FullAttentionSpec={}, MambaSpec={}, ChunkedLocalAttentionSpec={}), "auto")
