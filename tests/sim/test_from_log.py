"""A log becomes the workload again that it was made by, and what a live log has more of is understood."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from sim_fleets import MODEL, closed_plan, combo, load, mixed, problem

from potluck.core.errors import InputError
from potluck.core.state.events import Event, RequestArrived, RequestCancelled, RequestFinished
from potluck.core.state.facts import FleetFacts, ModelFacts
from potluck.core.state.policy import Policy
from potluck.core.values.types import Request
from potluck.runtime.brain_log import header
from potluck.runtime.log_lines import line
from potluck.sim.load.log_workload import from_log
from potluck.sim.load.request_labels import RequestLabels
from potluck.sim.load.workload import Workload
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults


def logged(work: Workload, policy: Policy | None = None, faults: Faults | None = None) -> list[str]:
    out = io.StringIO()
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), work, policy, log=out, faults=faults)
    return out.getvalue().splitlines(keepends=True)


def test_a_simulated_log_gives_its_workload_back() -> None:
    rng = np.random.default_rng(3)
    work = load(80, 6.0, blocks=3)
    labels = RequestLabels(
        ("default", "acme"),
        rng.integers(0, 2, 80).astype(np.int32),
        ("standard", "batch"),
        rng.integers(0, 2, 80).astype(np.int32),
        np.where(rng.random(80) < 0.5, np.inf, rng.uniform(20, 90, 80)),
        exact=rng.random(80) < 0.5,
    )
    work = replace(work, labels=labels, priority=rng.integers(0, 3, 80).astype(np.int32))
    lines = logged(work, faults=Faults(random=FaultRates(*[300.0] * 6)))
    found = from_log(lines)
    again = found.workload
    assert found.answered > 40
    assert again.models == work.models
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "priority"):
        assert (getattr(again, name) == getattr(work, name)).all(), name
    assert again.blocks is not None
    assert work.blocks is not None
    assert again.blocks.tokens == work.blocks.tokens
    assert (again.blocks.starts == work.blocks.starts).all()
    assert (again.blocks.ids == work.blocks.ids).all()
    assert again.labels is not None
    arrivals = work.arrival_s.tolist()
    assert again.labels.rows(0, 80, arrivals) == labels.rows(0, 80, arrivals)
    assert logged(again, faults=Faults(random=FaultRates(*[300.0] * 6))) == lines


def live(*told: tuple[float, Event], zero_utc_s: float | None = 1e9, block_tokens: int = 16) -> list[str]:
    facts = FleetFacts({MODEL: ModelFacts(1.0, block_tokens=block_tokens)}, {})
    return [header(facts, Policy(), "run", zero_utc_s), *(line(at_s, event, []) for at_s, event in told)]


def asked(id: str, at_s: float, blocks: tuple[int, ...] = ()) -> tuple[float, Event]:
    return at_s, RequestArrived(Request(id, MODEL, at_s, 40, 500, blocks=blocks))


def test_answers_are_as_long_as_they_were_and_the_rest_as_asked() -> None:
    wide = (2**127 + 1, 2**127 + 2)
    first = live(
        asked("a", 1.0, wide),
        asked("b", 2.0),
        asked("c", 2.5),
        (3.0, RequestFinished("a", 1, 7)),
        (3.5, RequestCancelled("b")),
        (4.0, RequestFinished("elsewhere", 1, 9)),
    )
    # Started again 100 s later: the same ids are other requests.
    second = live(asked("a", 0.5, (wide[0], 9)), (2.0, RequestFinished("a", 2, 0)), zero_utc_s=1e9 + 100)
    found = from_log([*first, '[5.0,["Finis', *second])
    assert (found.runs, found.answered, found.cuts) == (2, 2, (8,))
    assert found.workload.arrival_s.tolist() == [1.0, 2.0, 2.5, 100.5]
    assert found.workload.output_tokens.tolist() == [7, 500, 500, 1]
    assert found.workload.labels is None
    assert found.workload.blocks is not None
    blocks = [found.workload.blocks.of(i) for i in range(4)]
    assert blocks[0][0] == blocks[3][0]
    assert len({*blocks[0], *blocks[3]}) == 3


def test_runs_without_a_clock_or_with_one_put_back_follow_each_other() -> None:
    for zero_utc_s in (None, 1e9 - 50):
        lines = [*live(asked("a", 1.0), asked("b", 9.0)), *live(asked("a", 1.0), zero_utc_s=zero_utc_s)]
        assert from_log(lines).workload.arrival_s.tolist() == [1.0, 9.0, 10.0]


def test_what_cannot_become_a_workload_is_said() -> None:
    with pytest.raises(InputError, match="has no requests"):
        from_log(live())
    two = [*live(asked("a", 1.0, (1, 2))), *live(asked("b", 1.0, (3,)), block_tokens=64)]
    with pytest.raises(InputError, match="block_tokens"):
        from_log(two)
