"""A model as serving sees it: layers, each with one attention and one feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

from potluck.core.errors import InputError, UnknownNameError

Format = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4"]
FORMAT_BITS: Final[dict[Format, float]] = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp32": 32.0,
    "fp8": 8.0,
    "fp8_block": 8.0,
    "int8": 8.0,
    "int4": 4.156,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}
"""Bits of a stored weight, scales included: int4 has 16 + 4 for 128 weights, MXFP4 8 for 32, NVFP4 8 for 16."""
ChosenFormat = Literal["bf16", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4"]
CHOSEN: Final[tuple[Format, ...]] = ("bf16", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4")
"""Formats that a person may ask for by name."""


def format_of_bits(bits: float) -> Format:
    """The usual format of so many bits, where nothing says which."""
    if bits > 5.0:
        return "fp32" if bits > 16.0 else "bf16" if bits > 8.5 else "fp8"
    if bits == FORMAT_BITS["mxfp4"]:
        return "mxfp4"
    return "nvfp4" if bits == FORMAT_BITS["nvfp4"] else "int4"


def format_named(name: str, field: str = "weights") -> Format:
    """The format of that name; an unknown one is an error that suggests the nearest."""
    for known in CHOSEN:
        if name == known:
            return known
    raise UnknownNameError(field, name, CHOSEN)


LinearKind = Literal["kda", "gated_delta", "lightning"]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """MHA, GQA or MQA over the whole context, or over the last `window` tokens when that is set."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    bias: bool = False
    output_gate: bool = False
    """Whether a gate as wide as the queries multiplies the output (Qwen3.5)."""
    sinks: bool = False
    """Whether each head has a learned sink logit (GPT-OSS)."""
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norm weights on q and k: none, one per head dimension, or one over all heads."""

    def __post_init__(self) -> None:
        _positive(self, "heads", "kv_heads", "head_dim", "v_head_dim")
        if self.heads % self.kv_heads:
            raise InputError("kv_heads", f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.window is not None and self.window < 1:
            raise InputError("window", "must be at least 1 token")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: one compressed latent and one rotary key per token, shared by all heads."""

    heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        if self.qk_rope_head_dim < 0:
            raise InputError("qk_rope_head_dim", f"must not be negative, is {self.qk_rope_head_dim}")


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention with a recurrent state of fixed size per request and layer."""

    kind: LinearKind
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 0
    """Taps of the short convolution on q, k, v; 0 when there is none."""
    state_bytes_per_element: int = 4
    gate_rank: int = 0
    """Inner width of the low-rank gates (KDA); 0 when there are none."""

    def __post_init__(self) -> None:
        _positive(self, "key_heads", "value_heads", "key_head_dim", "value_head_dim")
        _positive(self, "state_bytes_per_element")

    @property
    def state_elements(self) -> int:
        """Elements of the recurrent state of one request in one layer."""
        return self.value_heads * self.key_head_dim * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim


Attention = FullAttention | LatentAttention | LinearAttention


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """A gated feed-forward part: gate, up and down projections."""

    intermediate: int

    def __post_init__(self) -> None:
        _positive(self, "intermediate")


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """A mixture of experts: `active` of `experts` per token, plus always-on shared experts."""

    experts: int
    active: int
    intermediate: int
    shared_intermediate: int = 0
    """Total width of the shared experts; 0 when there are none."""
    bias: bool = False
    """Whether experts and router carry biases (GPT-OSS)."""
    router_bias: bool = False
    """Whether the router has a correction bias per expert (DeepSeek-V3)."""
    shared_gate: bool = False
    """Whether a learned gate scales the shared expert (Qwen3.5)."""

    def __post_init__(self) -> None:
        _positive(self, "experts", "active", "intermediate")
        if self.active > self.experts:
            raise InputError("active", f"{self.active} active experts exceed the {self.experts} there are")


Ffn = DenseFfn | MoeFfn


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    ffn: Ffn


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture with the widths in which its parts are stored."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    max_context_tokens: int
    tied_embeddings: bool = False
    weight_bits: float = 16.0
    """Bits per weight outside the routed experts (attention, dense and shared parts)."""
    expert_bits: float = 16.0
    """Bits per routed-expert weight, scales included (MXFP4: 4.25)."""
    kv_bits: float = 16.0
    """Bits per element of the growing KV cache."""
    weight_format: Format | None = None
    """What `weight_bits` are; None: what is usual of so many."""
    expert_format: Format | None = None

    def __post_init__(self) -> None:
        _positive(self, "hidden", "vocab", "max_context_tokens", "weight_bits", "expert_bits", "kv_bits")
        if not self.layers:
            raise InputError("layers", "a model needs at least one layer")
        # Equal layers are one object, so that whoever counts them need not compare what is in them.
        once: dict[Layer, Layer] = {}
        object.__setattr__(self, "layers", tuple(once.setdefault(layer, layer) for layer in self.layers))

    def __hash__(self) -> int:  # enough to tell models apart, in far less time than all their layers take
        return hash((self.name, self.hidden, self.vocab, len(self.layers), self.weight_bits))

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def is_latent(self) -> bool:
        """Whether what it keeps of tokens is latents alone."""
        kinds = {type(layer.attention) for layer in self.layers} - {LinearAttention}
        return kinds == {LatentAttention}

    @property
    def exact_prefix(self) -> bool:
        """Whether a prefix can be resumed only where a checkpoint was kept: some layer has a window or a state."""
        return any(
            isinstance(layer.attention, LinearAttention)
            or getattr(layer.attention, "window", None) is not None
            for layer in self.layers
        )

    @property
    def weights_are(self) -> Format:
        return self.weight_format or format_of_bits(self.weight_bits)

    @property
    def experts_are(self) -> Format:
        """The format of routed experts; those of 8 bits are usually scaled by blocks."""
        usual = format_of_bits(self.expert_bits)
        return self.expert_format or ("fp8_block" if usual == "fp8" else usual)

    @property
    def mostly(self) -> Format:
        """The format of most of its weights: its experts', where it has any."""
        mixture = any(isinstance(layer.ffn, MoeFfn) for layer in self.layers)
        return self.experts_are if mixture else self.weights_are


