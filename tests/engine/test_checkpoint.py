"""Weights and configurations as files: read back as written, and refused in one line when they are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import FANCY, KINDS, logits_of, open_row, prompt
from hugging_face_models import load, make
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_model import FreshWeights, ReferenceModel
from safetensors.torch import load_file, save_file
from sample_models import BASE, LLAMA3, YARN
from torch import Tensor

from potluck.catalog.huggingface import read_model
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.model import FullAttention, Layer, LinearAttention, Model
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource, brought_back, fingerprint, save
from potluck.engine.model.config import EngineModelConfig, read_config, read_quantised

SIZE = RunnerSize(rows=1, blocks=20, max_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, KINDS["hybrid"], ReferenceModel(KINDS["hybrid"], RandomSource(1)).tensors())
    return path


def load_runner(folder: Path) -> Runner:
    return Runner(read_config(folder), SafetensorsSource(folder), SIZE)


def assert_one_line_error(folder: Path, *words: str) -> None:
    with pytest.raises(PotluckError) as caught:
        load_runner(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_checkpoint_folder_runs_like_the_tensors_it_was_saved_from(folder: Path) -> None:
    engine = load_runner(folder)
    memory = Runner(KINDS["hybrid"], RandomSource(1), SIZE)
    tokens = prompt(40)
    one, two = (logits_of(item, open_row(item, 40), tokens, [40]) for item in (engine, memory))
    assert torch.equal(one, two)
    assert engine.fingerprint != memory.fingerprint  # of a file and of a seed; each is stable
    assert engine.fingerprint == load_runner(folder).fingerprint


@settings(max_examples=25)
@given(st.data())
def test_truncated_weight_file_is_refused_in_one_line(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = tmp_path_factory.mktemp("cut")
    shutil.copy(folder / "config.json", copy)
    whole = (folder / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert_one_line_error(copy, "model.safetensors")


@settings(max_examples=25)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=8))
def test_damaged_weight_header_is_refused_in_one_line_or_harmless(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    copy = tmp_path_factory.mktemp("noise")
    shutil.copy(folder / "config.json", copy)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[place : place + len(noise)] = noise
    (copy / "model.safetensors").write_bytes(content)
    try:
        load_runner(copy)
    except PotluckError as error:
        text = str(error)
    else:
        text = ""
    assert "\n" not in text


def edited(folder: Path, copy: Path, edit: dict[str, torch.Tensor | None]) -> Path:
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in edit.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_missing_misshapen_and_non_finite_tensors_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    assert_one_line_error(edited(folder, tmp_path / "a", {name: None}), name, "no tensor")
    assert_one_line_error(
        edited(folder, tmp_path / "b", {name: torch.zeros(3, 4)}), name, "[3, 4]", "[64, 64]"
    )
    assert_one_line_error(
        edited(folder, tmp_path / "c", {name: torch.full((64, 64), torch.inf)}), name, "not finite"
    )
    assert_one_line_error(
        edited(folder, tmp_path / "d", {name: torch.zeros(64, 64, dtype=torch.int8)}), name, "int8"
    )


def test_weights_in_several_files_with_an_index_are_read(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    shutil.copy(folder / "config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    tokens = prompt(30)
    one, two = (
        logits_of(item, open_row(item, 30), tokens, [30])
        for item in (load_runner(tmp_path), load_runner(folder))
    )
    assert torch.equal(one, two)
    (tmp_path / "part-1.safetensors").rename(tmp_path / "gone")
    assert_one_line_error(tmp_path, "part-1.safetensors", "is missing")
    for bad in (
        "[]",
        "{",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(bad)
        assert_one_line_error(tmp_path, "index.json")


def test_fingerprints_differ_between_weights_and_models(tmp_path: Path) -> None:
    config, other = KINDS["hybrid"], KINDS["full"]
    weights = ReferenceModel(config, RandomSource(1)).tensors()
    changed = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1e-3}
    pairs = [(config, RandomSource(1)), (config, RandomSource(2)), (other, RandomSource(1))]
    for name, tensors in (("one", weights), ("two", changed)):
        save(tmp_path / name, config, tensors)
        pairs.append((config, SafetensorsSource(tmp_path / name)))
    assert len({fingerprint(*pair) for pair in pairs}) == len(pairs)
    assert fingerprint(config, FreshWeights(1)) == fingerprint(config, FreshWeights(1))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"model_type": "potluck"}', "config"),
        ('{"model_type": "potluck", "config": {"model": 1}}', "config"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ("{}", "model_type"),
        ('{"model_type": "llama"}', "core.Model"),
    ],
)
def test_invalid_config_json_is_refused_in_one_line(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert_one_line_error(tmp_path, word)


def test_folder_without_model_files_is_refused_in_one_line(tmp_path: Path) -> None:
    assert_one_line_error(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.slow
def test_both_forms_of_rope_settings_are_read(tmp_path: Path) -> None:
    """The files of published models have rope_theta beside rope_scaling; transformers writes rope_parameters."""
    make("llama-llama3-rope", tmp_path)
    config, _ = load(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values.pop("rope_parameters")
    values |= {"rope_theta": 10_000.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}
    path.write_text(json.dumps(values))
    assert read_config(tmp_path, config.model) == config
    for change in (
        {"rope_scaling": {"type": "dynamic"}},
        {"hidden_act": "gelu"},
        {"torch_dtype": "int8", "dtype": None},
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(InputError, match="cannot be run"):
            read_config(tmp_path, config.model)
    path.write_text(json.dumps({**values, "rope_scaling": {"type": "yarn", **YARN}, "eos_token_id": [2, 3]}))
    assert read_config(tmp_path, config.model).rope.kind == "yarn"
    assert read_config(tmp_path, config.model).eos_tokens == (2, 3)


@pytest.mark.parametrize(
    "part",
    [
        FullAttention(4, 2, 16, 16, sinks=True),
        FullAttention(4, 2, 16, 8),
        FullAttention(4, 2, 16, 16, qk_norm="full"),
        LinearAttention("kda", 2, 2, 16, 16, conv_kernel=4),
        LinearAttention("gated_delta", 2, 2, 16, 16),
    ],
)
def test_unsupported_layers_are_refused_when_the_model_is_read(part: FullAttention | LinearAttention) -> None:
    ffn = KINDS["full"].model.layers[0].ffn
    model = Model("odd", BASE["hidden_size"], 10, (Layer(FANCY, ffn), Layer(part, ffn)), 64)
    with pytest.raises(InputError, match="^layer 1: .*cannot be run"):
        EngineModelConfig(model)


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


def quantized(weight: Tensor, way: str) -> tuple[Tensor, Tensor, Tensor]:
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


def write_quantized(folder: Path, small: Path, plain: Path, way: str, suffix: str) -> None:
    """Two directories: one with 8-bit floats, and one with the numbers that they stand for."""
    tensors = load_file(folder / "model.safetensors")
    kept, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            kept[name], scale, meant[name] = quantized(tensor, way)
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
def test_fp8_weights_run_like_their_dequantized_values(
    family: str, way: str, suffix: str, scheme: dict[str, Any] | None, tmp_path: Path
) -> None:
    make(family, tmp_path / "whole")
    small, plain = tmp_path / "small", tmp_path / "plain"
    write_quantized(tmp_path / "whole", small, plain, way, suffix)
    if scheme is None:
        (small / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        configure(small, quantization_config=scheme)
    (_, one), (_, two) = load(small), load(plain)
    tokens = [token % 96 for token in prompt(20)]
    result, expected = (logits_of(item, open_row(item, 20), tokens, [20]) for item in (one, two))
    assert torch.equal(result, expected)
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
def test_fp8_scales_of_every_shape_are_applied(rows: int, columns: int, way: str, flat: bool) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.01
    small, scales, meant = quantized(weight, way)
    block = (24, 20) if way == "block" else None
    if flat and way == "row":
        scales = scales.reshape(-1)
    assert torch.equal(brought_back(small, scales, block, "w", "here"), meant)


def test_non_finite_scale_is_refused() -> None:
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
def test_unsupported_quantization_is_refused_in_one_line(scheme: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32, "quantization_config": scheme})
    )
    whole = json.loads((tmp_path / "config.json").read_text())
    more = {"vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**whole, **more, "max_position_embeddings": 64}))
    with pytest.raises(InputError, match="quantization_config") as caught:
        read_config(tmp_path, read_model(tmp_path))
    assert "\n" not in str(caught.value)


def test_modelopt_quantization_file_is_read_by_catalog_and_engine(tmp_path: Path) -> None:
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
    quantised = read_quantised(tmp_path)
    assert quantised is not None
    assert quantised.fp8
    for bad in ("[]", "{}", '{"quantization": 3}'):
        beside.write_text(bad)
        with pytest.raises(InputError, match=r"hf_quant_config\.json"):
            read_model(tmp_path)
