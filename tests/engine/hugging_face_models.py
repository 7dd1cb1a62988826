"""Tiny random checkpoints of the families that the engine runs, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from potluck.catalog.huggingface import read_model
from potluck.engine.compute.runner import Runner, Size
from potluck.engine.model.checkpoint import Files
from potluck.engine.model.config import Config, read_config

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
MLA = {
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
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def _scaled(kind: dict[str, Any]) -> dict[str, Any]:
    return {**kind, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-llama3-rope": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _scaled(LLAMA3)}),
    "llama-biases-tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 20}),
    "qwen2-some-windows": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**MLA, "q_lora_rank": None}),
    "deepseek-v2-groups": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**MLA, "q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": 12, "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": 12, "n_group": 2, "topk_group": 1, "rope_parameters": _scaled(YARN)},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **DELTA,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA),
}


def make(name: str, folder: Path) -> Any:
    """The transformers model, saved in `folder`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    kind, config, values = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**BASE, **values})).eval()
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # What starts as a constant is given values that matter.
            if parameter_name.endswith(("norm.weight", "bias", "dt_bias", "A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter_name.endswith("gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def load(folder: Path, **values: Any) -> tuple[Config, Runner]:
    """The engine's view of the same directory."""
    config = read_config(folder, read_model(folder))
    size = {"rows": 4, "blocks": 256, "max_tokens": 512, **values}
    return config, Runner(config, Files(folder), Size(**size))
