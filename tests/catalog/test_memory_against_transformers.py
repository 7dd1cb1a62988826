"""Parameters and KV bytes equal what transformers builds and allocates for the same dimensions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers_reference import CONFIG_CLASSES, reference_config

from potluck.catalog import huggingface, models
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model, MoeFfn
from potluck.perf import memory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BF16_BYTES = 2


def _built(config: Any, device: str, dtype: Any = torch.bfloat16) -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _cache_after_forward(model: Model, tokens: int, new_cache: Callable[[Any], Any]) -> Any:
    """A cache after a forward pass: in bfloat16 for one token; for more in float32, whose entries take twice as much,
    since processors without arithmetic in bfloat16 take seconds for those."""
    built = _built(reference_config(model), "cpu", torch.bfloat16 if tokens == 1 else torch.float32)
    cache = new_cache(built.config)
    with torch.no_grad():
        built(torch.zeros((1, tokens), dtype=torch.long), past_key_values=cache, use_cache=True)
    return cache


def _dynamic_cache(config: Any) -> Any:
    return transformers.DynamicCache(config=config)


@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_parameter_count_equals_that_of_transformers(name: str) -> None:
    model = models.model(name)
    built = _built(reference_config(model), "meta")
    tensors = sum(parameter.numel() for parameter in built.parameters())
    # The routers' correction biases are part of the checkpoint, but buffers in transformers.
    tensors += sum(buffer.numel() for key, buffer in built.named_buffers() if key.endswith("correction_bias"))
    assert memory.parameters(model) == tensors


@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_catalog_model_survives_config_json(name: str, tmp_path: Path) -> None:
    """Catalog -> transformers config -> config.json -> read_model gives the same architecture."""
    model = models.model(name)
    reference_config(model).to_json_file(tmp_path / "config.json", use_diff=False)
    read = huggingface.read_model(tmp_path, name=name)
    # A plain config says nothing about quantisation: that is tested apart.
    bits = {field: getattr(model, field) for field in ("weight_bits", "expert_bits", *models.FORMATS)}
    assert replace(read, **bits) == model


def test_published_config_key_variants_are_read(tmp_path: Path) -> None:
    """MiMo's and Kimi's own files use other keys than transformers writes."""
    mimo = models.model("MiMo-V2-Flash")
    config = json.loads(reference_config(mimo).to_json_string(use_diff=False))
    kinds, ffns = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    config["moe_layer_freq"] = [int(kind == "sparse") for kind in ffns]
    config |= {
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "n_shared_experts": None,
    }
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert huggingface.read_model(tmp_path, name=mimo.name) == mimo

    kimi = models.model("Kimi-Linear")
    config = json.loads(reference_config(kimi).to_json_string(use_diff=False))
    for key in (
        "layer_types",
        "mlp_layer_types",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    ):
        config.pop(key)
    full = [4, 8, 12, 16, 20, 24, 27]
    config["linear_attn_config"] = {
        "full_attn_layers": full,
        "kda_layers": [index for index in range(1, 28) if index not in full],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
    config["first_k_dense_replace"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert huggingface.read_model(tmp_path, name=kimi.name) == kimi


def _reduced_model(model: Model, layers: int) -> Model:
    """The same kinds of layers with the same KV heads, state and window; thin everywhere else."""
    stack = []
    for layer in model.layers[:layers]:
        ffn = layer.ffn
        if isinstance(ffn, MoeFfn):
            shared = 16 if ffn.shared_intermediate else 0
            ffn = replace(ffn, experts=4, active=2, intermediate=16, shared_intermediate=shared)
        else:
            ffn = replace(ffn, intermediate=16)
        stack.append(replace(layer, ffn=ffn))
    return replace(model, hidden=64, vocab=128, layers=tuple(stack))


def _held_bytes(cache: Any, tokens: int) -> int:
    """In bfloat16, whichever of the two formats `_after` had."""
    tensors = [item for layer in cache.layers for item in (layer.keys, layer.values) if item is not None]
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return held_bytes if tokens == 1 else held_bytes // 2


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Llama-3.1-8B", 2),
        ("Llama-2-7B", 1),
        ("Qwen2-7B", 2),
        ("Qwen3-32B", 2),
        ("Qwen3-235B-A22B", 2),
        ("Phi-4", 2),
    ],
)
@pytest.mark.parametrize("tokens", [1, 40])
# Said by torch on processors without arithmetic in bfloat16; the cache is as large there.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed, switching to BLAS gemm:UserWarning")
def test_kv_bytes_equal_a_cache_after_a_forward_pass(name: str, layers: int, tokens: int) -> None:
    model = _reduced_model(models.model(name), layers)
    assert _held_bytes(_cache_after_forward(model, tokens, _dynamic_cache), tokens) == memory.kv_bytes(
        model, tokens
    )


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("GPT-OSS-20B", 1),
        ("GPT-OSS-20B", 127),
        ("GPT-OSS-20B", 129),
        ("GPT-OSS-120B", 128),
        ("GPT-OSS-120B", 200),
    ],
)
def test_window_layers_hold_no_more_than_the_window(name: str, tokens: int) -> None:
    """A cache of fixed size allocates min(tokens, window) slots, which is what we count."""
    model = _reduced_model(models.model(name), 4)
    cache = _cache_after_forward(
        model, tokens, lambda config: transformers.StaticCache(config=config, max_cache_len=tokens)
    )
    assert _held_bytes(cache, tokens) == memory.kv_bytes(model, tokens)


def test_growing_cache_drops_one_more_window_token() -> None:
    """Between steps the growing cache keeps window - 1 tokens: the next token completes the window."""
    model = _reduced_model(models.model("GPT-OSS-20B"), 4)
    cache = _cache_after_forward(model, 200, _dynamic_cache)
    one_token = memory.window_bytes_per_token(model)[128]
    assert _held_bytes(cache, 200) == memory.kv_bytes(model, 200) - one_token


@pytest.mark.parametrize("name", ["Qwen3.5-397B-A17B", "Kimi-Linear-48B-A3B"])
def test_linear_state_size_equals_the_transformers_cache(name: str) -> None:
    """The recurrent state is held in 32 bits; transformers keeps one more conv input than is needed."""
    model = _reduced_model(models.model(name), 4)
    cache = _cache_after_forward(model, 9, _dynamic_cache)
    seen = 0
    for held, layer in zip(cache.layers, model.layers, strict=True):
        attention = layer.attention
        if isinstance(attention, LinearAttention):
            recurrent, conv = _states(held)
            assert recurrent == attention.state_elements
            assert conv == attention.conv_channels * attention.conv_kernel
            needed = attention.conv_channels * (attention.conv_kernel - 1) * BF16_BYTES
            index = model.layers.index(layer)
            assert memory.state_bytes(model, range(index, index + 1)) == recurrent * 4 + needed
            seen += 1
        elif isinstance(attention, FullAttention):
            grown = held.keys.numel() + held.values.numel()
            assert grown * BF16_BYTES == 9 * attention.kv_heads * 2 * attention.head_dim * BF16_BYTES
    assert seen == 3


def _states(held: Any) -> tuple[int, int]:
    def total(value: Any) -> int:
        items = (
            value
            if isinstance(value, list | tuple)
            else value.values()
            if isinstance(value, dict)
            else [value]
        )
        return sum(item.numel() for item in items if item is not None)

    return total(held.recurrent_states), total(held.conv_states)


def test_latent_attention_counts_only_the_latent() -> None:
    """transformers expands MLA's cache to full heads; serving engines keep the latent, as we count."""
    model = models.model("DeepSeek-V3")
    assert isinstance(model.layers[0].attention, LatentAttention)
    latent_bytes = (512 + 64) * BF16_BYTES
    assert memory.kv_bytes_per_token(model) == 61 * latent_bytes == 70272
