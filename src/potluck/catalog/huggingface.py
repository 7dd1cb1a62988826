"""A model from a Hugging Face `config.json`: the file itself or the directory that holds it."""

from __future__ import annotations

from pathlib import Path

from potluck.catalog.hf_families import FAMILIES
from potluck.catalog.hf_fields import Fields, read_json
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.model import Model

DTYPE_BITS = {
    "float32": 32.0,
    "float": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "half": 16.0,
    "float8_e4m3fn": 8.0,
}
SCALE_BITS = 16
"""AWQ and GPTQ keep one scale of this width, and one zero point, per group of weights."""


def read_model(path: str | Path, name: str | None = None) -> Model:
    """The model that `config.json` describes; `name` is the directory's unless given.

    Raises InputError in one line for whatever is wrong with the file.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        exists = file.is_file()
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"is not a usable path ({error})") from error
    if not exists:
        raise InputError(str(path), "has no config.json; give a model's directory or the file itself")
    label = name or (file.resolve().parent.name if file.name == "config.json" else file.stem) or "model"
    return model_from(read_json(file), label)


def model_from(fields: Fields, name: str) -> Model:
    """The model of an opened file."""
    outer = fields
    kind = fields.text("model_type")
    if kind is None:
        raise fields.problem("model_type is missing")
    inner = fields.part("text_config")
    if kind not in FAMILIES and inner is not None:
        fields, kind = inner, inner.text("model_type") or f"{kind}_text"
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise outer.problem(f"model_type {kind[:60]!r} is not supported; supported are {known}")
    weight_bits, expert_bits, kv_bits = _bits(outer, fields)
    try:
        return Model(
            name=name,
            hidden=fields.count("hidden_size"),
            vocab=fields.count("vocab_size"),
            layers=family(fields),
            max_context_tokens=fields.count("max_position_embeddings", "model_max_length"),
            tied_embeddings=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings")),
            weight_bits=weight_bits,
            expert_bits=expert_bits,
            kv_bits=kv_bits,
        )
    except InputError as error:
        if error.field.startswith(outer.where):
            raise
        # A value that the model itself refuses, such as more active experts than there are.
        raise outer.problem(f"{error.field}: {error.problem}") from error


def _bits(outer: Fields, fields: Fields) -> tuple[float, float, float]:
    """(weight, expert, KV) bits from the dtype and the quantisation."""
    dtype = fields.text("dtype", "torch_dtype") or outer.text("dtype", "torch_dtype") or "bfloat16"
    plain = DTYPE_BITS.get(dtype.removeprefix("torch."))
    if plain is None:
        raise UnknownNameError(f"{outer.where}: dtype", dtype[:60], DTYPE_BITS)
    kv_bits = plain if plain >= 16 else 16.0
    scheme = outer.part("quantization_config") or fields.part("quantization_config")
    if scheme is None:
        return plain, plain, kv_bits
    method = scheme.text("quant_method", "quant_algo") or ""
    weight, expert = _quantised(scheme, method.casefold(), plain)
    cache = scheme.part("kv_cache_scheme")
    if cache is not None:
        kv_bits = float(cache.count("num_bits", default=8, most=64))
    return weight, expert, kv_bits


def _quantised(scheme: Fields, method: str, plain: float) -> tuple[float, float]:
    """(weight, expert) bits of a quantisation, its scales included where they are not negligible."""
    if method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        return 8.0, 8.0
    if method == "mxfp4":  # only the experts: 4 bits and an 8-bit scale for every 32 of them
        return plain, 4.25
    if method in ("awq", "gptq"):
        bits = _grouped(scheme, scheme.count("bits", "w_bit", most=64), with_zero=True)
        return bits, bits
    if method == "compressed-tensors":
        return _compressed(scheme)
    if method == "bitsandbytes":
        bits = 4.5 if scheme.flag("load_in_4bit") else 8.0
        return bits, bits
    if method == "modelopt":
        bits = 4.5 if "FP4" in (scheme.text("quant_algo") or "").upper() else 8.0
        return bits, bits
    known = "awq, bitsandbytes, compressed-tensors, fp8, gptq, modelopt, mxfp4"
    raise scheme.problem(f"quant_method {method[:60]!r} is not supported; supported are {known}")


def _compressed(scheme: Fields) -> tuple[float, float]:
    groups = scheme.objects("config_groups")
    weights = groups[0].part("weights") if groups else None
    if weights is None:
        raise scheme.problem("config_groups names no weights")
    bits = _grouped(weights, weights.count("num_bits", most=64), with_zero=False)
    return bits, bits


def _grouped(fields: Fields, bits: int, *, with_zero: bool) -> float:
    # Absent means 128 for AWQ and GPTQ; elsewhere, as -1 does, one scale per whole row: nothing.
    size = fields.number("group_size", 128 if with_zero else -1, least=-1)
    overhead = SCALE_BITS + (bits if with_zero else 0)
    return bits + overhead / size if size > 0 else float(bits)
