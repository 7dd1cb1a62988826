"""Draws lengths from their laws, by the million.

A law's lengths are real numbers and tokens are whole: x becomes the next number below or above it at random, in
proportion to nearness, so that means are kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.length_laws import Binned, Fixed, Law, Lengths, LogNormal

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def draw(rng: np.random.Generator, lengths: Lengths, count: int) -> tuple[Ints, Ints]:
    """(prompt tokens, output tokens) of `count` requests."""
    if isinstance(lengths, Binned):
        return draw_bins(rng, lengths, count)
    inputs, outputs = rng.spawn(2)
    return draw_law(inputs, lengths.prompt, count), draw_law(outputs, lengths.output, count)


def draw_law(rng: np.random.Generator, law: Law, count: int) -> Ints:
    if isinstance(law, Fixed):
        return whole(rng, np.full(count, float(law.tokens)))
    if isinstance(law, LogNormal):
        return whole(rng, _lognormal(rng, law, count))
    levels, tokens = np.array(law.points).T
    return whole(rng, np.interp(rng.random(count), levels, tokens))


def draw_bins(rng: np.random.Generator, lengths: Binned, count: int) -> tuple[Ints, Ints]:
    """Each bin as often as its share says, by chance or just so; all of its requests have its mean lengths."""
    share = np.array([one.share for one in lengths.bins])
    share /= share.sum()
    if lengths.even:
        places = (np.arange(count) + rng.random()) / count
        chosen = rng.permutation(np.minimum(np.searchsorted(np.cumsum(share), places), len(share) - 1))
    else:
        chosen = rng.choice(len(share), size=count, p=share)
    inputs = np.array([one.input_tokens for one in lengths.bins])[chosen]
    outputs = np.array([one.output_tokens for one in lengths.bins])[chosen]
    return whole(rng, inputs), whole(rng, outputs)


def draw_pairs(
    rng: np.random.Generator, prompt_tokens: Ints, output_tokens: Ints, count: int
) -> tuple[Ints, Ints]:
    """Pairs that were seen, drawn again with replacement: correlation is kept, order is not."""
    chosen = rng.integers(len(prompt_tokens), size=count)
    return prompt_tokens[chosen], output_tokens[chosen]


def whole(rng: np.random.Generator, tokens: Floats) -> Ints:
    """Rounded at random without bias; at least 1."""
    return np.maximum(np.floor(tokens + rng.random(len(tokens))), 1.0).astype(np.int64)


def _lognormal(rng: np.random.Generator, law: LogNormal, count: int) -> Floats:
    """What falls outside the bounds is drawn again; the law makes sure that enough falls inside."""
    drawn = rng.lognormal(law.mu, law.sigma, count)
    outside = np.flatnonzero((drawn < law.low_tokens) | (drawn > law.high_tokens))
    while len(outside):
        # Draw as many as it should take, so that a narrow window needs few rounds.
        tries = min(int(len(outside) / law.mass * 1.1) + 16, 4_000_000)
        again = rng.lognormal(law.mu, law.sigma, tries)
        again = again[(again >= law.low_tokens) & (again <= law.high_tokens)][: len(outside)]
        drawn[outside[: len(again)]] = again
        outside = outside[len(again) :]
    return drawn
