"""The program as a sparse matrix over some of its columns: variables, rows, extraction of a solution.

Order of the variables: theta; extra variables of limits; reserved nodes in use; f for every bucket and pair of
regions with a path; for each column j n_new, n_old (when some run), and its shares x_jb, z_jb, w_jb of nonzero
capacity; y of ordered models. theta is 1 when cost is minimised; when that is infeasible, theta <= 1 is maximised
instead, and the row demand_b requires theta D_b.
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
    network_rows,
    node_price_usd_per_h,
)

PHASES: tuple[Phase, ...] = ("prefill", "decode", "closed")
THETA = 0


@dataclass(frozen=True, slots=True)
class NumberedBucket:
    """A demand bucket with its model's index and its own; the program numbers the buckets of all models."""

    model: int
    bucket: int
    rate_per_s: float
    name: str
    demand: DemandBucket


def numbered_buckets(program: FlowProgram) -> tuple[NumberedBucket, ...]:
    return tuple(
        NumberedBucket(m, b, d.rate_per_s, f"{model.name}/{d.name}", d)
        for m, model in enumerate(program.models)
        for b, d in enumerate(model.buckets)
    )


@dataclass(slots=True)
class MatrixEntries:
    """Rows, variables and nonzero entries of the matrix, in the order of their creation."""

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
    """The program over some columns; a bucket's rows are scaled by its rate, a link's by its bandwidth.

    `order` adds the rows that keep crossing prompts longer than staying ones; relaxations omit them, as fractional y
    hardly restrict anything.
    """

    def __init__(self, program: FlowProgram, keys: list[ColumnKey], order: bool = True) -> None:
        self.program = program
        self.bins = numbered_buckets(program)
        self.entries = MatrixEntries()
        self.flows: dict[tuple[int, int, int], int] = {}
        self.new: dict[ColumnKey, int] = {}
        self.old: dict[ColumnKey, int] = {}
        self.shares: list[tuple[ColumnKey, int, int, int, float]] = []
        """(column, bucket number, phase, variable, capacity)"""
        self._first_bin = np.cumsum([0, *(len(model.buckets) for model in program.models)])
        self._cards = [network_rows(model, program.headroom) for model in program.models]
        self._add_shared_rows()
        self._add_limit_rows()
        self._add_flow_variables()
        self._running, self._pins = dict(program.running), {pin.key: pin for pin in program.pins}
        self.add(keys)
        self.order: list[int] = []
        """The variables y."""
        for m, model in enumerate(program.models):
            if order and model.ordered:
                self._add_order_rows(range(int(self._first_bin[m]), int(self._first_bin[m + 1])))

    def add(self, keys: Iterable[ColumnKey]) -> None:
        for key in keys:
            self._add_column(key, self._running.get(key, 0), self._pins.get(key))

    def _add_shared_rows(self) -> None:
        """Add theta and the rows of demands, phases, nodes, links and the budget."""
        program, entries = self.program, self.entries
        node_supply, regions = program.fleet, range(len(program.fleet.regions))
        entries.new_variable(0.0, 1.0)  # theta
        self.scale = [max(numbered.rate_per_s, 1e-300) for numbered in self.bins]
        self.demand = [
            entries.new_row(float(numbered.demand.firm and numbered.rate_per_s > 0), INFINITY)
            for numbered in self.bins
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
        for b, numbered in enumerate(self.bins):
            entries.put(
                self.demand[b], THETA, -1.0 if numbered.rate_per_s > 0 and not numbered.demand.firm else 0.0
            )

    def _add_limit_rows(self) -> None:
        """Add limits with their extra variables, and reserved nodes; `_add_column` adds the entries of columns."""
        program, entries = self.program, self.entries
        self.helpers = [
            entries.new_variable(extra.usd_per_h, extra.upper, extra.whole) for extra in program.helpers
        ]
        for variable, helper in zip(self.helpers, program.helpers, strict=True):
            usd_per_h = helper.usd_per_h if program.budget_usd_per_h is not None else 0.0
            entries.put(self.budget, variable, usd_per_h)
        self.limits = [entries.new_row(count_limit.low, count_limit.high) for count_limit in program.limits]
        for row, limit in zip(self.limits, program.limits, strict=True):
            entries.put(row, THETA, -limit.theta)
            for index, value in limit.helpers:
                entries.put(row, self.helpers[index], value)
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
            used_nodes = entries.new_variable(
                -price, float(node_supply.reserved[r, c]) if node_supply.reserved is not None else 0
            )
            self.paid[r, c] = entries.new_row(0.0, INFINITY)
            entries.put(self.paid[r, c], used_nodes, -1.0)
            entries.put(self.budget, used_nodes, -price if program.budget_usd_per_h is not None else 0.0)

    def _add_flow_variables(self) -> None:
        """Add a flow variable for each bucket and each pair of regions with a usable path."""
        program, entries = self.program, self.entries
        paths: list[tuple[int, int, int | None]] = [(r, r, None) for r in range(len(program.fleet.regions))]
        paths += [(link.source, link.target, i) for i, link in enumerate(program.links)]
        for b, numbered in enumerate(self.bins):
            for source, target, i in paths:
                if (source, target) in numbered.demand.barred:
                    continue
                cost = 0.0
                if i is not None:
                    egress = program.links[i].egress_usd_per_h * numbered.demand.kv_bits
                    cost = (egress + numbered.demand.crossing_usd_per_h) * self.scale[b]
                variable = entries.new_variable(cost, INFINITY)
                self.flows[b, source, target] = variable
                entries.put(self.demand[b], variable, 1.0)
                entries.put(self.phase[0, b, source], variable, -1.0)
                entries.put(self.phase[1, b, target], variable, -1.0)
                if i is not None:
                    link_share = numbered.demand.kv_bits * self.scale[b] / program.links[i].bits_per_s
                    entries.put(self.links[i], variable, link_share)

    def _add_order_rows(self, bins: Iterable[int]) -> None:
        """Add the ordering rows over all columns; no column may be added afterwards."""
        entries, active_buckets = self.entries, [b for b in bins if self.bins[b].rate_per_s > 0]
        crossing: dict[int, list[tuple[int, float]]] = {b: [] for b in active_buckets}
        staying: dict[int, list[tuple[int, float]]] = {b: [] for b in active_buckets}
        for (b, source, target), variable in self.flows.items():
            if b in crossing:
                (staying if source == target else crossing)[b].append((variable, 1.0))
        for _, b, p, variable, rate in self.shares:
            if b in staying and p == 2:
                staying[b].append((variable, rate / self.scale[b]))
        if not any(crossing.values()):
            return
        rows: list[tuple[float, list[tuple[int, float]]]] = []
        for index, b in enumerate(active_buckets):
            previous_y = self.order[-1:] if index else []
            rows += [(1.0, [*staying[b], (y, 1.0)]) for y in previous_y]
            if b != active_buckets[-1]:
                self.order.append(entries.new_variable(0.0, 1.0, integer=True))
                rows += [(0.0, [(y, 1.0), (self.order[-1], -1.0)]) for y in previous_y]
                rows.append((0.0, [*crossing[b], (self.order[-1], -1.0)]))
        for high, terms in rows:
            row = entries.new_row(-INFINITY, high)
            for variable, coefficient in terms:
                entries.put(row, variable, coefficient)

    def _add_column(self, key: ColumnKey, running: int, pin: ColumnPin | None) -> None:
        """Add a column's counts and shares, and their entries in all rows."""
        program, entries = self.program, self.entries
        model = program.models[key.group]
        uses = model.uses[key.template]
        price = node_price_usd_per_h(program.fleet, uses, key.region)
        used_types = np.flatnonzero(uses)
        max_count = float((program.fleet.available[key.region][used_types] // uses[used_types]).min())
        if model.allowed is not None and not model.allowed[key.template, key.region]:
            max_count = 0.0
        time = entries.new_row(-INFINITY, 0.0)
        fee = program.fee_usd_per_h(key)
        usd_per_h = price + fee + program.copy_complexity_usd_per_h(key)
        copies = [entries.new_variable(price * program.init_penalty + usd_per_h, max_count, integer=True)]
        self.new[key] = copies[0]
        if running:
            copies.append(entries.new_variable(usd_per_h, min(float(running), max_count), integer=True))
            self.old[key] = copies[1]
        for variable in copies:
            entries.put(time, variable, -program.headroom)
            entries.put(self.budget, variable, price + fee if program.budget_usd_per_h is not None else 0.0)
            for c in used_types:
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
        cards = self._add_network_rows(key, copies)
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
                    kv_bits_per_s, limit = self._cards[key.group][p]
                    entries.put(card, share, float(kv_bits_per_s[key.template, bucket] / limit[key.template]))

    def _add_network_rows(self, key: ColumnKey, copies: list[int]) -> list[int | None]:
        """Add a copy's rows for sending and receiving KV, scaled by its network cards; None where never binding."""
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
        """The program that minimises cost with theta = 1, or maximises theta up to a cap.

        `priced` removes the upper bounds of new columns, so that the dual of nodes_rc, which implies them, is the
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
        """Copies of each column in a solution."""
        counts_by_column: dict[ColumnKey, int] = {}
        for variables in (self.new, self.old):
            for key, variable in variables.items():
                if n := round(float(x[variable])):
                    counts_by_column[key] = counts_by_column.get(key, 0) + n
        return counts_by_column

    def shares_and_flows(self, x: Floats) -> tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...]]:
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
