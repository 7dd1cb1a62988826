"""Arithmetic: products with matrices, why cutting the work changes no bit, and the compiled inner loops."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether cutting the work changes no bit of an answer, and by which row padding that was reached."""

    holds: bool
    products: str
