"""What the engine must know of a model beyond `core.Model`: positions, norms, routing, number format.

`read_config` takes a Hugging Face directory together with the `core.Model` that `catalog` made of the same file (this
package may not import that one), or a directory of our own kind, whose config.json holds everything:

    {"model_type": "potluck", "config": <this module's Config as core.codec writes it>}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from potluck.api.model_files import JsonMembers, read_json
from potluck.core.codec import decode, encode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.model import (
    FullAttention,
    LatentAttention,
    LinearAttention,
    Model,
    MoeFfn,
    Quantised,
    modelopt_scheme,
    quantised_of,
)

OWN_KIND = "potluck"
ROPES = ("default", "linear", "llama3", "yarn")
PHI_ROPES = ("default", "longrope")


RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `kind` says how long contexts are reached; the fields below it belong to the kinds."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    share: float = 1.0
    """The part of each head that is rotated (Qwen3-Next: a quarter)."""
    interleaved: bool = False
    """Whether pairs are neighbours in the stored weights (DeepSeek) instead of half a head apart."""
    factor: float = 1.0
    original_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """yarn: whether the ends of its ramp are rounded to whole pairs."""
    attention_factor: float = 0.0
    """yarn, longrope: what cosines and sines are multiplied by; 0 means that it follows from the others."""
    factors: tuple[float, ...] = ()
    """longrope: how much slower each pair turns, within the original context."""


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of the chosen experts are made to add up to 1."""
    scale: float = 1.0
    groups: int = 1
    """Experts are chosen within the best `top_groups` of so many groups."""
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class EngineModelConfig:
    model: Model
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    routing: ExpertRouting = ExpertRouting()
    family: str = OWN_KIND
    """The model_type, which says how tensors are named and packed in the file."""
    norm_plus_one: bool = False
    """Whether norm weights are stored as differences from 1 (Qwen3-Next)."""
    ffn_bias: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.model.layers):
            problem = _unsupported(layer.attention) or _unsupported_ffn(layer.ffn, self.routing)
            if problem:
                raise InputError(f"layer {index}", f"{problem} cannot be run by the embedded engine")
            if self.rope.kind == "longrope":
                self._check_factors(layer.attention)
        if self.family not in FAMILIES and self.family != OWN_KIND:
            known = ", ".join(sorted(FAMILIES))
            raise InputError(
                "model_type", f"{self.family!r} cannot be run by the embedded engine; known are {known}"
            )

    def _check_factors(self, attention: object) -> None:
        size = attention.head_dim if isinstance(attention, FullAttention) else 0
        if (
            len(self.rope.factors) != (count := int(size * self.rope.share) // 2)
            or min(self.rope.factors) <= 0
        ):
            raise InputError("config.json: short_factor", f"must be {count} numbers above 0")


def _unsupported(attention: object) -> str | None:
    if isinstance(attention, FullAttention):
        if attention.sinks:
            return "attention with sinks"
        if attention.v_head_dim != attention.head_dim:
            return "attention whose values and keys differ in size"
        return "a norm over all heads" if attention.qk_norm == "full" else None
    if isinstance(attention, LinearAttention):
        if attention.kind != "gated_delta":
            return f"linear attention of kind {attention.kind}"
        return None if attention.conv_kernel > 1 else "linear attention without a short convolution"
    return None


def _unsupported_ffn(ffn: object, routing: ExpertRouting) -> str | None:
    if not isinstance(ffn, MoeFfn):
        return None
    if ffn.bias:
        return "experts with biases"
    groups, top = routing.groups, routing.top_groups
    if groups < 1 or ffn.experts % groups or not 1 <= top <= groups:
        return f"a choice of {top} of {groups} groups of {ffn.experts} experts"
    if groups > 1 and ffn.experts < 2 * groups:
        return f"{groups} groups of fewer than two of {ffn.experts} experts"
    if ffn.active > ffn.experts // groups * top:
        return f"a choice of {ffn.active} experts within {top} of {groups} groups of {ffn.experts}"
    return None


def read_config(directory: str | Path, model: Model | None = None) -> EngineModelConfig:
    """The configuration in a directory; `model` is needed unless the directory is of our own kind."""
    values = read_json(Path(directory) / "config.json")
    kind = values.get("model_type")
    if kind == OWN_KIND:
        return decode(EngineModelConfig, values.get("config"), "config.json: config")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            "config.json: model_type", f"{kind!r} cannot be run; known are {', '.join(sorted(FAMILIES))}"
        )
    if model is None:
        raise InputError("config.json", f"a model of type {kind} must be described by its core.Model too")
    check_keys(values, kind, model)
    must_be_readable(directory, values)
    return _from_hugging_face(JsonMembers(values), kind, model)


