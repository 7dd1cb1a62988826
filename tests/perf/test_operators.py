"""Operators: never faster than the hardware, quantised in waves, and equal to sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.perf.operators.kernels import (
    L2_SPEEDUP,
    ChipFigures,
    DecodeCurve,
    GemmCurve,
    PrefillCurve,
    StreamCurve,
    decode_attention_s,
    gemm_s,
    mean_keys,
    prefill_attention_s,
    spanned_keys,
    stream_s,
)

# Round figures near an A100: 100 SMs of 3 TFLOP/s, 2 TB/s.
CHIP = ChipFigures(3e14, 2e12, 100.0, 40e6, 2e12, 40e9, 128.0)
GEMM = GemmCurve(0.9, 0.9, 3e-6, (0.9, 0.95, 0.98, 1.0), 100.0, 2.5)
PREFILL = PrefillCurve(0.7, 0.6, 1e-5, 1.0, 0.5)
DECODE = DecodeCurve(0.8, 1e-5, 5e-6, 4e-6, 2.0)
IDEAL_GEMM = GemmCurve(1.0, 1.0, 0.0, (1.0, 1.0, 1.0, 1.0), 0.0, 8.0)
IDEAL_PREFILL = PrefillCurve(1.0, 1.0, 0.0, 1.0, 0.0)

sizes = st.integers(1, 20_000)
copies = st.integers(1, 64)
lengths = st.integers(0, 6000)
windows = st.integers(1, 8000)


def gemm(m: float, n: float, k: float, **more: float) -> float:
    return float(gemm_s(m, n, k, CHIP, GEMM, **more))


def prefill(new: object, cached: object, window: float | None = None, curve: PrefillCurve = PREFILL) -> float:
    return float(prefill_attention_s(new, cached, 32, 8, 128, 128, CHIP, curve, window=window))


@given(sizes, sizes, sizes, copies)
def test_gemm_is_never_faster_than_the_hardware(m: int, n: int, k: int, many: int) -> None:
    time = gemm(m, n, k, copies=many)
    assert time >= 2.0 * m * n * k * many / 3e14
    assert time >= 2.0 * many * (n * k + m * k + m * n) / 2e12


@given(sizes, sizes, sizes)
def test_ideal_gemm_equals_the_plain_roofline(m: int, n: int, k: int) -> None:
    """Tiles of whole waves and sharp corners: at most 2^(1/8) above the larger of the two."""
    rows, cols = 1280 * ceil(m / 1280), 2560 * ceil(n / 2560)  # 100 tiles of 128x256
    time = float(gemm_s(rows, cols, k, CHIP, IDEAL_GEMM))
    floor = max(2.0 * rows * cols * k / 3e14, 2.0 * (cols * k + rows * k + rows * cols) / 2e12)
    assert floor * (1 - 1e-12) <= time <= floor * 2 ** (1 / 8)


@given(sizes, sizes, sizes, st.sampled_from("mnk"), st.integers(1, 5000))
def test_larger_gemm_is_never_faster(m: int, n: int, k: int, which: str, extra: int) -> None:
    """For one tile shape waves only grow; the best of several growing times grows as well."""
    larger = {"m": (m + extra, n, k), "n": (m, n + extra, k), "k": (m, n, k + extra)}[which]
    assert gemm(*larger) >= gemm(m, n, k) * (1 - 1e-9)


@given(sizes, sizes, sizes)
def test_gemm_on_a_faster_chip_is_never_slower(m: int, n: int, k: int) -> None:
    base = gemm(m, n, k)
    assert gemm_s(m, n, k, replace(CHIP, bytes_per_s=4e12), GEMM) <= base
    assert gemm_s(m, n, k, replace(CHIP, flops_per_s=6e14), GEMM) <= base


def test_gemm_with_one_tile_beyond_a_wave_costs_a_further_wave() -> None:
    """With one tile size and no splits that help, 100 tiles fill the SMs and the 101st starts a new wave."""
    one_shape = replace(GEMM, tile_share=(1e-6, 1e-6, 1e-6, 1.0), extra_depth=0.0, fixed_s=0.0, p=50.0)
    deep = 1 << 17  # compute must dominate, and a split along k would move too many partial sums
    full = float(gemm_s(1280, 2560, deep, CHIP, one_shape))
    more = float(gemm_s(1280, 2561, deep, CHIP, one_shape))
    assert full == pytest.approx(2 * 1280 * 2560 * deep / (3e14 * 0.9), rel=1e-3)
    # A split into four fills the second wave with quarter tiles, so it costs a quarter at least.
    assert 1.24 <= more / full <= 2.0
    assert float(gemm_s(1280, 5120, deep, CHIP, one_shape)) == pytest.approx(2 * full, rel=1e-3)


def test_gemm_with_few_tiles_leaves_most_of_the_chip_idle() -> None:
    """A 128 x 128 product makes 16 blocks at most (64 x 64, split in four): 84 of 100 SMs have nothing."""
    small, large = gemm(128, 128, 65536) - 3e-6, gemm(8192, 8192, 65536) - 3e-6
    assert small / (128 * 128) > 5 * large / (8192 * 8192)


@given(st.integers(1, 64), st.integers(64, 4096), st.integers(64, 4096), copies)
def test_batched_gemm_costs_at_most_as_much_as_separate_launches(m: int, n: int, k: int, many: int) -> None:
    together, alone = gemm(m, n, k, copies=many), gemm(m, n, k)
    assert alone <= together <= alone * many * (1 + 1e-9)


def test_gemm_with_narrow_weights_is_faster() -> None:
    """Bound by its weights, a product gains what they shrink by, until its padded tiles take as long."""
    fast = replace(CHIP, flops_per_s=3e15)
    times = [float(gemm_s(1, 8192, 8192, fast, GEMM, weight_bytes=w)) - 3e-6 for w in (2.0, 0.5)]
    assert times[0] / times[1] == pytest.approx(4.0, rel=0.1)
    assert 1.0 < (gemm(1, 8192, 8192) - 3e-6) / (gemm(1, 8192, 8192, weight_bytes=0.5) - 3e-6) < 4.0


@given(sizes, sizes, st.integers(0, 3))
def test_gemm_with_warm_weights_is_never_slower(n: int, k: int, share: int) -> None:
    cold, warm = gemm(1, n, k), gemm(1, n, k, warm_share=share)
    assert warm <= cold * (1 + 1e-12)
    assert warm - 3e-6 >= (cold - 3e-6) / L2_SPEEDUP * (1 - 1e-9)
    if 2 * n * k > 10 * 3 * 40e6:
        assert warm == pytest.approx(cold, rel=1e-6)


def test_gemm_arguments_broadcast() -> None:
    m, n = np.array([[1.0], [512.0]]), np.array([128.0, 4096.0, 14336.0])
    table = gemm_s(m, n, 4096, CHIP, GEMM)
    assert table.shape == (2, 3)
    assert table[1, 2] == gemm(512, 14336, 4096)


@given(st.integers(1, 700), st.integers(0, 700), st.integers(1, 600), st.sampled_from([16, 64, 128]))
def test_attention_tile_spans_the_keys_of_all_its_rows(new: int, cached: int, window: int, tile: int) -> None:
    """Against a count of every tile's keys; where the last tile is not full, within what it lacks."""
    tiles = ceil(new / tile)
    spans = [
        cached + min(first + tile, new) - max(0, cached + first - window) for first in range(0, new, tile)
    ]
    got = spanned_keys(
        *(np.array(float(x)) for x in (new, cached)), window, np.array(float(tile)), np.array(float(tiles))
    )
    assert abs(float(got) - sum(spans) / tiles) <= tile


