"""Ways to multiply: which one holds is found by trying, here and with libraries that are made up."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_models import KINDS, opened, prompt, run, runner
from torch import Tensor

from potluck.engine.numbers import matrix, row_padding
from potluck.engine.numbers.row_padding import (
    FILLINGS,
    PLAIN,
    Exactness,
    exactness,
    filling_for,
    multiply,
    together,
)

CPU = torch.device("cpu")
PAIRS, STRIPS = FILLINGS[1:]
Odd = Callable[[int], bool]


def test_platforms_that_are_meant_to_work_are_exact() -> None:
    """Elsewhere the other tests compare up to rounding, and the engine says so."""
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if known or torch.backends.mkl.is_available():
        assert exactness(CPU, torch.float32, latent=True).holds


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Odd], None]]:
    """Makes torch multiply as a library would that adds up in another order for some numbers of rows."""
    mm, addmm = torch.mm, torch.addmm

    def take(odd: Odd) -> None:
        # Row by row in a fixed form, so that only what is made up here depends on the rows.
        def product(x: Tensor, weight: Tensor) -> Tensor:
            if odd(x.shape[0]):
                half = x.shape[1] // 2
                parts = ((x[:, :half], weight[:half]), (x[:, half:], weight[half:]))
                return sum(_rows(mm, *part) for part in parts)  # type: ignore[return-value]
            return _rows(mm, x, weight)

        monkeypatch.setattr(torch, "mm", product)
        monkeypatch.setattr(torch, "addmm", lambda added, x, weight: product(x, weight) + added)

    row_padding._found.cache_clear()
    yield take
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    row_padding._found.cache_clear()


def _rows(mm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    pair = torch.zeros(2, x.shape[1], dtype=x.dtype)
    found = []
    for row in x:
        pair[0] = row
        found.append(mm(pair, weight)[:1])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (lambda rows: False, PLAIN),
        (lambda rows: rows == 1, PAIRS),
        (lambda rows: rows % 16 > 0, STRIPS),
        (lambda rows: rows < 40, None),
    ],
    ids=["all alike", "one row", "parts of strips", "hopeless"],
)
def test_the_cheapest_way_that_holds_is_taken(
    library: Callable[[Odd], None],
    odd: Odd,
    expected: row_padding.RowPadding | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_padding, "SHAPES", ((64, 20), (20, 30)))
    library(odd)
    assert filling_for(torch.float32) == expected
    assert exactness(CPU, torch.float32) == Exactness(expected is not None, (expected or PLAIN).name)
    made = matrix.across(torch.randn(20, 30))
    if expected in (PLAIN, None):
        assert isinstance(made, Tensor)
    else:
        assert isinstance(made, matrix.PaddedMatrix)
        assert made.filling == expected


def test_a_model_is_exact_with_a_library_that_treats_single_rows_apart(
    library: Callable[[Odd], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_padding, "SHAPES", ((64, 20),))
    library(lambda rows: rows == 1)
    engine, tokens = runner(KINDS["full-fancy"]), prompt(20)
    assert engine.exact == Exactness(True, "pairs")
    whole = run(engine, opened(engine, 20), tokens, [20])
    assert torch.equal(run(engine, opened(engine, 20), tokens, [1, 1, 7, 1, 10]), whole)


@pytest.mark.parametrize("way", FILLINGS, ids=lambda way: way.name)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17])
def test_rows_that_are_added_change_nothing(way: row_padding.RowPadding, rows: int) -> None:
    x, weight, bias, added = (torch.randn(*shape) for shape in ((rows, 24), (24, 40), (40,), (rows, 40)))
    made = matrix.PaddedMatrix(weight, way)
    torch.testing.assert_close(matrix.product(x, made), x @ weight)
    torch.testing.assert_close(matrix.product(x, made, bias), x @ weight + bias)
    torch.testing.assert_close(matrix.add_product(added, x, made), x @ weight + added)
    assert multiply(x, weight, way).shape == (rows, 40)
    assert way.rows(rows) >= rows


def test_a_gpu_promises_nothing() -> None:
    assert exactness(torch.device("cuda"), torch.float32) == Exactness(False, "plain")


def test_a_pipeline_is_as_exact_as_its_workers() -> None:
    yes, no = Exactness(True, "plain"), Exactness(False, "plain")
    assert together([yes, yes]) == yes
    assert together([yes, no]) == no
    assert together([yes, Exactness(True, "pairs")]) == Exactness(True, "pairs+plain")
