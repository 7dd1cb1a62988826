"""A model as serving sees it: layers, each with one attention and one feed-forward part.

The four attention kinds cover every model in the catalog. They differ in what a request leaves in
memory: full and latent attention keep something for every token, a window keeps the last `window`
tokens, linear attention keeps a state of fixed size. `perf.sizes.arithmetic` does the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from potluck.core.errors import InputError
from potluck.core.values.precision import FORMAT_BITS, Format, format_of_bits

LinearKind = Literal["kda", "gated_delta", "lightning"]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """MHA, GQA or MQA over the whole context, or over the last `window` tokens when that is set."""

    heads: int
    kv_heads: int
    head_dim: int
    """Size of a query or key head."""
    v_head_dim: int
    window: int | None = None
    bias: bool = False
    """Whether the q, k, v projections carry a bias."""
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
        """Channels that the short convolution runs over."""
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
    """One block of the stack."""

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

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def weights_are(self) -> Format:
        """The format of weights outside the routed experts."""
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
