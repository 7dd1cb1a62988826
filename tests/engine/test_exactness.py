"""The answer does not depend on how the work is cut or on who else is served: bit for bit."""

from __future__ import annotations

import platform
import random
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_models import KINDS, VOCAB, equal_logits, greedy_tokens, logits_of, open_row, prompt, runner
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers import Exactness, exact, matrix
from potluck.engine.numbers.exact import (
    FILLINGS,
    LONGEST_SUM,
    PART,
    PLAIN,
    exactness,
    filling_for,
    multiply,
    padded_columns,
    per_head,
    rms_norm,
    sigmoid,
    silu,
    softplus,
)

LENGTH = 600  # Beyond the places (256, 384, 512) where sums over the context are cut.


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_chunk_sizes(kind: str) -> None:
    engine, tokens = runner(KINDS[kind]), prompt(LENGTH)
    row = open_row(engine, LENGTH)
    whole = logits_of(engine, row, tokens, [LENGTH])
    text = greedy_tokens(engine, row, whole, 4)
    engine.tables.close(row)
    for size in (1, 7, 64, 512):
        length = LENGTH if size > 7 else 330
        row = open_row(engine, LENGTH)
        completed = logits_of(engine, row, tokens[:length], [size] * LENGTH)
        assert equal_logits(completed, whole[:length]), size
        if length < LENGTH:
            completed = torch.cat([completed, logits_of(engine, row, tokens[length:], [LENGTH])])
        assert greedy_tokens(engine, row, completed, 4) == text
        engine.tables.close(row)
    engine.tables.check()


def test_chunk_that_leaves_one_query_gives_equal_logits() -> None:
    """torch's attention takes 32 queries at a time: the last of 33 is by itself."""
    engine, tokens = runner(KINDS["latent"]), prompt(99)
    row = open_row(engine, 99)
    whole = logits_of(engine, row, tokens, [99])
    engine.tables.close(row)
    assert equal_logits(logits_of(engine, open_row(engine, 99), tokens, [33] * 3), whole)


def test_logits_of_a_wide_model_do_not_depend_on_chunk_sizes() -> None:
    """Wide enough that the library has several ways to multiply, which differ for 1, 7 and 64 rows."""
    layer = Layer(FullAttention(8, 4, 32, 32), DenseFfn(704))
    engine = runner(EngineModelConfig(Model("wide", 256, 1000, (layer, layer), 1024)))
    tokens = prompt(140, seed=2)
    row = open_row(engine, 140)
    whole = logits_of(engine, row, tokens, [140])
    for sizes in ([1] * 140, [7] * 20, [64] * 3):
        row = open_row(engine, 140)
        assert equal_logits(logits_of(engine, row, tokens, sizes), whole)


def logits_among_others(engine: Runner, tokens: list[int], sizes: list[int], seed: int) -> torch.Tensor:
    """Run `tokens` among 16 others that come and go, in steps that mix chunks and decodes in any order."""
    chance, others = random.Random(seed), {}
    row, result, first = open_row(engine, len(tokens)), [], 0
    for size in sizes:
        chunk = tokens[first : first + size]
        works = [SequenceWork(row, first, chunk, "all")]
        for other in [other for other in others if others[other] > 200]:
            engine.tables.close(other)
            del others[other]
        while len(others) < 16:
            others[open_row(engine, 400)] = 0
        for other, length in others.items():
            count = chance.choice((1, 1, 1, 3, 30))
            works.append(SequenceWork(other, length, [chance.randrange(VOCAB) for _ in range(count)], "none"))
            others[other] = length + count
        chance.shuffle(works)
        result.append(engine.step(works))
        first += len(chunk)
        if first == len(tokens):
            break
    for other in [row, *others]:
        engine.tables.close(other)
    return torch.cat(result)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_other_requests_in_the_batch(kind: str) -> None:
    engine, tokens = runner(KINDS[kind]), prompt(150, seed=3)
    row = open_row(engine, 150)
    whole = logits_of(engine, row, tokens, [150])
    engine.tables.close(row)
    for seed, sizes in enumerate(([40] * 4, [9] * 8 + [1] * 90)):
        assert equal_logits(logits_among_others(engine, tokens, sizes, seed), whole)
    engine.tables.check()


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_logits_do_not_depend_on_block_placement(kind: str) -> None:
    """With rows that outgrow their home, blocks are gathered instead of read in place."""
    tokens = prompt(300, seed=4)
    roomy = runner(KINDS[kind])
    whole = logits_of(roomy, open_row(roomy, 300), tokens, [300])
    tight = runner(KINDS[kind], rows=8, blocks=48)
    others = [open_row(tight, 16 * (1 + index % 3)) for index in range(5)]
    row = open_row(tight, 300)
    assert not tight.tables.whole(0, row)
    for other in others[::2]:
        tight.tables.close(other)
    assert equal_logits(logits_of(tight, row, tokens, [100, 1, 1, 98, *[1] * 100]), whole)


