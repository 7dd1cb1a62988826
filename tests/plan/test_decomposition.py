"""Decomposition by model and removal of dominated columns keep the optimum."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from allocate_reference import random_flow, reference

from potluck.plan.allocate.decomposition import ModelDecomposition, is_separable
from potluck.plan.allocate.flow import solve_relaxation
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.program import ColumnKey, FlowProgram
from potluck.plan.allocate.solve import solve, with_stand_ins, without_dominated


def joint_program(seed: int) -> FlowProgram:
    """A random program of several models that share nodes, links and perhaps a budget."""
    return replace(random_flow(seed), running=(), pins=(), limits=(), helpers=())


SEEDS = [
    seed
    for seed in range(40)
    if is_separable(joint_program(seed)) and reference(joint_program(seed)) is not None
][:8]


@pytest.mark.parametrize("seed", SEEDS)
def test_decomposition_bound_never_exceeds_the_optimum_for_any_prices(seed: int) -> None:
    program, best = joint_program(seed), reference(joint_program(seed))
    assert best is not None
    state = solve_relaxation(program, Deadline(30.0, time.process_time), 0.0, [])
    apart = ModelDecomposition(program, state, Deadline(30.0, time.process_time))
    rng = np.random.default_rng(seed)
    for scale in (0.0, 0.3, 3.0):
        mu = rng.uniform(0, scale, program.fleet.available.shape) * (
            rng.random(program.fleet.available.shape) < 0.5
        )
        least = apart.bounds_at(mu)
        assert least is not None
        assert sum(least) - float((mu * program.fleet.available).sum()) <= best * (1 + 1e-6) + 1e-6
    apart.run(np.zeros(program.fleet.available.shape))
    assert state.lower <= best * (1 + 1e-6) + 1e-6
    assert state.upper >= best * (1 - 1e-6) - 1e-6


def test_decomposition_settles_models_when_nodes_are_plentiful() -> None:
    """The relaxation rents parts of copies; apart every model has whole ones, and nothing is left to prove."""
    program = joint_program(SEEDS[0])
    node_supply = replace(program.fleet, available=program.fleet.available * 100)
    program = replace(program, fleet=node_supply, links=(), budget_usd_per_h=None)
    state = solve_relaxation(program, Deadline(30.0, time.process_time), 0.0, [])
    assert state.relaxed is not None
    assert not state.done
    ModelDecomposition(program, state, Deadline(30.0, time.process_time)).run(
        np.zeros(node_supply.available.shape)
    )
    assert state.lower == pytest.approx(state.upper, rel=1e-3)
    assert state.upper == pytest.approx(reference(program), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_removing_dominated_columns_keeps_the_optimum(seed: int) -> None:
    program = joint_program(seed)
    worse = [
        replace(
            model,
            uses=np.concatenate([model.uses, model.uses]),
            prefill_per_s=np.concatenate([model.prefill_per_s, 0.9 * model.prefill_per_s]),
            decode_per_s=np.concatenate([model.decode_per_s, model.decode_per_s]),
            closed_per_s=np.concatenate([model.closed_per_s, 0.8 * model.closed_per_s]),
            sends_bits_per_s=None,
            takes_bits_per_s=None,
            allowed=None,
            fees_usd_per_h=None,
        )
        for model in program.models
    ]
    program = replace(program, models=tuple(worse))
    thin, stands = without_dominated(program)
    for model, stand in zip(thin.models, stands, strict=True):
        half = len(stand) // 2
        assert model.allowed is not None
        assert not model.allowed[half:].any()
        assert (stand[stand] == stand).all()
    message = with_stand_ins({ColumnKey(0, len(stands[0]) // 2, 0): 2, ColumnKey(0, 0, 0): 1}, stands)
    assert sum(message.values()) == 3
    assert all(thin.models[0].allowed[key.template, key.region] for key in message)  # type: ignore[index]
    result, best = solve(program, time_limit_s=30.0), reference(program)
    assert result.found == (best is not None)
    if best is not None:
        assert result.cost_usd_per_h == pytest.approx(best, rel=1e-6, abs=1e-6)
