"""Tenants, classes and deadlines from a trace to a summary; what admission does for them in simulation."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sim_fleets as fleets
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_fleets import closed_plan, combo, decode_only, flow_plan, load, mixed, pair, prefill_only, problem

from potluck.cli.common.workloads import WorkloadOptions, of_trace, to_trace
from potluck.core.brain.brain import Brain
from potluck.core.errors import InputError
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.service import Tenant
from potluck.core.values.types import Codec
from potluck.runtime.replay import replay
from potluck.sim.links import handovers
from potluck.sim.links.handovers import SimHandovers
from potluck.sim.load.workload import Workload, labelled, merge, same_labels, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults
from potluck.sim.world.sim_state import SimAttempt, SimReplica
from potluck.spec.traces import load_trace, write_trace


def equal_requests(count: int, rate_per_s: float, prompt: int, output: int, seed: int = 0) -> Workload:
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_per_s, count))
    return workload(fleets.MODEL, times, np.full(count, prompt), np.full(count, output))


def two_tenants() -> Workload:
    chat = labelled(fleets.load(150, 15.0), "chat", "interactive", 30.0)
    return merge([chat, labelled(equal_requests(60, 6.0, 7000, 100), "flood", "batch")])


def test_tenant_class_and_deadline_labels_survive_a_trace_file(tmp_path: Path) -> None:
    workload = two_tenants()
    path = tmp_path / "trace.jsonl"
    write_trace(to_trace(workload), path, "mooncake")
    again = of_trace(load_trace(path), fleets.MODEL, WorkloadOptions())
    assert workload.labels is not None
    assert again.labels is not None
    assert (again.labels.tenants, again.labels.classes) == (workload.labels.tenants, workload.labels.classes)
    for name in ("tenant", "request_class"):
        assert (getattr(again.labels, name) == getattr(workload.labels, name)).all()
    assert again.labels.wait_s == pytest.approx(workload.labels.wait_s, abs=1e-3)


def test_csv_trace_labels_are_read_and_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens,Tenant,Class,Deadline ms\n"
    path.write_text(head + "2024-01-01 00:00:00,10,5,a,batch,1500\n2024-01-01 00:00:01,10,5,,,\n")
    trace = load_trace(path)
    assert (trace.tenants, trace.classes) == (("a", ""), ("batch", ""))
    assert trace.wait_s is not None
    assert trace.wait_s.tolist() == [1.5, np.inf]
    workload = of_trace(trace, "m", WorkloadOptions())
    assert workload.labels is not None
    assert workload.labels.tenants == ("a", "default")
    assert workload.labels.classes == ("batch", "standard")
    path.write_text(head + "2024-01-01 00:00:00,10,5,a,batch,-3\n")
    with pytest.raises(InputError, match=r"trace.csv:2: Deadline ms must be a positive number"):
        load_trace(path)


def test_summary_by_tenant_and_class_shows_no_harm_from_a_flooding_tenant() -> None:
    problem = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 2)))
    workload, log = two_tenants(), io.StringIO()
    summary = summarise(simulate(problem, workload, Policy(tenants=(Tenant("chat", 2.0),)), log=log))
    tenants = {tenant.model: tenant for tenant in summary.tenants}
    classes = {item.model: item for item in summary.classes}
    assert tenants.keys() == {"chat", "flood"}
    assert classes.keys() == {"interactive", "batch"}
    assert (tenants["chat"].attainment or 0) >= 0.95
    assert tenants["flood"].outcomes.answered > 0
    assert sum(tenant.requests for tenant in summary.tenants) == summary.total.requests
    assert classes["batch"].attainment == tenants["flood"].attainment
    log.seek(0)
    assert replay(log, Brain).difference == ""


def test_admission_refuses_overload_and_serves_the_rest_in_time() -> None:
    problem = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 1)))
    workload = equal_requests(1500, 75.0, 1155, 211)
    summaries = [
        summarise(simulate(problem, workload, Policy(admission=on)), warm_up_s=10.0).models[0]
        for on in (True, False)
    ]
    ours, before = summaries
    assert ours.outcomes.refusals.keys() == {"overloaded"}
    assert (ours.goodput_per_s or 0) > 15.0
    assert (before.goodput_per_s or 0) < 5.0
    assert before.outcomes.refused == 0


COUNT = 60


interpreted = pytest.mark.skipif(
    not handovers.__file__.endswith(".py"), reason="methods of compiled classes cannot be listened to"
)


def in_codec(plan: Plan, codec: Codec) -> Plan:
    templates = tuple(replace(template, codec=codec) for template in plan.templates)
    return replace(plan, templates=templates, flows=tuple(replace(flow, codec=codec) for flow in plan.flows))


PLANS = {
    "combo": closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1)),
    "pair": closed_plan((pair(), "east", 2)),
    "remote": flow_plan((prefill_only(), "west", 2), (decode_only(), "east", 2)),
    "local": flow_plan((prefill_only(), "east", 1), (decode_only(), "east", 2)),
}


def transfer_codecs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Codec]]:
    """Of every hand-over: whether its request must stay exact, and its codec."""
    result: list[tuple[bool, Codec]] = []
    begin = SimHandovers.begin

    def noted(self: SimHandovers, now_s: float, attempt: SimAttempt, size_bytes: float, codec: Codec) -> None:
        result.append((attempt.request.exact, codec))
        begin(self, now_s, attempt, size_bytes, codec)

    monkeypatch.setattr(SimHandovers, "begin", noted)
    return result


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(("int8", "int4")),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from((0, 3)),
)
def test_exact_requests_are_transferred_in_fp16_despite_faults_and_retries(
    name: str, codec: Codec, seed: int, faults: bool, blocks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = transfer_codecs(patch)
        exact = np.random.default_rng(seed).random(COUNT) < 0.5
        work = replace(load(COUNT, 6.0, seed, blocks=blocks), labels=replace(same_labels(COUNT), exact=exact))
        rates = Faults(random=FaultRates(*[100.0] * 6)) if faults else None
        simulate(problem(in_codec(PLANS[name], codec)), work, Policy(), seed=seed, faults=rates)
    assert {message for must, message in seen if must} <= {"fp16"}
    assert {message for must, message in seen if not must} <= {codec, "fp16"}


def test_exact_requests_have_full_transfer_sizes() -> None:
    work = load(COUNT, 4.0)
    plan, exact = PLANS["remote"], np.arange(COUNT) % 2 == 0
    whole = simulate(problem(plan), work).records.wire_bytes
    mix = replace(work, labels=replace(same_labels(COUNT), exact=exact))
    sent = simulate(problem(in_codec(plan, "int4")), mix).records.wire_bytes
    assert sent[exact] == pytest.approx(whole[exact])
    assert (sent[~exact] < 0.3 * whole[~exact]).all()


@interpreted
@pytest.mark.parametrize("name", ["combo", "local"])
def test_kv_received_lossy_is_not_kept_as_a_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that got a prompt's KV whole keeps it as a prefix; one that got it in four bits does not."""
    kept: set[str] = set()
    keep = SimReplica.keep

    def noted(self: SimReplica, at_s: float, blocks: tuple[int, ...]) -> None:
        kept.add(self.role)
        keep(self, at_s, blocks)

    monkeypatch.setattr(SimReplica, "keep", noted)
    # All go over, so that no decoder computes a prompt itself.
    policy, work = Policy(opportunistic=False), load(COUNT, 2.0, blocks=3)
    resolved = problem(closed_plan((combo(1, 2), "east", 1)) if name == "combo" else PLANS[name])
    simulate(resolved, work, policy)
    assert kept == {"prefill", "decode"}
    kept.clear()
    simulate(replace(resolved, plan=in_codec(resolved.plan, "int4")), work, policy)
    assert kept == {"prefill"}
