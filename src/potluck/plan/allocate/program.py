"""The allocation program: how many copies of which template to run in which region.

Sets
    b        demand: a model's bucket of prompt lengths, with rate D_b (requests/s)
    r, s     regions
    c        node types; region r rents A_rc of them (those already running included) for p_rc $/h
    j        columns: a template of one model in one region, using U_jc nodes; price p_j = sum_c p_rc U_jc

Variables
    n_j      integer   copies of column j; v_j of them run already
    x_jb     >= 0      copies' time spent on the prefill of bucket b
    z_jb     >= 0      ... on decoding bucket b
    w_jb     >= 0      ... on doing both inside the template, when it is a closed group
    f_brs    >= 0      requests/s of bucket b prefilled in region r and decoded in region s
    y_b      0 or 1    whether bucket b of an ordered model may cross a link; all longer ones may then, and only they

Minimise  sum_j p_j (n_j + K max(0, n_j - v_j)) + (e_j + q_j) n_j - sum_rc p_rc g_rc
          + sum_brs (egress_rs kv_b + [r != s] q_b) f_brs     e_j: charges of a copy beside its nodes' rent
                                                              q: complexity penalty, not a real charge

Rows
    time_j       sum_b (x_jb + z_jb + w_jb) <= h n_j          h: utilisation headroom
    demand_b     sum_rs f_brs + sum_j C_jb w_jb >= theta D_b   theta is 1, or maximised; firm demand requires D_b
    prefill_br   sum_{j in r} P_jb x_jb >= sum_s f_brs
    decode_bs    sum_{j in s} Q_jb z_jb >= sum_r f_brs
    nodes_rc     sum_{j in r} U_jc n_j <= A_rc
    link_rs      sum_b kv_b f_brs <= bandwidth_rs             r != s; without a link, or where the KV would be
                                                              too late (barred), f_brs does not exist
    across_b     sum_{r != s} f_brs <= D_b y_b                PrfaaS 3.3, of models in length order: buckets come
    stays_b      sum_r f_brr + sum_j C_jb w_jb <= D_b (1 - y_a)   shortest first (in tokens that are not cached, too),
    longer_b     y_a <= y_b                                   and a is the next shorter one than b
    sends_j      sum_b kv_b P_jb x_jb <= O_j n_j              the network cards of a copy that prefills for
    takes_j      sum_b kv_b Q_jb z_jb <= I_j n_j              others, or decodes for them; inside a template
                                                              they are in C_jb
    paid_rc      g_rc <= sum_{j in r} U_jc n_j                g_rc <= R_rc reserved nodes in use, whose price
                                                              p_rc g_rc is deducted from cost and rent
    budget       the objective without penalty, egress and q <= B
    pin_j        n_j >= k or n_j = k
    limit_i      low_i <= sum_j A_ij n_j + sum_h B_ih y_h - t_i theta <= high_i     y_h: an extra variable;
                 terms on counts; losses that must be survived become such rows too (`outages.py`)

The penalty K (CORAL 4.3) is the ratio of a node's start-up time to the interval between two plans. It needs
no variable of its own: every running template has two columns, `running` (cost p_j, at most v_j) and `new`
(cost (1 + K) p_j).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ExtraVariable:
    """A variable beside the counts, such as a switch that is 1 when any copy of some columns is rented."""

    name: str
    upper: float = 1.0
    whole: bool = True
    usd_per_h: float = 0.0  # Charged once where it is 1.
    row: int = -1  # Index of the limit whose copies force it to 1.


@dataclass(frozen=True, slots=True, eq=False)
class CountLimit:
    """A row limit_i: bounds on a weighted sum of the counts."""

    name: str
    low: float
    high: float
    copies: tuple[Floats | None, ...]  # A: per model [templates, regions]; None: all 0.
    helpers: tuple[tuple[int, float], ...] = ()  # (helper, B)
    theta: float = 0.0  # t: of rows whose right side is proportional to theta.

    def scaled(self, fraction: float) -> CountLimit:
        """The limit for a fraction of the demand."""
        return self if not self.theta else replace(self, theta=self.theta * fraction)


@dataclass(frozen=True, slots=True, eq=False)
class Outage:
    """Nodes that can fail together, and the share of each model's demand that must be served without them."""

    name: str
    gone: NDArray[np.bool_]  # [regions, node types]; a copy with any of these nodes is lost.
    shares: tuple[float, ...]  # By model; 0: no requirement.


