"""A tiny model of every family that the engine runs, as the members of its config.json.

The checks beside this file and the tests make checkpoints of them. Nothing is imported here, so that it is at hand
wherever the engine is.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

BASE: Values = {
    "hidden_size": 32,
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXPERTS: Values = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATENT: Values = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DELTA: Values = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

LLAMA3: Values = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BETAS: Values = {"beta_fast": 32, "beta_slow": 1}
YARN: Values = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, **BETAS}

BASES: dict[str, Values] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 12, "n_group": 4, "topk_group": 2},
    "kimi_k2": {**LATENT, "q_lora_rank": 12, "n_group": 1, "topk_group": 1},
}
"""What each model type has beyond BASE."""


def scaled(rope: Values) -> Values:
    """Rope parameters for a context that was made longer."""
    return {**rope, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}


VARIANTS: dict[str, tuple[str, Values]] = {
    "llama-llama3-rope": ("llama", {"rope_parameters": scaled(LLAMA3)}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 20, "head_dim": 16}),
    "phi3-longrope": (
        "phi3",
        {
            "hidden_size": 64,
            "initializer_range": 0.15,
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.1, 1.7, 2.3, 3.1],
                "long_factor": [2.0, 5.0, 7.0, 9.0],
            },
        },
    ),
    "qwen2-some-windows": (
        "qwen2",
        {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3-moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {"q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-yarn": ("deepseek_v3", {"n_group": 2, "topk_group": 1, "rope_parameters": scaled(YARN)}),
}
SAMPLES: dict[str, tuple[str, Values]] = {**{family: (family, {}) for family in BASES}, **VARIANTS}
"""By name: the model type, and what differs from its base."""


def config_of(family: str, changes: Values | None = None) -> Values:
    return {"model_type": family, **BASE, **BASES[family], **(changes or {})}
