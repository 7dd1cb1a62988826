"""Errors of formats, experts and latent attention on rows that their fits have not seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accuracy_study.format_fits import predict, with_extras
from accuracy_study.measured import Measurements
from potluck.core.values.types import Gpu
from potluck.perf.operators.calibration import WINDOWED, Calibration, curves_for
from potluck.perf.step_timer import Floats

KINDS = {
    "gemm": "FP8 GEMM",
    "experts": "experts",
    "latent": "latent module",
    "windowed": "windowed attention",
}


class FormatScore(NamedTuple):
    """Absolute errors of one kind of work, by format or phase; of all formats together where that is empty."""

    kind: str
    group: str
    gpu: str
    errors: Floats


def calibrated_errors(calibration: Calibration, rows: dict[str, Measurements]) -> Iterator[FormatScore]:
    """Half of every GPU's rows fitted, the other half predicted."""
    seen = {name: part.half() for name, part in rows.items()}
    fitted = with_extras(calibration, {n: part.where(seen[n]) for n, part in rows.items()}, surfaces=True)
    rest = {name: part.where(~seen[name]) for name, part in rows.items()}
    for scales in fitted.gpus:
        yield from _errors(fitted.spec(scales.gpu), fitted, rest)


def left_out_errors(
    gpu: Gpu, calibration: Calibration, rows: dict[str, Measurements]
) -> Iterator[FormatScore]:
    """A GPU's rows from the other GPUs'; `calibration` knows nothing of it either."""
    others = {name: part.where(part.gpu != gpu.name) for name, part in rows.items()}
    fitted = with_extras(calibration, {n: part for n, part in others.items() if len(part)}, surfaces=False)
    yield from _errors(gpu, fitted, rows)


def _errors(gpu: Gpu, calibration: Calibration, rows: dict[str, Measurements]) -> Iterator[FormatScore]:
    curves = curves_for(gpu, calibration)
    every: dict[str, list[Floats]] = {}
    for name, part in rows.items():
        mine = part.where((part.gpu == gpu.name) & _served(part))
        if not len(mine):
            continue
        errors = np.abs(predict(mine, gpu, curves) / mine.seconds - 1.0)
        operator, group = name.split(":")
        every.setdefault(KINDS[operator], []).append(errors)
        yield FormatScore(KINDS[operator], group, gpu.name, errors)
    for kind, parts in every.items():
        yield FormatScore(kind, "", gpu.name, np.concatenate(parts))


def _served(rows: Measurements) -> NDArray[np.bool_]:
    """Products of sizes that models have, and prompts of 256 tokens or more, as elsewhere."""
    if rows.operator == WINDOWED:
        long: NDArray[np.bool_] = rows.columns["new"] >= 256
        return long
    if not rows.operator.startswith("gemm"):
        return np.ones(len(rows), bool)
    served: NDArray[np.bool_] = (rows.columns["n"] >= 1024) & (rows.columns["k"] >= 1024)
    return served
