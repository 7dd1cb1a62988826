"""How wrong the performance model is, on data it has not seen.

Three questions, each answered on rows that were kept out of the fit:

- *calibrated*: half of a GPU's rows are fitted, the other half predicted.
- *GPU left out*: nothing of that GPU (or of a sibling with the same chip) is seen; its data sheet and the
  other GPUs' measurements must do.
- *model left out*: the rows of one model are predicted from those of the others.

Errors are absolute percentage errors; the median and the ninth decile are kept for each kind of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log1p
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from accuracy_study.calibrate import (
    OperatorFit,
    build,
    calibrate,
    fit_operator,
    fit_residuals,
    harness_shift,
    keys_of,
)
from accuracy_study.format_scores import FormatScore, calibrated_errors, left_out_errors
from accuracy_study.measured import Measurements, Operator, half, read_all
from accuracy_study.measured_formats import read_formats
from accuracy_study.measured_steps import read_steps
from accuracy_study.networks import LINKS, Collectives, fit_networks, predict, read_collectives
from accuracy_study.smaller_fits import BATCH_GPU, batch_errors
from potluck.core.values.model import Model
from potluck.core.values.types import Gpu, NodeType
from potluck.perf.operators.calibration import Calibration, ExpectedError, GpuCurves, chip_of, curves_for
from potluck.perf.operators.kernels import ChipFigures
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import NO_HOST
from potluck.perf.timers.roofline import roofline

Question = Literal["calibrated", "GPU left out", "model left out"]
Kind = Literal[
    "prefill GEMM",
    "prefill attention",
    "decode GEMM",
    "decode attention",
    "any GEMM",
    "step with prefill",
    "decode step",
    "all-reduce",
    "all-to-all",
    "FP8 GEMM",
    "experts",
    "latent module",
    "windowed attention",
    "whole batch",
]
Progress = Callable[[str], None]
OPERATORS: tuple[Kind, ...] = ("prefill GEMM", "prefill attention", "decode GEMM", "decode attention")
SAME_MAKER = ("MI300X", "MI325X", "MI210")
"""GPUs whose figures come from whole batches on one of them."""
APART = 0.45
"""Of an operator's error, what a whole step has."""
SIBLINGS = {"A100-80": {"A100-80", "A100-40"}}
"""Chips that are the same silicon: left out together."""


@dataclass(frozen=True, slots=True)
class Score:
    """The error of one kind of work on one GPU as one harness measured it."""

    question: Question
    kind: Kind
    gpu: str
    harness: str
    group: str
    rows: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class StepCheck:
    """The model and node that whole steps were measured on."""

    model: Model
    node: NodeType


def study(
    folder: Path, gpus: dict[str, Gpu], step_check: StepCheck, progress: Progress = lambda _: None
) -> tuple[Score, ...]:
    """All three questions; takes a minute or two."""
    rows, formats = read_all(folder), read_formats(folder)
    chips = {name: chip_of(gpu) for name, gpu in gpus.items()}
    scores = list(_calibrated(rows, chips, progress))
    for gpu in sorted({str(name) for name in rows["gemm"].gpu}):
        progress(f"without {gpu}")
        result, calibration = _without_gpu(gpu, rows, gpus, chips, folder)
        scores += result
        if any((part.gpu == gpu).any() for part in formats.values()):
            errors = left_out_errors(gpus[gpu], calibration, formats)
            scores += [_format_score("GPU left out", error) for error in errors]
        if gpu == step_check.node.gpu.name:
            scores += _steps("GPU left out", folder, step_check, calibration)
    progress("whole steps")
    full = calibrate(folder, gpus, {})
    scores += _steps("calibrated", folder, step_check, full)
    off = np.abs(batch_errors(folder, full))
    median, p90 = (round(float(v), 4) for v in np.quantile(off, [0.5, 0.9]))
    scores.append(Score("calibrated", "whole batch", BATCH_GPU, "argonne", "", len(off), median, p90))
    progress("formats, experts, latent attention")
    scores += [_format_score("calibrated", error) for error in calibrated_errors(full, formats)]
    progress("collectives")
    scores += _collectives(folder)
    progress("without a model")
    scores += _without_model(rows["gemm"], chips)
    return tuple(scores)


