"""What an engine can promise of its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether cutting the work changes no bit of an answer, and how that was reached."""

    holds: bool
    products: str
    """The name of a filling."""