class ColumnKey(NamedTuple):
    """A column: the template with this index of this group (a model), in this region."""

    group: int
    template: int
    region: int


class ColumnCount(NamedTuple):
    """Copies of a column."""

    key: ColumnKey
    copies: int


class ColumnPin(NamedTuple):
    """Copies of a column that a solution must have: at least so many, or exactly."""

    key: ColumnKey
    copies: int
    exactly: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NodeSupply:
    """What can be rented where: rows are regions, columns are node types."""

    regions: tuple[str, ...]
    nodes: tuple[str, ...]
    price_usd_per_h: Floats
    available: Ints
    """Nodes that may be rented, running ones included; 0 where a region does not offer the type."""
    reserved: Ints | None = None  # R: reserved nodes among these, which are paid for anyway; None: none.

    def __post_init__(self) -> None:
        shape = (len(self.regions), len(self.nodes))
        for name in ("price_usd_per_h", "available", "reserved"):
            value = getattr(self, name)
            if value is None and name == "reserved":
                continue
            if value.shape != shape:
                raise InputError(f"fleet: {name}", f"needs shape {shape}, has {value.shape}")
            if not np.isfinite(value).all() or (value < 0).any():
                raise InputError(f"fleet: {name}", "must be finite and not negative")

    def node_label(self, region: int, node: int) -> str:
        return f"{self.regions[region]}: {self.nodes[node]}"


@dataclass(frozen=True, slots=True)
class DemandBucket:
    """Requests of one model with prompts of about one length."""

    name: str
    rate_per_s: float
    kv_bits: float  # Size of a request's KV on a link between its prefill and decode regions.
    barred: frozenset[tuple[int, int]] = frozenset()
    """(source, target) regions between which KV transfer would exceed the objective."""
    firm: bool = False  # Must be met whole, whatever theta is.
    crossing_usd_per_h: float = 0.0  # q_b: complexity penalty of 1 request/s between two regions.

    def __post_init__(self) -> None:
        _check_rate(f"bucket {self.name}: rate_per_s", self.rate_per_s)
        _check_rate(f"bucket {self.name}: kv_bits", self.kv_bits)


