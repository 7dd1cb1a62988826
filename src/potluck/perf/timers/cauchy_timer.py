"""CAUCHY's closed form (SoCC '25, sections 3.2, 3.3 and 5): its equations 1 to 18 as printed.

Prefill is bound by arithmetic, decode by memory bandwidth, both at the peak rates of the data sheet, and
nothing overlaps or costs anything besides. That ranks GPUs; it does not predict times, so whatever comes
from here is "assumed". Letters are those of the paper's Table 2:

    l layers   h hidden   n heads   s head size   k KV heads   i intermediate   v vocab   d bytes an element
    B batch    R_in, R_out tokens of a request    GPU_n, GPU_f, GPU_b, GPU_p   count, FLOP/s, byte/s, price

Where the printed equations are looser than the machine, they stay as printed and the function says so:
C_1 to C_3 assume k = n and n s = h; (9) rounds the sum of (8); (18) keeps one request's KV over B requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError
from potluck.core.values.model import DenseFfn, FullAttention, Model
from potluck.core.values.types import Gpu

S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class CauchyModel:
    """A dense model in the paper's letters, and everything that follows from it and one workload."""

    l: int  # noqa: E741 - the paper's letter
    h: int
    n: int
    s: int
    k: int
    i: int
    v: int
    d: float

    def __post_init__(self) -> None:
        for name in ("l", "h", "n", "s", "k", "i", "v", "d"):
            if not getattr(self, name) > 0:
                raise InputError(f"cauchy: {name}", f"must be positive, is {getattr(self, name)}")

    @classmethod
    def from_model(cls, model: Model) -> CauchyModel:
        """The letters of a catalog model; only what the equations describe: dense, full attention, one dtype.

        A head size other than h/n (Qwen3) is taken as it is, so C_4 stays the true KV size.
        """
        first = model.layers[0]
        for index, layer in enumerate(model.layers):
            if not isinstance(layer.attention, FullAttention) or not isinstance(layer.ffn, DenseFfn):
                kinds = f"{type(layer.attention).__name__} and {type(layer.ffn).__name__}"
                raise _not_covered(model, f"layer {index} has {kinds}")
            if layer.attention.window is not None:
                raise _not_covered(model, f"layer {index} has a sliding window")
            if layer != first:
                raise _not_covered(model, f"layer {index} differs from layer 0")
        if model.weight_bits != model.kv_bits:
            problem = f"weights of {model.weight_bits:g} bits differ from KV of {model.kv_bits:g}"
            raise _not_covered(model, problem)
        attention, ffn = first.attention, first.ffn
        assert isinstance(attention, FullAttention)
        assert isinstance(ffn, DenseFfn)
        if attention.head_dim != attention.v_head_dim:
            raise _not_covered(model, "key and value heads differ in size")
        return cls(
            l=model.layer_count,
            h=model.hidden,
            n=attention.heads,
            s=attention.head_dim,
            k=attention.kv_heads,
            i=ffn.intermediate,
            v=model.vocab,
            d=model.weight_bits / 8,
        )

    @property
    def c1(self) -> float:
        """(1) C_1 = 4 l h: FLOPs of attention per squared token."""
        return 4.0 * self.l * self.h

    @property
    def c2(self) -> float:
        """(2) C_2 = 8 l h^2 + 6 l h i: FLOPs of the projections and the feed-forward per token."""
        return 8.0 * self.l * self.h**2 + 6.0 * self.l * self.h * self.i

    @property
    def c3(self) -> float:
        """(6) C_3 = d (2 v h + (4 h^2 + 3 h i + 2 h) l): bytes of the weights."""
        return self.d * (
            2.0 * self.v * self.h + (4.0 * self.h**2 + 3.0 * self.h * self.i + 2.0 * self.h) * self.l
        )

    @property
    def c4(self) -> float:
        """(7) C_4 = 2 d l k s: bytes of KV per token."""
        return 2.0 * self.d * self.l * self.k * self.s

    def flop_prefill(self, b: float, r_in: float) -> float:
        """(3) FLOP_prefill = B (C_1 R_in^2 + C_2 R_in)."""
        return b * (self.c1 * r_in**2 + self.c2 * r_in)

    def t_prefill_s(self, b: float, r_in: float, gpu_n: int, gpu_f: float) -> float:
        """(4) T_prefill = FLOP_prefill / (GPU_n GPU_f), with GPU_f in FLOP/s."""
        return self.flop_prefill(b, r_in) / (gpu_n * gpu_f)

    def s_prefill(self, r_in: float, gpu_n: int, gpu_f: float) -> float:
        """(5) S_prefill = GPU_n GPU_f / (C_1 R_in + C_2): input tokens a second, whatever B."""
        return gpu_n * gpu_f / (self.c1 * r_in + self.c2)

    def byte_decode(self, b: float, r_in: float, r_out: float) -> float:
        """(9) As printed: (C_3 + B C_4 R_in) R_out + B C_4 R_out^2 / 2.

        The sum of j is R_out (R_out - 1) / 2, so (9) exceeds (8) by B C_4 R_out / 2.
        """
        return (self.c3 + b * self.c4 * r_in) * r_out + 0.5 * b * self.c4 * r_out**2

    def t_decode_s(self, b: float, r_in: float, r_out: float, gpu_n: int, gpu_b: float) -> float:
        """(10) T_decode = (9) / (GPU_n GPU_b), with GPU_b in byte/s."""
        return self.byte_decode(b, r_in, r_out) / (gpu_n * gpu_b)

    def s_decode(self, b: float, r_in: float, r_out: float, gpu_n: int, gpu_b: float) -> float:
        """(11) S_decode = GPU_n GPU_b / (C_4 R_out / 2 + C_4 R_in + C_3 / B): output tokens a second."""
        return gpu_n * gpu_b / (self.c4 * r_out / 2 + self.c4 * r_in + self.c3 / b)

    def a1(self, r_in: float) -> float:
        """(12) A_1 = 1 / (C_1 R_in + C_2)."""
        return 1.0 / (self.c1 * r_in + self.c2)

    def a2(self, b: float, r_in: float, r_out: float) -> float:
        """(13) A_2 = 1 / (C_4 R_out / 2 + C_4 R_in + C_3 / B)."""
        return 1.0 / (self.c4 * r_out / 2 + self.c4 * r_in + self.c3 / b)


