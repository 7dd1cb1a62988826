"""The calibration that ships is as good as its report says, and its report can be made."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from accuracy.calibrate import fit_operator, fit_residuals, keys_of
from accuracy.measured import Measurements, read_all
from accuracy.report import report
from accuracy.scores import stored_scores
from accuracy.study import OPERATORS, expected_errors, kinds_of

from potluck.catalog import gpus
from potluck.perf.operators.calibration import bundled, chip_of, curves_for

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("POTLUCK_DATA", ROOT.parent / "shared" / "data")) / "measured"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public measurements are not on this machine")


def test_the_page_has_every_target() -> None:
    text = report(stored_scores())
    assert text.startswith("# ")
    assert text.count("\n|") > 100


@pytest.mark.parametrize(("question", "target"), [("calibrated", 0.06), ("GPU left out", 0.15)])
@pytest.mark.parametrize("kind", OPERATORS)
def test_each_kind_of_work_meets_its_target_in_the_middle(question: str, target: float, kind: str) -> None:
    """The median over GPUs; the pairs that miss are listed in the report."""
    found = [s.median for s in stored_scores() if s.question == question and s.kind == kind]
    assert len(found) >= 5
    assert np.median(found) <= target


def test_every_measured_gpu_was_left_out_once() -> None:
    measured = {scales.gpu for scales in bundled().gpus if not scales.coarse}
    assert {s.gpu for s in stored_scores() if s.question == "GPU left out"} == measured


def test_expected_errors_are_those_of_the_scores() -> None:
    assert bundled().errors == expected_errors(stored_scores())
    errors = bundled().errors
    assert errors["measured"].median < errors["transferred"].median < errors["transferred"].p90


@needs_data
def test_the_bundled_curves_still_fit_the_measurements() -> None:
    """A change to a formula without a new calibration would show here."""
    rows = read_all(DATA)["gemm"]
    part = rows.where((rows.gpu == "A100-80") & (rows.harness == "aiconfigurator"))
    curves = curves_for(gpus.gpu("A100-80"), bundled())
    from potluck.perf.operators.kernels import gemm_s

    m, n, k = (part.columns[axis] for axis in "mnk")
    assert curves.gemm_residual is not None
    seconds = gemm_s(m, n, k, curves.chip, curves.gemm) * curves.gemm_residual.factor(m, n * k, n / k)
    error = np.abs(seconds / part.seconds - 1)
    assert np.median(error[kinds_of(part)["prefill GEMM"]]) < 0.07


@needs_data
def test_a_fit_without_a_gpu_never_sees_its_rows() -> None:
    rows = read_all(DATA)["decode"]
    chips = {name: chip_of(gpus.gpu(name)) for name in gpus.names()}
    fit = fit_operator(rows.where(rows.gpu != "A30"), chips, sample=60)
    assert "A30" not in {gpu for gpu, _ in fit.scales}
    with pytest.raises(KeyError):
        fit.predict(rows.where(rows.gpu == "A30"), chips)


def test_known_figures_are_found_again() -> None:
    """Measurements made with known shares give those shares back, and the residual surface finds nothing to do."""
    rng = np.random.default_rng(3)
    size = 400
    columns = {
        "m": 2.0 ** rng.integers(0, 13, size),
        "n": 128.0 * rng.integers(8, 200, size),
        "k": 128.0 * rng.integers(8, 120, size),
    }
    from potluck.perf.operators.kernels import GemmCurve, gemm_s

    chips = {"L4": chip_of(gpus.gpu("L4"))}
    truth = GemmCurve(0.62, 0.81, 2.5e-6, (0.93, 0.95, 0.97, 1.0), 90.0, 2.4)
    seconds = gemm_s(columns["m"], columns["n"], columns["k"], chips["L4"], truth)
    names = np.full(size, "L4"), np.full(size, "made up"), np.full(size, "")
    rows = Measurements("gemm", *names, columns, seconds, np.zeros(size), columns["m"])
    fit = fit_operator(rows, chips)
    compute, bandwidth, _ = np.exp(fit.scales["L4", "made up"])
    assert compute == pytest.approx(0.62, rel=0.05)
    assert bandwidth == pytest.approx(0.81, rel=0.03)
    surface = fit_residuals(rows, fit, chips)["L4", "made up"]
    assert np.abs(np.asarray(surface.log_factor)).max() < 0.05
    assert keys_of(rows)[0] == ("L4", "made up")
