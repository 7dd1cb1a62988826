"""`config.json` files: keys of each model family, quantization, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import huggingface
from potluck.catalog.huggingface import FAMILIES, ConfigFields
from potluck.core.errors import InputError
from potluck.core.values.model import (
    FullAttention,
    LatentAttention,
    LinearAttention,
    MoeFfn,
    modelopt_scheme,
    quantised_of,
)
from potluck.perf import memory

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


LATENT = {"kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}


KIMI = {
    "linear_attn_config": {"num_heads": 4, "head_dim": 8, "full_attn_layers": [4]},
    "num_shared_experts": 1,
}


MIMO = {"head_dim": 12, "v_head_dim": 8, "sliding_window": 16, "hybrid_layer_pattern": [0, 1, 1, 0]}


EXTRAS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**EXPERTS, "sliding_window": 16}, "mixtral": EXPERTS, "minimax_m2": EXPERTS, "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, **DELTA}, "deepseek_v2": {**EXPERTS, **LATENT}, "deepseek_v3": {**EXPERTS, **LATENT},
    "kimi_k2": {**EXPERTS, **LATENT}, "kimi_linear": {**EXPERTS, **LATENT, **KIMI},
    "mimo_v2_flash": {**EXPERTS, **MIMO}, "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA}, "qwen3_5_text": DELTA,
}  # fmt: skip


def config(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**BASE, **EXTRAS.get(kind, {}), "model_type": kind, **changes}


def read(values: dict[str, Any]) -> Any:
    return huggingface.model_from(ConfigFields(values), "m")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_model_family_reads_a_small_config(kind: str) -> None:
    model = read(config(kind))
    assert model.layer_count == 4
    assert memory.parameters(model) > 0
    assert memory.kv_bytes(model, 100) > 0


def test_sliding_windows_are_read_per_family_and_layer() -> None:
    def windows(values: dict[str, Any]) -> list[int | None]:
        return [layer.attention.window for layer in read(values).layers]

    assert windows(config("mistral", sliding_window=32)) == [32] * 4
    assert windows(config("mistral", sliding_window=None)) == [None] * 4
    assert windows(config("qwen2", sliding_window=32)) == [None] * 4
    on = {"use_sliding_window": True, "sliding_window": 32}
    assert windows(config("qwen2", **on, max_window_layers=3)) == [None, None, None, 32]
    assert windows(config("qwen3", **on)) == [None] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(config("qwen3", sliding_window=8, layer_types=kinds)) == [None, 8] * 2
    assert windows(config("gpt_oss")) == [16, None] * 2
    assert windows(config("mimo_v2_flash")) == [None, 16, 16, None]


def test_attention_and_ffn_kinds_are_read_per_layer() -> None:
    kimi = read(config("kimi_linear"))
    assert [type(layer.attention) for layer in kimi.layers] == [LinearAttention] * 3 + [LatentAttention]
    assert [isinstance(layer.ffn, MoeFfn) for layer in kimi.layers] == [False, True, True, True]
    deepseek = read(config("deepseek_v3", first_k_dense_replace=2, n_shared_experts=2))
    assert [isinstance(layer.ffn, MoeFfn) for layer in deepseek.layers] == [False, False, True, True]
    assert deepseek.layers[3].ffn.shared_intermediate == 64
    sparse = read(config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [isinstance(layer.ffn, MoeFfn) for layer in sparse.layers] == [False, True, False, False]
    hybrid = read(config("qwen3_next", full_attention_interval=2))
    assert [isinstance(layer.attention, FullAttention) for layer in hybrid.layers] == [False, True] * 2


def test_text_part_of_a_multimodal_config_is_read() -> None:
    inner = config("qwen3_5_moe_text", dtype="bfloat16")
    outer = {"model_type": "qwen3_5_moe", "text_config": inner, "tie_word_embeddings": True}
    model = read(outer)
    assert model.tied_embeddings
    assert model.layers == read(inner).layers


@pytest.mark.parametrize(
    ("scheme", "weight", "expert"), [ ({"quant_method": "fp8"}, 8, 8), ({"quant_method": "mxfp4"}, 16, 4.25),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, 8),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, 4.5),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 4.5), ( { "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}, }, 4.5, 4.5, ),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8, 8), ],
)  # fmt: skip
def test_quantization_config_sets_weight_and_expert_bits(
    scheme: dict[str, Any], weight: float, expert: float
) -> None:
    model = read(config("qwen3_moe", quantization_config=scheme, torch_dtype="bfloat16"))
    assert (model.weight_bits, model.expert_bits, model.kv_bits) == (weight, expert, 16)


def test_dtype_and_kv_cache_scheme_set_bits() -> None:
    assert read(config(torch_dtype="float32")).weight_bits == 32
    assert read(config(dtype="float16")).kv_bits == 16
    eight = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read(config(quantization_config=eight)).kv_bits == 8


def _write(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_model_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    _write(folder, config())
    assert huggingface.read_model(folder) == huggingface.read_model(folder / "config.json")
    assert huggingface.read_model(str(folder)).name == "my-model"
    (tmp_path / "other.json").write_text(json.dumps(config()))
    assert huggingface.read_model(tmp_path / "other.json").name == "other"


def test_missing_layer_count_is_refused_in_one_line(tmp_path: Path) -> None:
    values = config()
    del values["num_hidden_layers"]
    with pytest.raises(InputError) as caught:
        huggingface.read_model(_write(tmp_path, values))
    assert str(caught.value) == "config.json: num_hidden_layers is missing"


@pytest.mark.parametrize(
    ("changes", "message"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are deepseek_v2, "),
    ({"model_type": None}, "model_type is missing"), ({"model_type": 7}, "model_type must be a string, not 7"),
    ({"hidden_size": -4096}, "hidden_size must be 1 to "),
    ({"hidden_size": 4096.5}, "hidden_size must be an integer, not 4096.5"),
    ({"hidden_size": True}, "hidden_size must be an integer, not true"),
    ({"vocab_size": "many"}, "vocab_size must be an integer, not 'many'"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be 1 to 10000"),
    ({"num_hidden_layers": float("nan")}, "num_hidden_layers must be an integer, not NaN"),
    ({"num_key_value_heads": 3}, "8 heads cannot share 3 KV heads evenly"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim is missing and hidden_size"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"dtype": "int3"}, "dtype: unknown 'int3'"),
    ({"quantization_config": []}, "quantization_config must be an object, not a list"),
    ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic' is not supported"), (
    {"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers", ),
    ({"model_type": "qwen2", "layer_types": ["x"] * 4}, "layer_types has 'x'; known are full_attention"),
    ({"model_type": "qwen2", "layer_types": "full"}, "layer_types must be a list"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "kv_lora_rank is missing"), ],
)  # fmt: skip
def test_invalid_config_values_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    kind = changes.get("model_type", "llama")
    values = config(kind if isinstance(kind, str) else "llama", **changes)
    with pytest.raises(InputError) as caught:
        read(values)
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)


def test_unreadable_config_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InputError, match="has no config.json"):
        huggingface.read_model(tmp_path)
    for text in ("", "{", "[1]", "null", '{"a": ' + "9" * 10_000 + "}", "[" * 100_000, '{"a":' * 50_000):
        file.write_text(text)
        with pytest.raises(InputError, match="^config.json: "):
            huggingface.read_model(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not JSON"):
        huggingface.read_model(tmp_path)
    with pytest.raises(InputError):
        huggingface.read_model("a\0b")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


MORE_KEYS = (
    *("head_dim", "dtype", "quantization_config", "text_config", "layer_types", "mlp_layer_types"),
    *("sliding_window", "attention_bias", "tie_word_embeddings", "first_k_dense_replace", "moe_layer_freq"),
    *("mlp_only_layers", "decoder_sparse_step", "use_sliding_window", "max_window_layers"),
    "full_attention_interval",
)


KEYS = sorted({key for kind in FAMILIES for key in config(kind)} | set(MORE_KEYS))


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), dropped=st.sampled_from(KEYS))
def test_any_changed_config_is_read_or_refused_in_one_line(
    kind: str, changes: dict[str, Any], dropped: str
) -> None:
    values = config(kind)
    values.pop(dropped, None)
    values.update(changes)
    try:
        model = read(values)
    except InputError as error:
        lines = str(error).splitlines()
    else:
        assert memory.parameters(model) > 0
        lines = [model.name]
    assert len(lines) == 1


@given(JSON)
def test_any_json_document_is_refused_as_config_without_traceback(document: object) -> None:
    if not isinstance(document, dict):
        return
    with pytest.raises(InputError):
        read(document)


CASES: list[tuple[dict[str, Any], str, str | None, str | None]] = [
    ({"quant_method": "fp8"}, "per tensor", "fp8", "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by blocks", "fp8_block", "fp8_block"),
    ({"quant_method": "mxfp4"}, "experts alone", None, "mxfp4"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "int4", "int4"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq", "int8", "int8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "int4", "int4"), ( {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}, }, "compressed fp8", "fp8",
    "fp8", ), ( { "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}, }, "compressed int8", "int8",
    "int8", ), (modelopt_scheme({"quantization": {"quant_algo": "NVFP4"}}), "modelopt", "nvfp4", "nvfp4"),
    (modelopt_scheme({"quantization": {"quant_algo": "FP8"}}), "modelopt fp8", "fp8", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "words", "weights", "experts"), CASES, ids=[case[1] for case in CASES])
def test_weight_format_is_recognised_from_the_config(
    scheme: dict[str, Any], words: str, weights: str | None, experts: str | None
) -> None:
    quantised = quantised_of(scheme, 16.0, words)
    assert (quantised.weight_format, quantised.expert_format) == (weights, experts)
