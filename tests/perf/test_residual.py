"""Residual surfaces: interpolation between knots, and fits that find a known surface among bad rows."""

from __future__ import annotations

import numpy as np
import pytest
from accuracy.residual_fit import fit_residual
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.codec import dumps, loads
from potluck.perf.operators.residual import Residual
from potluck.perf.step_timer import Floats

SURFACE = Residual((0.0, 2.5, 5.0), (1.0, 4.0), ((0.0, 0.3), (-0.2, 0.1), (0.5, -0.4)), z_power=0.05)
features = st.floats(1e-3, 1e9)


@pytest.mark.parametrize(("i", "x"), enumerate(SURFACE.x))
@pytest.mark.parametrize(("j", "y"), enumerate(SURFACE.y))
def test_knots_give_their_own_value(i: int, x: float, j: int, y: float) -> None:
    assert SURFACE.factor(2**x, 2**y) == pytest.approx(np.exp(SURFACE.log_factor[i][j]))


def test_between_knots_the_logarithm_is_bilinear() -> None:
    middle = (0.0 + 0.3 - 0.2 + 0.1) / 4
    assert SURFACE.factor(2**1.25, 2**2.5) == pytest.approx(np.exp(middle))
    third = (-0.2 * 4 + 0.5) / 5
    assert SURFACE.factor(2**3.0, 2**1.0) == pytest.approx(np.exp(third))


@given(features, features, st.floats(0.1, 100.0))
def test_factors_stay_within_the_grid(x: float, y: float, z: float) -> None:
    """Outside, the nearest edge holds: a factor is never more extreme than any knot."""
    factor = float(SURFACE.factor(x, y, z)) / 2 ** (0.05 * np.log2(z) / np.log(2))
    assert np.exp(-0.4) - 1e-9 <= factor <= np.exp(0.5) + 1e-9


@given(features, features)
def test_beyond_the_grid_the_edge_holds(x: float, y: float) -> None:
    inside = SURFACE.factor(np.clip(x, 1.0, 32.0), np.clip(y, 2.0, 16.0))
    assert SURFACE.factor(x, y) == pytest.approx(inside)


def test_no_feature_at_all_is_the_low_edge() -> None:
    """Measurements of a batch without chunks or decodes ask for feature 0; their time is 0 whatever the factor."""
    assert SURFACE.factor(0.0, 0.0) == pytest.approx(1.0)


def test_arrays_give_arrays() -> None:
    x, y = np.array([1.0, 4.0, 32.0]), np.array([2.0, 16.0, 2.0])
    assert SURFACE.factor(x, y) == pytest.approx(
        [float(SURFACE.factor(a, b)) for a, b in zip(x, y, strict=True)]
    )
    assert SURFACE.factor(x, 2.0).shape == (3,)


def points(count: int, seed: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(seed)
    return 2 ** rng.uniform(0, 12, count), 2 ** rng.uniform(3, 20, count), 2 ** rng.uniform(-2, 2, count)


def truth(x: Floats, y: Floats, z: Floats) -> Floats:
    return 0.1 * np.sin(np.log2(x) / 3) + 0.02 * np.log2(y) + 0.03 * np.log2(z)


def test_a_fit_finds_the_surface_behind_noise() -> None:
    x, y, z = points(4000, 1)
    noise = np.random.default_rng(2).normal(0, 0.02, len(x))
    found = fit_residual(x, y, z, truth(x, y, z) + noise)
    fresh = points(500, 3)
    left = np.log(found.factor(*fresh)) - truth(*fresh)
    assert np.median(np.abs(left)) < 0.01
    assert found.z_power == pytest.approx(0.03, abs=0.005)


def test_far_off_rows_lose_their_weight() -> None:
    """A tenth of the rows ten times too slow would move a least-squares fit by about 0.23 everywhere."""
    x, y, z = points(4000, 4)
    measured = truth(x, y, z) + np.random.default_rng(5).normal(0, 0.02, len(x))
    measured[::10] += np.log(10.0)
    found = fit_residual(x, y, z, measured)
    fresh = points(500, 6)
    assert np.median(np.abs(np.log(found.factor(*fresh)) - truth(*fresh))) < 0.03


def test_where_nothing_was_measured_a_fit_says_little() -> None:
    """The penalty draws knots without rows to their neighbours and to 0, never beyond what was seen."""
    x, y, z = points(300, 7)
    found = fit_residual(x, y, z, np.full(len(x), 0.4))
    assert np.asarray(found.log_factor).max() <= 0.5
    assert np.asarray(found.log_factor).min() >= 0.0


def test_a_single_feature_value_is_no_division_by_zero() -> None:
    y = np.geomspace(1, 1000, 50)
    found = fit_residual(np.full(50, 8.0), y, np.ones(50), np.full(50, 0.2))
    assert found.factor(8.0, 30.0) == pytest.approx(np.exp(0.2), rel=0.05)


def test_a_surface_survives_its_file() -> None:
    text = dumps(SURFACE, format_name="t", version=1)
    assert loads(Residual, text, format_name="t", version=1) == SURFACE
