"""Requests that must stay exact, under lossy plans, in simulation: nothing of theirs crosses or is kept lossy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_fleets import closed_plan, combo, decode_only, flow_plan, load, mixed, pair, prefill_only, problem

from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec
from potluck.sim.links import handovers
from potluck.sim.links.handovers import SimHandovers
from potluck.sim.load.request_labels import same
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults
from potluck.sim.world.sim_state import SimAttempt, SimReplica

COUNT = 60
interpreted = pytest.mark.skipif(
    not handovers.__file__.endswith(".py"), reason="methods of compiled classes cannot be listened to"
)


def in_codec(plan: Plan, codec: Codec) -> Plan:
    templates = tuple(replace(each, codec=codec) for each in plan.templates)
    return replace(plan, templates=templates, flows=tuple(replace(each, codec=codec) for each in plan.flows))


PLANS = {
    "combo": closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1)),
    "pair": closed_plan((pair(), "east", 2)),
    "remote": flow_plan((prefill_only(), "west", 2), (decode_only(), "east", 2)),
    "local": flow_plan((prefill_only(), "east", 1), (decode_only(), "east", 2)),
}


def crossed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Codec]]:
    """Of every hand-over: whether its request must stay exact, and its codec."""
    found: list[tuple[bool, Codec]] = []
    expect = SimHandovers.expect

    def noted(self: SimHandovers, now_s: float, running: SimAttempt, size_bytes: float, codec: Codec) -> None:
        found.append((running.request.exact, codec))
        expect(self, now_s, running, size_bytes, codec)

    monkeypatch.setattr(SimHandovers, "expect", noted)
    return found


@interpreted
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(("int8", "int4")),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from((0, 3)),
)
def test_whatever_fails_and_is_done_again_exact_requests_cross_whole(
    name: str, codec: Codec, seed: int, faults: bool, blocks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = crossed(patch)
        exact = np.random.default_rng(seed).random(COUNT) < 0.5
        work = replace(load(COUNT, 6.0, seed, blocks=blocks), labels=replace(same(COUNT), exact=exact))
        rates = Faults(random=FaultRates(*[100.0] * 6)) if faults else None
        simulate(problem(in_codec(PLANS[name], codec)), work, Policy(hedge=1.0), seed=seed, faults=rates)
    assert {told for must, told in seen if must} <= {"fp16"}
    assert {told for must, told in seen if not must} <= {codec, "fp16"}


def test_exact_requests_weigh_what_they_weigh_where_nothing_is_lossy() -> None:
    work = load(COUNT, 4.0)
    plan, exact = PLANS["remote"], np.arange(COUNT) % 2 == 0
    whole = simulate(problem(plan), work).records.wire_bytes
    mix = replace(work, labels=replace(same(COUNT), exact=exact))
    sent = simulate(problem(in_codec(plan, "int4")), mix).records.wire_bytes
    assert sent[exact] == pytest.approx(whole[exact])
    assert (sent[~exact] < 0.3 * whole[~exact]).all()


@interpreted
@pytest.mark.parametrize("name", ["combo", "local"])
def test_what_came_in_fewer_bits_is_kept_for_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
