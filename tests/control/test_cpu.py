"""Whether a machine can act as a plan's GPUs, before anything is served."""

from __future__ import annotations

import pytest

from potluck.control.launchers.local_capacity import CpuCost, cost_of, needed_cpus, slow_line
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, Plan, PlannedReplica, Prediction, Template
from potluck.core.values.types import LengthBin, Traffic

L4 = single("1xL4", 1, 32)
TEMPLATE = Template(
    "t",
    "combo",
    "words",
    (),
    (PlannedReplica("prefill", L4), PlannedReplica("decode", L4), PlannedReplica("mixed", L4)),
    (),
    "measured",
)
PLAN = Plan(
    "auto",
    (TEMPLATE,),
    (Deployment("t", "east", 2),),
    (),
    (),
    (),
    (Prediction("words", 10.0, 12.0, 0.1, 0.05, "measured"),),
    1.0,
    0.0,
)


def asked(rate_per_s: float, answer: int = 80) -> tuple[Traffic, ...]:
    return (Traffic("words", rate_per_s, (LengthBin(500, answer, 1.0),)),)


def test_prompts_steps_and_sequences_are_added_up() -> None:
    cost = CpuCost(1e-4, 5e-3, 1e-4)
    # 10 x 500 prompt tokens; four replicas answer, 20 steps a second each; 10 x 80 answer tokens
    assert needed_cpus(PLAN, asked(10.0), cost) == pytest.approx(0.5 + 80 * 5e-3 + 0.08)
    # no more steps than tokens
    assert needed_cpus(PLAN, asked(0.1), cost) == pytest.approx(0.005 + 8 * 5e-3 + 0.0008)


def test_a_machine_that_is_too_slow_is_told_how_far_it_reaches() -> None:
    cost = CpuCost(4e-4, 5e-3, 0.0)
    line = slow_line(PLAN, asked(10.0), cost, 1)
    assert line.startswith("this machine would have to compute 2.4 times faster to stand for these GPUs")
    assert "at the planned 10.0 requests/s: beyond about 3.00 requests/s latencies are the CPU's" in line
    assert slow_line(PLAN, asked(10.0), cost, 2) == ""


@pytest.mark.parametrize("said", [None, {}, {"prompt_token_s": 1.0}, "quick", {"prompt_token_s": "x"}])
def test_who_says_nothing_is_not_judged(said: object) -> None:
    assert cost_of(said) is None


def test_what_a_nursery_says_is_read() -> None:
    assert cost_of({"prompt_token_s": 1, "step_s": 2.0, "sequence_s": 0}) == CpuCost(1, 2.0, 0)
    bad = {"prompt_token_s": float("nan"), "step_s": 2.0, "sequence_s": 0}
    assert cost_of(bad) is None