@given(lengths, lengths, st.none() | windows)
@example(5, 0, 3)
@example(1, 10, 10)
def test_mean_keys_equals_the_mean_over_tokens(new: int, cached: int, window: int | None) -> None:
    if new == 0:
        return
    seen = np.arange(cached + 1, cached + new + 1)
    expected = np.mean(seen if window is None else np.minimum(seen, window))
    got = mean_keys(np.array(float(new)), np.array(float(cached)), window)
    assert float(got) == pytest.approx(float(expected), rel=1e-12)


@given(st.integers(1, 4000), lengths, st.none() | windows)
def test_prefill_attention_work_equals_enumerated_query_key_pairs(
    new: int, cached: int, window: int | None
) -> None:
    """On an ideal chip of one SM every tile of 128 queries meets its keys and half a tile of masked ones."""
    chip = replace(CHIP, sm_count=1.0, bytes_per_s=1e30)
    got = float(prefill_attention_s(new, cached, 32, 8, 128, 128, chip, IDEAL_PREFILL, window=window))
    seen = np.arange(cached + 1, cached + new + 1)
    seen = seen if window is None else np.minimum(seen, window)
    tiles = ceil(new / 128)
    pairs = float(np.mean(seen)) * tiles * 128
    flops = 2.0 * 32 * (128 + 128)
    assert got >= flops * float(seen.sum()) / 3e14  # never less than the bare pairs
    # Half a tile more keys per query tile, and never less than the last tile's reach. With a window all queries of a
    # tile go over what any of them sees: up to a tile more than each.
    more = 64 if window is None else 64 + 128
    assert got <= flops * (pairs + tiles * 128 * more + 128 * (cached + new)) / 3e14 * (1 + 1e-9)


@given(st.integers(1, 4000), lengths, st.integers(1, 4000), lengths)
def test_two_chunks_cost_between_the_larger_one_and_their_sum(a: int, ca: int, b: int, cb: int) -> None:
    """Up to one wave more: tiles that are alike end together, unlike ones do not, and a launch mixes both."""
    first, second, both = prefill(a, ca), prefill(b, cb), prefill([a, b], [ca, cb])
    assert both >= max(first, second) * (1 - 1e-9) - wave_s(max(ca + a, cb + b))
    assert both <= (first + second) * (1 + 1e-9) + wave_s(max(ca + a, cb + b))


