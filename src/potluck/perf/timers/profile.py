"""The profile provider: step times from a table measured on a real engine.

A profile is a list of measured steps. `ProfileTimer` answers for others in two layers:

    t(step) = f(step) exp(g(step))
    f   non-negative least squares of relative errors on what a step physically does: a fixed part, tokens
        through the dense layers (with knees, where weights stop being the bottleneck), attention pairs of
        the chunks, cached tokens they read, sequences, tokens of context the decodes read
    g   what f misses near by: log(measured / f) of the measured steps, averaged by inverse distance in log
        space, fading to 0 a few neighbours away, so that far from all points f alone extrapolates

At a measured step the answer is the measurement to 0.1 % (repeated steps: their mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from math import isfinite

import numpy as np

from potluck.core.codec import dumps, loads
from potluck.core.errors import InputError
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType
from potluck.perf.linear_fit import mean_ape, relative_weights, solve
from potluck.perf.step_timer import Floats, StepBatch, steps

PROFILE_FORMAT = "potluck.profile"
PROFILE_VERSION = 1

MIN_POINTS = 8
KNEES_TOKENS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
SOFTENING = 1e-8
"""Squared log distance within which a step counts as the measured one."""
BLOCK_ELEMENTS = 1 << 15
"""Distances computed at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measured step: at most one prefill chunk, beside decodes."""

    chunk_new: int
    chunk_cached: int
    decodes: int
    decode_context: int
    """Tokens of context of all the decodes together."""
    seconds: float
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_new", "chunk_cached", "decodes", "decode_context"):
            if getattr(self, name) < 0:
                raise InputError(name, f"must not be negative, is {getattr(self, name)}")
        if self.chunk_new + self.decodes < 1:
            raise InputError("chunk_new", "a step needs new tokens or decodes")
        if self.chunk_cached and not self.chunk_new:
            raise InputError("chunk_cached", "needs a chunk: chunk_new is 0")
        if self.decode_context and not self.decodes:
            raise InputError("decode_context", "needs decodes: decodes is 0")
        if not (isfinite(self.seconds) and self.seconds > 0):
            raise InputError("seconds", f"must be positive, is {self.seconds}")
        if self.repeats < 1:
            raise InputError("repeats", f"must be at least 1, is {self.repeats}")


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured steps of one model on one kind of GPU, and with what they were measured."""

    gpu: str
    model: str
    tp: int
    engine: str
    versions: dict[str, str]
    """Version per component: engine, driver, torch."""
    date: str
    """Day of the measurement, as 2026-01-31."""
    points: tuple[ProfilePoint, ...]

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise InputError("tp", f"must be at least 1, is {self.tp}")
        try:
            date.fromisoformat(self.date)
        except ValueError as error:
            raise InputError("date", f"must be like 2026-01-31, is {self.date!r}") from error
        if len(self.points) < MIN_POINTS:
            raise InputError("points", f"{len(self.points)} are too few; a profile needs {MIN_POINTS}")


def profile_to_json(profile: Profile) -> str:
    """The text of a profile file."""
    return dumps(profile, format_name=PROFILE_FORMAT, version=PROFILE_VERSION)


def profile_from_json(text: str) -> Profile:
    """Read a profile file; another version, an unknown key or an impossible step is named in the error."""
    return loads(Profile, text, format_name=PROFILE_FORMAT, version=PROFILE_VERSION)


def profile_for(profiles: Sequence[Profile], model: Model, node: NodeType, tp: int) -> Profile | None:
    """The profile of this model on this kind of GPU, sharded alike; the last one where there are several."""
    key = (node.gpu.name.lower(), model.name.lower(), tp)
    result = [
        profile for profile in profiles if (profile.gpu.lower(), profile.model.lower(), profile.tp) == key
    ]
    return result[-1] if result else None


