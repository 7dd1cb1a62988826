"""What vLLM says of its caches: layers with their blocks, or why they cannot be handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from potluck.core.errors import InputError
from potluck.vllm.identity import layer_of
from potluck.vllm.vllm_blocks import LayerBlocks, PackedBlocks, PlainBlocks, VllmLayer

if TYPE_CHECKING:
    from torch import Tensor

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOWED = frozenset({"SlidingWindowSpec"})
EXACT = frozenset({"auto", "float16", "bfloat16", "float32", "half", "float"})


def check_caches(kv_cache_config: Any, cache_dtype: str) -> bool:
    """InputError for what cannot be handed over; whether some layers keep no more than a window."""
    if cache_dtype not in EXACT:
        raise InputError(
            "--kv-cache-dtype",
            f"{cache_dtype} cannot be handed over by this connector; leave it out, or take bfloat16 or float16",
        )
    kinds = {type(spec).__name__ for _, _, spec in _specs(kv_cache_config)}
    unknown = sorted(kinds - FULL - WINDOWED)
    if unknown:
        raise InputError(
            "model",
            f"has caches of {', '.join(unknown)}; only models whose layers all have full attention, latents or a "
            "sliding window can be handed over by this connector",
        )
    return bool(kinds & WINDOWED)


def keeps_all_of_windows(kv_cache_config: Any) -> bool:
    """As with --disable-hybrid-kv-cache-manager."""
    return any(
        type(spec).__name__ in FULL and getattr(spec, "sliding_window", None)
        for _, _, spec in _specs(kv_cache_config)
    )


def layers_of(kv_caches: Mapping[str, Tensor], kv_cache_config: Any, config: Any) -> dict[int, VllmLayer]:
    """By their numbers in the model."""
    context = config.compilation_config.static_forward_context
    specs = {name: (group, spec) for group, name, spec in _specs(kv_cache_config)}
    found: dict[int, VllmLayer] = {}
    for name, cache in kv_caches.items():
        number = layer_of(name)
        if number in found:
            raise InputError("vLLM", f"has two caches for layer {number}; that cannot be handed over")
        if name not in specs:
            raise InputError("vLLM", f"has a cache of {name}, which is in none of its groups")
        group, spec = specs[name]
        window = int(spec.sliding_window) if type(spec).__name__ in WINDOWED else None
        blocks = _blocks(cache, int(spec.block_size), context[name], latent=config.model_config.use_mla)
        found[number] = VllmLayer(blocks, group, window)
    return found


def _specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """(group, layer, what is kept of it)"""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    for number, group in enumerate(groups):
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield number, name, group.kv_cache_spec if each is None else each[name]


def _blocks(cache: Tensor, block_tokens: int, layer: Any, *, latent: bool) -> LayerBlocks:
    if cache.dim() != 4 or cache.shape[2] != block_tokens:
        raise InputError(
            "vLLM",
            f"has blocks of shape {list(cache.shape)}, expected blocks x heads x {block_tokens} tokens x content",
        )
    isa = getattr(layer, "isa", None)
    if isa is None:
        return PlainBlocks(cache, "latent" if latent else "kv")
    from vllm import _custom_ops as ops

    def write(keys: Tensor, values: Tensor, into: Tensor, slots: Tensor) -> None:
        blocks, heads, tokens, _ = into.shape
        halves = into.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)

    return PackedBlocks(cache, write)
