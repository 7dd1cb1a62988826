"""Steps that fit the objective: slow GPUs take fewer tokens at once, fast ones as many as ever."""

from __future__ import annotations

import pytest

from potluck.catalog import models, nodes
from potluck.core.values.types import Slo
from potluck.perf.serving.phases import CHUNK_TOKENS, chunked_iteration_s
from potluck.perf.serving.step_budget import LEAST_TOKENS, LONGEST, paced_budget
from potluck.perf.serving.throughput import best_operating
from potluck.perf.step_timer import StepTimer
from potluck.perf.timers.roofline import roofline

SLO = Slo(2.5, 0.1, 0.9)


def timer(node: str, tp: int) -> StepTimer:
    return roofline(models.model("Qwen3-32B"), nodes.node_type(node), tp)


def step_s(each: StepTimer, budget: int, slo: Slo) -> float:
    found = best_operating(each, 1155, 211, 60, slo)
    assert found is not None
    return float(chunked_iteration_s(each, budget - found.batch, 0.0, found.batch, 1155 + 211 / 2)[0])


@pytest.mark.parametrize("tpot_s", [0.06, 0.08, 0.1, 0.15])
def test_it_is_the_largest_that_is_short_enough(tpot_s: float) -> None:
    slow, slo = timer("2xL40S", 2), Slo(2.5, tpot_s, 0.9)
    budget = paced_budget(slow, 1155, 211, 60, slo)
    assert LEAST_TOKENS < budget < CHUNK_TOKENS
    assert step_s(slow, budget, slo) <= LONGEST * tpot_s < step_s(slow, 2 * budget, slo)


def test_a_fast_gpu_takes_more() -> None:
    assert paced_budget(timer("1xH100", 1), 1155, 211, 60, SLO) > paced_budget(
        timer("2xL40S", 2), 1155, 211, 60, SLO
    )


def test_an_objective_that_cannot_be_kept_changes_nothing() -> None:
    assert paced_budget(timer("2xL40S", 2), 1155, 211, 60, Slo(2.5, 0.001, 0.9)) == CHUNK_TOKENS


def test_it_never_falls_below_the_least() -> None:
    slow = timer("2xL40S", 2)
    slos = [Slo(2.5, tpot_ms / 1000, 0.9) for tpot_ms in range(30, 80)]
    tight = next(slo for slo in slos if best_operating(slow, 1155, 211, 60, slo))
    assert LEAST_TOKENS <= paced_budget(slow, 1155, 211, 60, tight) <= paced_budget(slow, 1155, 211, 60, SLO)
