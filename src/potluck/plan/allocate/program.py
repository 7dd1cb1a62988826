"""The allocation program: how many copies of which template to run in which region.

Sets
    b        demands: a model's bucket of prompt lengths, with rate D_b (requests/s)
    r, s     regions
    c        node types; region r rents A_rc of them (those already running included) for p_rc $/h
    j        columns: a template of one model in one region, using U_jc nodes; price p_j = sum_c p_rc U_jc

Variables
    n_j      integer   copies of column j; v_j of them run already
    x_jb     >= 0      copies' time spent on prefilling bucket b
    z_jb     >= 0      ... on decoding bucket b
    w_jb     >= 0      ... on doing both inside the template, when it is a closed group
    f_brs    >= 0      requests/s of bucket b prefilled in region r and decoded in region s
    y_b      0 or 1    whether bucket b of an ordered model may cross a link; all longer ones may then, and only they

Minimise  sum_j p_j (n_j + K max(0, n_j - v_j)) + (e_j + q_j) n_j - sum_rc p_rc g_rc
          + sum_brs (egress_rs kv_b + [r != s] q_b) f_brs     e_j: what a copy costs beside its nodes' rent
                                                              q: what moving parts count for; nobody pays it

Rows
    time_j       sum_b (x_jb + z_jb + w_jb) <= h n_j          h: utilisation headroom
    demand_b     sum_rs f_brs + sum_j C_jb w_jb >= theta D_b   theta is 1, or maximised; a firm one asks for D_b
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
    paid_rc      g_rc <= sum_{j in r} U_jc n_j                g_rc <= R_rc nodes that are paid for already, for
                                                              which p_rc g_rc comes off the cost and the rent
    budget       all of that but the penalty, egress and q <= B
    pin_j        n_j >= k or n_j = k
    limit_i      low_i <= sum_j A_ij n_j + sum_h B_ih y_h - t_i theta <= high_i     y_h: a helper, whole or not;
                 what an owner asks of counts; losses that must be survived become such rows (`outages.py`)

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
    name: str
    upper: float = 1.0
    whole: bool = True
    usd_per_h: float = 0.0  # What is paid where it is 1 ...
    row: int = -1  # ... which the copies in this limit call for.


@dataclass(frozen=True, slots=True, eq=False)
class CountLimit:
    name: str
    low: float
    high: float
    copies: tuple[Floats | None, ...]  # A: per model [templates, regions]; None: all 0.
    helpers: tuple[tuple[int, float], ...] = ()  # (helper, B)
    theta: float = 0.0  # t: for rows that ask for so much of the demand.

    def scaled(self, fraction: float) -> CountLimit:
        return self if not self.theta else replace(self, theta=self.theta * fraction)


@dataclass(frozen=True, slots=True, eq=False)
class Outage:
    """Nodes that may go all at once, and the share of each model's demand that must still be served without them."""

    name: str
    gone: NDArray[np.bool_]  # [regions, node types]; a copy with a node of these goes with it.
    shares: tuple[float, ...]  # Per model; 0: nothing is asked.


class ColumnKey(NamedTuple):
    """A column: the template with this index of this group (a model), in this region."""

    group: int
    template: int
    region: int


class ColumnCount(NamedTuple):
    key: ColumnKey
    copies: int


class ColumnPin(NamedTuple):
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
    """Nodes one may hold at all, those running now included; 0 where a region does not rent a type."""
    reserved: Ints | None = None  # R: of these, those that are paid for already; None: none.

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
    kv_bits: float  # What crosses a link when prefill and decode are in different regions.
    barred: frozenset[tuple[int, int]] = frozenset()
    """(source, target) regions between which the KV would take too long for the objective."""
    firm: bool = False  # Asked for whole, whatever theta is.
    crossing_usd_per_h: float = 0.0  # q_b: what a request a second between two regions counts for.

    def __post_init__(self) -> None:
        _check_rate(f"bucket {self.name}: rate_per_s", self.rate_per_s)
        _check_rate(f"bucket {self.name}: kv_bits", self.kv_bits)


