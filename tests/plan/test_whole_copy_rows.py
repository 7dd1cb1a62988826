"""Strengthening rows for whole copies hold for every plan."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from allocate_reference import random_cards, random_flow

from potluck.plan.allocate.flow import fix_counts, solve_flow, start_vector
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.matrix import FlowRows
from potluck.plan.allocate.program import ColumnKey, DemandBucket, FlowProgram, ModelColumns, NodeSupply
from potluck.plan.allocate.relaxation import Pricer, relax_flow, with_whole_copy_rows

LIMIT_S = 60.0


def deadline() -> Deadline:
    return Deadline(LIMIT_S, time.process_time)


def strengthened_program(program: FlowProgram) -> tuple[FlowProgram, float, float] | None:
    """The program with its rows, and the bounds without and with them; None where it cannot be met."""
    pricer = Pricer(program)
    most = relax_flow(pricer, deadline(), at_cost=False, keys=pricer.first_keys())
    if most is None or most.theta < 1 - 1e-6:
        return None
    plain = relax_flow(pricer, deadline(), at_cost=True, keys=most.keys)
    assert plain is not None
    rows = with_whole_copy_rows(pricer, plain, deadline())
    return None if rows is None else (rows[0].program, plain.bound, rows[1].bound)


@pytest.mark.parametrize("make", [random_flow, random_cards])
def test_strengthening_rows_hold_for_every_feasible_plan(make: type[FlowProgram]) -> None:
    """Every plan of a few copies that meets the demand, by trying them all."""
    rng, seen = np.random.default_rng(7), 0
    for seed in range(900, 908):
        program = make(seed, extras=False)  # type: ignore[call-arg]
        result = strengthened_program(program)
        if result is None:
            continue
        rows = result[0].limits[len(program.limits) :]
        keys = [
            ColumnKey(m, t, r)
            for m, model in enumerate(program.models)
            for t in range(len(model.uses))
            for r in range(len(program.fleet.regions))
        ]
        some = [keys[k] for k in sorted(rng.choice(len(keys), min(4, len(keys)), replace=False))]
        matrix = FlowRows(program, keys)
        for counts in itertools.product(range(3), repeat=len(some)):
            held = {key: n for key, n in zip(some, counts, strict=True) if n}
            if fix_counts(matrix, start_vector(matrix, held), True, deadline()) is None:
                continue
            seen += 1
            for row in rows:
                have = sum(
                    n * table[key.template, key.region]
                    for key, n in held.items()
                    if (table := row.copies[key.group]) is not None
                )
                assert have >= row.low + row.theta - 1e-6
    assert seen


def test_strengthened_relaxation_charges_a_fractional_copy_as_a_whole_one() -> None:
    """One node does ten times what is asked: a relaxation rents a tenth of it, and with the rows all of it."""
    none, one = np.zeros((1, 1)), np.array([[10.0]])
    model = ModelColumns("m", (DemandBucket("b", 1.0, 0.0),), np.ones((1, 1), np.uint8), none, none, one)
    node_supply = NodeSupply(("here",), ("a",), np.array([[7.0]]), np.array([[5]]))
    result = strengthened_program(FlowProgram(node_supply, (model,)))
    assert result is not None
    assert result[1] == pytest.approx(0.7)
    assert result[2] == pytest.approx(7.0)


def test_demand_price_is_that_of_a_fractional_copy_while_the_bound_charges_a_whole_one() -> None:
    """Demand prices are the duals of the relaxation without strengthening rows."""
    none, one = np.zeros((1, 1)), np.array([[10.0]])
    model = ModelColumns("m", (DemandBucket("b", 1.0, 0.0),), np.ones((1, 1), np.uint8), none, none, one)
    node_supply = NodeSupply(("here",), ("a",), np.array([[7.0]]), np.array([[5]]))
    flow = solve_flow(FlowProgram(node_supply, (model,)), deadline(), 0.0, [])
    assert flow.upper == pytest.approx(7.0)
    assert flow.prices is not None
    assert flow.prices.duals.demand.tolist() == pytest.approx([0.7])
