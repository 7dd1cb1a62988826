"""What the engine must know of a model beyond `core.Model`: positions, norms, routing, number format.

`read_config` takes a Hugging Face directory together with the `core.Model` that `catalog` made of the same file (this
package may not import that one), or a directory of our own kind, whose config.json holds everything:

    {"model_type": "potluck", "config": <this module's Config as core.codec writes it>}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from potluck.api.model_files import JsonMembers, read_json
from potluck.core.codec import decode, encode
from potluck.core.errors import InputError
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model, MoeFfn
from potluck.engine.model.config_keys import check_keys
from potluck.engine.model.fp8_scales import must_be_readable

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
    """How a token picks its experts."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of the chosen experts are made to add up to 1."""
    scale: float = 1.0
    groups: int = 1
    """Experts are chosen within the best `top_groups` of so many groups."""
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class EngineModelConfig:
    """A model as the engine runs it."""

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
        if len(self.rope.factors) != int(size * self.rope.share) // 2 or min(self.rope.factors) <= 0:
            count = int(size * self.rope.share) // 2
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
    """A config.json of our own kind."""
    document = {"model_type": OWN_KIND, "config": encode(config)}
    Path(directory, "config.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _from_hugging_face(fields: JsonMembers, kind: str, model: Model) -> EngineModelConfig:
    dtype = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(
            "config.json: dtype", f"{dtype!r} cannot be run; known are bfloat16, float16, float32"
        )
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise InputError("config.json: hidden_act", f"{activation!r} cannot be run; only silu can")
    rope = _rope(fields, kind, model)
    if rope.kind == "longrope":
        # Beyond the original context every position turns otherwise, also those that were computed before.
        model = replace(model, max_context_tokens=min(model.max_context_tokens, rope.original_tokens))
    return EngineModelConfig(
        model=model,
        norm_eps=fields.above_zero("rms_norm_eps", 1e-5 if kind in ("mixtral", "phi3") else 1e-6),
        rope=rope,
        routing=_routing(fields, kind),
        family=kind,
        norm_plus_one=kind in ("qwen3_next", "qwen3_5_text"),
        ffn_bias=fields.flag("mlp_bias") and kind == "llama",
        dtype=decode(Literal["float32", "bfloat16", "float16"], dtype, "dtype"),  # type: ignore[arg-type]
        eos_tokens=fields.tokens("eos_token_id"),
    )


def _rope(fields: JsonMembers, family: str, model: Model) -> RopeConfig:
    """Both spellings: `rope_parameters` with everything, or `rope_theta` beside `rope_scaling`, which is stronger."""
    part = fields.part("rope_scaling", "rope_parameters")
    kind = part.text("rope_type", "type", default="default")
    kinds = PHI_ROPES if family == "phi3" else ROPES
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what it was called before
    if kind not in kinds:
        raise InputError("config.json: rope_type", f"{kind!r} cannot be run; known are {', '.join(kinds)}")
    usual = 0.25 if family in ("qwen3_next", "qwen3_5_text") else 1.0
    share = part.above_zero("partial_rotary_factor", fields.above_zero("partial_rotary_factor", usual))
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
    before = fields.above_zero("original_max_position_embeddings", model.max_context_tokens)
    original = part.above_zero("original_max_position_embeddings", before)
    if kind == "longrope" and (original != before or not fields.has("original_max_position_embeddings")):
        problem = "must stand beside rope_scaling, and be the same within it if it is there too"
        raise InputError("config.json: original_max_position_embeddings", problem)
    stretched = kind in ("yarn", "longrope")
    return RopeConfig(
        theta=part.above_zero("rope_theta", fields.above_zero("rope_theta", FAMILIES[family])),
        kind=decode(RopeKind, kind, "rope_type"),  # type: ignore[arg-type]
        share=share,
        interleaved=latent and fields.flag("rope_interleave", True),
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


def _routing(fields: JsonMembers, kind: str) -> ExpertRouting:
    if kind in ("deepseek_v3", "kimi_k2"):
        return ExpertRouting(
            scoring="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
            groups=int(fields.number("n_group", 1)),
            top_groups=int(fields.number("topk_group", 1)),
        )
    if kind == "deepseek_v2":
        method = fields.text("topk_method", default="greedy")
        if method not in ("greedy", "group_limited_greedy"):
            known = "greedy, group_limited_greedy"
            raise InputError("config.json: topk_method", f"{method!r} cannot be run; known are {known}")
        limited = method == "group_limited_greedy"
        return ExpertRouting(
            normalised=False,
            scale=fields.number("routed_scaling_factor", 1.0),
            groups=int(fields.number("n_group", 1)) if limited else 1,
            top_groups=int(fields.number("topk_group", 1)) if limited else 1,
        )
    return ExpertRouting(normalised=kind == "mixtral" or fields.flag("norm_topk_prob", kind == "qwen3_next"))


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
