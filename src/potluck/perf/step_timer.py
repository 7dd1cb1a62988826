"""One engine step, and the face that every provider of step times shows.

A step runs the model once over a mix of prefill chunks (new tokens behind cached context) and decodes
(one new token each behind their context). Everything else that is asked about time, such as a prefill,
a decode step or a chunked-prefill iteration, is a question about steps, so providers answer only this
one. Steps come as arrays: a planner asks for millions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.core.values.plan import Confidence

Floats = NDArray[np.float64]


def once(values: ArrayLike) -> Floats:
    """The sorted unique values. NumPy's `unique` imports masked arrays, too slow for `estimate`."""
    return np.array(sorted(set(np.ravel(np.asarray(values, np.float64)).tolist())))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """N steps. `chunk_new` and `chunk_cached` are (N, C): a row's unused chunks are 0 new tokens."""

    chunk_new: Floats
    chunk_cached: Floats
    decodes: Floats
    """(N,) requests that decode one token in the step."""
    decode_context: Floats
    """(N,) tokens of context of those requests, added up."""

    @property
    def tokens(self) -> Floats:
        """(N,) new tokens in the step: what the dense layers see."""
        if self.chunk_new.shape[1] == 1:
            return np.asarray(self.chunk_new[:, 0] + self.decodes, np.float64)
        total: Floats = self.chunk_new.sum(axis=1) + self.decodes
        return total

    @property
    def sequences(self) -> Floats:
        """(N,) requests that need logits at the end of the step."""
        if self.chunk_new.shape[1] == 1:  # as most have, and a sum over one column is slow
            return np.asarray((self.chunk_new[:, 0] > 0) + self.decodes, np.float64)
        active: Floats = (self.chunk_new > 0).sum(axis=1) + self.decodes
        return active

    def __len__(self) -> int:
        return int(self.decodes.shape[0])


def steps(
    chunk_new: ArrayLike = 0.0,
    chunk_cached: ArrayLike = 0.0,
    decodes: ArrayLike = 0.0,
    decode_context: ArrayLike = 0.0,
) -> StepBatch:
    """Build Steps from scalars, one value per step, or for chunks one row per step; shapes broadcast."""
    new, cached = _columns(chunk_new), _columns(chunk_cached)
    count, context = np.atleast_1d(_floats(decodes)), np.atleast_1d(_floats(decode_context))
    rows = max(new.shape[0], cached.shape[0], count.shape[0], context.shape[0])
    width = max(new.shape[1], cached.shape[1])
    return StepBatch(
        np.broadcast_to(new, (rows, width)),
        np.broadcast_to(cached, (rows, width)),
        np.broadcast_to(count, (rows,)),
        np.broadcast_to(context, (rows,)),
    )


class StepTimer(Protocol):
    """A provider of step times: the roofline, a measured profile, a paper's closed form."""

    @property
    def confidence(self) -> Confidence:
        """Confidence of its times."""

    def step_s(self, batch: StepBatch) -> Floats:
        """(N,) seconds for N steps, from the first token's embedding to the logits."""


def _floats(value: ArrayLike) -> Floats:
    return np.asarray(value, dtype=np.float64)


def _columns(value: ArrayLike) -> Floats:
    array = _floats(value)
    if array.ndim == 0:
        return array.reshape(1, 1)
    return array.reshape(-1, 1) if array.ndim == 1 else array