@dataclass(frozen=True, slots=True)
class ComboSide:
    """One side of a combo: GPU_n GPUs of one kind at GPU_p dollars an hour each."""

    gpu: Gpu
    gpu_n: int
    gpu_p_usd_per_h: float

    def __post_init__(self) -> None:
        if self.gpu_n < 1:
            raise InputError(f"{self.gpu.name}: gpu_n", f"must be at least 1, is {self.gpu_n}")
        if not self.gpu_p_usd_per_h > 0:
            raise InputError(
                f"{self.gpu.name}: price_usd_per_h", f"must be positive, is {self.gpu_p_usd_per_h}"
            )

    @property
    def gpu_f(self) -> float:
        """FLOP/s of one GPU."""
        return self.gpu.fp16_tflops * 1e12

    @property
    def gpu_b(self) -> float:
        """Bytes/s of one GPU's memory."""
        return self.gpu.bandwidth_gb_per_s * 1e9


def ce(
    model: CauchyModel, b: float, r_in: float, r_out: float, prefill_side: ComboSide, decode_side: ComboSide
) -> float:
    """(15) CE = A_1 GPU_f / GPU_p of prefill + A_2 GPU_b / GPU_p of decode, tokens per USD."""
    prefill_part = model.a1(r_in) * prefill_side.gpu_f / (prefill_side.gpu_p_usd_per_h / S_PER_H)
    decode_part = model.a2(b, r_in, r_out) * decode_side.gpu_b / (decode_side.gpu_p_usd_per_h / S_PER_H)
    return prefill_part + decode_part


def _not_covered(model: Model, problem: str) -> InputError:
    covered = "CAUCHY's equations cover dense models with alike layers of full attention only"
    return InputError(f"model {model.name}", f"{covered}; {problem}")
