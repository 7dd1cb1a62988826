"""Replicas set apart for tenants that send little but long prompts: how many, and what is done where."""

from __future__ import annotations

import pytest
from brain_builders import assert_idle
from hypothesis import given
from hypothesis import strategies as st
from test_admission import admission_world, equal_replicas_plan, tenant_request

from potluck.core.routing.isolation import AWAY, CALM_S, OthersLoad, away, busiest, fewest, spare
from potluck.core.state.actions import Run
from potluck.core.state.events import FirstToken, SegmentDone
from potluck.core.state.policy import Policy

LOADS = st.builds(
    lambda count, steps, prompts: OthersLoad(count, steps * count, prompts * count, count - 1),
    st.integers(2, 40),
    st.floats(0.0, 0.49),
    st.floats(0.001, 0.49),
)


@given(LOADS, st.floats(0.0, 50.0), st.floats(0.001, 0.3))
def test_isolation_keeps_the_pace_of_other_tenants_and_conserves_work(
    load: OthersLoad, asked: float, slower: float
) -> None:
    """With k apart, the rest is as busy as its pace allows, and what the k compute and spare is all of their time."""
    k = fewest(load, asked, slower)
    assert 0 <= k < load.replicas
    busy = (load.steps + load.prompts) / load.replicas
    x = busiest(load, slower)
    assert (1.0 - busy) / (1.0 - x) == pytest.approx(1.0 + slower)
    share = away(load, k, slower)
    there = load.steps + (1.0 - share) * load.prompts
    assert there == pytest.approx((load.replicas - k) * x)
    assert spare(load, k, slower) + share * load.prompts == pytest.approx(float(k), abs=1e-6)
    if k:
        assert share <= AWAY
        assert spare(load, k - 1, slower) < asked
    if k + 1 <= load.most and spare(load, k, slower) < asked:
        assert away(load, k + 1, slower) > AWAY


def test_light_load_of_long_prompts_isolates_no_replica() -> None:
    load = OthersLoad(4, 0.5, 1.1, 3)
    assert fewest(load, 0.01, 0.08) == 0
    assert fewest(load, 0.5, 0.08) == 1
    assert fewest(load, 3.0, 0.08) == 2  # with three the last one could not make all answers
    assert fewest(OthersLoad(4, 0.5, 1.1, 1), 3.0, 0.08) == 1


def test_engines_without_kv_transfer_isolate_no_replica() -> None:
    there = admission_world(equal_replicas_plan(4), Policy(set_apart=False))
    for number in range(80):
        there.now_s = 0.05 * number
        there.arrive(tenant_request(f"flood{number}", there.now_s, "flooder", prompt=9000, output=20))
        there.arrive(tenant_request(f"other{number}", there.now_s, "other", prompt=300, output=20))
    assert not there.brain.admission.room.tenants.isolation.views("m")
    assert all(len(job.run.route.segments) == 1 for job in there.jobs.values())


def test_flooding_tenant_gets_isolated_replicas_that_only_prefill_for_others() -> None:
    """And when it is over, all is as before."""
    there = admission_world(equal_replicas_plan(4))
    apart = there.brain.admission.room.tenants.isolation
    seen: list[tuple[str, ...]] = []
    for number in range(160):
        there.now_s = 0.05 * number
        flood = [f"flood{number}"] if number % 2 else []
        for name in (*flood, f"other{number}"):
            tenant, prompt = ("flooder", 9000) if name in flood else ("other", 300)
            message = there.arrive(tenant_request(name, there.now_s, tenant, prompt=prompt, output=20))
            runs = [item for item in message if isinstance(item, Run) and item.request.startswith("other")]
            if number > 100:
                seen += [tuple(segment.replica for segment in run.route.segments) for run in runs]
        for name, job in list(there.jobs.items()):
            at_s = there.requests[name].arrival_s
            if there.now_s - at_s < 0.3:
                continue
            if len(job.run.route.segments) > 1:
                there.tell(SegmentDone(name, 0, 0))
            there.tell(FirstToken(name, 0))
            there.finish(name)
    set_apart = {view.member.id for view in apart.views("m")}
    assert 0 < len(set_apart) < 4
    assert any(len(route) == 2 for route in seen)
    for route in seen:
        assert route[-1] not in set_apart
        assert len(route) == 1 or route[0] in set_apart
    while there.jobs:
        there.finish(next(iter(there.jobs)))
    for number in range(350):
        there.now_s += CALM_S / 50.0
        there.arrive(tenant_request(f"late{number}", there.now_s, "other", prompt=300, output=20))
        there.finish(f"late{number}")
    assert not apart.views("m")
    assert_idle(there.brain)
    assert not there.brain.admission.room.mixes
