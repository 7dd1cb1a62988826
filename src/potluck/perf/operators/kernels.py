"""How long one GPU takes for one operator: a roofline with the quantisation that GPUs really have.

Three kernels carry a transformer. Each has a compute time and a memory time; what is reported is

    t = fixed + (t_compute^p + t_memory^p)^(1/p)

which is the larger of the two with a rounded corner. Compute comes in tiles that fill the
multiprocessors (SMs) in waves, so a little more work may cost a whole wave; that, not a constant
efficiency, is why small matrices run far below the data sheet. The letters:

    F  matrix FLOP/s of the GPU      W  memory bytes/s      S  number of SMs
    ηc, ηb  reachable share of F and of W (fitted per GPU)

Every argument may be an array; numpy broadcasting applies. Nothing here knows a model or a GPU name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.perf.step_timer import Floats, once

MEASURED_ROUTER_SKEW = 1.01
"""A router of the published measurements: nearly every load equally likely on a logarithmic scale."""
FAIR_ROUTER_SKEW = 0.0
EXPERT_LOG_DEVIATION = 1.0
"""Standard deviation of the logarithm of how often a router chooses an expert: serving runs of three models leave it
between 0.7 and 1.3."""
LOAD_QUANTILES = 32
"""Expert loads are tracked at this many quantiles, not expert by expert."""
TILE_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """Load of the busiest rank's experts; each array has one entry per token count."""

    rows: Floats
    used: Floats
    """Experts with at least one row: their weights are read."""
    tiles: dict[int, Floats]
    """Tiles of so many rows that it takes; a tile has rows of one expert."""


def busiest_share(rows: Floats, ranks: int) -> Floats:
    """The part of all rows that the busiest of some ranks gets, on average, when each row picks one by chance.

    The largest of n normal numbers is about Phi^-1((n - 3/8) / (n + 1/4)) deviations above their mean (Blom); as
    counts add up to a given number they are correlated, which widens it.
    """
    mean = 1.0 / ranks
    deviation = np.sqrt(mean * (1.0 - mean) / np.maximum(rows, 1.0))
    share: Floats = np.minimum(mean + _blom(ranks) * deviation, 1.0)
    return share


def spread(
    tokens: ArrayLike,
    experts: ArrayLike,
    active: ArrayLike,
    ranks: ArrayLike = 1.0,
    skew: ArrayLike | None = None,
) -> ExpertSpread:
    """Loads on the experts of the busiest of `ranks`, each of which has experts / ranks of them whole.

    Routers are not fair: of the experts of one layer some get many times the rows of others. Without a `skew`, as
    models' do (`_loads_in_service`). With one as in the published measurements: loads of E experts follow a power
    law with density x^-a between 1 and 0.8 T (T tokens, each choosing k); they are scaled to T k rows and
    rounded, and rows that are lost go to experts without any. a = 0 is a router that is fair to the row. With
    expert parallelism the busiest rank decides: above the mean by Blom's z, times the deviation of a sum of E
    / ranks such loads.
    """
    if skew is None:
        return _loads_in_service(*(np.atleast_1d(_floats(v)) for v in (tokens, experts, active, ranks)))
    chosen, many, per_token, places, power = np.broadcast_arrays(
        *(np.atleast_1d(_floats(v)) for v in (tokens, experts, active, ranks, skew))
    )
    loads = _fair_loads(chosen, many, per_token)
    if (power != FAIR_ROUTER_SKEW).any():
        uneven = _skewed_loads(
            chosen, many, per_token, places, np.where(power == FAIR_ROUTER_SKEW, MEASURED_ROUTER_SKEW, power)
        )
        loads = np.where((power == FAIR_ROUTER_SKEW)[:, None], loads, uneven)
    local = np.maximum(many / places, 1.0)
    weight = local / LOAD_QUANTILES
    exact, loads = loads, np.round(np.minimum(loads, chosen[:, None]))
    rows = np.maximum(exact.sum(axis=1) * weight, 1.0)
    # What rounding and the bound of a row a token leave over goes to experts that have none.
    used = (loads > 0).sum(axis=1) * weight
    over = np.clip(rows - loads.sum(axis=1) * weight, 0.0, local - used)
    used = np.maximum(used + over, 1.0)
    least = np.ceil(loads / np.array(TILE_ROWS)[:, None, None]).sum(axis=2) * weight + over
    tiles = {tall: np.maximum(least[i], np.maximum(used, rows / tall)) for i, tall in enumerate(TILE_ROWS)}
    return ExpertSpread(rows, used, tiles)


