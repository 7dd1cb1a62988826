"""Weights stored as 8-bit floats: each is multiplied by its scale when it is read, and runs as any other.

DeepSeek keeps `NAME_scale_inv`, one for each block of 128 by 128; compressed-tensors, ModelOpt and others keep
`NAME_scale`, one for the tensor, for each row, or for each block. All are factors. Activations stay as they are:
what is meant to run in 8 bits throughout runs a little more exactly here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from potluck.api.model_files import read_json
from potluck.core.errors import FormatError, InputError
from potluck.core.values.model import Quantised, modelopt_scheme, quantised_of

MODELOPT = "hf_quant_config.json"


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
    found = read_quantised(directory, config)
    if found is not None and not found.fp8:
        raise InputError(
            "config.json: quantization_config",
            f"weights made by {found.method} ({found.weight_bits:g} bits) cannot be run; 8-bit floats (fp8) can",
        )
