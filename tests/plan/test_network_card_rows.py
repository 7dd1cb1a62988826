"""Network card limits in the program, against the reference model and an enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from allocate_reference import check, random_cards, reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.allocate.program import DemandBucket, FlowProgram, ModelColumns, NodeSupply
from potluck.plan.allocate.relaxation import Duals, Pricer
from potluck.plan.allocate.solve import solve

LIMIT_S = 60.0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
@example(698887)  # a column of a fixed number must not stand for one like it
def test_programs_with_network_cards_equal_the_reference_model(seed: int) -> None:
    program = random_cards(seed)
    result, best = solve(program, time_limit_s=LIMIT_S), reference(program)
    if best is not None:
        assert result.status == "optimal"
        assert result.cost_usd_per_h == pytest.approx(best, rel=1e-6, abs=1e-6)
        check(program, result)
        return
    assert result.shortfall is not None
    fraction = reference(program, fraction=True)
    if fraction is not None:
        assert result.shortfall.fraction == pytest.approx(fraction, abs=1e-5)
        check(program, result, result.shortfall.fraction)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_priced_column_with_thin_network_cards_earns_its_maximum(seed: int) -> None:
    program, rng = random_cards(seed), np.random.default_rng(seed)
    pricer, regions = Pricer(program), len(program.fleet.regions)
    bins = int(pricer.first_bin[-1])
    duals = Duals(
        rng.uniform(0, 3, (2, bins, regions)) * (rng.random((2, bins, regions)) < 0.8),
        rng.uniform(0, 3, bins),
        np.zeros(program.fleet.available.shape),
        np.zeros(len(program.links)),
        0.0,
        np.zeros(program.fleet.available.shape),
        np.zeros(len(program.limits)),
    )
    for m, model in enumerate(program.models):
        first, earned = int(pricer.first_bin[m]), pricer.earnings(m, duals)
        for t in range(len(model.uses)):
            for r in range(regions):
                best = _best_earnings(program, model, t, duals, first, r)
                assert earned[t, r] == pytest.approx(best, rel=1e-6, abs=1e-6)


def _best_earnings(
    program: FlowProgram, model: ModelColumns, t: int, duals: Duals, first: int, r: int
) -> float:
    """The best use of a copy's time, as the linear program that it is."""
    value, rows = [], [[], [], []]
    for b, bucket in enumerate(model.buckets):
        rates = (model.prefill_per_s[t, b], model.decode_per_s[t, b], model.closed_per_s[t, b])
        prices = (duals.phase[0, first + b, r], duals.phase[1, first + b, r], duals.demand[first + b])
        for phase, (rate, price) in enumerate(zip(rates, prices, strict=True)):
            value.append(-rate * price)
            rows[0].append(1.0)
            rows[1].append(rate * bucket.kv_bits / 1e9 if phase == 0 else 0.0)
            rows[2].append(rate * bucket.kv_bits / 1e9 if phase == 1 else 0.0)
    assert model.sends_bits_per_s is not None
    assert model.takes_bits_per_s is not None
    limits = [program.headroom, model.sends_bits_per_s[t] / 1e9, model.takes_bits_per_s[t] / 1e9]
    row, column = np.indices((3, len(value)))
    answer = solve_milp(
        Milp(
            cost=np.array(value),
            lower=np.zeros(len(value)),
            upper=np.full(len(value), np.inf),
            integer=np.zeros(len(value), bool),
            row_lower=np.full(3, -np.inf),
            row_upper=np.array(limits),
            row=row.ravel().astype(np.int64),
            column=column.ravel().astype(np.int64),
            value=np.array(rows, dtype=np.float64).ravel(),
        ),
        time_limit_s=10.0,
        relax=True,
    )
    return -answer.objective


def prefill_decode_program(card_bits_per_s: float) -> FlowProgram:
    """A prefill and a decode template of ten requests a second each, 1 Gbit of KV a request."""
    model = ModelColumns(
        "m",
        (DemandBucket("all", 8.0, 1e9),),
        np.array([[1], [1]], dtype=np.uint8),
        np.array([[10.0], [0.0]]),
        np.array([[0.0], [10.0]]),
        np.zeros((2, 1)),
        sends_bits_per_s=np.full(2, card_bits_per_s),
        takes_bits_per_s=np.full(2, card_bits_per_s),
    )
    return FlowProgram(NodeSupply(("here",), ("a",), np.ones((1, 1)), np.full((1, 1), 9)), (model,))


@pytest.mark.parametrize(("gbps", "nodes"), [(10.0, 2), (7.9, 4), (2.0, 8), (1.9, 0)])
def test_thin_network_cards_raise_the_node_count_or_make_the_program_infeasible(
    gbps: float, nodes: int
) -> None:
    result = solve(prefill_decode_program(gbps * 1e9), time_limit_s=LIMIT_S)
    assert result.found == bool(nodes)
    if nodes:
        assert result.cost_usd_per_h == pytest.approx(nodes)
    else:  # four and five of nine nodes carry 7.6 of the 8 Gbit/s
        assert result.shortfall is not None
        assert result.shortfall.fraction == pytest.approx(4 * 1.9 / 8)


def test_model_columns_refuse_network_card_rates_that_are_not_positive() -> None:
    model = prefill_decode_program(1e9).models[0]
    with pytest.raises(InputError, match="cards"):
        replace(model, sends_bits_per_s=np.zeros(2))
    with pytest.raises(InputError, match="cards"):
        replace(model, takes_bits_per_s=np.ones(3))
