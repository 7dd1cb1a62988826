"""Calibration from measurements, and its transfer to GPUs that were not measured.

A measured GPU has its own reachable shares of compute and bandwidth, fixed times and residual surfaces. One with the
same chip as a measured one (H200 and H100, GB200 and B200) takes that one's figures: shares refer to its own data
sheet, and compute follows its power limit. For any other GPU they are transferred from related GPUs (same compute
capability, else all):

- compute: ηc = relative's ηc x power(this) / power(relative), where `power` is the share of the matrix rate that a
  chip sustains within its power limit: a soft minimum of what the kernels reach and of
  watts / (energy per FLOP x rate). L4, L40S and A30 are limited by power, an RTX 4090 is not.
- attention: the GPU's own matrix share times the related GPUs' ratio of attention to matrix product.
- bandwidth and fixed times: the geometric mean over measured GPUs.
- a GPU of an architecture without measurements gets the median compute share of those measured.

`GpuCurves` are what the roofline uses; `confidence` says which of these ways they came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.codec import loads
from potluck.core.values.plan import Confidence
from potluck.core.values.types import Gpu
from potluck.perf import shipped
from potluck.perf.operators.kernels import ChipFigures, DecodeCurve, GemmCurve, PrefillCurve, StreamCurve
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import own_cluster


@dataclass(frozen=True, slots=True)
class Residual:
    """`log_factor[i][j]` belongs to `x[i]`, `y[j]`, both base-2 logarithms of a feature.

    Kernels have habits that no short formula catches. Where a GPU was measured, the logarithm of measured over
    predicted time is kept on a coarse grid of two base-2 logarithms and interpolated bilinearly; outside the
    grid the nearest edge holds. A third feature enters as a power. A GPU whose chip was not measured has no surface.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    log_factor: tuple[tuple[float, ...], ...]
    z_power: float = 0.0

    def factor(self, x: ArrayLike, y: ArrayLike, z: ArrayLike = 1.0) -> Floats:
        """What to multiply a predicted time with; `x`, `y` and `z` are the features themselves."""
        rows, row_share = knot_position(self.x, x)
        cols, col_share = knot_position(self.y, y)
        grid = np.asarray(self.log_factor)
        low = grid[rows, cols] * (1 - col_share) + grid[rows, cols + 1] * col_share
        high = grid[rows + 1, cols] * (1 - col_share) + grid[rows + 1, cols + 1] * col_share
        third = self.z_power * np.log2(np.asarray(z, np.float64))
        result: Floats = np.exp(low * (1 - row_share) + high * row_share + third)
        return result


def knot_position(
    knots: tuple[float, ...], value: ArrayLike
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], Floats]:
    """Which knot lies before, and how far it is to the next; knots lie evenly, so none is looked for."""
    last = len(knots) - 1
    at = np.log2(np.maximum(np.asarray(value, np.float64), 1e-12))
    at = np.clip((at - knots[0]) * (last / (knots[-1] - knots[0])), 0.0, float(last))
    index = np.minimum(at.astype(np.intp), last - 1)
    share: Floats = at - index
    return index, share


CALIBRATION_VERSION = 1
FORMAT = "potluck.calibration"
WINDOWED = "windowed:prefill"
"""Attention of prompts to the last tokens alone, among a GPU's extras."""
FAMILIES = {"turing": "volta", "ada": "ampere", "desk": "ampere"}
"""Kernels (`kernels_of`) whose GPUs share an energy per FLOP with others', by matrix units and process."""
PREVIOUS_KERNELS = {"blackwell": "hopper", "desk": "ada"}
"""The most similar kernels where no GPU with the same was measured."""
PREVIOUS_GENERATIONS = {"blackwell": ("ampere", "hopper")}
"""The two previous kernel generations of data-centre GPUs."""
SUBSTITUTE_OPERATORS = {
    "experts:fp8": "experts:fp8_block",
    "experts:nvfp4": "experts:fp8_block",
    "gemm:fp8_block": "gemm:fp8",
    "gemm:nvfp4": "gemm:fp8",
}
"""Operators used in place of others that were not measured with a GPU's kernels."""


def kernels_of(gpu: Gpu) -> str:
    """Whose kernels engines run on a GPU: its architecture's, but a Blackwell of a desk has others."""
    return "desk" if gpu.compute_capability == 12.0 else gpu.architecture


