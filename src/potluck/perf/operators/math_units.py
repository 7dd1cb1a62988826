"""How a GPU multiplies with weights of a format: on which units, with inputs of how many bytes.

16 bits             the FP16/BF16 units; a GPU without BF16 (V100, T4) takes FP16, which is as fast
fp8, fp8_block      the FP8 units, after the inputs are made small; a GPU without them reads small weights and
                    multiplies in 16 bits (weight-only)
int8                the INT8 units from Turing on, after the inputs are made small
int4, mxfp4, nvfp4  weight-only, but mxfp4 and nvfp4 on the FP4 units of a Blackwell
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.values.model import Format
from potluck.core.values.types import Gpu


@dataclass(frozen=True, slots=True)
class MathUnits:
    """What multiplies, and what it is fed."""

    family: str
    """Whose fitted shares hold: bf16, fp8, fp8_block, int4 or mxfp4."""
    flops_per_s: float
    input_bytes: float
    """Of an input element as the product reads it."""
    makes_small: bool
    """Whether inputs of 16 bits are made small first, by a kernel of its own."""
    said: str = ""
    """What a person should know of it; empty when nothing."""

    @property
    def plain(self) -> bool:
        """Whether weights and inputs are of 16 bits."""
        return self.family == "bf16"


def units_for(kind: Format, gpu: Gpu) -> MathUnits:
    """The units of a GPU that multiply with weights of a format."""
    plain = gpu.fp16_tflops * 1e12
    if kind in ("bf16", "fp16", "fp32"):
        said = "" if gpu.bf16 or kind == "fp16" else f"{gpu.name} has no bf16: fp16 instead"
        return MathUnits("bf16", plain, 2.0, False, said)
    if kind in ("fp8", "fp8_block"):
        if gpu.fp8_tflops:
            return MathUnits(kind, gpu.fp8_tflops * 1e12, 1.0, True)
        return MathUnits("int4", plain, 2.0, False, f"{gpu.name} has no FP8 units: weights only")
    if kind == "int8":
        if gpu.fp8_tflops:
            return MathUnits("fp8", gpu.fp8_tflops * 1e12, 1.0, True)
        if gpu.compute_capability is not None and gpu.compute_capability >= 7.5:
            return MathUnits("fp8", 2.0 * plain, 1.0, True)
        return MathUnits("int4", plain, 2.0, False, f"{gpu.name} has no INT8 units: weights only")
    if kind != "int4" and gpu.fp4_tflops:
        return MathUnits("fp8", gpu.fp4_tflops * 1e12, 0.5, True)
    return MathUnits("mxfp4" if kind == "mxfp4" else "int4", plain, 2.0, False)
