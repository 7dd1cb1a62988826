"""Which members of a config.json the engine understands: a key that it does not know is refused, never ignored.

A key is either read (by `catalog` for the shapes, by `config.py` for the rest), or harmless: it has nothing to do
with logits, or is about training. Some are fine with one value only, which is what a family's code does anyway.
Anything else may change what the model computes, so the file is refused with the key's name. `docs/checkpoints.csv`
has what comes of each, tried against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.errors import InputError
from potluck.core.values.model import FullAttention, Model

# fmt: off
HARMLESS = frozenset({
    # Names, versions, and where code is.
    "architectures", "auto_map", "model_type", "name_or_path", "tokenizer_class", "torch_dtype", "dtype",
    "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "model_name",
    # Training.
    "attention_dropout", "aux_loss_alpha", "classifier_dropout", "embd_pdrop", "finetuning_task",
    "gradient_checkpointing", "hidden_dropout", "initializer_factor", "initializer_range", "attn_pdrop",
    "output_router_logits", "pretraining_tp", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
    "router_z_loss_coef", "seq_aux", "ep_size", "problem_type", "id2label", "label2id", "loss_type",
    "use_bfloat16",
    # How it is run elsewhere.
    "attn_implementation", "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict",
    "torchscript", "use_cache", "use_flash_attn", "cache_implementation", "max_length", "min_length",
    "model_max_length",
    # Tokens, and what generation_config.json says better.
    "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "do_sample", "eos_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "pad_token_id", "sep_token_id", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "bad_words_ids", "diversity_penalty", "early_stopping", "length_penalty",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values",
    "return_dict_in_generate", "suppress_tokens", "task_specific_params", "tf_legacy_loss",
    "cross_attention_hidden_size",
    # Heads that guess further tokens are left out.
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
})

READ = frozenset({
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "quantization_config", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
})
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers"}
_EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size",
            "decoder_sparse_step", "mlp_only_layers"}
_SHARED = {"shared_expert_intermediate_size"}
_DELTA = {"head_dim", "attention_bias", "layer_types", "full_attention_interval", "linear_conv_kernel_dim",
          "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
          "partial_rotary_factor"}
_LATENT = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
           "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace",
           "routed_scaling_factor", "n_group", "topk_group"}
READ_BY: dict[str, frozenset[str]] = {family: READ | keys for family, keys in {
    "llama": {"head_dim", "attention_bias", "mlp_bias"},
    "mistral": {"head_dim", "sliding_window"},
    "mixtral": {"head_dim", "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"},
    "phi3": {"head_dim", "sliding_window", "original_max_position_embeddings", "partial_rotary_factor"},
    "qwen2": {"layer_types", *_WINDOWS},
    "qwen2_moe": {"layer_types", "qkv_bias", *_WINDOWS, *_EXPERTS, *_SHARED},
    "qwen3": {"head_dim", "attention_bias", "layer_types", *_WINDOWS},
    "qwen3_moe": {"head_dim", "attention_bias", *_WINDOWS, *_EXPERTS},
    "qwen3_next": _DELTA | _EXPERTS | _SHARED,
    "qwen3_5_text": _DELTA,
    "deepseek_v2": _LATENT | {"topk_method"},
    "deepseek_v3": _LATENT | {"norm_topk_prob", "rope_interleave"},
    "kimi_k2": _LATENT | {"norm_topk_prob", "rope_interleave"},
}.items()}
"""The keys that count, by family."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,), "attention_bias": (False,), "is_decoder": (False, True),
    "is_encoder_decoder": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1.0,), "pruned_heads": ({},),
    "tie_encoder_decoder": (False,), "use_qk_norm": (False,), "use_sliding_window": (False,), "qkv_bias": (False,),
    "final_logit_softcapping": (0.0,), "attn_logit_softcapping": (0.0,), "logit_scale": (1.0,),
    "logits_scaling": (1.0,), "residual_multiplier": (1.0,), "embedding_multiplier": (1.0,),
    "sliding_window": (0,), "moe_layer_freq": (1,), "use_mrope": (False,),
}
"""Keys that a family does not read, and the values with which that makes no difference."""
_ALWAYS: dict[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
NEUTRAL_IN: dict[str, dict[str, tuple[object, ...]]] = {
    "qwen2": {"attention_bias": (True, False)},  # its code has them whatever the file says, and none at the output
    "deepseek_v2": {"scoring_func": ("softmax",), "norm_topk_prob": (False,), "rope_interleave": (True,)},
    "deepseek_v3": _ALWAYS,
    "kimi_k2": _ALWAYS,
    "qwen3_next": {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)},
    "qwen3_5_text": {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)},
}
_GROUPED = ("n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
            "q_lora_rank")
MUST_HAVE: dict[str, tuple[str, ...]] = {
    "deepseek_v2": ("n_shared_experts", "q_lora_rank"), "deepseek_v3": _GROUPED, "kimi_k2": _GROUPED,
}
"""Keys for which nobody can guess what was meant: a family's code has defaults that are one model's own."""

ROPE_KEYS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type",
    "truncate", "type",
    # Positions in pictures: all parts of a position are the same in a text.
    "mrope_interleaved", "mrope_section",
    "finetuned",
})
# fmt: on


PHI_ROPE_KEYS = ROPE_KEYS | {"short_factor", "long_factor"}


def check_keys(values: Mapping[str, object], family: str, model: Model) -> None:
    """Raises InputError for the first key that is not understood."""
    own = NEUTRAL_IN.get(family, {})
    for key in MUST_HAVE.get(family, ()):
        if key not in values:
            raise InputError(f"config.json: {key}", f"is missing; a {family} model must say it")
    for key, value in values.items():
        if value is None or key in READ_BY[family] or key in HARMLESS or key.startswith("_"):
            continue
        if _derived(key, value, values, model):
            continue
        fine = own.get(key, NEUTRAL.get(key))
        if fine is None:
            raise InputError(
                f"config.json: {key}", f"is not known in a {family} model, and may change what it computes"
            )
        if value not in fine:
            wanted = " or ".join(map(_shown, fine)) or "null"
            raise InputError(f"config.json: {key}", f"{_shown(value)} cannot be run; only {wanted} can")
    for key in ("rope_scaling", "rope_parameters"):
        part = values.get(key)
        for name, value in part.items() if isinstance(part, dict) else ():
            if name not in (PHI_ROPE_KEYS if family == "phi3" else ROPE_KEYS) and value is not None:
                raise InputError(
                    f"config.json: {key}.{name}", "is not known, and may change what the model computes"
                )


def _derived(key: str, value: object, values: Mapping[str, object], model: Model) -> bool:
    """Whether a key only repeats what follows from others, as transformers writes it."""
    if key == "qk_head_dim":
        parts = (values.get("qk_nope_head_dim"), values.get("qk_rope_head_dim"))
        return all(isinstance(part, int) for part in parts) and value == sum(parts)  # type: ignore[arg-type]
    if key == "head_dim":
        return value == values.get("qk_rope_head_dim", _head_dim(model))
    if key == "max_window_layers":
        return not values.get("use_sliding_window")
    if key == "layer_types":
        full = [isinstance(layer.attention, FullAttention) for layer in model.layers]
        windows = [isinstance(a := layer.attention, FullAttention) and a.window for layer in model.layers]
        plain = ["sliding_attention" if window else "full_attention" for window in windows]
        return all(full) and value == plain
    return False


def _head_dim(model: Model) -> int | None:
    sizes = {layer.attention.head_dim for layer in model.layers if isinstance(layer.attention, FullAttention)}
    return sizes.pop() if len(sizes) == 1 else None


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."