def test_activation_functions_do_not_depend_on_position_in_the_tensor() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 4
    for function in (sigmoid, silu, softplus):
        for count in range(1, 40):
            assert torch.equal(torch.cat([function(part) for part in x.split(count)]), function(x))


def test_exact_functions_equal_those_of_torch() -> None:
    x = torch.linspace(-30, 30, 601)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x))
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(softplus(x), torch.nn.functional.softplus(x), atol=1e-7, rtol=1e-5)
    rows, weight = torch.randn(5, 30), torch.randn(30)
    torch.testing.assert_close(
        rms_norm(rows, weight, 1e-3), torch.nn.functional.rms_norm(rows, (30,), weight, 1e-3)
    )


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 30), st.integers(1, 30))
def test_per_head_products_equal_einsum(tokens: int, heads: int, inner: int, outer: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, inner, generator=generator)
    weight = torch.randn(heads, inner, outer, generator=generator)
    torch.testing.assert_close(
        per_head(x, weight), torch.einsum("thi,hio->tho", x, weight), atol=1e-5, rtol=1e-5
    )


@given(st.integers(0, 5000))
def test_padded_column_count_keeps_partial_sums_aligned(column: int) -> None:
    """As exact.py says: the last part of a call is one sum or whole, and stays so for all who share the call."""
    padded = padded_columns(column + 1)
    assert column < padded <= column + PART
    assert padded % 16 == 0
    assert padded % PART <= LONGEST_SUM


CPU = torch.device("cpu")
PAIRS, STRIPS = FILLINGS[1:]
Odd = Callable[[int], bool]


def test_supported_platforms_are_exact() -> None:
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

    exact._found.cache_clear()
    yield take
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    exact._found.cache_clear()


def _rows(mm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    pair = torch.zeros(2, x.shape[1], dtype=x.dtype)
    result = []
    for row in x:
        pair[0] = row
        result.append(mm(pair, weight)[:1])
    return torch.cat(result)


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
def test_cheapest_exact_padding_is_selected(
    library: Callable[[Odd], None],
    odd: Odd,
    expected: exact.RowPadding | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "SHAPES", ((64, 20), (20, 30)))
    library(odd)
    assert filling_for(torch.float32) == expected
    assert exactness(CPU, torch.float32) == Exactness(expected is not None, (expected or PLAIN).name)
    made = matrix.across(torch.randn(20, 30))
    if expected in (PLAIN, None):
        assert isinstance(made, Tensor)
    else:
        assert isinstance(made, matrix.PaddedMatrix)
        assert made.filling == expected


@pytest.mark.parametrize(
    ("filling", "rows"), [(PLAIN, {1: 2, 33: 34}), (PAIRS, {1: 2, 33: 34}), (STRIPS, {1: 16, 2: 16, 33: 48})]
)
def test_attention_queries_are_padded_like_product_rows(
    filling: exact.RowPadding, rows: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may treat a block of them apart, as it may rows of a product."""
    asked, real = list[int](), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(exact, "filling_for", lambda dtype: filling)
    monkeypatch.setattr(
        exact.F,
        "scaled_dot_product_attention",
        lambda q, *a, **k: asked.append(q.shape[-2]) or real(q, *a, **k),
    )
    for count in (1, 2, 16, 32, 33):
        q, k, v = torch.randn(2, 1, count, 8), torch.randn(2, 1, 40, 8), torch.randn(2, 1, 40, 8)
        mask = torch.randn(1, 1, count, 40)
        torch.testing.assert_close(exact.attention(q, k, v, mask, 0.3), real(q, k, v, mask, scale=0.3))
        assert asked.pop() == rows.get(count, count)


def test_model_is_exact_on_a_library_that_rounds_single_rows_differently(
    library: Callable[[Odd], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "SHAPES", ((64, 20),))
    library(lambda rows: rows == 1)
    engine, tokens = runner(KINDS["full-fancy"]), prompt(20)
    assert engine.exact == Exactness(True, "pairs")
    whole = logits_of(engine, open_row(engine, 20), tokens, [20])
    assert torch.equal(logits_of(engine, open_row(engine, 20), tokens, [1, 1, 7, 1, 10]), whole)


@pytest.mark.parametrize("way", FILLINGS, ids=lambda way: way.name)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17])
def test_padded_rows_do_not_change_products(way: exact.RowPadding, rows: int) -> None:
    x, weight, bias, added = (torch.randn(*shape) for shape in ((rows, 24), (24, 40), (40,), (rows, 40)))
    made = matrix.PaddedMatrix(weight, way)
    torch.testing.assert_close(matrix.product(x, made), x @ weight)
    torch.testing.assert_close(matrix.product(x, made, bias), x @ weight + bias)
    torch.testing.assert_close(matrix.add_product(added, x, made), x @ weight + added)
    assert multiply(x, weight, way).shape == (rows, 40)
    assert way.rows(rows) >= rows


def test_gpu_device_is_reported_as_not_exact() -> None:
    assert exactness(torch.device("cuda"), torch.float32) == Exactness(False, "plain")
