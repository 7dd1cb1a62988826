"""Changes to the config.json of each family, one at a time: what a checkpoint may have beyond the usual.

`check_checkpoints.py` makes a checkpoint of each, and compares the engine with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sample_models import BASE, BASES, LLAMA3, YARN, Values, config_of, scaled

ABSENT = "(absent)"  # In place of a value: the key is left out.


@dataclass(frozen=True)
class Case:
    family: str
    changes: Values

    @property
    def label(self) -> str:
        return ", ".join(
            f"no {key}" if value == ABSENT else f"{key}: {json.dumps(value)}"
            for key, value in self.changes.items()
        )

    def config(self) -> Values:
        values = config_of(self.family, self.changes)
        return {key: value for key, value in values.items() if value != ABSENT}


def _each(**choices: list[Any]) -> list[Values]:
    return [{key: value} for key, values in choices.items() for value in values]


def _scaling(**more: Any) -> Values:
    return {"rope_scaling": {**more, "original_max_position_embeddings": 64}}


PLAIN: Values = {"rope_theta": 777.0, "rope_type": "default"}
LINEAR: Values = {"rope_type": "linear", "factor": 4.0}
SHORT_LONG: Values = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
ROPE: list[Values] = [
    {"rope_theta": 500_000.0},
    {"rope_theta": 0},
    {"rope_theta": -1.0},
    {"rope_theta": "big"},
    {"rope_parameters": PLAIN},
    {"rope_scaling": {"type": "default"}},
    {"rope_scaling": LINEAR},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    _scaling(**LLAMA3),
    {"rope_scaling": LLAMA3},
    _scaling(rope_type="yarn", factor=4.0),
    _scaling(rope_type="yarn", factor=4.0, truncate=False),
    _scaling(rope_type="yarn", factor=4.0, attention_factor=1.3),
    _scaling(rope_type="yarn", factor=4.0, beta_fast=16, beta_slow=2),
    _scaling(**YARN),
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    _scaling(rope_type="longrope", factor=4.0, **SHORT_LONG),
    _scaling(rope_type="yarn", factor=4.0, finetuned=True),
    {"rope_parameters": scaled(YARN), "rope_scaling": LINEAR},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": "linear"},
]
MIXED = ["full_attention", "sliding_attention", "full_attention"]
COMMON: list[Values] = [
    *ROPE,
    *_each(hidden_act=["gelu", "gelu_pytorch_tanh"], attention_bias=[True], mlp_bias=[True]),
    *_each(tie_word_embeddings=[True], head_dim=[8, 24], num_key_value_heads=[1, 2, 4]),
    *_each(rms_norm_eps=[1e-2, ABSENT], max_position_embeddings=[64], sliding_window=[20, ABSENT]),
    *_each(use_sliding_window=[True], attention_dropout=[0.5], pretraining_tp=[2], use_cache=[False]),
    *_each(dtype=["float16", "float32", "float64", "int8"], torch_dtype=["bfloat16"]),
    *_each(final_logit_softcapping=[30.0], logit_scale=[0.5], query_pre_attn_scalar=[64]),
    *_each(residual_multiplier=[0.5], no_rope_layers=[[1, 0, 1]], a_new_key=[1, None]),
    *_each(architectures=[["SomeForCausalLM"]], output_attentions=[True], vocab_size=[97]),
    *_each(num_hidden_layers=[1], hidden_size=[64], intermediate_size=[64], num_attention_heads=[2]),
    *_each(quantization_config=[{"quant_method": "gptq", "bits": 4}]),
    {"use_sliding_window": True, "sliding_window": 20},
    {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 1},
    {"sliding_window": 20, "layer_types": MIXED},
    {"use_sliding_window": True, "sliding_window": 20, "layer_types": MIXED},
]
EXPERTS: list[Values] = [
    *_each(num_experts_per_tok=[1], norm_topk_prob=[True, False], router_jitter_noise=[0.3]),
    *_each(router_aux_loss_coef=[0.1], output_router_logits=[True], decoder_sparse_step=[2]),
    *_each(mlp_only_layers=[[0]], moe_intermediate_size=[24]),
]
RENAMED: Values = {"num_experts": ABSENT, "num_local_experts": 8}
SHARED: list[Values] = _each(shared_expert_intermediate_size=[16])
DELTA: list[Values] = [
    *_each(linear_conv_kernel_dim=[2, 1], linear_num_value_heads=[2], linear_num_key_heads=[4]),
    *_each(linear_key_head_dim=[16], linear_value_head_dim=[8]),
    *_each(layer_types=[ABSENT, ["full_attention"] * 3, ["linear_attention"] * 3]),
    *_each(attn_output_gate=[True, False], mamba_ssm_dtype=["float32"]),
    {"layer_types": ABSENT, "full_attention_interval": 2},
    {"partial_rotary_factor": 1.0},
    {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {**PLAIN, "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
]
LATENT: list[Values] = [
    *_each(q_lora_rank=[None, 12, ABSENT], first_k_dense_replace=[0, 2, 3, ABSENT]),
    *_each(n_shared_experts=[1, 0, None, ABSENT], routed_scaling_factor=[2.5, ABSENT]),
    *_each(norm_topk_prob=[True, False], n_group=[1, 2, None, ABSENT], topk_group=[1, None, ABSENT]),
    *_each(topk_method=["greedy", "group_limited_greedy", "noaux_tc"], scoring_func=["softmax", "sigmoid"]),
    *_each(rope_interleave=[False], moe_layer_freq=[1, 2], num_experts_per_tok=[1]),
    *_each(num_nextn_predict_layers=[1], ep_size=[1], aux_loss_alpha=[0.1], seq_aux=[True], kv_lora_rank=[8]),
    *_each(qk_nope_head_dim=[16], qk_rope_head_dim=[8], v_head_dim=[8], n_routed_experts=[16]),
    *_each(moe_intermediate_size=[24]),
]
LATENT += [
    {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    {"q_lora_rank": None, "attention_bias": True},
    {"rope_interleave": False, "rope_scaling": scaled(YARN)},
    {"rope_scaling": {**scaled(YARN), "mscale": 1.0}},
]
_LONG: Values = {"original_max_position_embeddings": 64}
PHI: list[Values] = [
    {**_LONG, "rope_scaling": {"type": "longrope", **SHORT_LONG}},
    {**_LONG, "rope_scaling": {"type": "su", **SHORT_LONG}},
    {**_LONG, "rope_scaling": {"type": "yarn", **SHORT_LONG}},
    {**_LONG, "rope_scaling": {"type": "longrope", "attention_factor": 1.3, **SHORT_LONG}},
    {**_LONG, "rope_scaling": {"type": "longrope", **SHORT_LONG}, "partial_rotary_factor": 0.5},
    {"original_max_position_embeddings": 64},
]
OWN: dict[str, list[Values]] = {
    "llama": [],
    "mistral": [],
    "mixtral": [*EXPERTS, {"num_local_experts": ABSENT, "num_experts": 4}, {"num_local_experts": 8}],
    "phi3": PHI,
    "qwen2": [],
    "qwen2_moe": [*EXPERTS, *SHARED, RENAMED, {"qkv_bias": False}],
    "qwen3": [],
    "qwen3_moe": [*EXPERTS, RENAMED],
    "qwen3_next": [*EXPERTS, *SHARED, RENAMED, *DELTA],
    "qwen3_5_text": DELTA,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
}


def cases() -> Iterator[Case]:
    """Every case, each once; the base of a family first."""
    for family in BASES:
        seen: set[str] = set()
        missing = [{key: ABSENT} for key in (*BASE, *BASES[family]) if "token_id" not in key]
        for changes in [{}, *COMMON, *OWN[family], *missing]:
            case = Case(family, changes)
            if case.label not in seen:
                seen.add(case.label)
                yield case
