"""Which prefill replica feeds which decode replica: THUNDERSERVE's two-stage transportation problem.

Sets        i  prefill replicas    j  decode replicas    k  mixed replicas    (a, b)  links between nodes
Given       D_ij  share of requests within the objective when i prefills and j decodes;  D_k  likewise
            P_i, Q_j, C_k  requests a second that a replica is planned to take
            s_ij,ab  seconds that one request from i to j keeps the link (a, b) busy;  R  the offered rate

Maximise    sum_ij D_ij f_ij + sum_k D_k g_k
Rows        prefill_i   sum_j f_ij <= P_i
            decode_j    sum_i f_ij <= Q_j
            mixed_k     g_k <= C_k
            offered     sum_ij f_ij + sum_k g_k <= R
            link_ab     sum_ij s_ij,ab f_ij <= 1

The paper's own X_i (share of requests that i prefills) and Y_ij (share of i's that j decodes) are f_ij =
R X_i Y_ij; as printed it has no capacities, and would send everything to the best pair. No right-hand side is
negative, so f = 0 is feasible and a primal simplex on a condensed tableau needs no first phase. Links are thick
enough in most states, so their rows are added only when an answer overloads one, and it is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.core.errors import InputError
from potluck.plan.search.orchestrate_kernel import Floats, simplex


@dataclass(frozen=True, slots=True)
class Pairing:
    """A share of the requests, from one replica to another or, when mixed, within one."""

    source: int
    """Place of the replica among the groups."""
    target: int
    rate_per_s: float
    attained: float
    """D_ij"""


@dataclass(frozen=True, slots=True)
class Orchestration:
    """How requests are routed."""

    pairings: tuple[Pairing, ...]

    @property
    def rate_per_s(self) -> float:
        return sum(each.rate_per_s for each in self.pairings)

    @property
    def goodput_per_s(self) -> float:
        return sum(each.rate_per_s * each.attained for each in self.pairings)

    def x(self) -> dict[int, float]:
        """X: share of the requests that each replica takes in first; they add up to 1."""
        total = self.rate_per_s
        shares: dict[int, float] = {}
        for each in self.pairings:
            shares[each.source] = shares.get(each.source, 0.0) + each.rate_per_s / total
        return shares

    def y(self) -> dict[tuple[int, int], float]:
        """Y: of what a replica takes in, the share that each other decodes; they add up to 1 per replica."""
        total, mine = self.rate_per_s, self.x()
        return {
            (each.source, each.target): each.rate_per_s / (total * mine[each.source])
            for each in self.pairings
        }


def shares_of(
    flow: Floats, weight: Floats, pre: Sequence[int], dec: Sequence[int], mix: Sequence[int]
) -> Orchestration:
    """Flows as they leave the program, with the places of the replicas among the groups."""
    found = []
    for x, i in enumerate(pre):
        for y, j in enumerate(dec):
            column = x * len(dec) + y
            if flow[column] > 1e-12:
                found.append(Pairing(i, j, float(flow[column]), float(weight[column])))
    for z, k in enumerate(mix):
        column = len(pre) * len(dec) + z
        if flow[column] > 1e-12:
            found.append(Pairing(k, k, float(flow[column]), float(weight[column])))
    return Orchestration(tuple(found))


def transport(
    prefill_per_s: Floats,
    decode_per_s: Floats,
    attained: Floats,
    offered_per_s: float | None = None,
    links: Floats | None = None,
) -> tuple[float, Floats]:
    """(value, f) of the program without mixed replicas; `links` is s as [link, i, j]."""
    m, n = attained.shape
    if prefill_per_s.shape != (m,) or decode_per_s.shape != (n,):
        raise InputError("orchestration", f"needs {m} prefill and {n} decode rates")
    sides = [prefill_per_s, decode_per_s, attained, *([] if links is None else [links])]
    if any(not np.isfinite(side).all() or (side < 0).any() for side in sides):
        raise InputError("orchestration", "rates and shares must be finite and not negative")
    blocks = [
        np.kron(np.eye(m), np.ones((1, n))),
        np.kron(np.ones((1, m)), np.eye(n)),
    ]
    right = [prefill_per_s, decode_per_s]
    if offered_per_s is not None:
        blocks.append(np.ones((1, m * n)))
        right.append(np.array([offered_per_s]))
    if links is not None:
        blocks.append(links.reshape(len(links), m * n))
        right.append(np.ones(len(links)))
    matrix, limit = np.vstack(blocks), np.concatenate(right)
    rows, columns = matrix.shape
    tableau = np.zeros((rows + 1, columns + 1))
    tableau[:rows, :columns], tableau[:rows, columns] = matrix, limit
    tableau[rows, :columns] = attained.ravel()
    basis, outside = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    simplex(tableau, basis, outside, rows, columns)
    flow = np.zeros(columns)
    inside = basis < columns
    flow[basis[inside]] = np.maximum(tableau[:rows, columns][inside], 0.0)
    return -float(tableau[rows, columns]), flow.reshape(m, n)