class ProfileTimer:
    """Step times interpolated from a profile; a StepTimer."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        merged = _merge(profile.points)
        columns = zip(
            *((p.chunk_new, p.chunk_cached, p.decodes, p.decode_context) for p in merged), strict=True
        )
        measured = steps(*(np.array(column, dtype=np.float64) for column in columns))
        seconds = np.array([point.seconds for point in merged])
        design = _features(measured)
        self._coefficients = solve(design, seconds, relative_weights(seconds), nonnegative=True)
        self._floor_s = float(seconds.min()) * 1e-3
        fitted = np.maximum(design @ self._coefficients, self._floor_s)
        self.fit_mape = mean_ape(seconds, fitted)
        """Mean error of f alone on the measured steps, as a fraction; large says the features do not fit."""
        self._places = _places(measured)
        self._residuals = np.log(seconds / fitted)
        self._fade = _neighbour_distance(self._places) ** 2 * 4.0

    @property
    def confidence(self) -> Confidence:
        return "measured"

    def step_s(self, batch: StepBatch) -> Floats:
        """(N,) seconds; a step without tokens takes none. Work grows as N times the points."""
        fitted = np.maximum(_features(batch) @ self._coefficients, self._floor_s)
        seconds: Floats = np.where(batch.tokens > 0, fitted * np.exp(self._correction(_places(batch))), 0.0)
        return seconds

    def _correction(self, places: Floats) -> Floats:
        """g = sum of w_i r_i / (sum of w_i + w_0) with w = (distance^2 + softening)^-3, in blocks.

        w_0 is the weight of a point with no residual at the fading distance.
        """
        known, correction = self._places, np.empty(len(places))
        # |q - k|^2 + softening = (q, |q|^2, 1) . (-2 k, 1, |k|^2 + softening): one product.
        ones = np.ones((len(known), 1))
        right = np.hstack([-2.0 * known, ones, (known**2).sum(axis=1, keepdims=True) + SOFTENING]).T
        left = np.hstack([places, (places**2).sum(axis=1, keepdims=True), np.ones((len(places), 1))])
        values, at_fade = np.hstack([self._residuals[:, None], ones]), self._fade**-3
        block = max(1, BLOCK_ELEMENTS // len(known))
        for start in range(0, len(places), block):
            d2 = left[start : start + block] @ right
            np.maximum(d2, SOFTENING, out=d2)
            weights = d2 * d2
            weights *= d2
            np.reciprocal(weights, out=weights)
            sums = weights @ values
            correction[start : start + block] = sums[:, 0] / (sums[:, 1] + at_fade)
        return correction


def _features(batch: StepBatch) -> Floats:
    """(N, F) what a step does, each part of which can only cost time."""
    new, cached = batch.chunk_new, batch.chunk_cached
    tokens = batch.tokens
    knees = [np.maximum(tokens - knee, 0.0) for knee in KNEES_TOKENS]
    parts = [
        np.ones_like(tokens),
        tokens,
        *knees,
        (new * (cached + new / 2)).sum(axis=1),
        np.where(new > 0, cached, 0.0).sum(axis=1),
        batch.sequences,
        batch.decode_context,
    ]
    return np.column_stack(parts)


def _places(batch: StepBatch) -> Floats:
    """(N, 4) where a step lies: logs of new tokens, their mean context, decodes and their context.

    The mean context weighs chunks by their new tokens, so several chunks lie where one like them does.
    """
    new = batch.chunk_new.sum(axis=1)
    pairs = (batch.chunk_new * (batch.chunk_cached + batch.chunk_new / 2)).sum(axis=1)
    context = pairs / np.maximum(new, 1.0)
    places: Floats = np.log1p(np.column_stack([new, context, batch.decodes, batch.decode_context]))
    return places


def _neighbour_distance(places: Floats) -> float:
    """Median distance of a point to the nearest other one: how dense the measurements are."""
    if len(places) < 2:
        return 1.0
    nearest = np.empty(len(places))
    for index, place in enumerate(places):
        d2 = ((places - place) ** 2).sum(axis=1)
        d2[index] = np.inf
        nearest[index] = d2.min()
    return float(np.sqrt(np.median(nearest)))


def _merge(points: tuple[ProfilePoint, ...]) -> list[ProfilePoint]:
    """One point per step: repeated measurements as their mean, weighted by repeats."""
    groups: dict[tuple[int, int, int, int], list[ProfilePoint]] = {}
    for point in points:
        key = (point.chunk_new, point.chunk_cached, point.decodes, point.decode_context)
        groups.setdefault(key, []).append(point)
    merged = []
    for key, group in groups.items():
        repeats = sum(point.repeats for point in group)
        seconds = sum(point.seconds * point.repeats for point in group) / repeats
        merged.append(ProfilePoint(*key, seconds, repeats))
    if len(merged) < MIN_POINTS:
        raise InputError(
            "profile: points", f"{len(merged)} different steps are too few; it needs {MIN_POINTS}"
        )
    return merged