def _loads_in_service(tokens: Floats, experts: Floats, active: Floats, ranks: Floats) -> ExpertSpread:
    """Expert loads in service: tokens choose at random, some experts more often than others."""
    popular = _expert_popularity()
    local = np.maximum(experts / ranks, 1.0)
    blom = {float(n): _blom(float(n)) if n > 1 else 0.0 for n in once(ranks)}
    above = 1.0 + np.array([blom[float(n)] for n in ranks]) * popular.std() / np.sqrt(local)
    share = np.minimum((active / experts * np.minimum(above, ranks))[:, None] * popular, 1.0 - 1e-9)
    loads, weight = tokens[:, None] * share, local / LOAD_QUANTILES
    touched = -np.expm1(np.maximum(tokens, 1e-9)[:, None] * np.log1p(-share))
    used = np.maximum(touched.sum(axis=1) * weight, 1.0)
    tiles = {
        tall: np.maximum((touched * np.ceil(loads / touched / tall)).sum(axis=1) * weight, used)
        for tall in TILE_ROWS
    }
    return ExpertSpread(np.maximum(loads.sum(axis=1) * weight, 1.0), used, tiles)


@lru_cache(maxsize=1)
def _expert_popularity() -> Floats:
    """How often a router chooses the experts at each quantile, relative to the mean."""
    from statistics import NormalDist  # slow to import, and of experts alone

    place = [(i + 0.5) / LOAD_QUANTILES for i in range(LOAD_QUANTILES)]
    chosen = np.exp(EXPERT_LOG_DEVIATION * np.array([NormalDist().inv_cdf(at) for at in place]))
    return _floats(chosen / chosen.mean())


def _fair_loads(tokens: Floats, experts: Floats, active: Floats) -> Floats:
    load = (tokens * active / experts)[:, None]
    place = (np.arange(LOAD_QUANTILES) + 0.5) / LOAD_QUANTILES
    few = (place[None, :] < load).astype(np.float64)
    result: Floats = np.where(load < 1.0, few, load)
    return result


def _skewed_loads(tokens: Floats, experts: Floats, active: Floats, ranks: Floats, skew: Floats) -> Floats:
    total = tokens * active
    many = total > experts
    low = np.where(many, 1.0, 0.01)[:, None]
    high = np.maximum(np.where(many, 0.8 * tokens, 2.0)[:, None], low * 1.0001)
    place = (np.arange(LOAD_QUANTILES) + 0.5) / LOAD_QUANTILES
    power = (1.0 - skew)[:, None]
    drawn = ((high**power - low**power) * place + low**power) ** (1.0 / power)
    loads = drawn / drawn.mean(axis=1, keepdims=True) * (total / experts)[:, None]
    if (ranks > 1).any():
        deviation = loads.std(axis=1) / np.maximum(loads.mean(axis=1), 1e-12)
        blom = {float(n): _blom(float(n)) if n > 1 else 0.0 for n in once(ranks)}
        above = 1.0 + np.array([blom[float(n)] for n in ranks]) * deviation / np.sqrt(
            np.maximum(experts / ranks, 1.0)
        )
        loads = loads * np.minimum(above, ranks)[:, None]
    return _floats(loads)


def _blom(ranks: float) -> float:
    from statistics import NormalDist  # slow to import, and of experts alone

    return float(NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * (ranks / (ranks - 1)) ** 0.5)


