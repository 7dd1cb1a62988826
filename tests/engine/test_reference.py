"""The engine against the plain function of the same weights; training; stages; resuming from a state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_models import KINDS, LATENT, LINEAR, SIGMOID_MOE, VOCAB, opened, prompt, run, runner, same, stack

from potluck.core.errors import PotluckError
from potluck.core.values.model import DenseFfn, FullAttention
from potluck.engine.compute.runner import Runner, RunnerSize, SequenceWork
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource, save
from potluck.engine.model.config import EngineModelConfig, read_config
from potluck.engine.model.reference import FreshWeights, ReferenceModel

TOKENS = prompt(90, seed=5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_reference(kind: str) -> None:
    config = KINDS[kind]
    with torch.no_grad():
        expected = ReferenceModel(config, RandomSource(7))(torch.tensor([TOKENS]))[0]
    engine = runner(config)
    found = run(engine, opened(engine, 90), TOKENS, [33, 1, 1, 55])
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)


TINY = stack(
    (FullAttention(2, 1, 16, 16, window=8), DenseFfn(64)), (LATENT, SIGMOID_MOE), (LINEAR, DenseFfn(64))
)


def test_what_is_trained_is_what_runs(tmp_path: Path) -> None:
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
    idle = {name for name, each in reference.named_parameters() if each.grad is None}
    assert idle == {"model/layers/1/mlp/gate/e_score_correction_bias"}  # it sways the choice of experts only
    assert losses[-1] < 0.2 * losses[0]
    save(tmp_path, TINY, reference.tensors())
    config = read_config(tmp_path)
    assert config == TINY
    engine = Runner(config, SafetensorsSource(tmp_path), RunnerSize(rows=1, blocks=20, max_tokens=64))
    tokens = pattern[0].tolist()
    with torch.no_grad():
        expected = reference(pattern)[0]
    found = run(engine, opened(engine, 24), tokens, [5] * 9)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), (1, 3), (3,)])
def test_stages_are_the_whole(cuts: tuple[int, ...]) -> None:
    """1 to 4 stages with uneven layers; each stage numbers its rows as it likes."""
    config = KINDS["hybrid"]
    tokens = [prompt(40, seed) for seed in range(3)]
    whole = runner(config)
    rows = [opened(whole, 60) for _ in tokens]
    stages = [runner(config, first, last) for first, last in zip((0, *cuts), (*cuts, 4), strict=True)]
    places = []
    for number, stage in enumerate(stages):
        skipped = [opened(stage, 1) for _ in range(number)]
        found = [opened(stage, 60) for _ in tokens]
        places.append(found[::-1] if number % 2 else found)
        for row in skipped:
            stage.tables.close(row)
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        chunks = [each[start:stop] if index else each[start : start + 1] for index, each in enumerate(tokens)]
        if start:
            chunks, these = chunks[1:], [1, 2]
        else:
            these = [0, 1, 2]
        works = [SequenceWork(rows[i], start, chunk) for i, chunk in zip(these, chunks, strict=True)]
        expected, hidden = whole.step(works), None
        for stage, place in zip(stages, places, strict=True):
            staged = [SequenceWork(place[i], start, chunk) for i, chunk in zip(these, chunks, strict=True)]
            hidden = stage.step(staged, hidden)
        assert hidden is not None
        assert same(hidden, expected)


def test_a_stage_needs_its_input_and_a_range() -> None:
    config = KINDS["full"]
    late = runner(config, 1)
    row = opened(late, 4)
    for hidden in (None, torch.zeros(3, 64), torch.zeros(4, 32)):
        with pytest.raises(PotluckError, match="^hidden"):
            late.step([SequenceWork(row, 0, [1, 2, 3, 4])], hidden)
    for first, last in ((0, 3), (1, 1), (-1, 1)):
        with pytest.raises(PotluckError, match="^layers"):
            runner(config, first, last)
    whole = runner(config)
    with pytest.raises(PotluckError, match="^hidden"):
        whole.step([SequenceWork(opened(whole, 1), 0, [1])], torch.zeros(1, 64))


def test_linear_layers_resume_from_a_copied_state() -> None:
    engine = runner(KINDS["linear"])
    row = opened(engine, 90)
    run(engine, row, TOKENS[:41], [41])
    copy = engine.cache.copy_states(row)
    expected = run(engine, row, TOKENS[41:], [90])
    again = opened(engine, 90)
    engine.cache.put_states(again, copy)
    engine.tables.advance(again, copy.length)
    assert copy.length == 41
    assert same(run(engine, again, TOKENS[41:], [7] * 9), expected)


def test_a_row_that_is_used_again_has_no_past() -> None:
    engine = runner(KINDS["hybrid"], rows=1)
    expected = run(engine, opened(engine, 90), TOKENS, [90])
    engine.tables.close(0)
    run(engine, opened(engine, 90), prompt(90, seed=6), [90])
    engine.tables.close(0)
    assert same(run(engine, opened(engine, 90), TOKENS, [90]), expected)


def test_steps_that_make_no_sense_are_refused_and_change_nothing() -> None:
    engine = runner(KINDS["hybrid"])
    row, other = opened(engine, 32), opened(engine, 32)
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


def test_fresh_weights_of_every_kind_can_be_run() -> None:
    config: EngineModelConfig = KINDS["hybrid"]
    engine = Runner(config, FreshWeights(1), RunnerSize(rows=1, blocks=10, max_tokens=64))
    assert bool(torch.isfinite(run(engine, opened(engine, 50), TOKENS[:50], [50])).all())