def wave_s(keys: float) -> float:
    """One wave of tiles of 128 queries over so many keys, softmax included."""
    softmax = PREFILL.softmax * 3e14 / 2e12
    return 128 * (keys + 128) * (2.0 * 256 + softmax) / (3e14 / 100 * 0.7)


@given(st.integers(1, 4000), lengths, windows)
def test_windowed_prefill_costs_no_more_than_full_attention(new: int, cached: int, window: int) -> None:
    full = prefill(new, cached)
    # Windowed tiles are more alike, so at worst their last wave is not shared.
    assert prefill(new, cached, window) <= full * (1 + 1e-9) + wave_s(min(cached + new, window))


def test_windowed_prefill_does_not_depend_on_a_longer_context() -> None:
    """512 new tokens with a window of 128 neither compute over nor read what lies further back."""
    assert prefill(512, 100_000, 128) == pytest.approx(prefill(512, 128, 128), rel=1e-9)
    assert prefill(512, 100_000) > 5 * prefill(512, 100_000, 128)


def test_unused_chunks_cost_nothing() -> None:
    assert prefill(0, 0) == 0.0
    assert prefill(0, 5000) == 0.0
    assert prefill([700, 0, 0], [100, 0, 90_000]) == prefill(700, 100)


@given(st.lists(st.tuples(st.integers(1, 3000), lengths), min_size=2, max_size=5), st.randoms())
def test_prefill_time_does_not_depend_on_the_order_of_chunks(
    chunks: list[tuple[int, int]], random: object
) -> None:
    shuffled = list(chunks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = zip(*chunks, strict=True), zip(*shuffled, strict=True)
    assert prefill(*map(list, first)) == pytest.approx(prefill(*map(list, second)), rel=1e-12)


@given(st.integers(1, 3000), lengths, st.integers(1, 3000))
def test_prefill_with_longer_context_is_never_faster(new: int, cached: int, extra: int) -> None:
    """Alike tiles behind a longer context may lose the sharing of one wave, never gain it."""
    assert prefill(new, cached + extra) >= prefill(new, cached) * (1 - 1e-9)


def test_kernels_without_causal_skipping_compute_the_masked_half() -> None:
    assert prefill(4096, 0, curve=replace(PREFILL, diagonal=2.0)) > 1.7 * prefill(4096, 0)


@given(st.integers(1, 512), st.integers(1, 8000))
def test_decode_attention_is_never_faster_than_reading_its_cache(requests: int, context: int) -> None:
    moved = requests * context * 4096.0
    time = float(decode_attention_s(requests, moved, context, 8, CHIP, DECODE))
    assert time >= moved / (2e12 * 0.8) + 1e-5
    assert float(decode_attention_s(requests, moved, context, 8, CHIP, DECODE, warm_share=1.0)) <= time
    twice = float(decode_attention_s(requests, moved, context, 8, replace(CHIP, bytes_per_s=4e12), DECODE))
    assert twice <= time


def test_warm_kv_cache_is_read_at_l2_speed() -> None:
    """1 MB in an L2 of 40 MB, then 400 MB that cannot stay there."""
    curve = replace(DECODE, block_s=0.0, fixed_s=0.0)
    for moved, speedup in ((1e6, L2_SPEEDUP), (4e8, 1.0)):
        cold, warm = (float(decode_attention_s(1, moved, 1, 8, CHIP, curve, warm_share=w)) for w in (0, 1))
        assert cold == pytest.approx(moved / (2e12 * 0.8))
        assert warm == pytest.approx(cold / speedup, rel=1e-6)


def test_decode_attention_without_requests_costs_nothing() -> None:
    got = decode_attention_s([0.0, 1.0], [0.0, 4096.0 * 100], [0.0, 100.0], 8, CHIP, DECODE)
    assert got[0] == 0.0
    assert got[1] > 1e-5


def test_many_heads_on_one_latent_make_decode_compute_bound() -> None:
    args = (64.0, 64 * 4096 * 1152.0, 4096.0, 2.0, CHIP, DECODE)
    flops = 2.0 * 128 * (576 + 512) * 64 * 4096
    plain, latent = float(decode_attention_s(*args)), float(decode_attention_s(*args, flops=flops))
    assert latent >= flops / (3e14 * 0.5)
    assert latent > plain


def test_split_decode_context_adds_the_merge_time() -> None:
    short, long = (float(decode_attention_s(1, 0.0, c, 8, CHIP, DECODE)) for c in (128, 256))
    assert long - short == pytest.approx(5e-6)


def test_stream_time_is_launches_plus_bytes() -> None:
    curve = StreamCurve(0.5, 2e-6)
    assert stream_s(1e9, 5, CHIP, curve) == pytest.approx(1e9 / 1e12 + 1e-5)
    assert stream_s([0.0, 1e6], [0.0, 1.0], CHIP, curve) == pytest.approx([0.0, 3e-6])
