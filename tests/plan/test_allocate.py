"""The allocation solver: bounds, time limit, warm starts, penalties, pins, explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from allocate_reference import check, closed, random_closed, random_flow, reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.plan.allocate import flow, highs, relaxation
from potluck.plan.allocate.program import (
    ColumnCount,
    ColumnKey,
    ColumnPin,
    DemandBucket,
    FlowProgram,
    LinkRow,
    ModelColumns,
    NodeSupply,
)
from potluck.plan.allocate.solve import cost_of, overpinned, solve

Kind = Callable[[int], FlowProgram]
Seeds = st.integers(10_000, 1_000_000)
Kinds = st.sampled_from([random_closed, random_flow])


def fleet(price: list[list[float]], available: list[list[int]]) -> NodeSupply:
    regions = ("us-east", "us-west")[: len(price)]
    return NodeSupply(regions, ("8xH100", "8xL40S")[: len(price[0])], np.array(price), np.array(available))


def demand(name: str, rate: float, uses: list[list[int]], throughput: list[float]) -> ModelColumns:
    return closed(name, rate, np.array(uses, dtype=np.uint8), np.array(throughput))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(Kinds, Seeds, st.sampled_from([0.0, 0.03, 0.3]), st.integers(2, 60))
def test_solver_lower_bound_never_exceeds_the_optimum_when_stopped_early(
    kind: Kind, seed: int, gap: float, ticks: int
) -> None:
    program = kind(seed)
    ticking: Iterator[int] = iter(range(1_000_000))
    result = solve(program, time_limit_s=float(ticks), gap_target=gap, clock=lambda: float(next(ticking)))
    best = reference(program)
    if best is None:
        assert not result.found
        return
    assert result.status != "infeasible"
    assert result.lower_bound_usd_per_h <= best * (1 + 1e-6) + 1e-6
    if result.found:
        check(program, result)
        assert result.cost_usd_per_h >= best * (1 - 1e-6) - 1e-6
        assert result.gap <= max(gap, 1.0)


@pytest.mark.parametrize("kind", [random_closed, random_flow])
def test_solver_keeps_its_time_limit_when_every_milp_uses_its_whole_budget(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    solve_milp = highs.solve_milp

    def slow(milp: highs.Milp, *, time_limit_s: float, **rest: object) -> highs.MilpResult:
        now[0] += max(time_limit_s, highs.MIN_TIME_S)
        return solve_milp(milp, time_limit_s=60.0, **rest)  # type: ignore[arg-type]

    for module in (flow, relaxation):
        monkeypatch.setattr(module, "solve_milp", slow, raising=True)
    for seed in range(6):
        now[0] = 0.0
        result = solve(kind(seed), time_limit_s=10.0, clock=lambda: now[0])
        assert now[0] <= 10.0 + 5 * highs.MIN_TIME_S
        assert result.status in ("optimal", "feasible", "infeasible", "unknown")


def test_change_penalty_keeps_running_deployments_unless_the_saving_exceeds_it() -> None:
    """Region 1 is 5 % cheaper: worth moving to without a penalty, not with one of 10 %."""
    one = demand("m", 2.0, [[1]], [1.0])
    place = fleet([[1.0], [0.95]], [[9], [9]])
    running = (ColumnCount(ColumnKey(0, 0, 0), 2),)
    moved = solve(FlowProgram(place, (one,), running=running, init_penalty=0.0))
    stayed = solve(FlowProgram(place, (one,), running=running, init_penalty=0.1))
    assert moved.counts == (ColumnCount(ColumnKey(0, 0, 1), 2),)
    assert stayed.counts == (ColumnCount(ColumnKey(0, 0, 0), 2),)
    assert stayed.cost_usd_per_h == pytest.approx(2.0)
    more = solve(FlowProgram(place, (demand("m", 3.0, [[1]], [1.0]),), running=running, init_penalty=0.1))
    assert more.cost_usd_per_h == pytest.approx(2.0 + 0.95 * 1.1)
    assert more.rent_usd_per_h == pytest.approx(2.95)


def test_allocation_keeps_pinned_counts_and_names_pins_over_supply() -> None:
    base = FlowProgram(fleet([[1.0], [3.0]], [[9], [9]]), (demand("m", 2.0, [[1]], [1.0]),))
    dear = replace(base, pins=(ColumnPin(ColumnKey(0, 0, 1), 1),))
    assert dict(solve(dear).counts) == {ColumnKey(0, 0, 0): 1, ColumnKey(0, 0, 1): 1}
    without = replace(base, pins=(ColumnPin(ColumnKey(0, 0, 0), 0, exactly=True),))
    assert dict(solve(without).counts) == {ColumnKey(0, 0, 1): 2}
    over = solve(replace(base, pins=(ColumnPin(ColumnKey(0, 0, 0), 10),)))
    assert over.status == "infeasible"
    assert over.shortfall is not None
    assert over.shortfall.overpinned == ("us-east: 8xH100",)


def test_insufficient_budget_is_named_as_the_binding_constraint() -> None:
    program = FlowProgram(fleet([[1.0]], [[9]]), (demand("m", 4.0, [[1]], [1.0]),), budget_usd_per_h=3.5)
    result = solve(program)
    assert result.status == "infeasible"
    assert result.shortfall is not None
    assert result.shortfall.fraction == pytest.approx(0.75)
    assert result.shortfall.binding == ("budget",)
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


def test_flows_use_a_wide_link_and_a_narrow_link_is_named_as_binding() -> None:
    wide = solve(linked(4.0))
    assert wide.status == "optimal"
    assert wide.cost_usd_per_h == pytest.approx(4 * 2.0 + 4 * 1.0)
    assert [(f.source, f.target, f.rate_per_s) for f in wide.flows] == [(0, 1, pytest.approx(4.0))]
    narrow = solve(linked(3.0))
    assert narrow.status == "infeasible"
    assert narrow.shortfall is not None
    assert narrow.shortfall.fraction == pytest.approx(0.75)
    assert narrow.shortfall.binding[0] == "link us-east->us-west"


def test_demand_that_needs_a_missing_link_is_named_as_unserved() -> None:
    result = solve(linked(0.0))
    assert result.status == "infeasible"
    assert result.shortfall is not None
    assert result.shortfall.unserved == ("m/short",)
    assert "no template" in str(result.shortfall)


def test_binding_constraints_name_scarce_nodes_by_descending_price() -> None:
    program = FlowProgram(fleet([[5.0, 1.0]], [[2, 8]]), (demand("m", 6.0, [[1, 0]], [1.0]),))
    result = solve(program)
    assert result.status == "infeasible"
    assert result.shortfall is not None
    assert result.shortfall.fraction == pytest.approx(2 / 6)
    assert result.shortfall.binding == ("us-east: 8xH100",)
    assert "33.3%" in str(result.shortfall)


def test_shadow_price_of_a_scarce_node_is_the_cost_it_would_save() -> None:
    """A node of the cheap type more replaces one of the dear type."""
    one = demand("m", 4.0, [[1, 0], [0, 1]], [1.0, 1.0])
    result = solve(FlowProgram(fleet([[1.0, 3.0]], [[2, 9]]), (one,)))
    assert result.cost_usd_per_h == pytest.approx(8.0)
    assert result.node_prices_usd_per_h == pytest.approx(np.array([[2.0, 0.0]]))


def test_allocation_without_demand_costs_nothing() -> None:
    program = FlowProgram(fleet([[1.0]], [[1]]), (demand("m", 0.0, [[1]], [1.0]),))
    for result in (solve(program), solve(FlowProgram(program.fleet, ()))):
        assert (result.status, result.cost_usd_per_h, result.counts) == ("optimal", 0.0, ())


def test_flow_program_refuses_invalid_values() -> None:
    place = fleet([[1.0]], [[1]])
    one = demand("m", 1.0, [[1]], [1.0])
    with pytest.raises(InputError, match="headroom"):
        FlowProgram(place, (one,), headroom=0.0)
    with pytest.raises(InputError, match="rate"):
        demand("m", float("nan"), [[1]], [1.0])
    with pytest.raises(InputError, match="at least one node"):
        demand("m", 1.0, [[0]], [1.0])
    with pytest.raises(InputError, match="not a column"):
        FlowProgram(place, (one,), pins=(ColumnPin(ColumnKey(0, 7, 0), 1),))
    with pytest.raises(InputError, match="time_limit_s"):
        solve(FlowProgram(place, (one,)), time_limit_s=0.0)
    with pytest.raises(InputError, match="links"):
        FlowProgram(place, (), (LinkRow(0, 0, 1.0),))


def test_warm_start_plan_is_returned_when_the_time_limit_has_passed() -> None:
    program = random_closed(1, extras=False)
    best = solve(program)
    assert best.found
    hours = iter(range(0, 10**9, 3600))
    late = solve(program, time_limit_s=1.0, starts=[dict(best.counts)], clock=lambda: float(next(hours)))
    assert late.counts == best.counts
    assert late.status == "feasible"


COUNTS = st.lists(st.integers(0, 6), min_size=3, max_size=3)
PRICES = st.lists(st.floats(0.01, 99.0), min_size=2, max_size=2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(COUNTS, PRICES, st.lists(st.integers(0, 18), min_size=2, max_size=2))
@example([2, 3, 0], [0.7, 1.0], [5, 0])
def test_rent_of_reserved_nodes_is_never_negative(
    counts: list[int], prices: list[float], reserved: list[int]
) -> None:
    place = replace(fleet([prices], [[18, 18]]), reserved=np.array([reserved]))
    models = tuple(demand(name, 0.1, [[1, 1]], [1.0]) for name in "abc")
    held = {ColumnKey(group, 0, 0): count for group, count in enumerate(counts)}
    rent, cost = cost_of(FlowProgram(place, models), held)
    beyond = [max(0, sum(counts) - most) * price for most, price in zip(reserved, prices, strict=True)]
    assert rent == cost == pytest.approx(sum(beyond), rel=1e-12, abs=0.0)
    assert rent >= 0.0


@pytest.mark.parametrize("price", [0.7, 0.1, 1.1, 4.41])
def test_plan_of_reserved_nodes_alone_has_a_cost_of_exactly_zero(price: float) -> None:
    place = replace(fleet([[price]], [[5]]), reserved=np.array([[5]]))
    models = (demand("a", 2.0, [[1]], [1.0]), demand("b", 3.0, [[1]], [1.0]))
    result = solve(FlowProgram(place, models))
    assert result.found
    assert result.rent_usd_per_h == result.cost_usd_per_h == 0.0


def test_reserved_nodes_of_pins_do_not_count_against_the_budget() -> None:
    place = replace(fleet([[2.0]], [[5]]), reserved=np.array([[2]]))
    pins = (ColumnPin(ColumnKey(0, 0, 0), 3),)
    program = FlowProgram(place, (demand("a", 9.0, [[1]], [1.0]),), pins=pins, budget_usd_per_h=2.0)
    assert overpinned(program) == ()
    assert overpinned(replace(program, budget_usd_per_h=1.9)) == ("budget",)
