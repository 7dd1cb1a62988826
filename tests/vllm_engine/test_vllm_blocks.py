"""Reading and writing KV in vLLM's blocks for any layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.kv.handles import directory_mark
from potluck.vllm.vllm_blocks import (
    LayerBlocks,
    PackedBlocks,
    PlainBlocks,
    check_caches,
    check_version,
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
def test_written_blocks_are_read_back_at_any_cut(kind: str, dtype: torch.dtype) -> None:
    blocks = kinds(4, dtype)[kind]
    table = (5, 0, 3)
    values = torch.randn(blocks.shape.of(11)).to(dtype)
    blocks.write(table, 0, values[:6])
    blocks.write(table, 6, values[6:])
    assert torch.equal(blocks.read(table, 0, 11), values)
    assert torch.equal(blocks.read(table, 3, 10), values[3:10])
    blocks.write(table, 2, values[5:7])
    assert torch.equal(blocks.read(table, 1, 5), torch.cat([values[1:2], values[5:7], values[4:5]]))


def test_plain_keys_and_values_are_adjacent_in_memory() -> None:
    cache = torch.zeros(2, HEADS, 4, 2 * WIDTH)
    blocks = PlainBlocks(cache, "kv")
    values = torch.randn(blocks.shape.of(1))
    blocks.write((1,), 2, values)
    assert torch.equal(cache[1, :, 2, :WIDTH], values[0, 0])
    assert torch.equal(cache[1, :, 2, WIDTH:], values[0, 1])


def test_unknown_block_layout_is_refused() -> None:
    def lost(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache[1] = 1

    with pytest.raises(InputError, match="cannot follow"):
        PackedBlocks(torch.zeros(2, 1, 4, 8), lost)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
def test_eight_bit_caches_are_stored_as_bytes_with_scales(dtype: str, scales: tuple[float, float]) -> None:
    form, factors = getattr(torch, dtype), torch.tensor(scales).view(1, 2, 1, 1)

    def quantised(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        small = [(part / scale).to(form) for part, scale in zip((keys, values), scales, strict=True)]
        turned(small[0].view(torch.uint8), small[1].view(torch.uint8), cache, slots)

    bytes_ = torch.zeros(6, HEADS, 4, 2 * WIDTH, dtype=torch.uint8)
    for blocks in (
        PlainBlocks(bytes_, "kv", dtype, scales),
        PackedBlocks(bytes_.clone(), quantised, dtype, scales),
    ):
        table, exact = (5, 0, 3), torch.randn(blocks.shape.of(11))
        blocks.write(table, 0, exact)  # larger ones are made small, with the layer's scales
        small = blocks.read(table, 0, 11)
        assert torch.equal(small.float(), (exact / factors).to(form).float())
        other = torch.randn(blocks.shape.of(11)).to(form)
        blocks.write(table, 0, other)  # those of the same format stay as they are
        assert torch.equal(blocks.read(table, 0, 11).view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", ["plain", "strided", "packed"])
def test_writing_some_heads_keeps_the_others(kind: str) -> None:
    blocks, table = kinds(4)[kind], (5, 0, 3)
    whole, one = torch.randn(blocks.shape.of(11)), torch.randn(blocks.shape.of(4, 1))
    blocks.write(table, 0, whole)
    blocks.write(table, 3, one, 1)
    whole[3:7, :, 1:] = one
    assert torch.equal(blocks.read(table, 0, 11), whole)


def test_model_fingerprint_is_the_same_for_every_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "transformers_version": "4"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    before = mark_of(str(tmp_path), None, {}, {})
    (tmp_path / "config.json").write_text('{"transformers_version": "5", "a": 1}')
    assert mark_of(str(tmp_path), "main", {"more": 2}, {}) == before == directory_mark(tmp_path)
    assert mark_of(str(tmp_path), None, {}, {"rope_theta": 2}) != before
    (tmp_path / "model.safetensors").write_bytes(bytes(range(255)) + bytes(1) + bytes(range(256)) * 399)
    assert directory_mark(tmp_path) != before
    assert mark_of("org/name", None, {"a": 1}, {}) != mark_of("org/name", None, {"a": 2}, {})


def test_untested_vllm_version_is_refused_unless_forced() -> None:
    assert check_version(f"{VLLM_VERSION}+cpu") == ""
    with pytest.raises(InputError, match=f"tested with {VLLM_VERSION}, not with 0.99"):
        check_version("0.99")
    assert "0.99" in check_version("0.99", anyway=True)


def test_layer_number_is_parsed_from_its_name() -> None:
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


def test_unsupported_cache_kinds_are_refused_when_vllm_starts() -> None:
    window: dict[str, object] = {"sliding_window": 8}
    assert not check_caches(specs(FullAttentionSpec={}), "auto")
    assert check_caches(specs(FullAttentionSpec={}, SlidingWindowSpec=window), "bfloat16") == {"window"}
    assert check_caches(specs(FullAttentionSpec={}, MambaSpec={}), "auto") == {"state"}
    assert not check_caches(specs(FullAttentionSpec=window), "fp8_e5m2")
    with pytest.raises(InputError, match="kv-cache-dtype: nvfp4 cannot"):
        check_caches(specs(FullAttentionSpec={}), "nvfp4")
    with pytest.raises(InputError, match="has caches of ChunkedLocalAttentionSpec; only"):
        check_caches(specs(FullAttentionSpec={}, MambaSpec={}, ChunkedLocalAttentionSpec={}), "auto")
