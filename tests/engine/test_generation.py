"""generation_config.json: what ends an answer and how tokens are drawn, where a request does not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_models import KINDS, VOCAB
from reference_model import ReferenceModel
from server_helpers import NAME, engine_client, letter_tokenizer

from potluck.api.model_files import NEUTRAL, GenerationConfig, read_generation
from potluck.cli.engine.engine import generation_of
from potluck.core.errors import InputError, PotluckError
from potluck.core.values.sampling import SamplingDefaults
from potluck.engine.model.checkpoint import RandomSource, save
from potluck.engine.serve import EngineSettings, assemble
from potluck.engine.server.engine_service import EngineService


def write_generation_config(folder: Path, values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "ends", "defaults"),
    [
        ({}, (), SamplingDefaults()),
        ({"eos_token_id": 7}, (7,), SamplingDefaults()),
        ({"eos_token_id": [7, 9], "transformers_version": "5"}, (7, 9), SamplingDefaults()),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (), SamplingDefaults(0.6, 0, 0.9)),
        ({"temperature": 0.7, "top_k": 20, "min_p": 0.05}, (), SamplingDefaults(0.7, 20, 1.0, 0.05)),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, (), SamplingDefaults(0.0)),
        ({"do_sample": None, "temperature": None, "top_k": -1}, (), SamplingDefaults()),
    ],
)
def test_generation_config_sets_end_tokens_and_sampling_defaults(
    tmp_path: Path, values: dict[str, Any], ends: tuple[int, ...], defaults: SamplingDefaults
) -> None:
    assert read_generation(tmp_path) == GenerationConfig()
    assert read_generation(write_generation_config(tmp_path, values)) == GenerationConfig(ends, defaults)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "generation_config.json"),
        ({"eos_token_id": "</s>"}, "generation_config.json: eos_token_id"),
        ({"temperature": -1}, "generation_config.json: temperature"),
        ({"temperature": "hot"}, "generation_config.json: temperature"),
        ({"top_p": 2}, "generation_config.json: top_p"),
        ({"do_sample": 1}, "generation_config.json: do_sample"),
    ],
)
def test_invalid_generation_config_is_refused_in_one_line(tmp_path: Path, values: object, words: str) -> None:
    with pytest.raises(PotluckError) as caught:
        read_generation(write_generation_config(tmp_path, values))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unsupported_generation_settings_are_reported_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_generation_config(
        tmp_path, {"repetition_penalty": 1.05, "num_beams": 4, "typical_p": 0.9, "guidance_scale": None}
    )
    generation = generation_of(tmp_path)
    assert generation.defaults.repetition_penalty == 1.05
    assert generation.left_out == ("num_beams 4", "typical_p 0.9")
    assert "generation_config.json: left out: num_beams 4, typical_p 0.9\n" in capsys.readouterr().err
    write_generation_config(tmp_path, {key: values[0] for key, values in NEUTRAL.items() if values})
    assert generation_of(tmp_path).left_out == ()
    assert capsys.readouterr().err == ""


def start_service(folder: Path) -> EngineService:
    settings = EngineSettings(max_running=2, max_tokens=64, prefix_cache_bytes=0)
    service = assemble(folder, None, settings, name=NAME, generation=read_generation(folder))
    service.text = letter_tokenizer()
    return service


async def answer_of(folder: Path, **fields: Any) -> tuple[str, str]:
    body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 8, **fields}
    async with engine_client(start_service(folder)) as client:
        status, reply = await client.post("/v1/completions", body)
    assert status == 200, reply
    return reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]


async def test_requests_without_sampling_fields_use_the_model_defaults(tmp_path: Path) -> None:
    save(tmp_path, KINDS["full"], ReferenceModel(KINDS["full"], RandomSource(1)).tensors())

    greedy, why = await answer_of(tmp_path, temperature=0)
    assert (len(greedy), why) == (8, "length")
    write_generation_config(tmp_path, {"do_sample": False})
    assert await answer_of(tmp_path) == (greedy, why)
    warm = {await answer_of(tmp_path, temperature=30, seed=seed) for seed in (1, 2)}
    assert (greedy, why) not in warm  # what a request says is stronger
    letter = greedy[2]
    write_generation_config(
        tmp_path, {"do_sample": False, "eos_token_id": [letter_tokenizer().encode(letter)[0]]}
    )
    assert await answer_of(tmp_path) == (greedy[: greedy.index(letter)], "stop")
    assert await answer_of(tmp_path, ignore_eos=True) == (greedy, why)
    write_generation_config(tmp_path, {"eos_token_id": [3, VOCAB]})
    with pytest.raises(InputError, match=f"^eos_token_id: {VOCAB} is not in the vocabulary"):
        start_service(tmp_path)
