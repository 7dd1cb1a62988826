"""Least squares: exact recovery, signs, outliers, reports and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls as scipy_nnls

from potluck.core.errors import InputError
from potluck.perf.fits.linear_fit import linear_fit, mean_ape, median_ape, nnls, r2

X = np.linspace(1, 100, 50)


def test_a_plane_is_recovered_with_its_report():
    z = np.sin(X)
    fit = linear_fit({"x": X, "z": z}, 3 * X - 2 * z + 7)
    assert fit.coefficients == pytest.approx({"x": 3, "z": -2})
    assert fit.intercept == pytest.approx(7)
    assert fit.r2 == pytest.approx(1)
    assert fit.mape == pytest.approx(0, abs=1e-12)
    assert fit.points == 50
    assert fit.predict({"x": 2.0, "z": 1.0}) == pytest.approx(11)
    assert fit.predict({"x": X, "z": z}).shape == X.shape


def test_no_intercept_when_not_wanted():
    fit = linear_fit({"x": X}, 3 * X, intercept=False)
    assert fit.intercept == 0
    assert fit.coefficients["x"] == pytest.approx(3)


def test_relative_weights_mind_small_values():
    """A parabola fitted by a line: per cents are better off with relative weights, squares without."""
    y = X + 0.05 * X**2
    plain, relative = linear_fit({"x": X}, y), linear_fit({"x": X}, y, "relative")
    assert relative.mape < plain.mape
    assert relative.r2 < plain.r2


def test_nonnegative_holds_a_cost_at_zero():
    y = 5 * X - 100.0
    assert linear_fit({"x": X}, y).intercept == pytest.approx(-100)
    held = linear_fit({"x": X}, y, nonnegative=True)
    assert held.intercept == 0
    assert held.coefficients["x"] == pytest.approx((X @ y) / (X @ X))


def test_robust_ignores_a_disturbed_tenth():
    rng = np.random.default_rng(1)
    y = (2 * X + 10) * rng.normal(1, 0.01, X.size)
    y[::10] *= 3
    plain, robust = linear_fit({"x": X}, y), linear_fit({"x": X}, y, robust=True)
    assert robust.coefficients["x"] == pytest.approx(2, rel=0.02)
    assert abs(plain.coefficients["x"] - 2) > 5 * abs(robust.coefficients["x"] - 2)
    exact = linear_fit({"x": X}, 2 * X + 10, "relative", robust=True)
    assert exact.coefficients["x"] == pytest.approx(2)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 25))
def test_nnls_is_as_good_as_scipys(seed, count, extra):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(count + extra, count)), rng.normal(size=count + extra)
    x, (_, norm) = nnls(a, b), scipy_nnls(a, b)
    assert x.min() >= 0
    assert np.linalg.norm(a @ x - b) == pytest.approx(norm, rel=1e-7, abs=1e-9)


def test_nnls_bears_repeated_and_empty_columns():
    a = np.column_stack([X, X, np.zeros_like(X), np.ones_like(X)])
    x = nnls(a, 4 * X + 1)
    assert x.min() >= 0
    assert a @ x == pytest.approx(4 * X + 1)
    assert nnls(a, np.zeros_like(X)).tolist() == [0, 0, 0, 0]


def test_error_measures():
    assert mean_ape([1, 2, 4], [1.1, 2, 2]) == pytest.approx((0.1 + 0 + 0.5) / 3)
    assert median_ape([1, 2, 4], [1.1, 2, 2]) == pytest.approx(0.1)
    assert r2([1, 2, 3], [1, 2, 3]) == 1
    assert r2([1, 2, 3], [2, 2, 2]) == 0
    assert r2([2, 2], [2, 2]) == 1
    assert r2([2, 2], [2, 3]) == 0


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: linear_fit({"x": [1.0, 2.0]}, [1.0, 2.0]), "2 are too few for 2"),
        (lambda: linear_fit({"x": [1.0, np.nan, 3.0]}, [1.0, 2.0, 3.0]), "x: has values that are not finite"),
        (lambda: linear_fit({"x": X}, np.full(50, np.inf)), "y: has values that are not finite"),
        (lambda: linear_fit({"x": X, "twice": 2 * X}, X), "twice: is collinear with x"),
        (lambda: linear_fit({"x": np.full(50, 3.0)}, X), "intercept: is collinear with x"),
        (lambda: linear_fit({"x": np.zeros(50)}, X), "x: is zero"),
        (lambda: linear_fit({"x": X[:10]}, X), "x: has 10 values"),
        (lambda: linear_fit({"x": X.reshape(5, 10)}, X), "x: must be a list"),
        (lambda: linear_fit({"x": X}, X - X[0], "relative"), "zeros"),
        (lambda: mean_ape([0.0], [1.0]), "zeros"),
        (lambda: mean_ape([], []), "there are none"),
        (lambda: linear_fit({"x": X}, X).predict({"z": 1.0}), "x: column is missing"),
    ],
)
def test_bad_points_are_refused_in_one_line(call, problem):
    with pytest.raises(InputError, match=problem) as caught:
        call()
    assert "\n" not in str(caught.value)
