"""Formats that a checkpoint's files tell."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.core.values.model import modelopt_scheme, quantised_of

CASES: list[tuple[dict[str, Any], str, str | None, str | None]] = [
    ({"quant_method": "fp8"}, "per tensor", "fp8", "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by blocks", "fp8_block", "fp8_block"),
    ({"quant_method": "mxfp4"}, "experts alone", None, "mxfp4"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "int4", "int4"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq", "int8", "int8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "int4", "int4"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        "compressed fp8",
        "fp8",
        "fp8",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
        },
        "compressed int8",
        "int8",
        "int8",
    ),
    (modelopt_scheme({"quantization": {"quant_algo": "NVFP4"}}), "modelopt", "nvfp4", "nvfp4"),
    (modelopt_scheme({"quantization": {"quant_algo": "FP8"}}), "modelopt fp8", "fp8", "fp8"),
]


@pytest.mark.parametrize(("scheme", "words", "weights", "experts"), CASES, ids=[case[1] for case in CASES])
def test_the_format_is_told(
    scheme: dict[str, Any], words: str, weights: str | None, experts: str | None
) -> None:
    found = quantised_of(scheme, 16.0, words)
    assert (found.weight_format, found.expert_format) == (weights, experts)
