"""What the engine must know of a model beyond `core.Model`: positions, norms, routing, number format.

`read_config` takes a Hugging Face directory together with the `core.Model` that `catalog` made of the same file (this
package may not import that one), or a directory of our own kind, whose config.json holds everything:

    {"model_type": "potluck", "config": <this module's Config as core.codec writes it>}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from potluck.core.codec import decode, encode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model, MoeFfn

OWN_KIND = "potluck"
LARGEST_FILE_BYTES = 16_000_000


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` says how long contexts are reached; the fields below it belong to the kinds."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
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
    attention_factor: float = 0.0
    """yarn: what cosines and sines are multiplied by; 0 means that it follows from the others."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token picks its experts."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of the chosen experts are made to add up to 1."""
    scale: float = 1.0
    groups: int = 1
    """Experts are chosen within the best `top_groups` of so many groups."""
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    """A model as the engine runs it."""

    model: Model
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    routing: Routing = Routing()
    family: str = OWN_KIND
    """The model_type, which says how tensors are named and packed in the file."""
    norm_plus_one: bool = False
    """Whether norm weights are stored as differences from 1 (Qwen3-Next)."""
    ffn_bias: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.model.layers):
            problem = _unsupported(layer.attention) or _unsupported_ffn(layer.ffn)
            if problem:
                raise InputError(f"layer {index}", f"{problem} cannot be run by the embedded engine")
        if self.family not in FAMILIES and self.family != OWN_KIND:
            known = ", ".join(sorted(FAMILIES))
            raise InputError(
                "model_type", f"{self.family!r} cannot be run by the embedded engine; known are {known}"
            )


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


def _unsupported_ffn(ffn: object) -> str | None:
    return "experts with biases" if isinstance(ffn, MoeFfn) and ffn.bias else None


def read_config(directory: str | Path, model: Model | None = None) -> Config:
    """The configuration in a directory; `model` is needed unless the directory is of our own kind."""
    values = _read_json(Path(directory) / "config.json")
    kind = values.get("model_type")
    if kind == OWN_KIND:
        return decode(Config, values.get("config"), "config.json: config")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            "config.json: model_type", f"{kind!r} cannot be run; known are {', '.join(sorted(FAMILIES))}"
        )
    if model is None:
        raise InputError("config.json", f"a model of type {kind} must be described by its core.Model too")
    return _from_hugging_face(_Fields(values), kind, model)


def write_config(directory: str | Path, config: Config) -> None:
    """A config.json of our own kind."""
    document = {"model_type": OWN_KIND, "config": encode(config)}
    Path(directory, "config.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FormatError(str(path), "is too large for a model's configuration")
        document: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is not JSON ({str(error).splitlines()[0][:120]})") from error
    if not isinstance(document, dict):
        raise FormatError(str(path), "must be a JSON object")
    return document


class _Fields:
    """Members of a JSON object by name and kind; null counts as missing."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self._where}: {name}", "must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self._where}: {name}", "must be true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        value = next((self._values[name] for name in names if self._values.get(name) is not None), default)
        if not isinstance(value, str):
            raise FormatError(f"{self._where}: {names[0]}", "must be a string")
        return value

    def part(self, *names: str) -> _Fields:
        for name in names:
            value = self._values.get(name)
            if isinstance(value, dict):
                return _Fields(value, f"{self._where}: {name}")
        return _Fields({}, self._where)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in found):
            raise FormatError(f"{self._where}: {name}", "must be a token or a list of tokens")
        return tuple(found)


def _from_hugging_face(fields: _Fields, kind: str, model: Model) -> Config:
    dtype = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(
            "config.json: dtype", f"{dtype!r} cannot be run; known are bfloat16, float16, float32"
        )
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise InputError("config.json: hidden_act", f"{activation!r} cannot be run; only silu can")
    return Config(
        model=model,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, kind, model),
        routing=_routing(fields, kind),
        family=kind,
        norm_plus_one=kind in ("qwen3_next", "qwen3_5_text"),
        ffn_bias=fields.flag("mlp_bias") and kind == "llama",
        dtype=decode(Literal["float32", "bfloat16", "float16"], dtype, "dtype"),  # type: ignore[arg-type]
        eos_tokens=fields.tokens("eos_token_id"),
    )


def _rope(fields: _Fields, family: str, model: Model) -> Rope:
    """Both spellings: `rope_parameters` with everything, or `rope_theta` beside `rope_scaling`."""
    part = fields.part("rope_parameters", "rope_scaling")
    kind = part.text("rope_type", "type", default="default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise InputError(
            "config.json: rope_type", f"{kind!r} cannot be run; known are default, linear, llama3, yarn"
        )
    theta = part.number("rope_theta", fields.number("rope_theta", FAMILIES[family]))
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    return Rope(
        theta=theta,
        kind=decode(Literal["default", "linear", "llama3", "yarn"], kind, "rope_type"),  # type: ignore[arg-type]
        share=part.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)),
        interleaved=latent and fields.flag("rope_interleave", True),
        factor=part.number("factor", 1.0),
        original_tokens=int(part.number("original_max_position_embeddings", model.max_context_tokens)),
        low_freq_factor=part.number("low_freq_factor", 1.0),
        high_freq_factor=part.number("high_freq_factor", 4.0),
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        mscale=part.number("mscale", 0.0),
        mscale_all_dim=part.number("mscale_all_dim", 0.0),
        attention_factor=part.number("attention_factor", 0.0),
    )


def _routing(fields: _Fields, kind: str) -> Routing:
    if kind in ("deepseek_v3", "kimi_k2"):
        return Routing(
            scoring="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
            groups=int(fields.number("n_group", 1)),
            top_groups=int(fields.number("topk_group", 1)),
        )
    if kind == "deepseek_v2":
        limited = fields.text("topk_method", default="greedy") == "group_limited_greedy"
        return Routing(
            normalised=False,
            scale=fields.number("routed_scaling_factor", 1.0),
            groups=int(fields.number("n_group", 1)) if limited else 1,
            top_groups=int(fields.number("topk_group", 1)) if limited else 1,
        )
    return Routing(normalised=kind == "mixtral" or fields.flag("norm_topk_prob", kind == "qwen3_next"))


FAMILIES = {
    "deepseek_v2": 10_000.0,
    "deepseek_v3": 10_000.0,
    "kimi_k2": 10_000.0,
    "llama": 10_000.0,
    "mistral": 10_000.0,
    "mixtral": 1_000_000.0,
    "qwen2": 10_000.0,
    "qwen2_moe": 10_000.0,
    "qwen3": 10_000.0,
    "qwen3_5_text": 10_000.0,
    "qwen3_moe": 10_000.0,
    "qwen3_next": 10_000.0,
}
"""Model types that can be run, with the rope base that their code takes when the file names none."""
