"""The compiled loops: against plain formulas in float64, and bit for bit the same however the work is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_models import KINDS, equal_logits, logits_of, open_row, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.compute.runner import Runner
from potluck.engine.model import attention as attention_layers
from potluck.engine.model import ffn
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.ffn import gated
from potluck.engine.numbers import matrix
from potluck.engine.numbers.exact import rms_norm
from potluck.engine.numbers.kernels import attention, products, rows, vector
from potluck.engine.numbers.kernels.vector import compiled
from potluck.engine.numbers.matrix import Norm, TiledMatrix, across, add_product, feed_forward, product

needs_tiles = pytest.mark.skipif(not products.available(), reason="this processor has no matrix tiles")


@compiled
def _exp(source, target, count):  # type: ignore[no-untyped-def]
    for place in range(0, 4 * count, 64):
        vector.store(target + place, vector.exp(vector.load(source + place)))


def test_vectorised_exp_is_within_rounding_of_exp() -> None:
    x = np.linspace(-86.9, 87.9, 64000, dtype=np.float32)
    result = np.empty_like(x)
    _exp(x.ctypes.data, result.ctypes.data, len(x))
    assert np.abs(result / np.exp(x.astype(np.float64)) - 1).max() < 1.5e-7
    far = np.array([-1e30, -200, 0, 200] * 4, np.float32)
    _exp(far.ctypes.data, result.ctypes.data, 16)
    assert result[0] == result[1] < 1e-37
    assert result[2] == 1
    assert np.isfinite(result[:16]).all()


def weights_in_16_bits(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1).bfloat16().float()


@needs_tiles
@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 150), st.integers(-20, 20))
def test_tiled_products_are_within_float32_rounding(rows: int, depth: int, width: int, exponent: int) -> None:
    weight = weights_in_16_bits(width, 32 * depth, seed=width)
    matrix = across(weight)
    assert isinstance(matrix, TiledMatrix)
    x = torch.randn(rows, 32 * depth, generator=torch.Generator().manual_seed(rows)) * 2.0**exponent
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    result = product(x, matrix)
    assert ((result - exact).abs() <= 32 * depth * 2**-24 * size).all()
    residual = torch.randn(rows, width) * 2.0**exponent
    added = add_product(residual, x, matrix)
    assert ((added - exact - residual).abs() <= 33 * depth * 2**-24 * (size + residual.abs())).all()
    for count in {1, rows // 2, rows - 1} - {0}:
        assert torch.equal(product(x[:count], matrix), result[:count])
        assert torch.equal(product(x[-count:], matrix), result[-count:])


@needs_tiles
def test_unsupported_weights_are_not_tiled() -> None:
    weight = torch.randn(64, 64)
    assert not isinstance(across(weight), TiledMatrix)
    assert not isinstance(across(weight.bfloat16().float()[:, :40]), TiledMatrix)
    assert not isinstance(across(weight.bfloat16()), TiledMatrix)
    assert isinstance(across(weight.bfloat16().float()), TiledMatrix)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 16, 45])
def test_feed_forward_kernel_equals_its_separate_operations(rows: int) -> None:
    up, down = weights_in_16_bits(256, 64, seed=1), weights_in_16_bits(64, 128, seed=2)
    packed, lowered = across(up), across(down)
    assert isinstance(packed, TiledMatrix)
    assert isinstance(lowered, TiledMatrix)
    x, norm = torch.randn(rows, 64), Norm(torch.rand(64) + 0.5, 1e-5)
    result = feed_forward(x, norm, packed, lowered)
    normed = x.double() * norm.weight.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    n, m = (normed @ up.double().T).chunk(2, 1)
    expected = x.double() + (n * m / (1 + n.exp())) @ down.double().T
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(result, add_product(x, gated(norm(x), packed), lowered))
    assert torch.equal(feed_forward(x[-1:], norm, packed, lowered), result[-1:])


def test_norm_of_strided_rows_equals_torch() -> None:
    wide, weight = torch.randn(9, 96), torch.rand(48)
    result = rms_norm(wide[:, 16:64], weight, 1e-4)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(wide[:, 16:64], (48,), weight, 1e-4))
    assert torch.equal(rms_norm(wide[3:4, 16:64], weight, 1e-4), result[3:4])


class PagedReference:
    """Keys and values of some sequences in scattered blocks."""

    def __init__(self, kv_heads: int, dim: int, lengths: list[int], seed: int) -> None:
        chance = np.random.default_rng(seed)
        most = max(lengths) // 16 + 1
        self.table = np.zeros((len(lengths), most + 4), np.int64)
        blocks = 1 + chance.permutation(len(lengths) * most).reshape(len(lengths), most)
        for row, length in enumerate(lengths):
            self.table[row, : length // 16 + 1] = blocks[row, : length // 16 + 1]
        shape = (len(lengths), most * 16, kv_heads, dim)
        self.k, self.v = (chance.standard_normal(shape).astype(np.float32) for _ in range(2))
        self.keys = np.zeros((blocks.size + 1, kv_heads, dim, 16), np.float32)
        self.values = np.zeros(((blocks.size + 1) * 16, kv_heads, dim), np.float32)
        self.state = np.empty((attention.TOGETHER, 4), np.float32)
        self.scratch = np.empty(128, np.float32)

    def put(self, rows: np.ndarray, places: np.ndarray, heads: int, queries: np.ndarray) -> np.ndarray:
        """Keep those tokens; returns them packed with their queries."""
        kv_heads, dim = self.k.shape[2:]
        kept = [item[rows, places].reshape(len(rows), -1) for item in (self.k, self.v)]
        packed = np.ascontiguousarray(np.concatenate([queries.reshape(len(rows), -1), *kept], 1))
        slots = self.table[rows, places // 16] * 16 + places % 16
        sizes = (packed.ctypes.data, packed.strides[0], heads, kv_heads, dim)
        attention.place(*sizes, 0, 0, places, slots, self.keys.ctypes.data, self.values.ctypes.data)
        return packed

    def attend(self, packed: np.ndarray, rows: np.ndarray, places: np.ndarray, window: int) -> np.ndarray:
        kv_heads, dim = self.k.shape[2:]
        heads = packed.shape[1] // dim - 2 * kv_heads
        out = np.full((len(rows), heads * dim), np.nan, np.float32)
        sizes = (packed.ctypes.data, packed.strides[0], heads, kv_heads, dim)
        cache = (self.keys.ctypes.data, self.values.ctypes.data, dim**-0.5)
        rest = (self.scratch.ctypes.data, self.state, out.ctypes.data)
        attention.attend(*sizes, rows, places, self.table, window, *cache, *rest)
        return out

    def expected(self, query: np.ndarray, row: int, place: int, window: int) -> np.ndarray:
        first = max(0, place - window + 1) if window else 0
        keys, values = (item[row, first : place + 1].astype(np.float64) for item in (self.k, self.v))
        scores = np.einsum("ghd,khd->ghk", query.astype(np.float64), keys) * query.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("ghk,khd->ghd", weights, values).ravel()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 2)]),
    st.sampled_from([16, 48, 64, 80]),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 24, 100]),
    st.integers(0, 1000),
)
def test_attention_kernel_equals_the_reference_for_any_batch(
    shape: tuple[int, int], dim: int, lengths: list[int], window: int, seed: int
) -> None:
    groups, kv_heads = shape
    heads = groups * kv_heads
    paged, chance = PagedReference(kv_heads, dim, lengths, seed), random.Random(seed)
    for row, length in enumerate(lengths):
        paged.put(np.full(length, row), np.arange(length), heads, np.zeros((length, heads * dim), np.float32))
    chunks = [
        (row, length - chance.randint(1, min(length, 20)), length) for row, length in enumerate(lengths)
    ]
    rows = np.concatenate([np.full(stop - start, row) for row, start, stop in chunks])
    places = np.concatenate([np.arange(start, stop) for _, start, stop in chunks])
    queries = (
        np.random.default_rng(seed).standard_normal((len(rows), groups, kv_heads, dim)).astype(np.float32)
    )
    packed = paged.put(rows, places, heads, queries)
    result = paged.attend(packed, rows, places, window)
    for token in range(len(rows)):
        expected = paged.expected(queries[token], rows[token], places[token], window)
        np.testing.assert_allclose(result[token], expected, atol=2e-6)
        one = slice(token, token + 1)
        assert np.array_equal(paged.attend(packed[one], rows[one], places[one], window)[0], result[token])


def test_cached_keys_and_values_are_read_back() -> None:
    paged = PagedReference(2, 32, [40, 7], seed=3)
    rows, places = np.repeat([0, 1], [40, 7]), np.concatenate([np.arange(40), np.arange(7)])
    paged.put(rows, places, 2, np.zeros((47, 64), np.float32))
    slots = paged.table[rows, places // 16] * 16 + places % 16
    out = np.empty((47, 128), np.float32)
    attention.collect(slots, 64, paged.keys.ctypes.data, paged.values.ctypes.data, out.ctypes.data)
    expected = [item[rows, places].reshape(47, -1) for item in (paged.k, paged.v)]
    assert np.array_equal(out, np.concatenate(expected, 1))


def test_delta_rule_kernel_equals_the_token_by_token_formula() -> None:
    chance = np.random.default_rng(0)
    tokens, heads, key_dim, value_dim = 12, 2, 8, 32
    query, key = chance.standard_normal((2, tokens, heads, key_dim)).astype(np.float32)
    value = chance.standard_normal((tokens, heads, value_dim)).astype(np.float32)
    decay, rate = chance.uniform(0.5, 1, (2, tokens, heads)).astype(np.float32)
    start = chance.standard_normal((3, heads, key_dim, value_dim)).astype(np.float32)
    state, expected = start.astype(np.float64), np.empty((tokens, heads, value_dim))
    sequences = [(2, 0, 7), (0, 7, 5)]
    for row, first, size in sequences:
        for t in range(first, first + size):
            for h in range(heads):
                s = state[row, h] * decay[t, h]
                s = s + np.outer(key[t, h], rate[t, h] * (value[t, h] - s.T @ key[t, h]))
                state[row, h], expected[t, h] = s, s.T @ query[t, h]

    def walked(cuts: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
        memory, out = start.copy(), np.empty_like(value)
        for cut in cuts:
            where = tuple(np.array([number]) for number in cut)
            arrays = (memory, query, key, value, decay, rate, out)
            rows.walk(*where, (heads, key_dim, value_dim), *(item.ctypes.data for item in arrays))
        return memory, out

    memory, out = walked(sequences)
    np.testing.assert_allclose(memory, state, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    again = walked([(2, 0, 3), (0, 7, 1), (2, 3, 4), (0, 8, 4)])
    assert np.array_equal(again[0], memory)
    assert np.array_equal(again[1], out)


class ShortWeights:
    """Random weights of 16 bits, for which products go through tiles where there are some."""

    fingerprint = "short"

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return RandomSource(7).take(name, *shape).bfloat16().float()


LIKE_THE_SHIPPED = EngineModelConfig(
    Model("wide", 256, 1000, (Layer(FullAttention(4, 2, 64, 64), DenseFfn(704)),) * 2, 1024)
)


@pytest.mark.parametrize("name", ["shipped", "full-fancy", "hybrid"])
def test_models_with_16_bit_weights_do_not_depend_on_chunk_sizes(name: str) -> None:
    config = LIKE_THE_SHIPPED if name == "shipped" else KINDS[name]
    engine = Runner(config, ShortWeights(), RunnerSize(4, 200, 1024))
    tokens = prompt(150, seed=2)
    whole = logits_of(engine, open_row(engine, 150), tokens, [150])
    for sizes in ([1] * 150, [7] * 22, [64] * 3):
        row = open_row(engine, 150)
        assert equal_logits(logits_of(engine, row, tokens, sizes), whole)
        engine.tables.close(row)


def test_logits_do_not_depend_on_the_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Runner(LIKE_THE_SHIPPED, ShortWeights(), RunnerSize(4, 200, 1024))
    tokens = prompt(150, seed=2)
    alone = logits_of(engine, open_row(engine, 150), tokens, [100] + [1] * 50)
    for module in (matrix, attention_layers, ffn):
        monkeypatch.setattr(module, "thread_count", lambda work: 3)
    assert torch.equal(logits_of(engine, open_row(engine, 150), tokens, [100] + [1] * 50), alone)


@given(st.integers(1, 40), st.integers(1, 5))
def test_thread_ranges_cover_all_work_once(count: int, parts: int) -> None:
    done = [0] * count

    def some(begin: int, stop: int) -> None:
        for place in range(begin, stop):
            done[place] += 1

    matrix.over_threads(count, parts, some)
    assert done == [1] * count


def test_exception_in_a_worker_thread_is_raised() -> None:
    def some(begin: int, stop: int) -> None:
        if begin:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        matrix.over_threads(4, 2, some)


def test_cached_machine_code_depends_on_all_source_files() -> None:
    """A change of vector.py alone must not leave old code of attention.py in use."""
    cache_file = getattr(attention.attend, "_cache")._cache_file  # noqa: B009
    assert {name for name, _, _ in cache_file._source_stamp} >= {"vector.py", "attention.py"}