GEMM_TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
SHORT_TILES = ((16, 64), (16, 128), (32, 128))
"""Of products with weights of 4 bits, besides: of few rows, so that arithmetic does not take longer than reading."""
PICKED_TILES = ((64.0, (64, 64)), (128.0, (64, 128)), (np.inf, (128, 128)))
"""CUTLASS's FP8 products take the tile by rows alone: up to so many, this one."""
EXPERT_TALL = {16: 0.35, 32: 0.6, 64: 0.9, 128: 1.0}
EXPERT_WIDE = {64: 0.9, 128: 1.0}
"""Rows and columns of a grouped product's tiles, and the share of the best tile's rate that each reaches."""
QUANTISE_ROW_S = 0.75e-6
QUANTISE_ELEMENT_S = 0.22e-9
"""Making a row of inputs small: an SM's time for a row, and for each of its elements (H100, L40S)."""
QUANTISE_SHARE = 0.8
"""Of memory bandwidth, where that is what limits it."""
SPLIT_K = (1, 2, 4)
KEY_TILE = 64
L2_SPEEDUP = 3.0
"""How much faster the L2 cache answers than memory; only matters where a benchmark kept its data warm."""

Number = float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChipFigures:
    """The figures of a GPU that the formulas need; arrays when many GPUs are fitted at once."""

    flops_per_s: Number
    bytes_per_s: Number
    sm_count: Number
    l2_bytes: Number
    exp_per_s: Number
    """Exponentials a second (16 per SM and clock): softmax needs one per query and key."""
    fetch_bytes_per_s: Number
    """That an SM gets from the L2 cache for a product's tile: 32 of the 64 a clock that its port has, but all of them
    on a Blackwell of a data centre, where two SMs share a tile's operands."""
    query_tile: Number
    """Query rows per attention block: 128 on the large HBM parts, 64 on sm_86 and sm_89."""


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Fitted figures of the matrix product."""

    compute: Number
    bandwidth: Number
    fixed_s: Number
    tile_share: tuple[float, float, float, float]
    """Share of ηc that tiles of 64x64, 64x128, 128x128 and 128x256 reach."""
    extra_depth: float
    """Prologue and epilogue of a tile, as so many more steps along k."""
    p: float


@dataclass(frozen=True, slots=True)
class ExpertCurve:
    """Fitted figures of a mixture's routed experts in one format."""

    compute: Number
    bandwidth: Number
    fixed_s: Number
    """Of the whole layer: sorting rows by expert, launches."""
    stream: Number
    """Share of bandwidth of what lies around the products."""
    extra_depth: float
    p: float


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Fitted figures of attention over new tokens."""

    compute: Number
    bandwidth: Number
    fixed_s: Number
    diagonal: Number
    """Cost of a pair inside the causal triangle against one behind it: 1 for kernels that skip what
    the mask hides, more for older ones."""
    softmax: Number
    """Share of the softmax's exponentials that does not hide behind the matrix products."""


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Fitted figures of attention for one new token per request."""

    bandwidth: Number
    fixed_s: Number
    combine_s: Number
    """Extra time to merge the partial results once a context is long enough to be split."""
    block_s: Number
    """Time one SM is busy with one (request, KV head) however short its context is."""
    p: float


@dataclass(frozen=True, slots=True)
class StreamCurve:
    """Fitted figures of element-wise work: norms, rotary embedding, activation, residual."""

    bandwidth: Number
    fixed_s: Number


def gemm_s(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    chip: ChipFigures,
    curve: GemmCurve,
    *,
    weight_bytes: float = 2.0,
    input_bytes: float = 2.0,
    copies: ArrayLike = 1.0,
    tiles: tuple[tuple[int, int], ...] = GEMM_TILES,
    splits: tuple[int, ...] = SPLIT_K,
    picked: bool = False,
    warm_share: ArrayLike = 0.0,
) -> Floats:
    """Seconds for `copies` products (m, k) x (k, n) in one launch.

    `picked`: the tile follows from the rows (`PICKED_TILES`), instead of being the best of `tiles`. `warm_share` is
    the part of L2 in which a benchmark's weights survive between repetitions; serving reads every layer's weights
    afresh, so it is 0 there.
    """
    rows, cols, depth, many = _floats(m), _floats(n), _floats(k), _floats(copies)
    rate = chip.flops_per_s / chip.sm_count * curve.compute
    stream = chip.bytes_per_s * curve.bandwidth
    sms = chip.sm_count
    if picked:
        arrays = [
            _tiled_s(rows, cols, depth, many, sms, rate, stream, curve, (t,), splits) for _, t in PICKED_TILES
        ]
        compute = np.select([rows <= most for most, _ in PICKED_TILES], arrays)
    else:
        compute = _tiled_s(rows, cols, depth, many, sms, rate, stream, curve, tiles, splits)
    weights = many * cols * depth * weight_bytes
    activations = many * (input_bytes * rows * depth + 2.0 * rows * cols)
    warm = _l2_time_factor(weights, _floats(warm_share) * chip.l2_bytes)
    memory = (weights * warm + activations) / stream
    return _floats(curve.fixed_s + _rounded_max(compute, memory, curve.p))


def _tiled_s(
    rows: Floats,
    cols: Floats,
    depth: Floats,
    many: Floats,
    sms: Number,
    rate: Number,
    stream: Number,
    curve: GemmCurve,
    shapes: tuple[tuple[int, int], ...],
    splits: tuple[int, ...],
) -> Floats:
    """The best of the tile shapes and splits along k that a kernel library would choose from."""
    best: Floats | None = None
    shares = dict(zip((64 * 64, 64 * 128, 128 * 128, 128 * 256), curve.tile_share, strict=True))
    for tall, wide in shapes:
        tiles = many * np.ceil(rows / tall) * np.ceil(cols / wide)
        work = 2.0 * tall * wide / (rate * shares.get(tall * wide, curve.tile_share[0]))
        for split in splits:
            waves = np.ceil(tiles * split / sms)
            time = waves * work * (depth / split + curve.extra_depth)
            if split > 1:
                time = time + split * 4.0 * many * rows * cols / stream + 1e-6
            best = time if best is None else np.minimum(best, time)
    assert best is not None
    return best


def quantise_s(rows: ArrayLike, depth: ArrayLike, chip: ChipFigures) -> Floats:
    """Seconds to make inputs of 16 bits small (to 8, one scale a row): a block reads a row twice and writes it."""
    m, k = _floats(rows), _floats(depth)
    memory = 3.0 * m * k / (chip.bytes_per_s * QUANTISE_SHARE)
    busy = np.maximum(m / chip.sm_count, 0.25) * (QUANTISE_ROW_S + QUANTISE_ELEMENT_S * k)
    return _floats(np.maximum(memory, busy))


def expert_product_s(
    expert_spread: ExpertSpread,
    n: ArrayLike,
    k: ArrayLike,
    chip: ChipFigures,
    curve: ExpertCurve,
    *,
    weight_bytes: float = 2.0,
    input_bytes: float = 2.0,
) -> Floats:
    """Seconds of one of an expert layer's two products, (rows, k) x (k, n) for each expert with its own matrix.

    A tile fetches its inputs and its weights from the L2 cache, so small ones, which share little, are held up there.
    """
    cols, depth = _floats(n), _floats(k)
    rate = chip.flops_per_s / chip.sm_count * curve.compute
    best: Floats | None = None
    for tall, tall_share in EXPERT_TALL.items():
        for wide, wide_share in EXPERT_WIDE.items():
            waves = np.ceil(expert_spread.tiles[tall] * np.ceil(cols / wide) / chip.sm_count)
            work = 2.0 * tall * wide / (rate * tall_share * wide_share)
            work = np.maximum(work, (tall * input_bytes + wide * weight_bytes) / chip.fetch_bytes_per_s)
            time = waves * work * (depth + curve.extra_depth)
            best = time if best is None else np.minimum(best, time)
    assert best is not None
    moved = expert_spread.used * cols * depth * weight_bytes + expert_spread.rows * (
        input_bytes * depth + 2.0 * cols
    )
    return _rounded_max(best, moved / (chip.bytes_per_s * curve.bandwidth), curve.p)


def expert_layer_s(
    expert_spread: ExpertSpread,
    tokens: ArrayLike,
    active: ArrayLike,
    hidden: ArrayLike,
    inner: ArrayLike,
    chip: ChipFigures,
    curve: ExpertCurve,
    *,
    weight_bytes: float = 2.0,
    input_bytes: float = 2.0,
    makes_small: bool = False,
) -> Floats:
    """Seconds of a mixture's routed experts on one rank: sort, gate and up, activate, down, add up.

    Activating and adding up go over all chosen rows, those of experts on other ranks too.
    """
    t, h, i = _floats(tokens), _floats(hidden), _floats(inner)
    rows = t * _floats(active)
    widths = {"weight_bytes": weight_bytes, "input_bytes": input_bytes}
    up = expert_product_s(expert_spread, 2.0 * i, h, chip, curve, **widths)
    down = expert_product_s(expert_spread, h, i, chip, curve, **widths)
    around = (rows * (6.0 * i + 2.0 * h) + 2.0 * t * h) / (chip.bytes_per_s * curve.stream)
    time = curve.fixed_s + up + down + around
    if makes_small:
        time = time + quantise_s(t, h, chip)
    return _floats(time)


def prefill_attention_s(
    new: ArrayLike,
    cached: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    qk_dim: ArrayLike,
    v_dim: ArrayLike,
    chip: ChipFigures,
    curve: PrefillCurve,
    *,
    window: float | None = None,
) -> Floats:
    """Seconds of causal attention in one launch over chunks; the last axis of `new` and `cached` is chunks.

    Query rows come in tiles of `chip.query_tile`; one SM works through the keys of one tile and head. The
    launch ends with its longest tile, and equal tiles end in whole waves.
    """
    q, c = np.atleast_1d(_floats(new)), np.atleast_1d(_floats(cached))
    tile, h, hk = _per_chunk(chip.query_tile), _per_chunk(heads), _per_chunk(kv_heads)
    dims = _per_chunk(qk_dim) + _per_chunk(v_dim)
    blocks_of = np.ceil(q / tile)
    if window is None:
        keys = (
            c + _per_chunk(curve.diagonal) * (mean_keys(q, c, None) - c) + np.minimum(tile, KEY_TILE + q) / 2
        )
    else:
        keys = spanned_keys(q, c, window, tile, blocks_of) + KEY_TILE / 2
    reach = c + q if window is None else np.minimum(c + q, window + tile)
    rate = chip.flops_per_s / chip.sm_count * curve.compute
    softmax = curve.softmax * chip.flops_per_s / chip.exp_per_s
    key_s = _per_chunk(1.0 / rate) * (2.0 * dims + _per_chunk(softmax)) * tile
    block_s = np.where(q > 0, key_s * keys, 0.0)
    total_s = (h * blocks_of * block_s).sum(axis=-1)
    longest_s = np.where(q > 0, key_s * reach, 0.0).max(axis=-1)
    blocks = (h * blocks_of).sum(axis=-1)
    mean_s = total_s / np.maximum(blocks, 1.0)
    # Tiles behind a long cached context are alike and finish wave by wave; those of a fresh prompt are
    # unlike and fill one another's gaps.
    alike = np.clip(mean_s / np.maximum(longest_s, 1e-30), 0.0, 1.0) ** 4
    waves = blocks / chip.sm_count
    filled = np.where(waves > 1.0, waves + alike * (np.ceil(waves) - waves), 1.0)
    compute = np.maximum(filled * mean_s, longest_s)
    held = c + q if window is None else np.minimum(c, window) + q
    moved = (q * h * dims + np.where(q > 0, held, 0.0) * hk * dims).sum(axis=-1) * 2.0
    memory = moved / (chip.bytes_per_s * curve.bandwidth)
    # Each block first waits for its queries, so here the two add up instead of hiding one another.
    return _floats(np.where(blocks > 0, curve.fixed_s + compute + memory, 0.0))


def spanned_keys(new: Floats, cached: Floats, window: float, tile: Floats, tiles: Floats) -> Floats:
    """Mean number of keys that a tile of queries goes over: from the first that its first row sees to its last row.

    A tile computes what any of its rows sees and masks the rest, so behind a window it goes over as many and its own.
    """
    growing = np.clip(np.ceil((window - cached) / tile), 0.0, tiles)
    total = growing * (cached + tile * (growing + 1.0) / 2.0) + (tiles - growing) * (window + tile)
    return _floats(np.minimum(total / np.maximum(tiles, 1.0), np.minimum(cached + new, window + tile)))


def decode_attention_s(
    requests: ArrayLike,
    kv_bytes: ArrayLike,
    mean_context: ArrayLike,
    kv_heads: ArrayLike,
    chip: ChipFigures,
    curve: DecodeCurve,
    *,
    flops: ArrayLike = 0.0,
    compute: Number = 0.5,
    warm_share: ArrayLike = 0.0,
) -> Floats:
    """Seconds of attention for `requests` new tokens that together read `kv_bytes` of KV.

    `flops` matters for latent attention alone, whose many heads share one small cache.
    """
    count, moved = _floats(requests), _floats(kv_bytes)
    memory = moved / (chip.bytes_per_s * curve.bandwidth)
    if np.any(warm_share):
        memory = memory * _l2_time_factor(moved, _floats(warm_share) * chip.l2_bytes)
    blocks = curve.block_s * count * _floats(kv_heads) / chip.sm_count
    busy = _rounded_max(memory, blocks, curve.p)
    if np.any(flops):
        busy = _rounded_max(busy, _floats(flops) / (chip.flops_per_s * compute), curve.p)
    split = np.clip(_floats(mean_context) / 128.0 - 1.0, 0.0, 1.0)
    time = curve.fixed_s + curve.combine_s * split + busy
    return _floats(np.where(count > 0, time, 0.0))


def stream_s(moved_bytes: ArrayLike, launches: ArrayLike, chip: ChipFigures, curve: StreamCurve) -> Floats:
    """Seconds of element-wise work that moves so many bytes in so many launches."""
    rate = chip.bytes_per_s * curve.bandwidth
    return _floats(_floats(launches) * curve.fixed_s + _floats(moved_bytes) / rate)


def mean_keys(new: Floats, cached: Floats, window: float | None) -> Floats:
    """Mean number of keys that a new token sees: its context and itself, at most `window`."""
    if window is None:
        return _floats(cached + (new + 1.0) / 2.0)
    growing = np.clip(window - cached, 0.0, new)
    grown = growing * (cached + (growing + 1.0) / 2.0)
    return _floats((grown + (new - growing) * window) / np.maximum(new, 1.0))


def _rounded_max(a: Number, b: Number, p: float) -> Floats:
    """max(a, b) with a rounded corner."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = low / np.maximum(high, 1e-30)
    return _floats(high * (1.0 + ratio**p) ** (1.0 / p))


def _l2_time_factor(size_bytes: Floats, kept_bytes: Number) -> Floats:
    """Factor on the memory time of data that may still lie in the L2 cache."""
    hit = 1.0 / (1.0 + (size_bytes / np.maximum(kept_bytes, 1.0)) ** 8)
    return _floats(1.0 - hit * (1.0 - 1.0 / L2_SPEEDUP))


def _floats(value: ArrayLike) -> Floats:
    return np.asarray(value, dtype=np.float64)


def _per_chunk(value: ArrayLike) -> Floats:
    """Add the chunk axis to a per-step figure."""
    array = _floats(value)
    return array[..., None] if array.ndim else array
