"""The check of a GPU against the CPU, as far as it goes without a GPU; and 16 bits, which no CPU serves by itself."""

from __future__ import annotations

import check_gpu
import pytest
import torch
from sample_models import BASES

from potluck.engine.model.config import FAMILIES
from potluck.engine.numbers import exact


def test_the_samples_have_every_family() -> None:
    assert set(BASES) == set(FAMILIES)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_norms_of_heads_run_in_sixteen_bits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main(["--device", "cpu", "--only", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines[1:-1]] == [
        ["float32", "launched"],
        ["bfloat16", "launched"],
        ["bfloat16", "recorded"],
    ]


def test_a_difference_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = exact.rms_norm

    def careless(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return honest(x, weight, eps) * (1.3 if x.dtype == torch.bfloat16 and x.dim() == 3 else 1.0)

    monkeypatch.setattr("potluck.engine.model.attention.full.rms_norm", careless)
    monkeypatch.setattr(check_gpu, "TIMES_BF16", 0.0)  # the CPU's own 16 bits are as careless here
    assert check_gpu.main(["--device", "cpu", "--only", "qwen3"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_with_a_weight_for_each_head(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    x, weight = torch.randn(7, 3, 16, generator=chance), torch.randn(3, 16, generator=chance)
    expected = exact.rms_norm(x.to(dtype).float(), weight.to(dtype).float(), 1e-5)
    found = exact.rms_norm(x.to(dtype), weight.to(dtype), 1e-5)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected, atol=0.02, rtol=0.02)