def write_config(directory: str | Path, config: EngineModelConfig) -> None:
    document = {"model_type": OWN_KIND, "config": encode(config)}
    Path(directory, "config.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _from_hugging_face(members: JsonMembers, kind: str, model: Model) -> EngineModelConfig:
    dtype = members.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(
            "config.json: dtype", f"{dtype!r} cannot be run; known are bfloat16, float16, float32"
        )
    activation = members.text("hidden_act", default="silu")
    if activation != "silu":
        raise InputError("config.json: hidden_act", f"{activation!r} cannot be run; only silu can")
    rope = _rope(members, kind, model)
    if rope.kind == "longrope":
        # Beyond the original context every position turns otherwise, also those that were computed before.
        model = replace(model, max_context_tokens=min(model.max_context_tokens, rope.original_tokens))
    return EngineModelConfig(
        model=model,
        norm_eps=members.above_zero("rms_norm_eps", 1e-5 if kind in ("mixtral", "phi3") else 1e-6),
        rope=rope,
        routing=_routing(members, kind),
        family=kind,
        norm_plus_one=kind in ("qwen3_next", "qwen3_5_text"),
        ffn_bias=members.flag("mlp_bias") and kind == "llama",
        dtype=decode(Literal["float32", "bfloat16", "float16"], dtype, "dtype"),  # type: ignore[arg-type]
        eos_tokens=members.tokens("eos_token_id"),
    )


def _rope(members: JsonMembers, family: str, model: Model) -> RopeConfig:
    """Both spellings: `rope_parameters` with everything, or `rope_theta` beside `rope_scaling`, which is stronger."""
    part = members.part("rope_scaling", "rope_parameters")
    kind = part.text("rope_type", "type", default="default")
    kinds = PHI_ROPES if family == "phi3" else ROPES
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what it was called before
    if kind not in kinds:
        raise InputError("config.json: rope_type", f"{kind!r} cannot be run; known are {', '.join(kinds)}")
    usual = 0.25 if family in ("qwen3_next", "qwen3_5_text") else 1.0
    share = part.above_zero("partial_rotary_factor", members.above_zero("partial_rotary_factor", usual))
    partial = usual != 1 or family == "phi3"
    if share > 1 or (share != 1 and not partial):
        most = "at most 1" if partial else "1"
        raise InputError(
            "config.json: partial_rotary_factor",
            f"{share:g} cannot be run in a {family} model; only {most} can",
        )
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    low, high = part.above_zero("low_freq_factor", 1.0), part.above_zero("high_freq_factor", 4.0)
    if low >= high:
        raise InputError("config.json: low_freq_factor", f"{low:g} must be below high_freq_factor, {high:g}")
    before = members.above_zero("original_max_position_embeddings", model.max_context_tokens)
    original = part.above_zero("original_max_position_embeddings", before)
    if kind == "longrope" and (original != before or not members.has("original_max_position_embeddings")):
        problem = "must stand beside rope_scaling, and be the same within it if it is there too"
        raise InputError("config.json: original_max_position_embeddings", problem)
    stretched = kind in ("yarn", "longrope")
    return RopeConfig(
        theta=part.above_zero("rope_theta", members.above_zero("rope_theta", FAMILIES[family])),
        kind=decode(RopeKind, kind, "rope_type"),  # type: ignore[arg-type]
        share=share,
        interleaved=latent and members.flag("rope_interleave", True),
        factor=part.above_zero("factor", model.max_context_tokens / original if stretched else 1.0),
        original_tokens=int(original),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=part.above_zero("beta_fast", 32.0),
        beta_slow=part.above_zero("beta_slow", 1.0),
        mscale=part.number("mscale", 0.0),
        mscale_all_dim=part.number("mscale_all_dim", 0.0),
        truncate=part.flag("truncate", True),
        attention_factor=part.above_zero("attention_factor", 1.0) if part.has("attention_factor") else 0.0,
        factors=part.numbers("short_factor") if kind == "longrope" else (),
    )


def _routing(members: JsonMembers, kind: str) -> ExpertRouting:
    if kind in ("deepseek_v3", "kimi_k2"):
        return ExpertRouting(
            scoring="sigmoid",
            normalised=members.flag("norm_topk_prob", True),
            scale=members.number("routed_scaling_factor", 1.0),
            groups=int(members.number("n_group", 1)),
            top_groups=int(members.number("topk_group", 1)),
        )
    if kind == "deepseek_v2":
        method = members.text("topk_method", default="greedy")
        if method not in ("greedy", "group_limited_greedy"):
            known = "greedy, group_limited_greedy"
            raise InputError("config.json: topk_method", f"{method!r} cannot be run; known are {known}")
        limited = method == "group_limited_greedy"
        return ExpertRouting(
            normalised=False,
            scale=members.number("routed_scaling_factor", 1.0),
            groups=int(members.number("n_group", 1)) if limited else 1,
            top_groups=int(members.number("topk_group", 1)) if limited else 1,
        )
    return ExpertRouting(normalised=kind == "mixtral" or members.flag("norm_topk_prob", kind == "qwen3_next"))


FAMILIES = {
    "deepseek_v2": 10_000.0,
    "deepseek_v3": 10_000.0,
    "kimi_k2": 10_000.0,
    "llama": 10_000.0,
    "mistral": 10_000.0,
    "mixtral": 1_000_000.0,
    "phi3": 10_000.0,
    "qwen2": 10_000.0,
    "qwen2_moe": 10_000.0,
    "qwen3": 10_000.0,
    "qwen3_5_text": 10_000.0,
    "qwen3_moe": 10_000.0,
    "qwen3_next": 10_000.0,
}
"""Model types that can be run, with the rope base that their code takes when the file names none."""


MODELOPT = "hf_quant_config.json"


# Weights stored as 8-bit floats: each is multiplied by its scale when it is read, and runs as any other. DeepSeek has
# `NAME_scale_inv`, one for each block of 128 by 128; compressed-tensors, ModelOpt and others have `NAME_scale`, one
# for the tensor, for each row, or for each block. Activations stay as they are.


def read_quantised(directory: str | Path, config: Mapping[str, object] | None = None) -> Quantised | None:
    """How the weights of a directory were made smaller; `config` is its config.json where it was read already."""
    folder = Path(directory)
    values = read_json(folder / "config.json") if config is None else config
    scheme = values.get("quantization_config")
    where = "config.json: quantization_config"
    if scheme is None and (folder / MODELOPT).is_file():
        scheme, where = modelopt_scheme(read_json(folder / MODELOPT)), MODELOPT
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise FormatError(where, "must be an object")
    return quantised_of(scheme, 16.0, where)


def must_be_readable(directory: str | Path, config: Mapping[str, object]) -> None:
    """Raises InputError for weights that the engine cannot bring back to numbers."""
    quantised = read_quantised(directory, config)
    if quantised is not None and not quantised.fp8:
        raise InputError(
            "config.json: quantization_config",
            f"weights made by {quantised.method} ({quantised.weight_bits:g} bits) cannot be run; "
            "8-bit floats (fp8) can",
        )


# A key of a config.json is either read (by `catalog` for the shapes, here for the rest), or harmless: not about
# logits, or about training. Some are fine with one value only, which is what a family's code does anyway. Anything
# else may change what the model computes, so the file is refused with the key's name, never ignored.
# `docs/checkpoints.csv` has what comes of each, tried against transformers.

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
