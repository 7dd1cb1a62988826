"""Limits, losses, fees and reserved nodes: the solver equals enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from allocate_reference import reference

from potluck.core.errors import InputError
from potluck.plan.allocate.outages import lost_columns
from potluck.plan.allocate.program import (
    ColumnKey,
    ColumnPin,
    CountLimit,
    DemandBucket,
    ExtraVariable,
    FlowProgram,
    LinkRow,
    ModelColumns,
    NodeSupply,
    Outage,
)
from potluck.plan.allocate.solve import solve


def small_program(seed: int) -> FlowProgram:
    """A random program with few plans: all its counts can be gone through."""
    rng = np.random.default_rng(seed)
    regions, models = ((1, 2), (2, 1))[seed % 2]
    node_supply = NodeSupply(
        tuple("ab"[:regions]),
        ("x", "y"),
        rng.uniform(0.5, 4.0, (regions, 2)).round(2),
        rng.integers(1, 4, (regions, 2)),
    )
    result = []
    for m in range(models):
        buckets = tuple(
            DemandBucket(f"b{b}", float(rng.uniform(0.2, 1.5)), float(rng.uniform(1e8, 2e9)))
            for b in range(2)
        )
        uses = np.array([[1, 0], [0, 1]] if rng.random() < 0.7 else [[1, 0], [1, 1]], np.uint8)
        tables = [rng.uniform(0.5, 4.0, (2, 2)) for _ in range(3)]
        if rng.random() < 0.5:  # phases apart: the first prefills, the second decodes
            tables[0][1] = tables[1][0] = tables[2][:] = 0.0
        else:
            tables[0][:] = tables[1][:] = 0.0
        result.append(ModelColumns(f"m{m}", buckets, uses, *tables))
    links = (LinkRow(0, 1, float(rng.uniform(1e8, 4e9))),) if regions > 1 else ()
    return FlowProgram(node_supply, tuple(result), links, headroom=0.8)


def plans(program: FlowProgram) -> Iterator[dict[ColumnKey, int]]:
    keys, ranges = [], []
    for m, model in enumerate(program.models):
        for t, uses in enumerate(model.uses):
            for r in range(len(program.fleet.regions)):
                held = np.flatnonzero(uses)
                most = int((program.fleet.available[r][held] // uses[held]).min())
                if most:
                    keys.append(ColumnKey(m, t, r))
                    ranges.append(range(most + 1))
    for counts in itertools.product(*ranges):
        used = np.zeros(program.fleet.available.shape)
        for key, n in zip(keys, counts, strict=True):
            used[key.region] += program.models[key.group].uses[key.template] * float(n)
        if (used <= program.fleet.available).all():
            yield {key: n for key, n in zip(keys, counts, strict=True) if n}


def served(program: FlowProgram, counts: dict[ColumnKey, int]) -> float:
    """The share of demand that these copies serve, by the plain telling of the program."""
    pins = tuple(
        ColumnPin(ColumnKey(m, t, r), counts.get(ColumnKey(m, t, r), 0), True)
        for m, model in enumerate(program.models)
        for t in range(len(model.uses))
        for r in range(len(program.fleet.regions))
    )
    plain = replace(
        program, pins=pins, limits=(), helpers=(), outages=(), spare=(), running=(), budget_usd_per_h=None
    )
    result = reference(plain, fraction=True)
    assert result is not None
    return result


def shared(program: FlowProgram, shares: tuple[float, ...]) -> FlowProgram:
    models = tuple(
        replace(m, buckets=tuple(replace(b, rate_per_s=b.rate_per_s * share) for b in m.buckets))
        for m, share in zip(program.models, shares, strict=True)
    )
    return replace(program, models=models)


def share_after_worst_loss(program: FlowProgram, counts: dict[ColumnKey, int]) -> float:
    """The share of what is asked for that is served after the worst of the losses."""
    result = [1.0]
    for outage in program.outages:
        rest = {
            key: n
            for key, n in counts.items()
            if not lost_columns(program, outage, key.group)[key.template, key.region]
        }
        result.append(served(shared(program, outage.shares), rest))
    for key in counts if program.spare else ():
        shares = tuple(program.spare[m] if m == key.group else 0.0 for m in range(len(program.models)))
        if shares[key.group]:
            result.append(served(shared(program, shares), counts | {key: counts[key] - 1}))
    return min(result)


def usd_per_h(program: FlowProgram, counts: dict[ColumnKey, int]) -> float:
    """Rent beyond what is paid for, and fees; egress apart."""
    used = np.zeros(program.fleet.available.shape)
    fees = 0.0
    for key, n in counts.items():
        used[key.region] += program.models[key.group].uses[key.template] * float(n)
        table = program.models[key.group].fees_usd_per_h
        fees += n * (0.0 if table is None else float(table[key.template, key.region]))
    for helper in program.helpers:
        if helper.name.startswith("head "):
            fees += helper.usd_per_h * any(key.region == int(helper.name.split()[1]) for key in counts)
    beyond = used if program.fleet.reserved is None else np.maximum(used - program.fleet.reserved, 0)
    return float((beyond * program.fleet.price_usd_per_h).sum()) + fees


def within_limits(program: FlowProgram, counts: dict[ColumnKey, int]) -> bool:
    """Limits without helpers, and the budget."""
    for limit in program.limits:
        tables = limit.copies
        total = sum(
            n * table[key.template, key.region]
            for key, n in counts.items()
            if (table := tables[key.group]) is not None
        )
        if not limit.helpers and not limit.low - 1e-9 <= total <= limit.high + 1e-9:
            return False
    budget = program.budget_usd_per_h
    return budget is None or usd_per_h(program, counts) <= budget + 1e-9


def cheapest(program: FlowProgram) -> float | None:
    for counts in sorted(plans(program), key=lambda each: usd_per_h(program, each)):
        if (
            within_limits(program, counts)
            and min(served(program, counts), share_after_worst_loss(program, counts)) > 1 - 1e-6
        ):
            return usd_per_h(program, counts)
    return None


def assert_equal_enumeration(program: FlowProgram) -> str:
    result, best = solve(program, time_limit_s=60.0), cheapest(program)
    counts = dict(result.counts)
    if best is None:
        assert result.status == "infeasible"
        able = [plan for plan in plans(program) if within_limits(program, plan)]
        most = max(
            (min(served(program, item), share_after_worst_loss(program, item)) for item in able), default=None
        )
        assert result.shortfall is not None
        assert result.shortfall.fraction == pytest.approx(most or 0.0, abs=1e-5)
        assert most is None or within_limits(program, counts)
        assert not counts or share_after_worst_loss(program, counts) >= result.shortfall.fraction - 1e-5
        return "infeasible"
    assert result.status == "optimal"
    assert result.cost_usd_per_h == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert share_after_worst_loss(program, counts) > 1 - 2e-6
    assert within_limits(program, counts)
    return "optimal"


@pytest.mark.parametrize("seed", range(8))
def test_plans_that_survive_the_loss_of_any_copy_equal_enumeration(seed: int) -> None:
    program = small_program(seed)
    rng = np.random.default_rng(seed)
    assert_equal_enumeration(
        replace(program, spare=tuple(float(rng.choice([1.0, 0.6, 0.0])) for _ in program.models))
    )


def one_of_each(seed: int) -> FlowProgram:
    """Hardly more than one node of a type: what survives a loss, or has so many copies, is of unlike nodes."""
    rng = np.random.default_rng(seed)
    types = int(rng.integers(3, 6))
    price = rng.uniform(0.4, 6.0, (1, types)).round(2)
    node_supply = NodeSupply(("a",), tuple("vwxyz"[:types]), price, rng.integers(1, 3, (1, types)))
    per_s, none = (price * rng.uniform(0.5, 1.5, types)).T, np.zeros((types, 1))
    bucket = DemandBucket("b", float(rng.uniform(0.5, 2.0)), 0.0)
    uses = np.eye(types, dtype=np.uint8)
    return FlowProgram(node_supply, (ModelColumns("m", (bucket,), uses, none, none, per_s),), headroom=0.8)


@pytest.mark.parametrize("seed", range(24))
def test_plans_of_single_copies_with_a_loss_margin_equal_enumeration(seed: int) -> None:
    program = one_of_each(seed)
    low = float(2 + seed % 2) if seed % 3 else 0.0
    copies = CountLimit("copies", low, np.inf, (np.ones((len(program.fleet.nodes), 1)),))
    assert_equal_enumeration(replace(program, limits=(copies,), spare=(1.0,) if seed % 3 < 2 else ()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_plans_that_survive_a_region_or_node_outage_equal_enumeration(seed: int) -> None:
    program = small_program(seed)
    rng = np.random.default_rng(seed)
    shape = program.fleet.available.shape
    outages = []
    for place in range(shape[0]):
        gone = np.zeros(shape, bool)
        gone[place] = True
        outages.append(Outage(f"region {place}", gone, tuple(0.5 for _ in program.models)))
    outages.append(Outage("spot", rng.random(shape) < 0.5, tuple(0.7 for _ in program.models)))
    assert_equal_enumeration(
        replace(program, outages=tuple(outages), spare=tuple(0.5 for _ in program.models))
    )


@pytest.mark.parametrize("seed", range(200, 208))
def test_plans_with_limits_fees_and_reserved_nodes_equal_enumeration(seed: int) -> None:
    program = small_program(seed)
    rng = np.random.default_rng(seed)
    node_supply = replace(program.fleet, reserved=rng.integers(0, 3, program.fleet.available.shape))
    models = tuple(
        replace(m, fees_usd_per_h=rng.uniform(0, 1, (len(m.uses), len(node_supply.regions))))
        for m in program.models
    )
    ones = [np.ones((len(m.uses), len(node_supply.regions))) for m in models]
    limits = tuple(
        CountLimit(
            f"copies {m}",
            float(rng.integers(0, 3)),
            float(rng.integers(2, 6)),
            tuple(ones[m] if other == m else None for other in range(len(models))),
        )
        for m in range(len(models))
    )
    heads = []
    for r in range(len(node_supply.regions)):  # paid once in each region where anything runs
        tables = tuple(np.where(np.arange(len(node_supply.regions)) == r, one, 0.0) for one in ones)
        heads.append(ExtraVariable(f"head {r}", usd_per_h=float(rng.uniform(0, 3)), row=len(limits)))
        limits += (
            CountLimit(f"head {r}", -np.inf, 0.0, tables, ((r, -float(node_supply.available[r].sum())),)),
        )
    budget = float(rng.uniform(2, 20)) if rng.random() < 0.5 else None
    flow_program = replace(program, fleet=node_supply, models=models, limits=limits, helpers=tuple(heads))
    assert_equal_enumeration(replace(flow_program, budget_usd_per_h=budget))


def with_type_limit(program: FlowProgram, most: int) -> FlowProgram:
    types = range(len(program.fleet.nodes))
    helpers = tuple(ExtraVariable(f"type {c}") for c in types)
    limits = [
        CountLimit(
            "kinds", -np.inf, float(most), (None,) * len(program.models), tuple((c, 1.0) for c in types)
        )
    ]
    for c in types:
        tables = tuple(
            np.repeat(m.uses[:, c].astype(float)[:, None], len(program.fleet.regions), axis=1)
            for m in program.models
        )
        total = float(program.fleet.available[:, c].sum())
        limits.append(CountLimit(f"use of {c}", -np.inf, 0.0, tables, ((c, -max(total, 1.0)),)))
    return replace(program, helpers=helpers, limits=tuple(limits))


@pytest.mark.parametrize("seed", range(300, 304))
def test_plans_with_at_most_one_node_type_equal_enumeration(seed: int) -> None:
    program = small_program(seed)
    result = solve(with_type_limit(program, 1), time_limit_s=60.0)
    best = None
    for counts in sorted(plans(program), key=lambda each: usd_per_h(program, each)):
        used = {
            int(c) for key in counts for c in np.flatnonzero(program.models[key.group].uses[key.template])
        }
        if len(used) <= 1 and served(program, counts) > 1 - 1e-6:
            best = usd_per_h(program, counts)
            break
    assert (result.status == "optimal") == (best is not None)
    if best is not None:
        assert result.cost_usd_per_h == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_unsatisfiable_limit_is_named_in_the_shortfall() -> None:
    program = small_program(1)
    tables = tuple(np.ones((len(m.uses), len(program.fleet.regions))) for m in program.models)
    result = solve(replace(program, limits=(CountLimit("at least 999 copies", 999.0, np.inf, tables),)))
    assert result.shortfall is not None
    assert "at least 999 copies" in str(result.shortfall)


def test_limit_tables_of_the_wrong_shape_are_refused() -> None:
    program = small_program(1)
    with pytest.raises(InputError, match="needs a table"):
        replace(program, limits=(CountLimit("odd", 0.0, 1.0, (np.ones((9, 9)),) * len(program.models)),))
    with pytest.raises(InputError, match="must be between 0 and 1"):
        replace(program, spare=(2.0,) * len(program.models))


@pytest.mark.parametrize("seed", [400, 402, 404, 406])
def test_firm_demand_is_served_before_other_demand(seed: int) -> None:
    """Of the second model as much as is left when the first must have all of its demand."""
    plain = small_program(seed)
    more = tuple(
        replace(
            m, buckets=tuple(replace(b, rate_per_s=b.rate_per_s * (0.4 if not i else 4.0)) for b in m.buckets)
        )
        for i, m in enumerate(plain.models)
    )
    firm = replace(more[0], buckets=tuple(replace(b, firm=True) for b in more[0].buckets))
    spare = (0.5, 0.5) if seed % 4 else ()
    result = solve(replace(plain, models=(firm, more[1]), spare=spare), time_limit_s=60.0)
    plain = replace(plain, models=more)
    first, second = (shared(plain, item) for item in ((1.0, 0.0), (0.0, 1.0)))
    most = None
    for counts in plans(plain):
        if (
            served(first, counts) < 1 - 1e-6
            or share_after_worst_loss(replace(plain, spare=(0.5, 0.0)[: len(spare)]), counts) < 1 - 1e-6
        ):
            continue
        rest = min(
            served(second, counts),
            share_after_worst_loss(replace(plain, spare=(0.0, 0.5)[: len(spare)]), counts),
        )
        most = rest if most is None else max(most, rest)
    if most is None:
        assert result.status == "infeasible"
        assert result.shortfall is not None
        assert result.shortfall.fraction == 0
    elif most > 1 - 1e-6:
        assert result.status == "optimal"
    else:
        assert result.shortfall is not None
        assert result.shortfall.fraction == pytest.approx(most, abs=1e-5)