def family_of(gpu: Gpu) -> str:
    """The family of GPUs with the same energy per FLOP."""
    return FAMILIES.get(kernels_of(gpu), kernels_of(gpu))


@dataclass(frozen=True, slots=True)
class SharedFigures:
    """Figures that all GPUs share."""

    tile_share: tuple[float, float, float, float]
    extra_depth: float
    gemm_p: float
    softmax: float
    decode_p: float


@dataclass(frozen=True, slots=True)
class ExtraOperator:
    """Figures of one more operator on one GPU: a product in a format, experts in one, latent attention.

    The first three are always compute share (of the rate in that format), bandwidth share, fixed seconds.
    """

    name: str
    """`gemm:FORMAT` (and a tile's further depth), `experts:FORMAT` (and the share of bandwidth around the
    products), `latent:prefill`, `latent:decode`."""
    values: tuple[float, ...]
    residual: Residual | None = None


@dataclass(frozen=True, slots=True)
class GpuScales:
    """Figures of one GPU; None where that operator was not measured on it."""

    gpu: str
    gemm: tuple[float, float, float] | None = None
    """Compute share, bandwidth share, fixed seconds."""
    prefill: tuple[float, float, float] | None = None
    """Compute share, bandwidth share, fixed seconds."""
    decode: tuple[float, float, float, float] | None = None
    """Bandwidth share, fixed, combine and block seconds."""
    stream: tuple[float, float] | None = None
    """Bandwidth share, fixed seconds."""
    coarse: bool = False
    """Only whole-layer times of another project stand behind it."""
    gemm_residual: Residual | None = None
    prefill_residual: Residual | None = None
    decode_residual: Residual | None = None
    extras: tuple[ExtraOperator, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Soft minimum of the kernels' share and of what the power limit allows."""

    ceiling: float
    watts_per_tflops: dict[str, float]
    """Energy per FLOP by family, in watts per TFLOP/s; a family that is not named is not limited."""
    sharpness: float = 4.0

    def share(self, gpu: Gpu) -> float:
        energy = self.watts_per_tflops.get(family_of(gpu))
        if energy is None or gpu.tdp_w is None:
            return self.ceiling
        allowed = gpu.tdp_w / (energy * gpu.fp16_tflops)
        return float((self.ceiling**-self.sharpness + allowed**-self.sharpness) ** (-1 / self.sharpness))


@dataclass(frozen=True, slots=True)
class CollectivePath:
    """One way of a collective: its start, what each further step adds, and the reachable share of the link."""

    fixed_s: float
    step_s: float
    share: float


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """Collectives between the GPUs of a node over one measured link; `perf.operators.network` has the formulas."""

    kind: str
    """nvswitch, pcie (with peer access), or PCIe through the host's memory: lanes (each its own), host (shared)."""
    gb_per_s: float
    """Of the link that was measured, one direction, per GPU."""
    library: CollectivePath
    shuffle: CollectivePath
    """All-to-all."""
    direct: CollectivePath | None = None
    split: CollectivePath | None = None


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """Median and ninth decile of the absolute percentage error, as fractions."""

    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything the roofline takes from measurements."""

    shapes: SharedFigures
    power: PowerLimit
    gpus: tuple[GpuScales, ...]
    specs: tuple[Gpu, ...]
    """The data sheets the fits divided by, one per entry of `gpus`."""
    networks: tuple[NodeNetwork, ...]
    errors: dict[str, ExpectedError]
    """By how it was predicted: `measured`, `transferred`."""

    def scales(self, gpu: str) -> GpuScales | None:
        return next((scales for scales in self.gpus if scales.gpu == gpu), None)

    def spec(self, gpu: str) -> Gpu:
        return next(spec for spec in self.specs if spec.name == gpu)


@dataclass(frozen=True, slots=True)
class GpuCurves:
    """The fitted formulas for one GPU."""

    chip: ChipFigures
    gemm: GemmCurve
    prefill: PrefillCurve
    decode: DecodeCurve
    stream: StreamCurve
    confidence: Confidence
    basis: str
    """Where the figures come from, in words."""
    gemm_residual: Residual | None = None
    prefill_residual: Residual | None = None
    decode_residual: Residual | None = None
    extras: dict[str, ExtraOperator] = field(default_factory=dict)
    """By name; those that were not measured on this GPU are carried over, with a surface from the same chip alone."""
    carried: frozenset[str] = frozenset()
    """Names of these."""


def shipped_calibration() -> Calibration:
    """The calibration that ships with the package."""
    text = shipped("calibration.json")
    return loads(Calibration, text, format_name=FORMAT, version=CALIBRATION_VERSION)


@lru_cache(maxsize=1)
def bundled() -> Calibration:
    """The same with links and experts as slow as one's own are known to be."""
    result, cluster = shipped_calibration(), own_cluster()
    return result if cluster is None else slower_experts(linked(result, cluster.links), cluster.experts)


def linked(calibration: Calibration, links: Mapping[str, float]) -> Calibration:
    """Collectives over some kinds of links as many times as slow."""

    def slowed(path: CollectivePath | None, times: float) -> CollectivePath | None:
        return path and CollectivePath(path.fixed_s * times, path.step_s * times, path.share / times)

    networks = []
    for network in calibration.networks:
        ways = (network.library, network.shuffle, network.direct, network.split)
        slower = (slowed(path, links.get(network.kind, 1.0)) for path in ways)
        networks.append(NodeNetwork(network.kind, network.gb_per_s, *slower))  # type: ignore[arg-type]
    return replace(calibration, networks=tuple(networks))


def slower_experts(calibration: Calibration, times: float) -> Calibration:
    """Routed experts as many times as slow, on every GPU."""

    def slowed(extra: ExtraOperator) -> ExtraOperator:
        compute, bandwidth, fixed_s, *stream = extra.values
        values = (compute / times, bandwidth / times, fixed_s * times, *(share / times for share in stream))
        return replace(extra, values=values) if extra.name.startswith("experts") else extra

    gpus = (replace(scales, extras=tuple(map(slowed, scales.extras))) for scales in calibration.gpus)
    return replace(calibration, gpus=tuple(gpus))


@lru_cache(maxsize=128)
def bundled_curves(gpu: Gpu) -> GpuCurves:
    """The formulas for a GPU by what ships."""
    return curves_for(gpu, bundled())


def chip_of(gpu: Gpu) -> ChipFigures:
    """The figures of a data sheet that the formulas need; what it leaves out is guessed from the rest."""
    sms = gpu.sm_count or max(20.0, gpu.fp16_tflops / 2.5)
    clock_ghz = gpu.boost_ghz or 1.6
    narrow = gpu.compute_capability in (8.6, 8.9, 12.0)
    return ChipFigures(
        flops_per_s=gpu.fp16_tflops * 1e12,
        bytes_per_s=gpu.bandwidth_gb_per_s * 1e9,
        sm_count=float(sms),
        l2_bytes=(gpu.l2_mb or 6.0) * 1e6,
        exp_per_s=16e9 * sms * clock_ghz,
        fetch_bytes_per_s=(64e9 if kernels_of(gpu) == "blackwell" else 32e9) * clock_ghz,
        query_tile=64.0 if narrow else 128.0,
    )


def curves_for(gpu: Gpu, calibration: Calibration) -> GpuCurves:
    """The formulas for any GPU, and how far to trust them."""
    listed_scales = calibration.scales(gpu.name)
    same_chip_scales = (
        None if listed_scales and not listed_scales.coarse else _scales_of_same_chip(gpu, calibration)
    )
    own_scales = same_chip_scales or listed_scales
    shared_figures = calibration.shapes
    relatives = _relatives(gpu, calibration)
    gemm = (own_scales and own_scales.gemm) or _carried_gemm(gpu, calibration, relatives)
    attention_scales = (None if own_scales else _extrapolated_attention(gpu, calibration)) or own_scales
    prefill = (attention_scales and attention_scales.prefill) or _carried_prefill(
        gpu, gemm[0], calibration, relatives
    )
    decode = (attention_scales and attention_scales.decode) or _geometric_mean(
        [s.decode for s in _sources_of_attention(gpu, calibration) if s.decode]
    )
    stream = (own_scales and own_scales.stream) or _geometric_mean(
        [s.stream for s in calibration.gpus if s.stream]
    )
    confidence, basis = _confidence_and_basis(
        gpu, None if same_chip_scales else own_scales, [same_chip_scales] if same_chip_scales else relatives
    )
    extras = _extras(gpu, gemm, own_scales, calibration)
    return GpuCurves(
        chip_of(gpu),
        GemmCurve(*gemm, shared_figures.tile_share, shared_figures.extra_depth, shared_figures.gemm_p),
        PrefillCurve(*prefill, 1.0, shared_figures.softmax),
        DecodeCurve(decode[0], decode[1], decode[2], decode[3], shared_figures.decode_p),
        StreamCurve(stream[0], stream[1]),
        confidence,
        basis,
        own_scales.gemm_residual if own_scales else None,
        own_scales.prefill_residual if own_scales else None,
        own_scales.decode_residual if own_scales else None,
        extras,
        frozenset(extras) - {extra.name for extra in (listed_scales.extras if listed_scales else ())},
    )


def _scales_of_same_chip(gpu: Gpu, calibration: Calibration) -> GpuScales | None:
    """Figures of a GPU that has the same chip, its compute as the power limit of this one has it.

    Experts' share of the arithmetic stays: their kernels are below what power allows.
    """
    chip = (kernels_of(gpu), gpu.sm_count, gpu.l2_mb)
    alike = [
        (s, spec)
        for s, spec in ((s, calibration.spec(s.gpu)) for s in calibration.gpus if s.gemm)
        if (kernels_of(spec), spec.sm_count, spec.l2_mb) == chip and s.gpu != gpu.name
    ]
    if gpu.sm_count is None or not alike:
        return None
    twin, spec = min(alike, key=lambda pair: pair[0].coarse)
    power = calibration.power.share(gpu) / calibration.power.share(spec)

    def limited(values: tuple[float, ...]) -> tuple[float, ...]:
        return (min(values[0] * power, max(values[0], 1.1)), *values[1:])

    extras = tuple(
        e if e.name.startswith("experts") else replace(e, values=limited(e.values)) for e in twin.extras
    )
    parts = {name: limited(values) for name in ("gemm", "prefill") if (values := getattr(twin, name))}
    return replace(twin, extras=extras, **parts)  # type: ignore[arg-type]


def _extras(
    gpu: Gpu, gemm: tuple[float, ...], own_scales: GpuScales | None, calibration: Calibration
) -> dict[str, ExtraOperator]:
    """Formats, experts and latent attention: as measured, else from GPUs with like kernels, else from all.

    Shares carry over as ratios to those of the 16-bit product, which know about power and memory already; but
    experts' share of the arithmetic as it is, for their kernels stay below what power allows. Windowed attention
    does not carry over: it follows the GPU's own.
    """
    measured = {extra.name: extra for extra in (own_scales.extras if own_scales else ())}
    extra_operators = dict(measured)
    known = {extra.name for s in calibration.gpus for extra in s.extras} | set(SUBSTITUTE_OPERATORS)
    for name in sorted(known - set(measured) - {WINDOWED}):
        if like := measured.get(SUBSTITUTE_OPERATORS.get(name, "")):
            extra_operators[name] = replace(like, name=name)
            continue
        seen = _measured_alike(name, gpu, calibration)
        own_share = name.startswith("experts")
        ratios = [
            (e.values[0] / (1.0 if own_share else s.gemm[0]), e.values[1] / s.gemm[1], *e.values[2:])
            for s, e in seen
            if s.gemm is not None
        ]
        if ratios:
            compute, bandwidth, *rest = _geometric_mean(ratios)
            values = (compute * (1.0 if own_share else gemm[0]), bandwidth * gemm[1], *rest)
            extra_operators[name] = ExtraOperator(name, values)
    return extra_operators


def _measured_alike(name: str, gpu: Gpu, calibration: Calibration) -> list[tuple[GpuScales, ExtraOperator]]:
    """An operator's figures on GPUs with the same kernels, or its stand-in's; of the kernels before; of all GPUs."""
    kernels, names = kernels_of(gpu), (name, SUBSTITUTE_OPERATORS.get(name))
    seen = [(s, e) for s in calibration.gpus for e in s.extras if s.gemm and e.name in names]
    others = {kernels_of(calibration.spec(s.gpu)) for s in _sources_of_attention(gpu, calibration)}
    # Hopper has a latent attention of its own; Ampere and older run what Ada does.
    former = PREVIOUS_KERNELS.get(kernels, "ada" if name.startswith("latent") else "")
    for like in ({kernels}, {former}, others):
        near = [(s, e) for s, e in seen if kernels_of(calibration.spec(s.gpu)) in like]
        for wanted in names:
            if alike := [(s, e) for s, e in near if e.name == wanted]:
                return alike
    return []


def _sources_of_attention(gpu: Gpu, calibration: Calibration) -> list[GpuScales]:
    """The GPUs whose attention and experts transfer: kernels of a data centre's Blackwell run nowhere else."""
    unlike = {"blackwell"} - {kernels_of(gpu)}
    return [s for s in calibration.gpus if kernels_of(calibration.spec(s.gpu)) not in unlike]


def _relatives(gpu: Gpu, calibration: Calibration) -> list[GpuScales]:
    """Measured GPUs of the same compute capability."""
    others = [s for s in calibration.gpus if s.gemm and s.gpu != gpu.name]
    alike = [s for s in others if calibration.spec(s.gpu).compute_capability == gpu.compute_capability]
    alike = [] if gpu.compute_capability is None else alike
    return [s for s in alike if not s.coarse] or alike


def _carried_gemm(
    gpu: Gpu, calibration: Calibration, relatives: list[GpuScales]
) -> tuple[float, float, float]:
    maker = gpu.compute_capability is None  # NVIDIA's have one: nobody else's figures say anything of them
    everyone = [s for s in calibration.gpus if s.gemm]
    measured = [
        s for s in everyone if (calibration.spec(s.gpu).compute_capability is None) == maker
    ] or everyone
    power = calibration.power
    mean = _geometric_mean([s.gemm for s in measured if s.gemm])
    if not relatives and not maker and family_of(gpu) not in power.watts_per_tflops:
        compute = float(np.median([s.gemm[0] for s in measured if s.gemm and not s.coarse]))
    else:
        near = relatives or measured
        ratios = [s.gemm[0] / power.share(calibration.spec(s.gpu)) for s in near if s.gemm]
        compute = power.share(gpu) * float(np.exp(np.mean(np.log(ratios))))
    return min(compute, 1.1), mean[1], mean[2]


def _carried_prefill(
    gpu: Gpu, gemm_compute: float, calibration: Calibration, relatives: list[GpuScales]
) -> tuple[float, float, float]:
    measured = [s for s in _sources_of_attention(gpu, calibration) if s.gemm and s.prefill]
    near = [s for s in relatives if s.prefill] or measured
    ratio = float(np.exp(np.mean([np.log(s.prefill[0] / s.gemm[0]) for s in near if s.prefill and s.gemm])))
    mean = _geometric_mean([s.prefill for s in measured if s.prefill])
    return gemm_compute * ratio, mean[1], mean[2]


def _extrapolated_attention(gpu: Gpu, calibration: Calibration) -> GpuScales | None:
    """Attention, of prompts and of decodes, on a data centre's next chip, from the two before it.

    Shares are as the last one's; decodes' times as much shorter again as its were than those before.
    """
    specs = {s.gpu: calibration.spec(s.gpu) for s in calibration.gpus if s.prefill and s.decode}
    largest = sorted(specs.values(), key=lambda spec: spec.fp16_tflops)
    newest_by_kernels = {kernels_of(spec): calibration.scales(spec.name) for spec in largest}
    second_last, last = (
        newest_by_kernels.get(kernels) for kernels in PREVIOUS_GENERATIONS.get(kernels_of(gpu), ("", ""))
    )
    if not (second_last and second_last.decode and last and last.decode and last.prefill):
        return None
    _, *times = (
        last_s * last_s / earlier_s for earlier_s, last_s in zip(second_last.decode, last.decode, strict=True)
    )
    return GpuScales(gpu.name, prefill=last.prefill, decode=(last.decode[0], *times))  # type: ignore[arg-type]


def _confidence_and_basis(
    gpu: Gpu, own_scales: GpuScales | None, relatives: list[GpuScales]
) -> tuple[Confidence, str]:
    if own_scales and own_scales.gemm and not own_scales.coarse:
        parts = [name for name in ("gemm", "prefill", "decode") if getattr(own_scales, name)]
        return "measured", f"{gpu.name} measured ({', '.join(parts)})"
    if gpu.compute_capability is None and (own_scales or relatives):
        name = own_scales.gpu if own_scales else relatives[0].gpu
        return "assumed", f"{name} fitted to whole batches on engines of 2024; attention carried over"
    if own_scales and own_scales.gemm:
        return "transferred", f"{gpu.name} fitted to whole-layer times; attention carried over"
    if relatives:
        names = ", ".join(sorted(scales.gpu for scales in relatives))
        return "transferred", f"carried over from {names}"
    return "assumed", "no GPU of its architecture was measured; the middle of all others"


def _geometric_mean(values: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Geometric mean of each column."""
    return tuple(float(v) for v in np.exp(np.mean(np.log(np.asarray(values)), axis=0)))
