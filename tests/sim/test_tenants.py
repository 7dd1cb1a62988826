"""Tenants, classes and deadlines from a trace to a summary; what admission does for them in simulation."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sim_fleets as fleets

from potluck.cli.common.workloads import WorkloadOptions, of_trace, to_trace
from potluck.core.brain.brain import Brain
from potluck.core.errors import InputError
from potluck.core.state.policy import Policy
from potluck.core.values.service import Tenant
from potluck.runtime.replay import replay
from potluck.sim.load.workload import Workload, labelled, merge, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.spec.trace_write import write_trace
from potluck.spec.traces import load_trace


def alike(count: int, rate_per_s: float, prompt: int, output: int, seed: int = 0) -> Workload:
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_per_s, count))
    return workload(fleets.MODEL, times, np.full(count, prompt), np.full(count, output))


def two_tenants() -> Workload:
    chat = labelled(fleets.load(150, 15.0), "chat", "interactive", 30.0)
    flood = labelled(alike(60, 6.0, 7000, 100), "flood", "batch")
    return merge([chat, flood])


def test_labels_survive_a_trace(tmp_path: Path) -> None:
    made = two_tenants()
    path = tmp_path / "trace.jsonl"
    write_trace(to_trace(made), path, "mooncake")
    again = of_trace(load_trace(path), fleets.MODEL, WorkloadOptions())
    assert made.labels is not None
    assert again.labels is not None
    assert (again.labels.tenants, again.labels.classes) == (made.labels.tenants, made.labels.classes)
    for name in ("tenant", "request_class"):
        assert (getattr(again.labels, name) == getattr(made.labels, name)).all()
    assert again.labels.wait_s == pytest.approx(made.labels.wait_s, abs=1e-3)


def test_csv_traces_may_have_labels_and_complain_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens,Tenant,Class,Deadline ms\n"
    path.write_text(head + "2024-01-01 00:00:00,10,5,a,batch,1500\n2024-01-01 00:00:01,10,5,,,\n")
    trace = load_trace(path)
    assert (trace.tenants, trace.classes) == (("a", ""), ("batch", ""))
    assert trace.wait_s is not None
    assert trace.wait_s.tolist() == [1.5, np.inf]
    made = of_trace(trace, "m", WorkloadOptions())
    assert made.labels is not None
    assert made.labels.tenants == ("a", "default")
    assert made.labels.classes == ("batch", "standard")
    path.write_text(head + "2024-01-01 00:00:00,10,5,a,batch,-3\n")
    with pytest.raises(InputError, match=r"trace.csv:2: Deadline ms must be a positive number"):
        load_trace(path)


def test_a_flood_of_another_tenant_harms_nobody_and_all_is_told_by_tenant_and_class() -> None:
    problem = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 2)))
    made, log = two_tenants(), io.StringIO()
    policy = Policy(tenants=(Tenant("chat", 2.0),))
    result = simulate(problem, made, policy, log=log)
    summary = summarise(result)
    tenants = {each.model: each for each in summary.tenants}
    classes = {each.model: each for each in summary.classes}
    assert tenants.keys() == {"chat", "flood"}
    assert classes.keys() == {"interactive", "batch"}
    assert (tenants["chat"].attainment or 0) >= 0.95
    assert tenants["flood"].outcomes.answered > 0
    assert sum(each.requests for each in summary.tenants) == summary.total.requests
    assert classes["batch"].attainment == tenants["flood"].attainment
    log.seek(0)
    found = replay(log, Brain)
    assert found.difference == ""


def test_overload_is_refused_and_the_rest_is_served_in_time() -> None:
    problem = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 1)))
    made = alike(1500, 75.0, 1155, 211)
    summaries = [
        summarise(simulate(problem, made, Policy(admission=on)), warm_up_s=10.0).models[0]
        for on in (True, False)
    ]
    ours, before = summaries
    assert ours.outcomes.refusals.keys() == {"overloaded"}
    assert (ours.goodput_per_s or 0) > 15.0
    assert (before.goodput_per_s or 0) < 5.0
    assert before.outcomes.refused == 0
