"""Steps of fixed shape, as recorded on a GPU, run here as they are: the same logits as steps laid out anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import check_gpu
import pytest
import torch
from engine_models import DENSE, KINDS, LINEAR, WINDOW, open_row, prompt, runner, stack
from sample_models import BASES

from potluck.core.errors import InputError
from potluck.core.values.model import FullAttention
from potluck.engine.compute.executor import RunnerSize, SequenceWork, last_drawn
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner, StepGraphs, recordable
from potluck.engine.model.checkpoint import LayerLoader, RandomSource
from potluck.engine.model.config import FAMILIES, EngineModelConfig
from potluck.engine.model.stack import Stack
from potluck.engine.numbers import exact
from potluck.engine.serve import warm_up

NARROW = FullAttention(4, 2, 8, 8)  # Too narrow for the compiled kernels, so that pages lie as on a GPU.
SHORT = FullAttention(4, 2, 8, 8, window=WINDOW)
MODELS = {
    "full": stack((NARROW, DENSE), (NARROW, DENSE)),
    "mixed": stack((LINEAR, DENSE), (NARROW, DENSE), (SHORT, DENSE)),
}


def runner_pair(config: EngineModelConfig) -> tuple[Runner, Runner]:
    """One runner that lays each step out anew, and one whose decode steps have fixed shapes."""
    plain, fixed = runner(config), runner(config)
    fixed._graphs = StepGraphs(fixed.stack, fixed.cache, fixed._taps)
    return plain, fixed


@pytest.mark.parametrize("name", MODELS)
def test_fixed_shape_steps_give_equal_logits(name: str) -> None:
    plain, fixed = runner_pair(MODELS[name])
    lengths = [3, 70, 17, 130, 40]
    for engine in (plain, fixed):
        for length in lengths:
            row = open_row(engine, length + 40)
            engine.step([SequenceWork(row, 0, prompt(length, seed=length))])
    rows = list(range(len(lengths)))
    for step in range(30):
        chosen = rows[: 1 + step % len(rows)]
        works = [SequenceWork(row, plain.tables.lengths[row], [(7 * step + row) % 200]) for row in chosen]
        with torch.inference_mode():  # as drawn by the step before, which only the device knows
            fixed.cache.drawn[chosen] = torch.tensor([work.tokens[0] for work in works])
        unknown = [replace(work, tokens=[last_drawn(work.row)]) for work in works]
        torch.testing.assert_close(fixed.step(unknown), plain.step(works), atol=2e-5, rtol=1e-4)
    late = prompt(90, seed=3)
    for engine in (plain, fixed):
        open_row(engine, len(late))
    for first, stop in ((0, 40), (40, 41), (41, 90)):  # beside a prompt, whose logits are wanted at its end
        works = [SequenceWork(row, plain.tables.lengths[row], [first + row]) for row in rows[1:4]]
        works.insert(2, SequenceWork(len(rows), first, late[first:stop], "last" if stop == 90 else "none"))
        torch.testing.assert_close(fixed.step(works), plain.step(works), atol=2e-5, rtol=1e-4)
    for one, two in zip(plain.cache.states, fixed.cache.states, strict=True):
        torch.testing.assert_close(one.memory, two.memory, atol=2e-5, rtol=1e-4)
    assert plain.tables.lengths == fixed.tables.lengths


def test_paged_attention_steps_give_equal_logits() -> None:
    """As full layers on a GPU do, here in plain words."""
    plain, paged = runner(MODELS["mixed"]), runner(MODELS["mixed"])
    paged.cache.followed = True
    texts = [prompt(length, seed=length) for length in (1, 200, 17, 300)]
    for engine in (plain, paged):
        for text in texts:
            open_row(engine, len(text) + 10)
    steps = [
        [SequenceWork(3, 0, texts[3][:150], "all"), SequenceWork(0, 0, texts[0])],
        [SequenceWork(0, 1, [5]), SequenceWork(3, 150, texts[3][150:]), SequenceWork(1, 0, texts[1], "none")],
        [SequenceWork(1, 200, [7]), SequenceWork(2, 0, texts[2], "all"), SequenceWork(3, 300, [9])],
    ]
    for works in steps:
        torch.testing.assert_close(paged.step(works), plain.step(works), atol=2e-5, rtol=1e-4)


def layers_on_no_device(config: EngineModelConfig) -> Stack:
    load = LayerLoader(RandomSource(1), torch.device("meta"), torch.bfloat16)
    return Stack(config, load)


def matrices_in(thing: object, known: set[int]) -> Iterator[torch.Tensor]:
    """Tensors of two dimensions in an object of ours, however deep."""
    if id(thing) in known:
        return
    known.add(id(thing))
    if isinstance(thing, torch.Tensor):
        if thing.dim() == 2:
            yield thing
    elif isinstance(thing, list | tuple | dict):
        for item in thing.values() if isinstance(thing, dict) else thing:
            yield from matrices_in(item, known)
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("potluck.engine.model"):
        yield from matrices_in(vars(thing), known)


@pytest.mark.parametrize("name", KINDS)
def test_weight_rows_are_aligned_for_gpus(name: str) -> None:
    """A product with a slice of wider rows falls back to a kernel several times as slow."""
    matrices = list(matrices_in(layers_on_no_device(KINDS[name]), set()))
    assert len(matrices) >= 4 * KINDS[name].model.layer_count
    assert all(matrix.is_contiguous() or matrix.T.is_contiguous() for matrix in matrices)


def test_small_steps_are_accepted_for_recording() -> None:
    _, fixed = runner_pair(MODELS["full"])
    graphs = fixed._graphs
    assert graphs is not None
    assert graphs.takes([SequenceWork(0, 5, [1])])
    assert not graphs.takes([SequenceWork(0, 0, [1])])
    assert graphs.takes([SequenceWork(0, 5, [1, 2])])
    assert graphs.takes([SequenceWork(0, 0, [1, 2], "none"), SequenceWork(1, 5, [1])])
    assert not graphs.takes([SequenceWork(0, 5, [1, 2], "all")])
    assert not graphs.takes([SequenceWork(0, 0, [1] * 2000)])
    assert not graphs.takes([SequenceWork(0, 5, [1], "none")])
    assert not graphs.takes([SequenceWork(row, 5, [1]) for row in range(21)])


def test_fixed_shape_step_that_does_not_continue_its_rows_is_refused() -> None:
    _, fixed = runner_pair(MODELS["full"])
    row = open_row(fixed, 20)
    fixed.step([SequenceWork(row, 0, prompt(9))])
    again, other = SequenceWork(row, 9, [1]), SequenceWork(row, 9, [last_drawn(row + 1)])
    for wrong in ([SequenceWork(row, 8, [1])], [again, again], [other]):
        with pytest.raises(InputError):
            fixed.step(wrong)


def test_warm_up_records_every_step_shape(caplog: pytest.LogCaptureFixture) -> None:
    _, fixed = runner_pair(MODELS["full"])
    executor = LocalExecutor(fixed, RunnerSize(fixed.tables.rows, 60, 256, 128))
    with caplog.at_level("INFO"):
        warm_up(executor)
    executor.check()
    assert fixed._graphs is not None
    assert len(fixed._graphs._recorded) == len(executor.shapes) - 1 == 18  # the smallest twice
    assert caplog.messages == ["19 of 19 shapes of steps are ready"]


def test_models_with_data_dependent_steps_are_not_recorded() -> None:
    models = {name: KINDS[name].model for name in ("full", "linear", "full-fancy", "latent")}
    recorded = [name for name, model in models.items() if recordable(model)]
    assert recorded == ["full", "linear"]


def test_gpu_check_samples_cover_every_model_family() -> None:
    assert set(BASES) == set(FAMILIES)


def test_gpu_check_passes_in_16_bits_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exact, "_found", lambda dtype, threads: exact.PLAIN)  # a GPU is not asked either
    assert check_gpu.main(["--device", "cpu", "--only", "qwen3_5_text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = [" ".join(line.split()[1:3]) for line in lines[1:-1]]
    handed = ["KV launched", "KV kept"]
    assert kinds == ["float32 launched", "bfloat16 launched", "bfloat16 recorded", *handed]


def test_gpu_check_detects_a_wrong_norm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = exact.rms_norm

    def careless(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return honest(x, weight, eps) * (1.3 if x.dtype == torch.bfloat16 and x.dim() == 3 else 1.0)

    monkeypatch.setattr("potluck.engine.model.attention.rms_norm", careless)
    monkeypatch.setattr(exact, "_found", lambda dtype, threads: exact.PLAIN)
    monkeypatch.setattr(check_gpu, "TIMES_BF16", 0.0)  # the CPU's own 16 bits are as careless here
    assert check_gpu.main(["--device", "cpu", "--only", "qwen3"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_accepts_a_weight_per_head(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    x, weight = torch.randn(7, 3, 16, generator=chance), torch.randn(3, 16, generator=chance)
    expected = exact.rms_norm(x.to(dtype).float(), weight.to(dtype).float(), 1e-5)
    result = exact.rms_norm(x.to(dtype), weight.to(dtype), 1e-5)
    assert result.dtype == dtype
    assert torch.allclose(result.float(), expected, atol=0.02, rtol=0.02)
