"""The best placement of one multiset of nodes in two slow ways that tests and benchmarks compare with.

CORAL's integer program (4.2), for nodes k = 1..n and a given number of stages S:

    x_sj = 1    stage s holds j layers              s = 1..S, j = 1..L
    y_sk = 1    node k belongs to stage s
    z_sjk = 1   both
    maximise T
    layers_s:   Σ_j x_sj = 1                        each stage picks one number of layers
    node_k:     Σ_s y_sk = 1                        each node is in one stage
    model:      Σ_s Σ_j j·x_sj = L                  the stages hold the whole model
    rate_s:     T ≤ Σ_j Σ_k z_sjk·T̂_j(g_k)          the slowest stage decides
    link_sjk:   z_sjk ≤ x_sj,  z_sjk ≤ y_sk,  z_sjk ≥ x_sj + y_sk - 1

The program lets a stage stay without nodes (T = 0 then), which never helps. `brute_force` tries everything.
Neither shares code with `plan.templates.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best throughput found, with how many stages, and whether nothing better exists."""

    units: int
    stages: int
    proven: bool


def integer_program(rates: Ints, types: Sequence[int], *, time_limit_s: float | None = None) -> Optimum:
    """CORAL's program for every number of stages; `time_limit_s` is for each of them."""
    best = Optimum(0, 0, True)
    most = min(len(types), rates.shape[0], rates.shape[2])
    for stages in range(1, most + 1):
        units, proven = solve_stages(rates[stages - 1, list(types)], stages, time_limit_s)
        if units > best.units:
            best = Optimum(units, stages, best.proven)
        if not proven:
            best = Optimum(best.units, best.stages, False)
    return best


def solve_stages(rates: Ints, stages: int, time_limit_s: float | None = None) -> tuple[int, bool]:
    """(T, proven) of the program for so many stages; `rates` is (n, L), a row per node.

    T is added up again in integers from x and y, so that no tolerance of the solver is in it.
    """
    import highspy

    program = _program(rates, stages)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.5)):
        solver.setOptionValue(option, value)
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", float(time_limit_s))
    if solver.passModel(program) == highspy.HighsStatus.kError:
        raise InputError("integer program", "the solver refused it")
    solver.run()
    status = solver.getModelStatus()
    proven = status == highspy.HighsModelStatus.kOptimal
    values = np.asarray(solver.getSolution().col_value)
    if len(values) != program.num_col_ or not solver.getSolution().value_valid:
        return 0, proven
    nodes, layers = rates.shape
    x = values[1 : 1 + stages * layers].reshape(stages, layers).argmax(axis=1)
    y = values[1 + stages * layers : 1 + stages * (layers + nodes)].reshape(stages, nodes).argmax(axis=0)
    reached = [int(rates[y == s, x[s]].sum()) for s in range(stages)]
    return (min(reached) if int(x.sum()) + stages == layers else 0), proven


def _program(rates: Ints, stages: int) -> Any:
    """The columns are T, then x by stage and layers, y by stage and node, z by stage, layers and node."""
    import highspy

    nodes, layers = int(rates.shape[0]), int(rates.shape[1])
    first_y = 1 + stages * layers
    first_z = first_y + stages * nodes
    columns = first_z + stages * layers * nodes
    rows: list[tuple[str, float, float, dict[int, float]]] = []
    inf = highspy.kHighsInf

    def x(s: int, j: int) -> int:
        return 1 + s * layers + j - 1

    def y(s: int, k: int) -> int:
        return first_y + s * nodes + k

    def z(s: int, j: int, k: int) -> int:
        return first_z + (s * layers + j - 1) * nodes + k

    numbers, all_nodes = range(1, layers + 1), range(nodes)
    for s in range(stages):
        rows.append((f"layers_{s}", 1.0, 1.0, {x(s, j): 1.0 for j in numbers}))
        given = {z(s, j, k): float(rates[k, j - 1]) for j in numbers for k in all_nodes}
        rows.append((f"rate_{s}", 0.0, inf, {0: -1.0} | given))
        for j, k in product(numbers, all_nodes):
            rows.append((f"link_x_{s}_{j}_{k}", 0.0, inf, {x(s, j): 1.0, z(s, j, k): -1.0}))
            rows.append((f"link_y_{s}_{j}_{k}", 0.0, inf, {y(s, k): 1.0, z(s, j, k): -1.0}))
            both = {x(s, j): 1.0, y(s, k): 1.0, z(s, j, k): -1.0}
            rows.append((f"link_{s}_{j}_{k}", -inf, 1.0, both))
    rows += [(f"node_{k}", 1.0, 1.0, {y(s, k): 1.0 for s in range(stages)}) for k in all_nodes]
    held = {x(s, j): float(j) for s in range(stages) for j in numbers}
    rows.append(("model", float(layers), float(layers), held))
    return _as_lp(rows, columns, float(rates.max(axis=1).sum()))


def _as_lp(rows: list[tuple[str, float, float, dict[int, float]]], columns: int, most: float) -> Any:
    import highspy

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = columns, len(rows)
    program.sense_ = highspy.ObjSense.kMaximize
    program.col_cost_ = np.eye(1, columns)[0]
    program.col_lower_ = np.zeros(columns)
    program.col_upper_ = np.concatenate([[most], np.ones(columns - 1)])
    program.integrality_ = [highspy.HighsVarType.kContinuous] + [highspy.HighsVarType.kInteger] * (
        columns - 1
    )
    program.row_lower_ = np.array([row[1] for row in rows])
    program.row_upper_ = np.array([row[2] for row in rows])
    program.row_names_ = [row[0] for row in rows]
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.cumsum([0, *(len(row[3]) for row in rows)])
    program.a_matrix_.index_ = np.array([column for row in rows for column in row[3]])
    program.a_matrix_.value_ = np.array([value for row in rows for value in row[3].values()])
    return program


def brute_force(rates: Ints, types: Sequence[int]) -> Optimum:
    """Every assignment of nodes to stages and every way to divide the layers."""
    best = Optimum(0, 0, True)
    layers = rates.shape[2]
    for stages in range(1, min(len(types), rates.shape[0], layers) + 1):
        divisions = list(_compositions(layers, stages))
        for owners in product(range(stages), repeat=len(types)):
            if len(set(owners)) < stages:
                continue
            sums = [[0] * layers for _ in range(stages)]
            for kind, stage in zip(types, owners, strict=True):
                for j in range(layers):
                    sums[stage][j] += int(rates[stages - 1, kind, j])
            for division in divisions:
                reached = min(sums[s][j - 1] for s, j in enumerate(division))
                if reached > best.units:
                    best = Optimum(reached, stages, True)
    return best


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered sum of so many positive ones."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))