@dataclass(frozen=True, slots=True, eq=False)
class ModelColumns:
    """A model's buckets and templates; rates are of one copy that does nothing else, 0 where it cannot."""

    name: str
    buckets: tuple[DemandBucket, ...]
    uses: Bytes  # [templates, node types]
    prefill_per_s: Floats  # P, [templates, buckets]
    decode_per_s: Floats  # Q
    closed_per_s: Floats  # C: requests/s doing both phases inside the template.
    allowed: NDArray[np.bool_] | None = None  # [templates, regions]; None: wherever its nodes are rented.
    sends_bits_per_s: Floats | None = None
    """O, [templates]: what the network cards of a copy may send; None: more than it can make."""
    takes_bits_per_s: Floats | None = None  # I: what they may receive.
    fees_usd_per_h: Floats | None = None
    """e, [templates, regions]: what a copy costs beside its nodes' rent; None: nothing."""
    complexity_usd_per_h: Floats | None = None
    """q_j, likewise: what the moving parts of a copy count for; None: nothing."""
    ordered: bool = False  # Whether who crosses a link is no shorter than who stays in a region.

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
    source: int
    target: int
    bits_per_s: float
    egress_usd_per_gb: float = 0.0

    @property
    def egress_usd_per_h(self) -> float:
        """Dollars an hour for one bit a second."""
        return self.egress_usd_per_gb * 3600 / 8e9


@dataclass(frozen=True, slots=True, eq=False)
class FlowProgram:
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
    """Per model the share of its demand that must still be served without any one of its copies; empty: nothing."""

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
        """The same with every demand multiplied that is not firm."""
        return replace(
            self,
            models=tuple(
                replace(
                    m,
                    buckets=tuple(
                        b if b.firm else replace(b, rate_per_s=b.rate_per_s * fraction) for b in m.buckets
                    ),
                )
                for m in self.models
            ),
            limits=tuple(limit.scaled(fraction) for limit in self.limits),
        )

    @property
    def guarded(self) -> bool:
        return any(self.spare) or any(any(outage.shares) for outage in self.outages)

    def fixed_usd_per_h(self, counts: Mapping[ColumnKey, int]) -> float:
        """What is paid once, however many copies call for it."""
        paid = 0.0
        for helper in self.helpers:
            tables = self.limits[helper.row].copies if helper.usd_per_h else ()
            called = any(
                count and (table := tables[key.group]) is not None and table[key.template, key.region]
                for key, count in counts.items()
                if tables
            )
            paid += helper.usd_per_h if called else 0.0
        return paid

    def fee_usd_per_h(self, key: ColumnKey) -> float:
        fees = self.models[key.group].fees_usd_per_h
        return 0.0 if fees is None else float(fees[key.template, key.region])

    def copy_complexity_usd_per_h(self, key: ColumnKey) -> float:
        parts = self.models[key.group].complexity_usd_per_h
        return 0.0 if parts is None else float(parts[key.template, key.region])


def card_rows(model: ModelColumns, headroom: float) -> tuple[tuple[Floats, Floats], ...]:
    """For sending and receiving: the bits/s that a copy makes in each bucket [templates, buckets], and its limit.

    A limit is infinite where a copy that is busy all its planned time stays within it: such a row never binds.
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
        made = table * bits
        result.append((made, np.where(made.max(axis=1, initial=0.0) * headroom <= cards, np.inf, cards)))
    return tuple(result)


def rent_usd_per_h(program: FlowProgram, counts: Mapping[ColumnKey, int]) -> float:
    """The rent of the nodes that these copies use beyond the reserved ones.

    Nodes are counted before they are priced: the price of all nodes less that of the reserved ones would leave a
    rounding error, which may be below zero.
    """
    node_supply = program.fleet
    used = np.zeros(node_supply.available.shape, np.int64)
    for key, count in counts.items():
        used[key.region] += program.models[key.group].uses[key.template].astype(np.int64) * count
    rented = used if node_supply.reserved is None else np.maximum(used - node_supply.reserved, 0)
    return float((rented * node_supply.price_usd_per_h).sum())


def price_of(node_supply: NodeSupply, uses: Bytes, region: int) -> float:
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
        if any(not 0 <= place < len(helpers) for place, _ in limit.helpers):
            raise InputError(f"limit {limit.name}", "names a helper that is not there")
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
        if len({one.key for one in keys}) < len(keys):
            raise InputError(name, "names a column twice")
    if not (np.isfinite(program.init_penalty) and program.init_penalty >= 0):
        raise InputError("init_penalty", f"must not be negative, is {program.init_penalty}")
    if not 0 < program.headroom <= 1:
        raise InputError("headroom", f"must be above 0 and at most 1, is {program.headroom}")
    budget = program.budget_usd_per_h
    if budget is not None and not (np.isfinite(budget) and budget >= 0):
        raise InputError("budget_usd_per_h", f"must not be negative, is {budget}")
