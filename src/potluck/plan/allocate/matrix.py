"""The general program as a matrix over some of its columns: variables, named rows, how to read a solution.

Variables in this order: theta; helpers of limits; nodes paid for already; f for every bucket and pair of regions
with a path; per column j: n_new, n_old (when some run), then its shares x_jb, z_jb, w_jb where the capacity is not 0;
y of ordered models. theta is 1 when cost is minimised; when the program is infeasible theta <= 1 is maximised
instead, and demand_b asks for theta D_b.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from potluck.plan.allocate.allocation import ColumnShare, FlowRate, Phase
from potluck.plan.allocate.highs import INFINITY, Milp
from potluck.plan.allocate.program import (
    ColumnKey,
    ColumnPin,
    DemandBucket,
    Floats,
    FlowProgram,
    card_rows,
    price_of,
)

PHASES: tuple[Phase, ...] = ("prefill", "decode", "closed")
THETA = 0


@dataclass(frozen=True, slots=True)
class NumberedBucket:
    model: int
    bucket: int
    rate_per_s: float
    name: str
    demand: DemandBucket


def bins_of(program: FlowProgram) -> tuple[NumberedBucket, ...]:
    return tuple(
        NumberedBucket(m, b, d.rate_per_s, f"{model.name}/{d.name}", d)
        for m, model in enumerate(program.models)
        for b, d in enumerate(model.buckets)
    )


@dataclass(slots=True)
class MatrixEntries:
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def new_row(self, low: float, high: float) -> int:
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def new_variable(self, cost: float, upper: float, integer: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def put(self, row: int, column: int, value: float) -> None:
        if value:
            self.row.append(row)
            self.column.append(column)
            self.value.append(value)


class FlowRows:
    """The program over some columns; a bucket's rows are scaled by its rate, a link's by its bandwidth. `order`: with
    rows for lengths in order, which relaxations go without, as fractions of y say next to nothing."""

    def __init__(self, program: FlowProgram, keys: list[ColumnKey], order: bool = True) -> None:
        self.program = program
        self.bins = bins_of(program)
        self.entries = MatrixEntries()
        self.flows: dict[tuple[int, int, int], int] = {}
        self.new: dict[ColumnKey, int] = {}
        self.old: dict[ColumnKey, int] = {}
        self.shares: list[tuple[ColumnKey, int, int, int, float]] = []
        """(column, bin, phase, variable, capacity)"""
        self._first_bin = np.cumsum([0, *(len(model.buckets) for model in program.models)])
        self._cards = [card_rows(model, program.headroom) for model in program.models]
        self._rows()
        self._limit_rows()
        self._flow_variables()
        self._running, self._pins = dict(program.running), {pin.key: pin for pin in program.pins}
        self.add(keys)
        self.order: list[int] = []
        """The variables y."""
        for m, model in enumerate(program.models):
            if order and model.ordered:
                self._order_rows(range(int(self._first_bin[m]), int(self._first_bin[m + 1])))

    def add(self, keys: Iterable[ColumnKey]) -> None:
        for key in keys:
            self._column(key, self._running.get(key, 0), self._pins.get(key))

    def _rows(self) -> None:
        program, entries = self.program, self.entries
        node_supply, regions = program.fleet, range(len(program.fleet.regions))
        entries.new_variable(0.0, 1.0)  # theta
        self.scale = [max(one.rate_per_s, 1e-300) for one in self.bins]
        self.demand = [
            entries.new_row(float(one.demand.firm and one.rate_per_s > 0), INFINITY) for one in self.bins
        ]
        self.phase = {
            (p, b, r): entries.new_row(0.0, INFINITY)
            for p in (0, 1)
            for b in range(len(self.bins))
            for r in regions
        }
        self.nodes = {
            (r, c): entries.new_row(-INFINITY, float(node_supply.available[r, c]))
            for r in regions
            for c in range(len(node_supply.nodes))
        }
        self.links = [entries.new_row(-INFINITY, 1.0) for _ in program.links]
        budget = program.budget_usd_per_h
        self.budget = entries.new_row(-INFINITY, INFINITY if budget is None else budget)
        for b, one in enumerate(self.bins):
            entries.put(self.demand[b], THETA, -1.0 if one.rate_per_s > 0 and not one.demand.firm else 0.0)

    def _limit_rows(self) -> None:
        """Limits with their helpers, and nodes that are paid for already; columns put themselves in."""
        program, entries = self.program, self.entries
        self.helpers = [
            entries.new_variable(each.usd_per_h, each.upper, each.whole) for each in program.helpers
        ]
        for variable, helper in zip(self.helpers, program.helpers, strict=True):
            paid = helper.usd_per_h if program.budget_usd_per_h is not None else 0.0
            entries.put(self.budget, variable, paid)
        self.limits = [entries.new_row(count_limit.low, count_limit.high) for count_limit in program.limits]
        for row, limit in zip(self.limits, program.limits, strict=True):
            entries.put(row, THETA, -limit.theta)
            for place, value in limit.helpers:
                entries.put(row, self.helpers[place], value)
        self._tables = [
            [
                (row, table)
                for row, limit in zip(self.limits, program.limits, strict=True)
                if (table := limit.copies[m]) is not None
            ]
            for m in range(len(program.models))
        ]
        self.paid: dict[tuple[int, int], int] = {}
        node_supply = program.fleet
        for r, c in [] if node_supply.reserved is None else np.argwhere(node_supply.reserved > 0).tolist():
            price = float(node_supply.price_usd_per_h[r, c])
            used = entries.new_variable(
                -price, float(node_supply.reserved[r, c]) if node_supply.reserved is not None else 0
            )
            self.paid[r, c] = entries.new_row(0.0, INFINITY)
            entries.put(self.paid[r, c], used, -1.0)
            entries.put(self.budget, used, -price if program.budget_usd_per_h is not None else 0.0)

    def _flow_variables(self) -> None:
        program, entries = self.program, self.entries
        paths: list[tuple[int, int, int | None]] = [(r, r, None) for r in range(len(program.fleet.regions))]
        paths += [(link.source, link.target, i) for i, link in enumerate(program.links)]
        for b, one in enumerate(self.bins):
            for source, target, i in paths:
                if (source, target) in one.demand.barred:
                    continue
                cost = 0.0
                if i is not None:
                    egress = program.links[i].egress_usd_per_h * one.demand.kv_bits
                    cost = (egress + one.demand.crossing_usd_per_h) * self.scale[b]
                variable = entries.new_variable(cost, INFINITY)
                self.flows[b, source, target] = variable
                entries.put(self.demand[b], variable, 1.0)
                entries.put(self.phase[0, b, source], variable, -1.0)
                entries.put(self.phase[1, b, target], variable, -1.0)
                if i is not None:
                    part = one.demand.kv_bits * self.scale[b] / program.links[i].bits_per_s
                    entries.put(self.links[i], variable, part)

    def _order_rows(self, bins: Iterable[int]) -> None:
        """Over all columns there are: none may be added after."""
        entries, live = self.entries, [b for b in bins if self.bins[b].rate_per_s > 0]
        away: dict[int, list[tuple[int, float]]] = {b: [] for b in live}
        home: dict[int, list[tuple[int, float]]] = {b: [] for b in live}
        for (b, source, target), variable in self.flows.items():
            if b in away:
                (home if source == target else away)[b].append((variable, 1.0))
        for _, b, p, variable, rate in self.shares:
            if b in home and p == 2:
                home[b].append((variable, rate / self.scale[b]))
        if not any(away.values()):
            return
        rows: list[tuple[float, list[tuple[int, float]]]] = []
        for place, b in enumerate(live):
            before = self.order[-1:] if place else []
            rows += [(1.0, [*home[b], (y, 1.0)]) for y in before]
            if b != live[-1]:
                self.order.append(entries.new_variable(0.0, 1.0, integer=True))
                rows += [(0.0, [(y, 1.0), (self.order[-1], -1.0)]) for y in before]
                rows.append((0.0, [*away[b], (self.order[-1], -1.0)]))
        for high, terms in rows:
            row = entries.new_row(-INFINITY, high)
            for variable, part in terms:
                entries.put(row, variable, part)

    def _column(self, key: ColumnKey, running: int, pin: ColumnPin | None) -> None:
        program, entries = self.program, self.entries
        model = program.models[key.group]
        uses = model.uses[key.template]
        price = price_of(program.fleet, uses, key.region)
        held = np.flatnonzero(uses)
        most = float((program.fleet.available[key.region][held] // uses[held]).min())
        if model.allowed is not None and not model.allowed[key.template, key.region]:
            most = 0.0
        time = entries.new_row(-INFINITY, 0.0)
        fee = program.fee_usd_per_h(key)
        counted = price + fee + program.copy_complexity_usd_per_h(key)
        copies = [entries.new_variable(price * program.init_penalty + counted, most, integer=True)]
        self.new[key] = copies[0]
        if running:
            copies.append(entries.new_variable(counted, min(float(running), most), integer=True))
            self.old[key] = copies[1]
        for variable in copies:
            entries.put(time, variable, -program.headroom)
            entries.put(self.budget, variable, price + fee if program.budget_usd_per_h is not None else 0.0)
            for c in held:
                entries.put(self.nodes[key.region, int(c)], variable, float(uses[c]))
                if (key.region, int(c)) in self.paid:
                    entries.put(self.paid[key.region, int(c)], variable, float(uses[c]))
            for row, table in self._tables[key.group]:
                entries.put(row, variable, float(table[key.template, key.region]))
        if pin is not None:
            high = float(pin.copies) if pin.exactly else INFINITY
            row = entries.new_row(float(pin.copies), high)
            for variable in copies:
                entries.put(row, variable, 1.0)
        cards = self._card_rows(key, copies)
        for p, table in enumerate((model.prefill_per_s, model.decode_per_s, model.closed_per_s)):
            for bucket in np.flatnonzero(table[key.template]):
                b = int(self._first_bin[key.group] + bucket)
                rate = float(table[key.template, bucket])
                share = entries.new_variable(0.0, INFINITY)
                entries.put(time, share, 1.0)
                row = self.demand[b] if p == 2 else self.phase[p, b, key.region]
                entries.put(row, share, rate / self.scale[b] if self.bins[b].rate_per_s > 0 else 0.0)
                self.shares.append((key, b, p, share, rate))
                if p < 2 and (card := cards[p]) is not None:
                    made, limit = self._cards[key.group][p]
                    entries.put(card, share, float(made[key.template, bucket] / limit[key.template]))

    def _card_rows(self, key: ColumnKey, copies: list[int]) -> list[int | None]:
        """Rows of a copy's network cards, sending and receiving, scaled by what they carry; None where none binds."""
        rows: list[int | None] = []
        for _, limit in self._cards[key.group]:
            if not np.isfinite(limit[key.template]):
                rows.append(None)
                continue
            row = self.entries.new_row(-INFINITY, 0.0)
            for variable in copies:
                self.entries.put(row, variable, -1.0)
            rows.append(row)
        return rows

    def milp(self, *, at_cost: bool, theta_cap: float = 1.0, priced: bool = False) -> Milp:
        """Minimise cost with theta = 1, or maximise theta up to a cap.

        `priced`: new columns have no limits of their own, so that nodes_rc, which implies them, carries the
        whole price of a scarce node.
        """
        entries = self.entries
        cost, upper = np.array(entries.cost), np.array(entries.upper)
        lower = np.zeros(len(cost))
        if priced:
            new = np.array(list(self.new.values()), dtype=np.int64)
            upper[new[upper[new] >= 1]] = INFINITY
        if at_cost:
            lower[THETA] = upper[THETA] = 1.0
        else:
            upper[THETA] = theta_cap
            cost = np.zeros(len(cost))
            cost[THETA] = -1.0
        return Milp(
            cost=cost,
            lower=lower,
            upper=upper,
            integer=np.array(entries.integer),
            row_lower=np.array(entries.low),
            row_upper=np.array(entries.high),
            row=np.array(entries.row, dtype=np.int64),
            column=np.array(entries.column, dtype=np.int64),
            value=np.array(entries.value),
        )

    def counts(self, x: Floats) -> dict[ColumnKey, int]:
        numbers: dict[ColumnKey, int] = {}
        for variables in (self.new, self.old):
            for key, variable in variables.items():
                if n := round(float(x[variable])):
                    numbers[key] = numbers.get(key, 0) + n
        return numbers

    def read(self, x: Floats) -> tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...]]:
        shares = tuple(
            ColumnShare(key, self.bins[b].bucket, PHASES[p], float(x[variable]), float(x[variable]) * rate)
            for key, b, p, variable, rate in self.shares
            if x[variable] > 1e-9
        )
        flows = tuple(
            FlowRate(self.bins[b].model, self.bins[b].bucket, r, s, float(x[variable]) * self.scale[b])
            for (b, r, s), variable in self.flows.items()
            if x[variable] > 1e-9 and self.bins[b].rate_per_s > 0
        )
        return shares, flows
