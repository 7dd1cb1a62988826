"""A cover program made ready for solving: pins taken out, templates sorted by throughput."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from potluck.plan.allocate.program import ColumnCount, ColumnKey, CoverProgram, Floats, Ints, price_of

ROUNDING = 1e-9
"""Relative; a demand counts as met when this much is missing, and the bound allows for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Multipliers:
    """Prices put on the rows that demands share: mu_rc on nodes, beta on the budget."""

    nodes: Floats
    budget: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The templates of one demand, by ascending throughput."""

    name: str
    need: float
    """What is left to cover after pins."""
    uses: Floats
    """[n, C]"""
    rate: Floats
    """T_j = h * throughput, ascending."""
    fits: NDArray[np.bool_]
    """[n, R]: the region rents enough for one copy, and no pin forbids it."""
    origin: Ints
    """Index of each template in the program."""

    def take(self, rows: Ints) -> Group:
        """The same demand with fewer templates; `rows` ascending."""
        return replace(
            self,
            uses=self.uses[rows],
            rate=self.rate[rows],
            fits=self.fits[rows],
            origin=self.origin[rows],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Old:
    """A running column: up to `count` copies without the penalty."""

    group: int
    key: ColumnKey
    count: int
    uses: Floats
    rate: float


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """What the cover solver works on."""

    program: CoverProgram
    groups: tuple[Group, ...]
    """Demands with something left to cover."""
    olds: tuple[Old, ...]
    available: Ints
    budget: float | None
    fixed: tuple[ColumnCount, ...]
    """Copies that pins demand."""
    fixed_cost: float
    overpinned: tuple[str, ...]
    """Resources that the pins alone exceed."""

    @property
    def price(self) -> Floats:
        return self.program.fleet.price_usd_per_h

    def zero(self) -> Multipliers:
        return Multipliers(np.zeros(self.available.shape))

    def new_price(self, at: Multipliers) -> Floats:
        """[R, C]: what a node of a new copy costs with the multipliers on top."""
        return self.price * (1 + self.program.init_penalty + at.budget) + at.nodes

    def old_price(self, at: Multipliers) -> Floats:
        return self.price * (1 + at.budget) + at.nodes

    def relief(self, at: Multipliers) -> float:
        """What the multipliers give back: sum mu A + beta B."""
        return float((at.nodes * self.available).sum()) + at.budget * (self.budget or 0.0)

    def restrict(self, rows: list[Ints]) -> Cover:
        """The same program with fewer templates per demand; running columns stay."""
        return replace(self, groups=tuple(g.take(r) for g, r in zip(self.groups, rows, strict=True)))


def reduced_prices(group: Group, node_price: Floats) -> Floats:
    """[n, R]: price of one copy in each region, infinite where it does not fit."""
    prices: Floats = group.uses @ node_price.T
    prices[~group.fits] = np.inf
    return prices


def prepare(program: CoverProgram) -> Cover:
    """Take pins out and sort."""
    available = program.fleet.available.astype(np.int64).copy()
    running = {key: count for key, count in program.running if count}
    needs = [demand.rate for demand in program.demands]
    banned: set[ColumnKey] = set()
    fixed: list[ColumnCount] = []
    cost = rent = 0.0
    for key, count, exactly in program.pins:
        demand = program.demands[key.group]
        price = price_of(program.fleet, demand.uses[key.template], key.region)
        kept = min(count, running.get(key, 0))
        rent += price * count
        cost += price * (count + program.init_penalty * (count - kept))
        needs[key.group] -= program.headroom * demand.throughput[key.template] * count
        available[key.region] -= demand.uses[key.template].astype(np.int64) * count
        running[key] = 0 if exactly else running.get(key, 0) - kept
        if exactly:
            banned.add(key)
        if count:
            fixed.append(ColumnCount(key, count))
    over = [program.fleet.node_label(int(r), int(c)) for r, c in np.argwhere(available < 0)]
    budget = None if program.budget_usd_per_h is None else program.budget_usd_per_h - rent
    if budget is not None and budget < -ROUNDING * max(1.0, rent):
        over.append("budget")
    open_groups = [d for d, need in enumerate(needs) if need > ROUNDING * program.demands[d].rate]
    return Cover(
        program=program,
        groups=tuple(_group(program, d, needs[d], available, banned) for d in open_groups),
        olds=_olds(program, running, open_groups, available),
        available=np.maximum(available, 0),
        budget=None if budget is None else max(budget, 0.0),
        fixed=tuple(fixed),
        fixed_cost=cost,
        overpinned=tuple(over),
    )


def _group(program: CoverProgram, d: int, need: float, available: Ints, banned: set[ColumnKey]) -> Group:
    demand = program.demands[d]
    rate = demand.throughput * program.headroom
    order = np.argsort(rate, kind="stable")
    order = order[np.searchsorted(rate[order], 0.0, side="right") :]
    uses = demand.uses[order]
    # Only types that are short somewhere can keep a copy out.
    fits = np.ones((len(order), len(available)), dtype=bool)
    most = uses.max(axis=0, initial=0)
    for r, c in np.argwhere(available < most):
        fits[:, r] &= uses[:, c] <= available[r, c]
    position = {int(template): i for i, template in enumerate(order)} if banned else {}
    for key in banned:
        if key.group == d and key.template in position:
            fits[position[key.template], key.region] = False
    anywhere = fits.any(axis=1)
    keep = slice(None) if anywhere.all() else anywhere
    return Group(
        name=demand.name,
        need=need,
        uses=uses[keep].astype(np.float64),
        rate=rate[order][keep],
        fits=fits[keep],
        origin=order[keep],
    )


def _olds(
    program: CoverProgram, running: dict[ColumnKey, int], open_groups: list[int], available: Ints
) -> tuple[Old, ...]:
    olds = []
    for key, count in sorted(running.items()):
        if count <= 0 or key.group not in open_groups:
            continue
        demand = program.demands[key.group]
        uses = demand.uses[key.template].astype(np.float64)
        rate = float(demand.throughput[key.template]) * program.headroom
        most = int(np.min(available[key.region][uses > 0] // uses[uses > 0]))
        if rate > 0 and most > 0:
            olds.append(Old(open_groups.index(key.group), key, min(count, most), uses, rate))
    return tuple(olds)
