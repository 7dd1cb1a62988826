"""Plans for a cover program: the knapsacks' own covers, a small integer program, large-neighbourhood search.

When nodes are plentiful every demand's cheapest cover can stand beside the others, and is the optimum. When
they are scarce the demands compete: freeing about four of them at a time, the rest held, and solving those
exactly finds the exchanges that diving and rounding miss. Demands are freed in proportion to what they cost
above their knapsack bound, since that is where the gap lies.
"""

from __future__ import annotations

import numpy as np

from potluck.plan.allocate.bound import Bound
from potluck.plan.allocate.cover_data import Cover
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Chosen, Columns, Restricted

FREED = 4


def cheapest_columns(
    bound: Bound, limit: int, ceiling: float = np.inf, extra: Chosen | None = None
) -> Columns:
    """Per demand the `limit` columns with the least excess, none above `ceiling`; and those of a plan."""
    parts: list[tuple[Ints, Ints, Ints]] = []
    for d in range(len(bound.tables)):
        excess = bound.excess(d)
        regions = excess.shape[1]
        flat = excess.ravel()
        few = min(limit, len(flat))
        pick = np.argpartition(flat, few - 1)[:few] if 0 < few < len(flat) else np.arange(len(flat))
        pick = pick[flat[pick] <= min(ceiling, 1e300)]
        if extra is not None:
            held = [i * regions + r for (g, i, r) in extra.new if g == d]
            pick = np.union1d(pick, np.array(held, dtype=np.int64))
        parts.append((np.full(len(pick), d), pick // regions, pick % regions))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return Columns(empty, empty, empty)
    group, row, region = (np.concatenate(p).astype(np.int64) for p in zip(*parts, strict=True))
    return Columns(group, row, region)


def counts_of(restricted: Restricted, plan: Chosen) -> Floats | None:
    """A plan as counts of the restricted columns; None when one of its columns is missing."""
    columns = restricted.columns
    keys = zip(columns.group.tolist(), columns.row.tolist(), columns.region.tolist(), strict=True)
    index = {key: j for j, key in enumerate(keys)}
    n = np.zeros(len(restricted))
    for key, count in plan.new.items():
        if key not in index:
            return None
        n[index[key]] = count
    for tag, count in plan.old.items():
        n[len(columns) + tag] = count
    return n


def knapsack_plan(cover: Cover, bound: Bound) -> Chosen | None:
    """Every demand's cheapest cover, side by side, when the nodes suffice and no rounding was flattered."""
    new: dict[tuple[int, int, int], int] = {}
    old: dict[int, int] = {}
    for d, table in enumerate(bound.tables):
        if not np.isfinite(table.value):
            return None
        covers, kept = table.best()
        old |= kept
        for row, count in covers.items():
            new[(d, row, int(np.argmin(bound.prices[d][row])))] = count
    return recheck(cover, Chosen(new, old, 0.0))


def recheck(cover: Cover, plan: Chosen) -> Chosen | None:
    """The plan with its cost, or None when it is not one."""
    keys = np.array(sorted(plan.new), dtype=np.int64).reshape(-1, 3)
    restricted = Restricted(cover, Columns(keys[:, 0], keys[:, 1], keys[:, 2]))
    n = counts_of(restricted, plan)
    if n is None:
        return None
    n = _prefer_running(restricted, n)
    return restricted.chosen(n) if restricted.feasible(n) else None


def _prefer_running(restricted: Restricted, n: Floats) -> Floats:
    """Copies of a running template are the running ones first."""
    cover, count = restricted.cover, len(restricted.columns)
    moved = n.copy()
    for tag, old in enumerate(cover.olds):
        for j in range(count):
            group = cover.groups[int(restricted.group[j])]
            same = (
                restricted.group[j] == old.group
                and restricted.region[j] == old.key.region
                and group.origin[restricted.columns.row[j]] == old.key.template
            )
            if same:
                shift = min(moved[j], old.count - moved[count + tag])
                moved[j] -= shift
                moved[count + tag] += shift
    return moved


class Neighbourhoods:
    """Large-neighbourhood search over a restricted program; one `step` frees some demands."""

    def __init__(self, restricted: Restricted, bound: Bound, seed: int = 0) -> None:
        self.restricted, self.bound = restricted, bound
        self._rng = np.random.default_rng(seed)
        self._reduced = restricted.reduced(bound.at)
        self._tried: set[tuple[int, ...]] = set()

    def step(self, n: Floats, *, size: int, time_limit_s: float, gap_abs: float) -> Floats | None:
        """A better plan, or None; never the same demands twice from the same plan."""
        free = self._pick(n, size)
        if free is None:
            return None
        restricted = self.restricted
        inside = np.isin(restricted.group, free)
        held = np.where(inside, 0.0, n)
        problem = restricted.milp(self.bound, free, held)
        part = _columns_of(problem, inside)
        answer = solve_milp(part, time_limit_s=time_limit_s, gap_abs=gap_abs, start=n[inside])
        if answer.x is None:
            return None
        better = held.copy()
        better[inside] = np.rint(answer.x)
        if float(restricted.cost @ (better - n)) > -1e-9 or not restricted.feasible(better):
            return None
        self._tried.clear()
        return better

    def _pick(self, n: Floats, size: int) -> Ints | None:
        groups = len(self.bound.tables)
        size = min(size, groups)
        paid = np.bincount(self.restricted.group, self._reduced * n, minlength=groups)
        above = paid - np.array([table.value for table in self.bound.tables])
        weight = np.maximum(above, 0.0) + 0.02 * max(float(above.sum()), 1e-9)
        for _ in range(20):
            free = np.sort(self._rng.choice(groups, size, replace=False, p=weight / weight.sum()))
            if (mark := tuple(free.tolist())) not in self._tried:
                self._tried.add(mark)
                return free
        return None


def _columns_of(problem: Milp, inside: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Milp:
    """The program with only the columns inside; their rows were made for them alone."""
    place = np.cumsum(inside) - 1
    kept = inside[problem.column]
    return Milp(
        cost=problem.cost[inside],
        lower=problem.lower[inside],
        upper=problem.upper[inside],
        integer=problem.integer[inside],
        row_lower=problem.row_lower,
        row_upper=problem.row_upper,
        row=problem.row[kept],
        column=place[problem.column[kept]],
        value=problem.value[kept],
    )
