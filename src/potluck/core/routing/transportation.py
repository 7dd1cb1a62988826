"""Who of a group hands to whom, and how much: THUNDERSERVE's transportation problem, solved where it is needed.

    maximise   sum_ij (1 - w t_ij) f_ij + sum_k g_k        i prefills, j decodes, k does both
    prefill_i  sum_j f_ij <= P_i
    decode_j   sum_i f_ij <= Q_j
    mixed_k    g_k <= C_k
    link_l     sum_ij s_ij,l f_ij <= 1                     s: seconds that one request's KV keeps the link busy

t_ij is how long the KV of a request takes, w so small that it only tells equal routings apart. f = 0 is feasible, so
a primal simplex on a dense tableau needs no first phase. Groups have a dozen replicas: it takes a few milliseconds.
The planner has its own, compiled for thousands of states a second (`plan/search/orchestrate_kernel.py`); tests hold
both to the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

HANDOVER_WEIGHT = 1e-5
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class KvPair:
    """KV from one replica to another."""

    prefill: int
    decode: int
    busy_s: tuple[tuple[str, float], ...]
    """(link, seconds of it) for one request."""
    handover_s: float


def orchestrated(
    prefill_per_s: Sequence[float], decode_per_s: Sequence[float], pairs: Sequence[KvPair]
) -> list[float]:
    """The flow of every pair, in requests a second; replicas are named by their places in the two rates."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    limits: dict[tuple[str, str], float] = {}
    for column, pair in enumerate(pairs):
        for side, place, rate in (
            ("prefill", pair.prefill, prefill_per_s[pair.prefill]),
            ("decode", pair.decode, decode_per_s[pair.decode]),
        ):
            key = (side, str(place))
            rows.setdefault(key, {})[column] = 1.0
            limits[key] = rate
        for link, seconds in pair.busy_s:
            rows.setdefault(("link", link), {})[column] = seconds
            limits["link", link] = 1.0
    most = [min(prefill_per_s[pair.prefill], decode_per_s[pair.decode]) for pair in pairs]
    kept = [
        key
        for key, row in rows.items()
        # A link that carries all that could ever be sent over it binds nothing.
        if key[0] != "link" or sum(value * most[column] for column, value in row.items()) > 1.0
    ]
    worth = [1.0 - HANDOVER_WEIGHT * min(1.0, pair.handover_s) for pair in pairs]
    return maximised(worth, [rows[key] for key in kept], [limits[key] for key in kept])


def maximised(
    worth: Sequence[float], rows: Sequence[dict[int, float]], limits: Sequence[float]
) -> list[float]:
    """x >= 0 that maximises worth x within rows x <= limits; no limit is negative."""
    columns, height = len(worth), len(rows)
    table = [[row.get(column, 0.0) for column in range(columns)] for row in rows]
    right, gain = [max(0.0, limit) for limit in limits], list(worth)
    basis = list(range(columns, columns + height))
    outside = list(range(columns))
    for turn in count():
        entering = _entering(gain, outside, careful=turn > 8 * (columns + height))
        if entering < 0:
            break
        leaving = _leaving(table, right, basis, entering)
        if leaving < 0:
            break  # unbounded: cannot be, as every pair has limits
        _pivot(table, right, gain, leaving, entering)
        basis[leaving], outside[entering] = outside[entering], basis[leaving]
    found = [0.0] * columns
    for row, name in enumerate(basis):
        if name < columns:
            found[name] = right[row]
    return found


def _entering(gain: list[float], outside: list[int], careful: bool) -> int:
    """The column that gains most; after very many turns the first that gains (Bland), which cannot go in circles."""
    best, most = -1, TINY
    for column, value in enumerate(gain):
        if value > TINY and (
            (not careful and value > most) or (careful and (best < 0 or outside[column] < outside[best]))
        ):
            best, most = column, value
    return best


def _leaving(table: list[list[float]], right: list[float], basis: list[int], column: int) -> int:
    best, least = -1, 0.0
    for row, values in enumerate(table):
        if values[column] > TINY:
            ratio = right[row] / values[column]
            if best < 0 or ratio < least - TINY or (ratio <= least + TINY and basis[row] < basis[best]):
                best, least = row, ratio
    return best


def _pivot(table: list[list[float]], right: list[float], gain: list[float], row: int, column: int) -> None:
    """A condensed tableau: the entering column becomes that of the leaving variable."""
    pivot = table[row][column]
    line = [value / pivot for value in table[row]]
    line[column] = 1.0 / pivot
    right[row] /= pivot
    for other, values in enumerate(table):
        factor = values[column]
        if other == row or factor == 0.0:
            continue
        for place, value in enumerate(line):
            if value:
                values[place] -= factor * value
        values[column] = -factor * line[column]
        right[other] = max(0.0, right[other] - factor * right[row])
    table[row] = line
    factor = gain[column]
    for place, value in enumerate(line):
        if value:
            gain[place] -= factor * value
    gain[column] = -factor * line[column]
