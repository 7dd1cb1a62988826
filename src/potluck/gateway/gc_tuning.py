"""The collector of garbage, kept out of the way of streams."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)
"""Requests leave no cycles behind, so there is little to find: it looks less often than Python's own 700 objects."""


def calm() -> None:
    """To be called once everything is made that lasts: it is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