def kinds_of(rows: Measurements) -> dict[Kind, NDArray[np.bool_]]:
    """Which rows are which kind of work.

    Prefill-size is 256 new tokens or more in a chunk, decode-size at most 64; matrices below 1024 on a side
    are in no model's projections and are counted under `any GEMM` only.
    """
    if rows.operator == "prefill":
        return {"prefill attention": rows.columns["new"] >= 256}
    if rows.operator == "decode":
        return {"decode attention": np.ones(len(rows), bool)}
    m, n, k = (rows.columns[axis] for axis in "mnk")
    served = (n >= 1024) & (k >= 1024)
    return {
        "prefill GEMM": served & (m >= 256),
        "decode GEMM": served & (m <= 64),
        "any GEMM": np.ones(len(rows), bool),
    }


def deviations(scores: Sequence[Score]) -> dict[str, float]:
    """The standard deviation of operators' errors by kind of model and how a GPU's were had, as if they were normal;
    of another maker's GPUs that of whole batches.

    What is wrong with a GPU is wrong with many operators of a step, but not with all: with APART of the errors of a
    GPU left out, bars hold for whole runs on one whose operators were (`serving.carried_over`). Of a mixture the
    experts decide, whose kernels differ most from GPU to GPU.
    """
    result = {}
    for kind, works in (("dense", OPERATORS), ("experts", ("experts",))):
        measured, transferred = (
            np.mean([s.median for s in scores if s.question == question and s.kind in works and not s.group])
            / 0.6745
            for question in ("calibrated", "GPU left out")
        )
        sizes = {"measured": measured, "transferred": max(APART * transferred, measured)}
        sizes["assumed"] = 2 * transferred
        result.update({f"{kind} {confidence}": round(float(size), 3) for confidence, size in sizes.items()})
        for score in (s for s in scores if s.kind == "whole batch"):
            size = max(float(sizes["assumed"]), log1p(score.p90) / NormalDist().inv_cdf(0.95))
            result.update({f"{kind} assumed {gpu}": round(size, 3) for gpu in SAME_MAKER})
    return result


def expected_errors(scores: Iterable[Score]) -> dict[str, ExpectedError]:
    """What the CLI says beside a prediction: the mean over GPUs and kinds of work."""
    result = {}
    for name, question in (("measured", "calibrated"), ("transferred", "GPU left out")):
        chosen = [s for s in scores if s.question == question and s.kind in OPERATORS]
        medians, tails = [s.median for s in chosen], [s.p90 for s in chosen]
        result[name] = ExpectedError(round(float(np.mean(medians)), 3), round(float(np.mean(tails)), 3))
    return result


def _scores(question: Question, rows: Measurements, seconds: Floats, group: str = "") -> list[Score]:
    error = np.abs(seconds / rows.seconds - 1.0)
    scores = []
    for kind, wanted in kinds_of(rows).items():
        for gpu, harness in sorted(set(keys_of(rows))):
            mask = wanted & (rows.gpu == gpu) & (rows.harness == harness)
            if mask.sum() >= 10:
                median, p90 = (round(float(v), 4) for v in np.quantile(error[mask], [0.5, 0.9]))
                scores.append(Score(question, kind, gpu, harness, group, int(mask.sum()), median, p90))
    return scores


def _calibrated(
    rows: dict[Operator, Measurements], chips: dict[str, ChipFigures], progress: Progress
) -> Iterable[Score]:
    for operator, part in rows.items():
        if operator == "stream":  # element-wise work is too small a share to judge by
            continue
        progress(f"calibrated {operator}")
        seen = part.half()
        train, test = part.where(seen), part.where(~seen)
        fit = fit_operator(train, chips)
        yield from _scores("calibrated", test, fit.predict(test, chips, fit_residuals(train, fit, chips)))


def _without_gpu(
    gpu: str,
    rows: dict[Operator, Measurements],
    gpus: dict[str, Gpu],
    chips: dict[str, ChipFigures],
    folder: Path,
) -> tuple[list[Score], Calibration]:
    fits = {op: fit_operator(part.where(part.gpu != gpu), chips, sample=400) for op, part in rows.items()}
    calibration = build(fits, gpus, folder, leave_out=frozenset(SIBLINGS.get(gpu, {gpu})))
    curves = curves_for(gpus[gpu], calibration)
    result = []
    for operator, part in rows.items():
        test = part.where(part.gpu == gpu)
        if operator == "stream" or not len(test):
            continue
        scales = {key: _carried(operator, key[1], curves, fits, calibration) for key in set(keys_of(test))}
        fit = OperatorFit(operator, fits[operator].shapes, scales)
        result += _scores("GPU left out", test, fit.predict(test, chips))
    return result, calibration


