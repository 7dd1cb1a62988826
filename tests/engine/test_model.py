"""The engine against the plain function of the same weights; training; stages; resuming from a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from check_checkpoints import compare, documented, refusal
from engine_models import (
    KINDS,
    LATENT,
    LINEAR,
    SIGMOID_MOE,
    VOCAB,
    equal_logits,
    logits_of,
    open_row,
    prompt,
    runner,
    stack,
)
from hugging_face_models import load, make
from odd_configs import ABSENT, Case, cases
from reference_model import FreshWeights, ReferenceModel
from sample_models import BASE, BASES, SAMPLES, Values

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.model import DenseFfn, FullAttention
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource, save
from potluck.engine.model.config import FAMILIES, READ_BY, EngineModelConfig, read_config

TOKENS = prompt(90, seed=5)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_logits_equal_the_reference_model(kind: str) -> None:
    config = KINDS[kind]
    with torch.no_grad():
        expected = ReferenceModel(config, RandomSource(7))(torch.tensor([TOKENS]))[0]
    engine = runner(config)
    completed = logits_of(engine, open_row(engine, 90), TOKENS, [33, 1, 1, 55])
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(completed, expected, atol=5e-5, rtol=5e-5)


TINY = stack(
    (FullAttention(2, 1, 16, 16, window=8), DenseFfn(64)), (LATENT, SIGMOID_MOE), (LINEAR, DenseFfn(64))
)


def test_trained_model_gives_equal_logits_in_the_engine(tmp_path: Path) -> None:
    """A few steps of training on a pattern, saved, loaded by the engine: the same logits, and the pattern learnt."""
    reference = ReferenceModel(TINY, FreshWeights(0))
    pattern = torch.tensor([3, 14, 15, 92, 65, 35] * 4)[None]
    optimiser = torch.optim.Adam(reference.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(reference(pattern[:, :-1])[0], pattern[0, 1:])
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    idle = {name for name, item in reference.named_parameters() if item.grad is None}
    assert idle == {"model/layers/1/mlp/gate/e_score_correction_bias"}  # it sways the choice of experts only
    assert losses[-1] < 0.2 * losses[0]
    save(tmp_path, TINY, reference.tensors())
    config = read_config(tmp_path)
    assert config == TINY
    engine = Runner(config, SafetensorsSource(tmp_path), RunnerSize(rows=1, blocks=20, max_tokens=64))
    tokens = pattern[0].tolist()
    with torch.no_grad():
        expected = reference(pattern)[0]
    completed = logits_of(engine, open_row(engine, 24), tokens, [5] * 9)
    torch.testing.assert_close(completed, expected, atol=1e-4, rtol=1e-4)


def test_reused_row_keeps_no_state() -> None:
    engine = runner(KINDS["hybrid"], rows=1)
    expected = logits_of(engine, open_row(engine, 90), TOKENS, [90])
    engine.tables.close(0)
    logits_of(engine, open_row(engine, 90), prompt(90, seed=6), [90])
    engine.tables.close(0)
    assert equal_logits(logits_of(engine, open_row(engine, 90), TOKENS, [90]), expected)


def test_invalid_steps_are_refused_without_side_effects() -> None:
    engine = runner(KINDS["hybrid"])
    row, other = open_row(engine, 32), open_row(engine, 32)
    for works in (
        [],
        [SequenceWork(row, 1, [1])],
        [SequenceWork(row, 0, [])],
        [SequenceWork(row, 0, [1]), SequenceWork(row, 0, [1])],
        [SequenceWork(row, 0, [1] * 33)],
        [SequenceWork(row, 0, [VOCAB])],
        [SequenceWork(other, 0, [1]), SequenceWork(row, 0, [5, -1])],
    ):
        with pytest.raises(PotluckError):
            engine.step(works)
    assert engine.tables.lengths[row] == engine.tables.lengths[other] == 0
    assert engine.step([SequenceWork(row, 0, [1, 2], "all"), SequenceWork(other, 0, [1])]).shape == (3, VOCAB)


def test_randomly_initialised_model_of_every_layer_kind_runs() -> None:
    config: EngineModelConfig = KINDS["hybrid"]
    engine = Runner(config, FreshWeights(1), RunnerSize(rows=1, blocks=10, max_tokens=64))
    assert bool(torch.isfinite(logits_of(engine, open_row(engine, 50), TOKENS[:50], [50])).all())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi")
    make("phi3-longrope", path)
    return path


def tokens_of(length: int) -> list[int]:
    return [token % 96 for token in prompt(length)]


def test_context_limit_ends_where_rope_scaling_changes(folder: Path, tmp_path: Path) -> None:
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


TABLE = Path(__file__).parents[2] / "docs" / "checkpoints.csv"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 20}),
        ("qwen3_next", {"layer_types": ABSENT, "full_attention_interval": 2}),
        ("mixtral", {"rms_norm_eps": ABSENT}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0}, "rope_scaling": YARN}),
    ],
)
def test_unusual_configurations_give_the_logits_of_transformers(family: str, changes: Values) -> None:
    outcome = compare(Case(family, changes))
    assert outcome.kind == "same", outcome


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {"attention_bias": True}, "config.json: attention_bias: true cannot be run"),
        ("llama", {"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: 0.5 cannot be run"),
        ("llama", {"rope_theta": 0}, "config.json: rope_theta: must be above 0"),
        ("llama", {"rope_scaling": {**YARN, "new": 1}}, "config.json: rope_scaling.new: is not known"),
        (
            "mistral",
            {"attn_logit_softcapping": 50.0},
            "config.json: attn_logit_softcapping: 50.0 cannot be run",
        ),
        ("qwen3", {"a_new_key": True}, "config.json: a_new_key: is not known in a qwen3 model"),
        ("deepseek_v3", {"n_group": 3}, "a choice of 2 of 3 groups of 8 experts"),
        ("deepseek_v3", {"topk_group": ABSENT}, "config.json: topk_group: is missing"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(
    family: str, changes: Values, words: str, tmp_path: Path
) -> None:
    text = refusal(Case(family, changes).config(), tmp_path)
    assert text is not None
    assert text.startswith(words) or (words in text and text.startswith("layer "))
    assert "\n" not in text


def test_documented_configuration_table_is_complete_and_true(tmp_path: Path) -> None:
    """Refusals are tried again, every one; what is the same as in transformers only by its not being refused."""
    result = documented(TABLE.read_text("utf-8"))
    tried = {(case.family, case.label or "(none)"): case for case in cases()}
    assert set(result) == set(tried), "run tools/check_checkpoints.py --write docs/checkpoints.csv"
    assert set(result.values()) <= {"same", "refused", "refused*", "n/a"}
    wrong = [
        key
        for key, case in tried.items()
        if (refusal(case.config(), tmp_path) is not None) != (result[key] == "refused")
    ]
    assert wrong == []
    assert all(result[family, "(none)"] == "same" for family in BASES)


def test_every_configuration_key_that_is_read_has_a_case() -> None:
    assert set(READ_BY) == set(FAMILIES) == set(BASES)
    for family, keys in READ_BY.items():
        changed = {key for case in cases() if case.family == family for key in case.changes}
        assert keys - changed - set(BASE) == set(), family


TOKENS_AGAINST_TRANSFORMERS = 50  # More than twice the windows that are tried.


@pytest.mark.parametrize("name", SAMPLES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    _, runner = load(tmp_path, max_tokens=64)
    tokens = torch.randint(0, 96, (TOKENS_AGAINST_TRANSFORMERS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].float()
    row = runner.tables.open()
    runner.tables.grow(row, TOKENS_AGAINST_TRANSFORMERS)
    result = [
        runner.step([SequenceWork(row, 0, tokens[:37].tolist(), "all")]),
        *(
            runner.step([SequenceWork(row, i, [int(tokens[i])])])
            for i in range(37, TOKENS_AGAINST_TRANSFORMERS)
        ),
    ]
    scale = float(expected.std())
    assert scale > 0.05
    # transformers computes the delta rule in a chunked form, in float32: there the two are further apart.
    close = 5e-4 if name in ("qwen3_next", "qwen3_5_text") else 2e-5
    assert torch.allclose(torch.cat(result), expected, atol=close * max(scale, 1.0), rtol=close)
