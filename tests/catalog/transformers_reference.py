"""transformers' own configurations with the dimensions of a catalog model, to compare against."""

from __future__ import annotations

from typing import Any

from potluck.core.values.model import DenseFfn, FullAttention, LatentAttention, LinearAttention, Model, MoeFfn

CONFIG_CLASSES = {
    "Llama-3.1-8B": "LlamaConfig", "Llama-3-70B": "LlamaConfig", "Llama-3.1-70B": "LlamaConfig",
    "Llama-2-7B": "LlamaConfig", "Llama-2-13B": "LlamaConfig", "Llama-2-70B": "LlamaConfig",
    "LLaMA-30B": "LlamaConfig", "Qwen2-7B": "Qwen2Config", "Qwen1.5-14B": "Qwen2Config",
    "Qwen3-32B": "Qwen3Config", "Qwen3-235B-A22B": "Qwen3MoeConfig", "Phi-4": "Phi3Config",
    "GPT-OSS-20B": "GptOssConfig", "GPT-OSS-120B": "GptOssConfig", "Kimi-Linear-48B-A3B": "KimiLinearConfig",
    "MiMo-V2-Flash": "MiMoV2FlashConfig", "Qwen3.5-397B-A17B": "Qwen3_5MoeTextConfig",
    "MiniMax-M2.5": "MiniMaxM2Config", "DeepSeek-V3": "DeepseekV3Config",
}  # fmt: skip
"""All but Ring-2.5-1T, of whose kind transformers has no class, and the internal model of PrfaaS."""


def reference_config(model: Model) -> Any:
    """A transformers configuration for `model`, built from nothing but the catalog's dimensions."""
    import transformers

    values: dict[str, Any] = {
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layer_count,
        "max_position_embeddings": model.max_context_tokens,
        "tie_word_embeddings": model.tied_embeddings,
    }
    for part in dict.fromkeys(layer.attention for layer in model.layers):
        values.update(_attention(part))
    for part in dict.fromkeys(layer.ffn for layer in model.layers):
        values.update(_ffn(part))
    kind = CONFIG_CLASSES[model.name]
    values.update(_pattern(model, kind))
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[token] = None  # scaled-down vocabularies do not hold the published ids
    return getattr(transformers, kind)(**values)


def _attention(attention: object) -> dict[str, Any]:
    if isinstance(attention, LatentAttention):
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {"num_attention_heads": attention.heads, **{name: getattr(attention, name) for name in names}}
    if isinstance(attention, LinearAttention):
        return {
            "linear_num_heads": attention.value_heads,
            "linear_head_dim": attention.key_head_dim,
            "linear_num_key_heads": attention.key_heads,
            "linear_num_value_heads": attention.value_heads,
            "linear_key_head_dim": attention.key_head_dim,
            "linear_value_head_dim": attention.value_head_dim,
            "linear_conv_kernel_dim": attention.conv_kernel,
        }
    assert isinstance(attention, FullAttention)
    values: dict[str, Any] = {"num_attention_heads": attention.heads, "head_dim": attention.head_dim}
    if attention.v_head_dim != attention.head_dim:
        values["v_head_dim"] = attention.v_head_dim
    if attention.window is None:
        values["num_key_value_heads"] = attention.kv_heads
    else:
        values["sliding_window"] = attention.window
    return values


def _ffn(ffn: object) -> dict[str, Any]:
    if isinstance(ffn, DenseFfn):
        return {"intermediate_size": ffn.intermediate}
    assert isinstance(ffn, MoeFfn)
    shared = ffn.shared_intermediate
    return {
        "num_experts": ffn.experts,
        "num_local_experts": ffn.experts,
        "n_routed_experts": ffn.experts,
        "num_experts_per_tok": ffn.active,
        "moe_intermediate_size": ffn.intermediate,
        "n_shared_experts": shared // ffn.intermediate,
        "shared_expert_intermediate_size": shared,
    }


def _pattern(model: Model, kind: str) -> dict[str, Any]:
    """Which layer is of which kind, in each family's own words."""
    values: dict[str, Any] = {}
    moes = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeFfn)]
    if kind in ("GptOssConfig", "MiniMaxM2Config"):
        values["intermediate_size"] = moes[0].intermediate  # these two name the experts' width so
    if kind == "DeepseekV3Config":
        values["first_k_dense_replace"] = model.layer_count - len(moes)
    if kind in ("GptOssConfig", "MiMoV2FlashConfig", "KimiLinearConfig", "Qwen3_5MoeTextConfig"):
        values["layer_types"] = [_word(layer.attention) for layer in model.layers]
    if kind in ("MiMoV2FlashConfig", "KimiLinearConfig"):
        values["mlp_layer_types"] = [
            "sparse" if isinstance(layer.ffn, MoeFfn) else "dense" for layer in model.layers
        ]
    return values


def _word(part: object) -> str:
    if isinstance(part, LinearAttention):
        return "linear_attention"
    if isinstance(part, FullAttention) and part.window is not None:
        return "sliding_attention"
    return "full_attention"
