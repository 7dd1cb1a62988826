"""A model from a Hugging Face `config.json`: the file itself or the directory that holds it."""

from __future__ import annotations

from pathlib import Path

from potluck.catalog.hf_families import FAMILIES
from potluck.catalog.hf_fields import ConfigFields, read_json
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.model import Format, Model, modelopt_scheme, quantised_of

DTYPE_BITS = {
    "float32": 32.0,
    "float": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "half": 16.0,
    "float8_e4m3fn": 8.0,
}


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
    beside = file.parent / "hf_quant_config.json"
    return model_from(read_json(file), label, read_json(beside) if beside.is_file() else None)


def model_from(fields: ConfigFields, name: str, modelopt: ConfigFields | None = None) -> Model:
    """The model of an opened file; `modelopt` is ModelOpt's file about its weights, where there is one."""
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
    weight_bits, expert_bits, kv_bits, formats = _bits(outer, fields, modelopt)
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
            weight_format=formats[0],
            expert_format=formats[1],
        )
    except InputError as error:
        if error.field.startswith(outer.where):
            raise
        # A value that the model itself refuses, such as more active experts than there are.
        raise outer.problem(f"{error.field}: {error.problem}") from error


Formats = tuple[Format | None, Format | None]


def _bits(
    outer: ConfigFields, fields: ConfigFields, modelopt: ConfigFields | None
) -> tuple[float, float, float, Formats]:
    """(weight, expert, KV) bits from the dtype and the quantisation, and what the first two are."""
    dtype = fields.text("dtype", "torch_dtype") or outer.text("dtype", "torch_dtype") or "bfloat16"
    plain = DTYPE_BITS.get(dtype.removeprefix("torch."))
    if plain is None:
        raise UnknownNameError(f"{outer.where}: dtype", dtype[:60], DTYPE_BITS)
    kv_bits = plain if plain >= 16 else 16.0
    scheme = outer.part("quantization_config") or fields.part("quantization_config")
    if scheme is not None:
        found = quantised_of(scheme.values, plain, scheme.where)
    elif modelopt is not None:
        found = quantised_of(modelopt_scheme(modelopt.values), plain, modelopt.where)
    else:
        kind: Format | None = "fp16" if dtype.removeprefix("torch.") in ("float16", "half") else None
        return plain, plain, kv_bits, (kind, kind)
    kv_bits = kv_bits if found.kv_bits is None else found.kv_bits
    return found.weight_bits, found.expert_bits, kv_bits, (found.weight_format, found.expert_format)
