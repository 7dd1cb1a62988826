"""Weights and configurations as files: read back as written, and refused in one line when they are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_models import FANCY, KINDS, opened, prompt, run
from hugging_face_models import load, make
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sample_models import BASE, LLAMA3, YARN

from potluck.core.errors import InputError, PotluckError
from potluck.core.values.model import FullAttention, Layer, LinearAttention, Model
from potluck.engine.compute.runner import Runner, RunnerSize
from potluck.engine.model.checkpoint import InMemorySource, RandomSource, SafetensorsSource, fingerprint, save
from potluck.engine.model.config import EngineModelConfig, read_config
from potluck.engine.model.reference import FreshWeights, ReferenceModel

SIZE = RunnerSize(rows=1, blocks=20, max_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, KINDS["hybrid"], ReferenceModel(KINDS["hybrid"], RandomSource(1)).tensors())
    return path


def start(folder: Path) -> Runner:
    return Runner(read_config(folder), SafetensorsSource(folder), SIZE)


def one_line(folder: Path, *words: str) -> None:
    with pytest.raises(PotluckError) as caught:
        start(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_a_directory_runs_as_the_tensors_it_was_made_of(folder: Path) -> None:
    engine = start(folder)
    memory = Runner(KINDS["hybrid"], InMemorySource(load_file(folder / "model.safetensors")), SIZE)
    tokens = prompt(40)
    one, two = (run(each, opened(each, 40), tokens, [40]) for each in (engine, memory))
    assert torch.equal(one, two)
    assert engine.fingerprint != memory.fingerprint  # of a file and of memory; each is stable
    assert engine.fingerprint == start(folder).fingerprint


@settings(max_examples=25)
@given(st.data())
def test_a_file_cut_short_is_found_out(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = tmp_path_factory.mktemp("cut")
    shutil.copy(folder / "config.json", copy)
    whole = (folder / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    one_line(copy, "model.safetensors")


@settings(max_examples=25)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_one_line_or_harmless(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    copy = tmp_path_factory.mktemp("noise")
    shutil.copy(folder / "config.json", copy)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[place : place + len(noise)] = noise
    (copy / "model.safetensors").write_bytes(content)
    try:
        start(copy)
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


def test_missing_misshapen_and_endless_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    one_line(edited(folder, tmp_path / "a", {name: None}), name, "no tensor")
    one_line(edited(folder, tmp_path / "b", {name: torch.zeros(3, 4)}), name, "[3, 4]", "[64, 64]")
    one_line(edited(folder, tmp_path / "c", {name: torch.full((64, 64), torch.inf)}), name, "not finite")
    one_line(edited(folder, tmp_path / "d", {name: torch.zeros(64, 64, dtype=torch.int8)}), name, "int8")


def test_several_files_with_an_index(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    shutil.copy(folder / "config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    tokens = prompt(30)
    one, two = (run(each, opened(each, 30), tokens, [30]) for each in (start(tmp_path), start(folder)))
    assert torch.equal(one, two)
    (tmp_path / "part-1.safetensors").rename(tmp_path / "gone")
    one_line(tmp_path, "part-1.safetensors", "is missing")
    for bad in (
        "[]",
        "{",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(bad)
        one_line(tmp_path, "index.json")


def test_a_stage_reads_its_own_layers_only() -> None:
    class Spy(RandomSource):
        taken: list[str] = []  # noqa: RUF012

        def take(self, name: str, *shape: int) -> torch.Tensor:
            Spy.taken.append(name)
            return RandomSource.take(self, name, *shape)

    Runner(KINDS["hybrid"], Spy(1), SIZE, first=1, last=3)
    assert {name.split(".")[2] for name in Spy.taken} == {"1", "2"}
    Spy.taken.clear()
    Runner(KINDS["full"], Spy(1), SIZE, first=1)
    assert "model.embed_tokens.weight" in Spy.taken  # tied: the head is the embedding
    assert not any("layers.0" in name for name in Spy.taken)


def test_fingerprints_tell_weights_and_models_apart() -> None:
    config, other = KINDS["hybrid"], KINDS["full"]
    weights = ReferenceModel(config, RandomSource(1)).tensors()
    changed = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1e-3}
    pairs = (
        (config, RandomSource(1)),
        (config, RandomSource(2)),
        (other, RandomSource(1)),
        (config, InMemorySource(weights)),
        (config, InMemorySource(changed)),
    )
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
def test_a_bad_configuration_is_one_line(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.json").write_text(text)
    one_line(tmp_path, word)


def test_a_directory_without_files_is_one_line(tmp_path: Path) -> None:
    one_line(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="safetensors"):
        SafetensorsSource(tmp_path)


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
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
def test_layers_that_cannot_be_run_are_refused_at_once(part: FullAttention | LinearAttention) -> None:
    ffn = KINDS["full"].model.layers[0].ffn
    model = Model("odd", BASE["hidden_size"], 10, (Layer(FANCY, ffn), Layer(part, ffn)), 64)
    with pytest.raises(InputError, match="^layer 1: .*cannot be run"):
        EngineModelConfig(model)
