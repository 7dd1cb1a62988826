"""Weights stored as 8-bit floats run as the numbers that they stand for; other small weights are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import opened, prompt, run
from hugging_face_models import load, make
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from potluck.catalog.huggingface import read_model
from potluck.core.errors import FormatError, InputError
from potluck.engine.model.config import read_config
from potluck.engine.model.fp8 import brought_back
from potluck.engine.model.fp8_scales import read_quantised

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [24, 20],
    "activation_scheme": "dynamic",
}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def tiles(shape: torch.Size, way: str) -> tuple[int, int]:
    return {"tensor": (shape[0], shape[1]), "row": (1, shape[1]), "block": (24, 20)}[way]


def pressed(weight: Tensor, way: str) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit floats, their scales, and what both stand for."""
    high, wide = tiles(weight.shape, way)
    scales = torch.stack(
        [
            torch.stack([part.abs().max() / 448 for part in band.split(wide, 1)])
            for band in weight.split(high, 0)
        ]
    )
    spread = scales.repeat_interleave(high, 0)[: len(weight)].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    small = (weight / spread).to(torch.float8_e4m3fn)
    return small, scales, small.float() * spread


def press(folder: Path, small: Path, plain: Path, way: str, suffix: str) -> None:
    """Two directories: one with 8-bit floats, and one with the numbers that they stand for."""
    tensors = load_file(folder / "model.safetensors")
    kept, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            kept[name], scale, meant[name] = pressed(tensor, way)
            kept[name + suffix] = scale.reshape(()) if way == "tensor" else scale
    for target, content in ((small, kept), (plain, meant)):
        target.mkdir()
        shutil.copy(folder / "config.json", target)
        save_file(content, target / "model.safetensors")


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("family", "way", "suffix", "scheme"),
    [
        ("deepseek_v3", "block", "_scale_inv", DEEPSEEK),
        ("qwen3", "tensor", "_scale", PER_TENSOR),
        ("qwen3_moe", "row", "_scale", COMPRESSED),
        ("llama", "tensor", "_scale", None),
    ],
)
def test_eight_bits_run_as_the_numbers_they_stand_for(
    family: str, way: str, suffix: str, scheme: dict[str, Any] | None, tmp_path: Path
) -> None:
    make(family, tmp_path / "whole")
    small, plain = tmp_path / "small", tmp_path / "plain"
    press(tmp_path / "whole", small, plain, way, suffix)
    if scheme is None:
        (small / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        configure(small, quantization_config=scheme)
    (_, one), (_, two) = load(small), load(plain)
    tokens = [token % 96 for token in prompt(20)]
    found, expected = (run(each, opened(each, 20), tokens, [20]) for each in (one, two))
    assert torch.equal(found, expected)
    assert read_model(small).weight_bits == 8
    assert read_model(small).kv_bits == (8 if scheme is None else 32)
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    for scale, words in ((None, "no .*_scale to go with it"), (torch.ones(3, 5), r"shape \[3, 5\]")):
        tensors.pop(name + suffix, None)
        save_file(
            {**tensors, **({} if scale is None else {name + suffix: scale})}, small / "model.safetensors"
        )
        with pytest.raises(FormatError, match=words):
            load(small)


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["tensor", "row", "block"]), st.booleans())
def test_every_shape_of_scales(rows: int, columns: int, way: str, flat: bool) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.01
    small, scales, meant = pressed(weight, way)
    block = (24, 20) if way == "block" else None
    if flat and way == "row":
        scales = scales.reshape(-1)
    assert torch.equal(brought_back(small, scales, block, "w", "here"), meant)


def test_a_scale_that_is_no_number_is_found_out() -> None:
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match="^here: the scale of w is not finite"):
        brought_back(weight, torch.tensor(torch.nan), None, "w", "here")


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}},
        },
        {"quant_method": "magic"},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {},
        [],
    ],
)
def test_other_small_weights_are_refused_in_one_line(scheme: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32, "quantization_config": scheme})
    )
    whole = json.loads((tmp_path / "config.json").read_text())
    more = {"vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**whole, **more, "max_position_embeddings": 64}))
    with pytest.raises(InputError, match="quantization_config") as caught:
        read_config(tmp_path, read_model(tmp_path))
    assert "\n" not in str(caught.value)


def test_modelopts_own_file_is_read_by_both(tmp_path: Path) -> None:
    values = {"model_type": "llama", "hidden_size": 32, "vocab_size": 9, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}))
    model = read_model(tmp_path)
    assert (model.weight_bits, model.kv_bits) == (4.5, 8)
    with pytest.raises(InputError, match=r"modelopt \(4.5 bits\) cannot be run"):
        read_config(tmp_path, model)
    beside.write_text(json.dumps(MODELOPT))
    found = read_quantised(tmp_path)
    assert found is not None
    assert found.fp8
    for bad in ("[]", "{}", '{"quantization": 3}'):
        beside.write_text(bad)
        with pytest.raises(InputError, match=r"hf_quant_config\.json"):
            read_model(tmp_path)
