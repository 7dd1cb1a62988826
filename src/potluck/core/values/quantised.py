"""How a checkpoint was made smaller: `quantization_config` of config.json, or ModelOpt's hf_quant_config.json.

Whoever counts bytes wants the bits, whoever runs the model the way back to numbers; both read the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from potluck.core.errors import InputError
from potluck.core.values.precision import Format

SCALE_BITS = 16
"""AWQ and GPTQ keep one scale of this width, and one zero point, per group of weights."""
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