@dataclass(frozen=True, slots=True, eq=False)
class ModelColumns:
    """A model's buckets and columns. Rates are of one copy fully busy with one phase of one bucket; 0: it cannot."""

    name: str
    buckets: tuple[DemandBucket, ...]
    uses: Bytes  # [templates, node types]
    prefill_per_s: Floats  # P, [templates, buckets]
    decode_per_s: Floats  # Q
    closed_per_s: Floats  # C: requests/s doing both phases inside the template.
    allowed: NDArray[np.bool_] | None = None  # [templates, regions]; None: wherever its nodes are offered.
    sends_bits_per_s: Floats | None = None
    """O, [templates]: rate at which the network cards of a copy may send; None: unlimited."""
    takes_bits_per_s: Floats | None = None  # I: rate at which they may receive.
    fees_usd_per_h: Floats | None = None
    """e, [templates, regions]: charges of a copy beside its nodes' rent; None: none."""
    complexity_usd_per_h: Floats | None = None
    """q_j, [templates, regions]: complexity penalty of a copy; None: none."""
    ordered: bool = False  # Whether requests that cross a link must be no shorter than those that stay.

    def __post_init__(self) -> None:
        for cards in (self.sends_bits_per_s, self.takes_bits_per_s):
            if cards is not None and (cards.shape != (len(self.uses),) or not (cards > 0).all()):
                raise InputError(f"model {self.name}: cards", "needs one rate per template, all positive")
        rates = (self.prefill_per_s, self.decode_per_s, self.closed_per_s)
        _check_table(f"model {self.name}", self.uses, rates)
        if self.prefill_per_s.shape != (len(self.uses), len(self.buckets)):
            raise InputError(
                f"model {self.name}: prefill_per_s", "needs a row per template, a column per bucket"
            )


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A link between two regions, by index, with the bandwidth that a plan may use."""

    source: int
    target: int
    bits_per_s: float
    egress_usd_per_gb: float = 0.0

    @property
    def egress_usd_per_h(self) -> float:
        """USD per hour for 1 bit/s."""
        return self.egress_usd_per_gb * 3600 / 8e9


@dataclass(frozen=True, slots=True, eq=False)
class FlowProgram:
    """The allocation program of this module's docstring, as data."""

    fleet: NodeSupply
    models: tuple[ModelColumns, ...]
    links: tuple[LinkRow, ...] = ()
    running: tuple[ColumnCount, ...] = ()
    pins: tuple[ColumnPin, ...] = ()
    init_penalty: float = 0.0
    headroom: float = 1.0
    budget_usd_per_h: float | None = None
    limits: tuple[CountLimit, ...] = ()
    helpers: tuple[ExtraVariable, ...] = ()
    outages: tuple[Outage, ...] = ()
    spare: tuple[float, ...] = ()
    """By model, the share of its demand that must be served after the loss of any one copy; empty: none."""

    def __post_init__(self) -> None:
        _check_common(self)
        shapes = [(len(model.uses), len(self.fleet.regions)) for model in self.models]
        shape = (len(self.fleet.regions), len(self.fleet.nodes))
        check_limits(self.limits, self.helpers, self.outages, self.spare, shapes, shape)
        pairs = [(link.source, link.target) for link in self.links]
        regions = range(len(self.fleet.regions))
        if len(set(pairs)) < len(pairs) or any(
            a == b or a not in regions or b not in regions for a, b in pairs
        ):
            raise InputError("links", "each must join two different known regions, once")

    def scaled(self, fraction: float) -> FlowProgram:
        """The program with all demand that is not firm multiplied by `fraction`."""
        return replace(
            self,
            models=tuple(
                replace(
                    model,
                    buckets=tuple(
                        bucket if bucket.firm else replace(bucket, rate_per_s=bucket.rate_per_s * fraction)
                        for bucket in model.buckets
                    ),
                )
                for model in self.models
            ),
            limits=tuple(limit.scaled(fraction) for limit in self.limits),
        )

    @property
    def guarded(self) -> bool:
        """Whether any loss must be survived."""
        return any(self.spare) or any(any(outage.shares) for outage in self.outages)

    def fixed_usd_per_h(self, counts: Mapping[ColumnKey, int]) -> float:
        """One-time charges that these counts incur."""
        total_usd_per_h = 0.0
        for helper in self.helpers:
            tables = self.limits[helper.row].copies if helper.usd_per_h else ()
            is_charged = any(
                count and (table := tables[key.group]) is not None and table[key.template, key.region]
                for key, count in counts.items()
                if tables
            )
            total_usd_per_h += helper.usd_per_h if is_charged else 0.0
        return total_usd_per_h

    def fee_usd_per_h(self, key: ColumnKey) -> float:
        """Charges of one copy of a column beside its nodes' rent."""
        fees = self.models[key.group].fees_usd_per_h
        return 0.0 if fees is None else float(fees[key.template, key.region])

    def copy_complexity_usd_per_h(self, key: ColumnKey) -> float:
        """Complexity penalty of one copy of a column."""
        parts = self.models[key.group].complexity_usd_per_h
        return 0.0 if parts is None else float(parts[key.template, key.region])


def network_rows(model: ModelColumns, headroom: float) -> tuple[tuple[Floats, Floats], ...]:
    """For sending and receiving: (bits/s of a copy by bucket [templates, buckets], its limit [templates]).

    A limit is infinite where even a fully utilized copy stays within it: such a row never binds.
    """
    bits = np.array([bucket.kv_bits for bucket in model.buckets])
    result = []
    for table, cards in (
        (model.prefill_per_s, model.sends_bits_per_s),
        (model.decode_per_s, model.takes_bits_per_s),
    ):
        if cards is None:
            result.append((table, np.full(len(table), np.inf)))
            continue
        kv_bits_per_s = table * bits
        result.append(
            (
                kv_bits_per_s,
                np.where(kv_bits_per_s.max(axis=1, initial=0.0) * headroom <= cards, np.inf, cards),
            )
        )
    return tuple(result)


