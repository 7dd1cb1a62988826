"""What the allocation promises beside the optimum: bounds, time, warm starts, penalties, pins, explanations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from allocate_reference import check, random_cover, random_flow, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.plan.allocate import colgen, flow, flow_price, highs, primal, survivors
from potluck.plan.allocate.program import (
    ColumnCount,
    ColumnKey,
    ColumnPin,
    CoverDemand,
    CoverProgram,
    DemandBucket,
    FlowProgram,
    LinkRow,
    ModelColumns,
    NodeSupply,
    Program,
)
from potluck.plan.allocate.solve import solve

Seeds = st.integers(10_000, 1_000_000)
Kinds = st.sampled_from([random_cover, random_flow])


def fleet(price: list[list[float]], available: list[list[int]]) -> NodeSupply:
    regions = ("us-east", "us-west")[: len(price)]
    nodes = ("8xH100", "8xL40S")[: len(price[0])]
    return NodeSupply(regions, nodes, np.array(price), np.array(available))


def demand(name: str, rate: float, uses: list[list[int]], throughput: list[float]) -> CoverDemand:
    return CoverDemand(name, rate, np.array(uses, dtype=np.uint8), np.array(throughput))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(Kinds, Seeds, st.sampled_from([0.0, 0.03, 0.3]), st.integers(2, 60))
def test_the_bound_is_below_the_optimum_wherever_it_stops(
    kind: type[Program], seed: int, gap: float, ticks: int
) -> None:
    program = kind(seed)
    ticking: Iterator[int] = iter(range(1_000_000))
    found = solve(program, time_limit_s=float(ticks), gap_target=gap, clock=lambda: float(next(ticking)))
    best = reference(program)
    if best is None:
        assert not found.found
        return
    assert found.status != "infeasible"
    assert found.lower_bound_usd_per_h <= best * (1 + 1e-6) + 1e-6
    if found.found:
        check(program, found)
        assert found.cost_usd_per_h >= best * (1 - 1e-6) - 1e-6
        assert found.gap <= max(gap, 1.0)


@pytest.mark.parametrize("kind", [random_cover, random_flow])
def test_the_time_limit_holds_even_if_every_solve_uses_all_it_may(
    kind: type[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    solve_milp, grow = highs.solve_milp, highs.GrowingLp.solve

    def slow(problem: highs.Milp, *, time_limit_s: float, **rest: object) -> highs.MilpResult:
        now[0] += max(time_limit_s, highs.MIN_TIME_S)
        return solve_milp(problem, time_limit_s=60.0, **rest)  # type: ignore[arg-type]

    def slow_grow(self: highs.GrowingLp, time_limit_s: float) -> object:
        now[0] += max(0.3 * time_limit_s, highs.MIN_TIME_S)
        return grow(self, 60.0)

    for module in (flow, flow_price, primal, survivors):
        monkeypatch.setattr(module, "solve_milp", slow, raising=True)
    monkeypatch.setattr(colgen.GrowingLp, "solve", slow_grow)
    for seed in range(15):
        now[0] = 0.0
        found = solve(kind(seed), time_limit_s=10.0, clock=lambda: now[0])
        assert now[0] <= 10.0 + 5 * highs.MIN_TIME_S
        assert found.status in ("optimal", "feasible", "infeasible", "unknown")


@pytest.mark.parametrize("kind", [random_cover, random_flow])
def test_a_warm_start_gives_the_same_optimum(kind: type[Program]) -> None:
    tried = 0
    for seed in range(400, 425):
        program = kind(seed)
        first = solve(program)
        if not first.found:
            continue
        for factor in (0.9, 1.0, 1.1):
            changed = program.scaled(factor)
            cold, warm = solve(changed), solve(changed, warm=first)
            assert warm.status == cold.status
            if cold.found:
                assert warm.cost_usd_per_h == pytest.approx(cold.cost_usd_per_h, rel=1e-6)
                check(changed, warm)
                tried += 1
    assert tried > 20


def test_a_warm_start_of_another_shape_is_ignored() -> None:
    small = CoverProgram(fleet([[1.0]], [[5]]), (demand("m", 1.0, [[1]], [1.0]),))
    large = CoverProgram(fleet([[1.0, 2.0]], [[5, 5]]), (demand("m", 1.0, [[1, 0]], [1.0]),))
    assert solve(large, warm=solve(small)).status == "optimal"


def test_the_penalty_keeps_what_runs() -> None:
    """Region 1 is 5 % cheaper: worth moving to without a penalty, not with one of 10 %."""
    one = demand("m", 2.0, [[1]], [1.0])
    place = fleet([[1.0], [0.95]], [[9], [9]])
    running = (ColumnCount(ColumnKey(0, 0, 0), 2),)
    moved = solve(CoverProgram(place, (one,), running=running, init_penalty=0.0))
    stayed = solve(CoverProgram(place, (one,), running=running, init_penalty=0.1))
    assert moved.counts == (ColumnCount(ColumnKey(0, 0, 1), 2),)
    assert stayed.counts == (ColumnCount(ColumnKey(0, 0, 0), 2),)
    assert stayed.cost_usd_per_h == pytest.approx(2.0)
    more = solve(CoverProgram(place, (replace(one, rate=3.0),), running=running, init_penalty=0.1))
    assert more.cost_usd_per_h == pytest.approx(2.0 + 0.95 * 1.1)
    assert more.rent_usd_per_h == pytest.approx(2.95)


def test_pins() -> None:
    base = CoverProgram(fleet([[1.0], [3.0]], [[9], [9]]), (demand("m", 2.0, [[1]], [1.0]),))
    dear = replace(base, pins=(ColumnPin(ColumnKey(0, 0, 1), 1),))
    assert dict(solve(dear).counts) == {ColumnKey(0, 0, 0): 1, ColumnKey(0, 0, 1): 1}
    without = replace(base, pins=(ColumnPin(ColumnKey(0, 0, 0), 0, exactly=True),))
    assert dict(solve(without).counts) == {ColumnKey(0, 0, 1): 2}
    over = solve(replace(base, pins=(ColumnPin(ColumnKey(0, 0, 0), 10),)))
    assert over.status == "infeasible"
    assert over.shortfall is not None
    assert over.shortfall.overpinned == ("us-east: 8xH100",)


def test_a_budget_that_does_not_suffice_is_what_binds() -> None:
    program = CoverProgram(fleet([[1.0]], [[9]]), (demand("m", 4.0, [[1]], [1.0]),), budget_usd_per_h=3.5)
    found = solve(program)
    assert found.status == "infeasible"
    assert found.shortfall is not None
    assert found.shortfall.fraction == pytest.approx(0.75)
    assert [binding.name for binding in found.shortfall.binding] == ["budget"]
    assert solve(replace(program, budget_usd_per_h=4.0)).status == "optimal"


def linked(gbps: float) -> FlowProgram:
    """Prefill only in the east, decode only in the west; 1 Gbit per request crosses."""
    none = np.zeros((2, 1))
    model = ModelColumns(
        "m",
        (DemandBucket("short", 4.0, 1e9),),
        np.array([[1, 0], [0, 1]], dtype=np.uint8),
        np.array([[1.0], [0.0]]),
        np.array([[0.0], [1.0]]),
        none,
    )
    place = fleet([[2.0, 9.0], [9.0, 1.0]], [[9, 0], [0, 9]])
    return FlowProgram(place, (model,), (LinkRow(0, 1, gbps * 1e9),) if gbps else ())


def test_flows_cross_a_link_and_a_narrow_link_binds() -> None:
    wide = solve(linked(4.0))
    assert wide.status == "optimal"
    assert wide.cost_usd_per_h == pytest.approx(4 * 2.0 + 4 * 1.0)
    assert [(f.source, f.target, f.rate_per_s) for f in wide.flows] == [(0, 1, pytest.approx(4.0))]
    narrow = solve(linked(3.0))
    assert narrow.status == "infeasible"
    assert narrow.shortfall is not None
    assert narrow.shortfall.fraction == pytest.approx(0.75)
    assert narrow.shortfall.binding[0].name == "link us-east->us-west"
    assert narrow.shortfall.binding[0].fraction_per_unit == pytest.approx(0.25)


def test_without_a_link_the_demand_is_named() -> None:
    found = solve(linked(0.0))
    assert found.status == "infeasible"
    assert found.shortfall is not None
    assert found.shortfall.unserved == ("m/short",)
    assert "no template" in str(found.shortfall)


def test_scarce_nodes_are_named_dearest_first() -> None:
    program = CoverProgram(fleet([[5.0, 1.0]], [[2, 8]]), (demand("m", 6.0, [[1, 0]], [1.0]),))
    found = solve(program)
    assert found.status == "infeasible"
    assert found.shortfall is not None
    assert found.shortfall.fraction == pytest.approx(2 / 6)
    assert [binding.name for binding in found.shortfall.binding] == ["us-east: 8xH100"]
    assert found.shortfall.binding[0].fraction_per_unit == pytest.approx(1 / 6)
    assert "33.3%" in str(found.shortfall)


def test_shadow_prices_of_scarce_nodes() -> None:
    """A node of the cheap type more replaces one of the dear type."""
    one = demand("m", 4.0, [[1, 0], [0, 1]], [1.0, 1.0])
    found = solve(CoverProgram(fleet([[1.0, 3.0]], [[2, 9]]), (one,)))
    assert found.cost_usd_per_h == pytest.approx(8.0)
    assert found.prices.nodes_usd_per_h == pytest.approx(np.array([[2.0, 0.0]]))
    assert found.prices.demands_usd_per_h == pytest.approx((3.0,))


def test_nothing_asked_costs_nothing() -> None:
    program = CoverProgram(fleet([[1.0]], [[1]]), (demand("m", 0.0, [[1]], [1.0]),))
    for found in (solve(program), solve(CoverProgram(program.fleet, ()))):
        assert (found.status, found.cost_usd_per_h, found.counts) == ("optimal", 0.0, ())


def test_absurd_values_are_refused() -> None:
    place = fleet([[1.0]], [[1]])
    one = demand("m", 1.0, [[1]], [1.0])
    with pytest.raises(InputError, match="headroom"):
        CoverProgram(place, (one,), headroom=0.0)
    with pytest.raises(InputError, match="rate"):
        demand("m", float("nan"), [[1]], [1.0])
    with pytest.raises(InputError, match="at least one node"):
        demand("m", 1.0, [[0]], [1.0])
    with pytest.raises(InputError, match="not a column"):
        CoverProgram(place, (one,), pins=(ColumnPin(ColumnKey(0, 7, 0), 1),))
    with pytest.raises(InputError, match="time_limit_s"):
        solve(CoverProgram(place, (one,)), time_limit_s=0.0)
    with pytest.raises(InputError, match="links"):
        FlowProgram(place, (), (LinkRow(0, 0, 1.0),))