def _steps(question: Question, folder: Path, check: StepCheck, calibration: Calibration) -> list[Score]:
    measured = read_steps(folder)
    timer = roofline(check.model, check.node, 1, calibration=calibration, host=NO_HOST)
    error = np.abs(timer.step_s(measured.batch) / measured.seconds - 1.0)
    prefill = measured.batch.chunk_new.sum(axis=1) > 0
    steps = []
    kinds: tuple[tuple[Kind, NDArray[np.bool_]], ...] = (
        ("step with prefill", prefill),
        ("decode step", ~prefill),
    )
    for kind, mask in kinds:
        median, p90 = (round(float(v), 4) for v in np.quantile(error[mask], [0.5, 0.9]))
        score = Score(question, kind, measured.gpu, "llmservingsim", "", int(mask.sum()), median, p90)
        steps.append(score)
    return steps


def _collectives(folder: Path) -> list[Score]:
    """Both questions about links. One machine has no peer access, so that none is left to predict it from."""
    rows = read_collectives(folder)
    halves = [half(f"{part.gpu} {part.op}", len(part.seconds)) for part in rows]
    seen = [part.where(mask) for part, mask in zip(rows, halves, strict=True)]
    fitted = fit_networks(folder, seen)
    collectives = []
    for part, mask in zip(rows, halves, strict=True):
        if part.op == "library":
            continue  # what the engine does is scored
        interconnect, rest = LINKS[part.gpu], part.where(~mask)
        collectives.append(_link_score("calibrated", rest, predict(rest, interconnect, fitted)))
        if interconnect.domain is None:
            others = fit_networks(folder, [other for other in rows if other.gpu != part.gpu])
            collectives.append(_link_score("GPU left out", part, predict(part, interconnect, others)))
    return collectives


def _format_score(question: Question, format_score: FormatScore) -> Score:
    median, p90 = (round(float(v), 4) for v in np.quantile(format_score.errors, [0.5, 0.9]))
    kind: Kind = format_score.kind  # type: ignore[assignment]
    return Score(
        question,
        kind,
        format_score.gpu,
        "aiconfigurator",
        format_score.group,
        len(format_score.errors),
        median,
        p90,
    )


def _link_score(question: Question, rows: Collectives, seconds: Floats) -> Score:
    error = np.abs(seconds / rows.seconds - 1.0)
    kind: Kind = "all-reduce" if rows.op == "all_reduce" else "all-to-all"
    median, p90 = (round(float(v), 4) for v in np.quantile(error, [0.5, 0.9]))
    return Score(question, kind, rows.gpu, "aiconfigurator", "", len(error), median, p90)


def _carried(
    operator: Operator,
    harness: str,
    curves: GpuCurves,
    fits: dict[Operator, OperatorFit],
    calibration: Calibration,
) -> Floats:
    """The carried-over scales of a GPU as a given harness would see them."""
    fit = fits[operator]
    if operator == "prefill" and harness == "vidur":
        # Other kernels altogether: learn them from the other GPU they were measured on.
        seen = {gpu: scale for (gpu, name), scale in fit.scales.items() if name == harness}
        others = [calibration.scales(gpu) for gpu in seen]
        ratio = np.mean([np.log(np.exp(seen[s.gpu][0]) / s.gemm[0]) for s in others if s and s.gemm])
        scale = np.mean(list(seen.values()), axis=0)
        scale[0] = ratio + np.log(curves.gemm.compute)
        return np.asarray(scale, np.float64)
    if operator == "gemm":
        values = [curves.gemm.compute, curves.gemm.bandwidth, curves.gemm.fixed_s]
    elif operator == "prefill":
        values = [curves.prefill.compute, curves.prefill.bandwidth, curves.prefill.fixed_s, 1.0]
    else:
        decode = curves.decode
        values = [decode.bandwidth, decode.fixed_s, decode.combine_s, decode.block_s]
    logs = np.log(np.asarray(values, np.float64))
    return logs + harness_shift(fit).get(harness, np.zeros_like(logs))


def _without_model(rows: Measurements, chips: dict[str, ChipFigures]) -> list[Score]:
    """Only Vidur measured several models on one GPU."""
    scores: list[Score] = []
    part = rows.where(rows.harness == "vidur")
    for model in sorted(set(map(str, part.group))):
        fit = fit_operator(part.where(part.group != model), chips)
        test = part.where(part.group == model)
        scores += _scores("model left out", test, fit.predict(test, chips), group=model)
    return scores
