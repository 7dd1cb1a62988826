"""Phi-3: projections in one tensor, and positions that are stretched beyond the original context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_models import opened, prompt, run, same
from hugging_face_models import load, make

from potluck.core.errors import FormatError, InputError
from potluck.engine.compute.runner import Runner, RunnerSize, SequenceWork
from potluck.engine.memory.handover import IncomingHandover, manifest, pack
from potluck.engine.model.checkpoint import SafetensorsSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi")
    make("phi3-longrope", path)
    return path


def tokens_of(length: int) -> list[int]:
    return [token % 96 for token in prompt(length)]


def test_any_cut_gives_the_same(folder: Path) -> None:
    _, engine = load(folder, max_tokens=64)
    tokens = tokens_of(50)
    whole = run(engine, opened(engine, 50), tokens, [50])
    for sizes in ([1] * 50, [7, 20, 23], [49, 1]):
        row = opened(engine, 50)
        assert same(run(engine, row, tokens, sizes), whole)
        engine.tables.close(row)


def test_a_cache_is_handed_on_at_any_cut(folder: Path) -> None:
    (_, sender), (_, receiver) = load(folder, max_tokens=64), load(folder, max_tokens=64)
    tokens = tokens_of(40)
    expected = run(receiver, opened(receiver, 40), tokens, [40])[-1:]
    for cut in (1, 16, 33, 39):
        source, row = opened(sender, 40), receiver.tables.open()
        sender.step([SequenceWork(source, 0, tokens[:cut], "none")])
        arrival = IncomingHandover(receiver, row, manifest(sender, tokens, 0, cut), tokens)
        for layer in range(3):
            for parcel in pack(sender, source, layer, 0, cut):
                arrival.accept(parcel)
        arrival.finish()
        receiver.tables.grow(row, 40)
        assert same(receiver.step([SequenceWork(row, cut, tokens[cut:])]), expected), cut
        sender.tables.close(source)
        receiver.tables.close(row)


def test_stages_take_their_own_parts(folder: Path) -> None:
    config, whole = load(folder, max_tokens=64)
    size = RunnerSize(rows=2, blocks=16, max_tokens=64)
    first, last = (
        Runner(config, SafetensorsSource(folder), size, first=begin, last=end)
        for begin, end in ((0, 2), (2, 3))
    )
    tokens = tokens_of(30)
    expected = run(whole, opened(whole, 30), tokens, [30])
    rows = [opened(each, 30) for each in (first, last)]
    states = first.step([SequenceWork(rows[0], 0, tokens, "all")])
    assert same(last.step([SequenceWork(rows[1], 0, tokens, "all")], states), expected)


def test_the_context_ends_where_positions_would_turn_otherwise(folder: Path, tmp_path: Path) -> None:
    config, _ = load(folder, max_tokens=64)
    assert config.model.max_context_tokens == 256
    with pytest.raises(InputError, match="max_tokens: 257 is more than the model's 256"):
        load(folder, max_tokens=257)
    values = json.loads((folder / "config.json").read_text())
    rope = dict(values["rope_parameters"])
    for change, words in (
        ({"short_factor": [1.0]}, "short_factor: must be 4 numbers above 0"),
        ({"short_factor": [1.0, 2.0, 3.0, 0.0]}, "short_factor: must be 4 numbers above 0"),
        ({"short_factor": "x"}, "short_factor: must be a list of numbers"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings: must stand beside"),
        ({"rope_type": "linear"}, "rope_type: 'linear' cannot be run; known are default, longrope"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**values, "rope_parameters": {**rope, **change}}))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises((InputError, FormatError), match=words):
            load(tmp_path, max_tokens=64)