def in_format(model: Model, weights: Format) -> Model:
    """The model as if its weights, experts among them, were stored in another format; KV stays as it is."""
    bits = FORMAT_BITS[weights]
    return replace(model, weight_bits=bits, expert_bits=bits, weight_format=weights, expert_format=weights)


def _positive(value: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(value, name) < inf:
            raise InputError(name, f"must be positive and finite, is {getattr(value, name)!r}")


SCALE_BITS = 16  # AWQ and GPTQ keep one scale of this width, and one zero point, per group of weights.
MOST = 1_000_000
FP8_METHODS = ("fp8", "fbgemm_fp8", "finegrained_fp8")
KNOWN = "awq, bitsandbytes, compressed-tensors, fp8, gptq, modelopt, mxfp4"


@dataclass(frozen=True, slots=True)
class Quantised:
    """What is stored. A tensor that was left as it was shows that by its own type."""

    method: str
    weight_bits: float
    """Scales included where they are not negligible."""
    expert_bits: float
    kv_bits: float | None = None
    """Of keys and values, where the checkpoint says so."""
    fp8: bool = False
    """Whether weights are 8-bit floats with scales beside them: times its scale, each is the number meant."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a whole row, or the whole tensor, does."""
    weight_format: Format | None = None
    """None: left as they were."""
    expert_format: Format | None = None


def quantised_of(scheme: Mapping[str, object], plain_bits: float, where: str) -> Quantised:
    """What a `quantization_config` says of a model whose other weights have `plain_bits`."""
    method = _text(scheme, "quant_method", where) or _text(scheme, "quant_algo", where) or ""
    method = method.casefold()
    kind: Format
    block = _block(scheme.get("weight_block_size"), where)
    kv_bits = _kv_bits(scheme, where)
    if method in FP8_METHODS:
        kind = _fp8(block)
        return Quantised(method, 8.0, 8.0, kv_bits, True, block, kind, kind)
    if method == "mxfp4":  # only the experts: 4 bits and an 8-bit scale for every 32 of them
        return Quantised(method, plain_bits, 4.25, kv_bits, expert_format="mxfp4")
    if method in ("awq", "gptq"):
        name = "bits" if scheme.get("bits") is not None else "w_bit"
        bits = _grouped(scheme, _count(scheme, name, where), where, with_zero=True)
        kind = "int8" if bits > 6 else "int4"
        return Quantised(method, bits, bits, kv_bits, weight_format=kind, expert_format=kind)
    if method == "compressed-tensors":
        return _compressed(scheme, kv_bits, where)
    if method == "bitsandbytes":
        four = scheme.get("load_in_4bit")
        if not isinstance(four, bool | None):
            raise InputError(where, f"load_in_4bit must be true or false, not {_short(four)}")
        kind = "int4" if four else "int8"
        bits = 4.5 if four else 8.0
        return Quantised(method, bits, bits, kv_bits, weight_format=kind, expert_format=kind)
    if method == "modelopt":
        algorithm = (_text(scheme, "quant_algo", where) or "").upper()
        bits, kind = (4.5, "nvfp4") if "FP4" in algorithm else (8.0, _fp8(block))
        if algorithm.startswith(("W4A16", "INT4")):
            bits, kind = 4.5, "int4"
        elif algorithm.startswith(("INT8", "W8A8_SQ")):
            kind = "int8"
        return Quantised(method, bits, bits, kv_bits, algorithm.startswith("FP8"), block, kind, kind)
    raise InputError(where, f"quant_method {method[:60]!r} is not supported; supported are {KNOWN}")


def modelopt_scheme(document: Mapping[str, object], where: str = "hf_quant_config.json") -> dict[str, object]:
    """ModelOpt's own file, in the words of a `quantization_config`."""
    inner = document.get("quantization")
    if not isinstance(inner, dict):
        raise InputError(where, "quantization is missing, or is not an object")
    return {"quant_method": "modelopt", **inner}


def _compressed(scheme: Mapping[str, object], kv_bits: float | None, where: str) -> Quantised:
    groups = scheme.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        raise InputError(where, f"config_groups must be an object, not {_short(groups)}")
    parts = [part for part in (groups or {}).values() if isinstance(part, dict)]
    weights = parts[0].get("weights") if parts else None
    if not isinstance(weights, dict):
        raise InputError(where, "config_groups names no weights")
    bits = _grouped(weights, _count(weights, "num_bits", where), where, with_zero=False)
    fp8 = all(isinstance(w := part.get("weights"), dict) and _is_float8(w) for part in parts)
    block = _block(weights.get("block_structure"), where)
    kind: Format = _fp8(block) if fp8 else "int8" if bits > 6 else "int4"
    if bits <= 6 and weights.get("type") == "float":
        kind = "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
    return Quantised("compressed-tensors", bits, bits, kv_bits, fp8, block, kind, kind)


def _fp8(block: tuple[int, int] | None) -> Format:
    return "fp8" if block is None else "fp8_block"


def _is_float8(weights: Mapping[str, object]) -> bool:
    return weights.get("type") == "float" and weights.get("num_bits") == 8


def _kv_bits(scheme: Mapping[str, object], where: str) -> float | None:
    cache = scheme.get("kv_cache_scheme")
    if isinstance(cache, dict):
        return float(_count(cache, "num_bits", where, 8))
    if cache is not None:
        raise InputError(where, f"kv_cache_scheme must be an object, not {_short(cache)}")
    algorithm = (_text(scheme, "kv_cache_quant_algo", where) or "").upper()
    return 4.5 if "FP4" in algorithm else 8.0 if "8" in algorithm else None


def _grouped(scheme: Mapping[str, object], bits: int, where: str, *, with_zero: bool) -> float:
    # Absent means 128 for AWQ and GPTQ; elsewhere, as -1 does, one scale per whole row: nothing.
    size = scheme.get("group_size")
    if size is None:
        size = 128 if with_zero else -1
    if isinstance(size, bool) or not isinstance(size, int) or not -1 <= size <= MOST:
        raise InputError(where, f"group_size must be an integer from -1, not {_short(size)}")
    overhead = SCALE_BITS + (bits if with_zero else 0)
    return bits + overhead / size if size > 0 else float(bits)


def _count(scheme: Mapping[str, object], name: str, where: str, default: int | None = None) -> int:
    value = scheme.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise InputError(where, f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
        raise InputError(where, f"{name} must be an integer from 1 to 64, not {_short(value)}")
    return value


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 1 <= n <= MOST for n in value):
        return value[0], value[1]
    raise InputError(where, "weight_block_size must be two integers above 0")


def _text(scheme: Mapping[str, object], name: str, where: str) -> str | None:
    value = scheme.get(name)
    if not isinstance(value, str | None):
        raise InputError(where, f"{name} must be a string, not {_short(value)}")
    return value


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number of that size"
    return repr(value)[:60]