def rent_usd_per_h(program: FlowProgram, counts: Mapping[ColumnKey, int]) -> float:
    """Rent of the nodes that these copies use beyond the reserved ones.

    Nodes are counted before they are priced, as subtracting the price of the reserved nodes may round below zero.
    """
    node_supply = program.fleet
    used = np.zeros(node_supply.available.shape, np.int64)
    for key, count in counts.items():
        used[key.region] += program.models[key.group].uses[key.template].astype(np.int64) * count
    rented = used if node_supply.reserved is None else np.maximum(used - node_supply.reserved, 0)
    return float((rented * node_supply.price_usd_per_h).sum())


def node_price_usd_per_h(node_supply: NodeSupply, uses: Bytes, region: int) -> float:
    return float(uses @ node_supply.price_usd_per_h[region])


def check_limits(
    limits: Sequence[CountLimit],
    helpers: Sequence[ExtraVariable],
    outages: Sequence[Outage],
    spare: Sequence[float],
    shapes: Sequence[tuple[int, int]],
    fleet: tuple[int, int],
) -> None:
    for limit in limits:
        if len(limit.copies) != len(shapes) or any(
            table is not None and table.shape != shape
            for table, shape in zip(limit.copies, shapes, strict=False)
        ):
            raise InputError(f"limit {limit.name}", "needs a table of templates and regions for every model")
        if any(not 0 <= index < len(helpers) for index, _ in limit.helpers):
            raise InputError(f"limit {limit.name}", "names an extra variable that does not exist")
    for outage in outages:
        if outage.gone.shape != fleet or len(outage.shares) != len(shapes):
            raise InputError(
                f"outage {outage.name}", "needs a table of regions and nodes, and a share per model"
            )
    if spare and len(spare) != len(shapes):
        raise InputError("spare", "needs a share per model")
    for share in (*spare, *(value for outage in outages for value in outage.shares)):
        if not 0 <= share <= 1:
            raise InputError("share", f"must be between 0 and 1, is {share}")


def _check_rate(field: str, value: float) -> None:
    if not (np.isfinite(value) and value >= 0):
        raise InputError(field, f"must not be negative, is {value}")


def _check_table(field: str, uses: Bytes, rates: Sequence[Floats]) -> None:
    if uses.ndim != 2 or any(len(rate) != len(uses) for rate in rates):
        raise InputError(field, "needs as many rows of capacity as templates")
    if any(rate.shape != rates[0].shape for rate in rates):
        raise InputError(field, "needs capacities of one shape")
    if any(not np.isfinite(rate).all() or (rate < 0).any() for rate in rates):
        raise InputError(field, "capacities must be finite and not negative")
    if not uses.any(axis=1).all():
        raise InputError(field, "every template must use at least one node")


def _check_common(program: FlowProgram) -> None:
    sizes = [len(model.uses) for model in program.models]
    nodes, regions = len(program.fleet.nodes), len(program.fleet.regions)
    for model in program.models:
        if model.uses.shape[1] != nodes:
            raise InputError(f"{model.name}: uses", f"needs {nodes} node types, has {model.uses.shape[1]}")
    for key, count in (*program.running, *((pin.key, pin.copies) for pin in program.pins)):
        group_ok = 0 <= key.group < len(sizes) and 0 <= key.template < sizes[key.group]
        if not group_ok or not 0 <= key.region < regions:
            raise InputError("running or pinned column", f"{tuple(key)} is not a column of the program")
        if count < 0:
            raise InputError("running or pinned count", f"must not be negative, is {count}")
    for name, keys in (("running", program.running), ("pins", program.pins)):
        if len({column.key for column in keys}) < len(keys):
            raise InputError(name, "names a column twice")
    if not (np.isfinite(program.init_penalty) and program.init_penalty >= 0):
        raise InputError("init_penalty", f"must not be negative, is {program.init_penalty}")
    if not 0 < program.headroom <= 1:
        raise InputError("headroom", f"must be above 0 and at most 1, is {program.headroom}")
    budget = program.budget_usd_per_h
    if budget is not None and not (np.isfinite(budget) and budget >= 0):
        raise InputError("budget_usd_per_h", f"must not be negative, is {budget}")
