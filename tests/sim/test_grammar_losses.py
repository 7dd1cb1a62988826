"""Simulated replica losses of requests with a grammar are handled as in the gateway."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_brains import requests
from sim_fleets import closed_plan, mixed, problem

from potluck.sim.load.workload import same_labels
from potluck.sim.results.records import ANSWERED, REASONS, REFUSED
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_request_with_grammar_is_refused_when_its_replica_is_lost_before_streaming(
    grammar: bool, streaming: bool
) -> None:
    plan = closed_plan((mixed(), "east", 3))
    work = replace(requests((0.0, 8000, 100)), labels=replace(same_labels(1), grammar=np.array([grammar])))
    calm = simulate(problem(plan), work).records
    first_s, finish_s = float(calm.first_token_s[0]), float(calm.finish_s[0])
    lost_s = (first_s + finish_s) / 2 if streaming else first_s / 2
    faults = Faults((Fault(lost_s, "replica", replica="*#0/0"),))
    records = simulate(problem(plan), work, faults=faults).records
    if grammar and not streaming:
        assert (records.attempts[0], records.outcome[0]) == (1, REFUSED)
        assert REASONS[records.reason[0]] == "grammar"
    else:
        assert (records.attempts[0], records.outcome[0]) == (2, ANSWERED)
