"""Named workloads as planning wants them: laws of lengths become bins, as written distributions do."""

from __future__ import annotations

from math import exp, inf

import numpy as np

from potluck.core.values.length_laws import Binned, Fixed, Law, Lengths, LogNormal
from potluck.core.values.types import LengthBin
from potluck.spec import binning

TAIL_SIGMAS = 9.0
CELLS = 2000


def length_bins(of: Lengths) -> tuple[LengthBin, ...]:
    """Bins that keep the means of the laws."""
    if isinstance(of, Binned):
        return of.bins
    inputs = _groups(of.prompt, binning.INPUT_GROUPS)
    return binning.product_bins(inputs, _groups(of.output, binning.OUTPUT_GROUPS))


def _groups(law: Law, groups: int) -> list[binning.Group]:
    if isinstance(law, Fixed):
        return [(1.0, law.tokens)]
    if isinstance(law, LogNormal):
        high = law.high_tokens
        if high == inf:
            high = exp(law.mu + (TAIL_SIGMAS + law.sigma) * law.sigma)
        return binning.cut_law(binning.lognormal(law.mu, law.sigma, law.low_tokens, high), groups)
    levels, tokens = np.array(law.points).T
    # Cells end at the law's own levels, so each one's mean lies midway and the mean of all is exact.
    edges = np.union1d(levels, np.linspace(0, 1, CELLS + 1))
    at = np.interp(edges, levels, tokens)
    return binning.cut_values((at[1:] + at[:-1]) / 2, np.diff(edges), groups)
