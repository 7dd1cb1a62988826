"""Figures as people read them: three digits, and the unit that fits."""

from __future__ import annotations

from math import floor, log10

LEAST = 1e-9  # Less is what rounding leaves.
LEAST_USD = 1e-6  # The same of money.


def digits(value: float) -> str:
    """Three significant digits, without an exponent where a person would write none."""
    size = abs(value)
    if size < LEAST:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size < 1e-4:
        return _small(value)
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def moved(old: float, new: float, form: str = ".0f") -> str:
    """`rose from 4 to 7.2`."""
    return f"{'rose' if new > old else 'fell'} from {old:{form}} to {new:{form}}"


def _small(value: float) -> str:
    """Three significant digits of something far below 1, without an exponent."""
    return f"{value:.{2 - floor(log10(abs(value)))}f}".rstrip("0")


def seconds(value_s: float) -> str:
    """`12.3 ms`."""
    units = (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")
    for limit_s, factor, unit in units:
        # 0.9996 s rounds to 1000 ms, which is better said as 1.00 s.
        if abs(value_s) < limit_s * 0.9995:
            return f"{digits(value_s * factor)} {unit}"
    return f"{digits(value_s / 3600)} h"


def usd(value_usd: float) -> str:
    """`$2.69`; what is less than a cent keeps three digits."""
    size = abs(value_usd) if abs(value_usd) >= LEAST_USD else 0.0
    sign = "-" if value_usd < 0 < size else ""
    return f"{sign}${_small(size) if 0 < size < 0.00995 else f'{size:,.2f}'}"
