"""Random fleets, faults and workloads: records are consistent and reproducible."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_brains import FixedRouteBrain, requests
from sim_fleets import (
    FAST,
    SLOW,
    closed_plan,
    combo,
    decode_only,
    flow_plan,
    load,
    mixed,
    pair,
    prefill_only,
    problem,
)

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, Run
from potluck.core.state.events import AttemptFailed, Event, RequestArrived
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.route import aggregated, handed_over
from potluck.runtime.brain_log import Decider
from potluck.runtime.replay import replay
from potluck.sim.links import handovers
from potluck.sim.load.workload import Workload
from potluck.sim.results.records import ANSWERED, OPEN, REFUSED
from potluck.sim.run import build, check, midway, result_of
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Fault, FaultRates, Faults, PriceChange, SupplyChange
from potluck.sim.world.world import SimWorld

PLANS = {
    "one": closed_plan((mixed(), "east", 1)),
    "three": closed_plan((mixed(), "east", 2), (mixed(SLOW), "west", 1)),
    "1P1D": closed_plan((combo(1, 1), "east", 1)),
    "1P3D": closed_plan((combo(1, 3), "east", 1)),
    "2P1D and mixed": closed_plan((combo(2, 1), "east", 1), (mixed(), "west", 1)),
    "pair": closed_plan((pair(), "east", 1)),
    "two pairs": closed_plan((pair(), "east", 2)),
    "remote prefill": flow_plan((prefill_only(), "west", 2), (decode_only(), "east", 2)),
    "local prefill": flow_plan((prefill_only(), "east", 1), (decode_only(), "east", 2), "int4"),
}


KINDS = ("replica", "node", "region", "link", "slow", "reports", "spot", "cancel")


class CheckedBrain:
    """A Brain whose world is looked over at every event."""

    def __init__(self, mind: Decider) -> None:
        self.mind = mind
        self.world: SimWorld | None = None
        self.last_s = 0.0

    def on(self, at_s: float, event: Event) -> list[Action]:
        assert at_s >= self.last_s, "time went back"
        self.last_s = at_s
        if self.world is not None:
            assert midway(self.world) == []
        return self.mind.on(at_s, event)


@st.composite
def faults(draw: st.DrawFn, horizon_s: float, requests: int) -> Faults:
    result = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(KINDS))
        at_s = draw(st.floats(0.0, horizon_s))
        pick, duration_s = draw(st.floats(0.0, 0.999)), draw(st.floats(0.01, 20.0))
        if kind == "region":
            result.append(Fault(at_s, "region", region=draw(st.sampled_from(["east", "west"]))))
        elif kind == "cancel":
            result.append(Fault(at_s, "cancel", request=draw(st.integers(0, requests + 3))))
        elif kind == "link":
            factor = draw(st.sampled_from([0.0, 0.01, 0.3]))
            result.append(Fault(at_s, "link", factor=factor, duration_s=duration_s, pick=pick))
        else:
            factor = draw(st.sampled_from([0.5, 3.0, 20.0]))
            notice_s = draw(st.sampled_from([0.0, 1.0, 30.0]))
            fault = Fault(at_s, kind, factor=factor, duration_s=duration_s, notice_s=notice_s, pick=pick)
            result.append(fault)
    changes = ()
    if draw(st.booleans()):
        changes = (SupplyChange(horizon_s / 2, "east", "1xH100-SXM", draw(st.integers(0, 2)), 1.0),)
    return Faults(
        tuple(result), prices=(PriceChange(horizon_s / 3, "east", "1xH100-SXM", 9.0),), availability=changes
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return load(
        draw(st.integers(1, 50)),
        draw(st.sampled_from([0.5, 5.0, 50.0])),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([(1, 50), (50, 3000), (3000, 8000)])),
        draw(st.sampled_from([(1, 2), (1, 300), (300, 900)])),
        draw(st.sampled_from([0, 0, 3])),
    )


def run_world(
    plan: Plan, work: Workload, what: Faults, policy: Policy, how: SimSettings, blocks: int | None
) -> SimWorld:
    watched: list[CheckedBrain] = []

    def mind(replica_models: object, policy: Policy) -> CheckedBrain:
        watched.append(CheckedBrain(Brain(replica_models.facts(), policy)))  # type: ignore[attr-defined]
        return watched[0]

    world = build(problem(plan, gbps=10.0), work, policy, settings=how, mind=mind)
    if blocks is not None:
        for key, replica_model in world.replica_models.replica_models.items():
            world.replica_models.replica_models[key] = replace(replica_model, total_blocks=blocks)
    watched[0].world = world
    world.external.plan(what, 1, 100.0)
    world.run()
    assert check(world) == []
    return world


@settings(max_examples=40)
@given(st.data())
def test_every_request_ends_with_consistent_records_under_random_faults(data: st.DataObject) -> None:
    work = data.draw(workloads())
    what = data.draw(faults(float(work.arrival_s[-1]) + 5.0, len(work)))
    policy = Policy(
        balance=data.draw(st.sampled_from(["goodput", "round-robin", "token", "fixed"])),
        opportunistic=data.draw(st.booleans()),
        split=data.draw(st.booleans()),
        retries=data.draw(st.integers(0, 3)),
        max_wait_s=data.draw(st.sampled_from([0.0, 5.0])),
    )
    how = SimSettings(
        fast_forward=data.draw(st.booleans()),
        overlap=data.draw(st.booleans()),
        reports=data.draw(st.booleans()),
        warm=data.draw(st.booleans()),
        samples=data.draw(st.sampled_from([0, 7])),
    )
    # Room for the longest request, or so little that many have to be put back or refused.
    blocks = data.draw(st.sampled_from([None, 700, 60]))
    world = run_world(PLANS[data.draw(st.sampled_from(sorted(PLANS)))], work, what, policy, how, blocks)
    records = result_of(world, 0).records
    assert not (records.outcome == OPEN).any()
    assert ((records.outcome == ANSWERED) <= (records.streamed_tokens == records.output_tokens)).all()
    assert ((records.outcome == REFUSED) == (records.reason > 0)).all()


@settings(max_examples=12)
@given(
    rate=st.sampled_from([5.0, 20.0, 60.0]),
    seed=st.integers(0, 1000),
    shared=st.integers(2, 5),
    plan=st.sampled_from(sorted(PLANS)),
    blocks=st.sampled_from([400, 700, 1200]),
    overlap=st.booleans(),
)
# Room set aside for KV to come ends a run early, which nobody had put on the agenda.
@example(rate=20.0, seed=892, shared=3, plan="remote prefill", blocks=1200, overlap=False)
def test_fast_forwarded_records_with_small_caches_equal_stepped_records(
    rate: float, seed: int, shared: int, plan: str, blocks: int, overlap: bool
) -> None:
    work = load(30, rate, seed, blocks=shared)
    ours, theirs = (
        result_of(
            run_world(
                PLANS[plan], work, Faults(), Policy(), SimSettings(fast_forward=on, overlap=overlap), blocks
            ),
            0,
        ).records
        for on in (True, False)
    )
    for name in ("outcome", "cached_tokens", "preemptions", "decode_replica", "attempts"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    for name in ("first_token_s", "finish_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9, nan_ok=True)


@settings(max_examples=12)
@given(st.data())
def test_log_of_a_seed_is_reproducible_and_replays(data: st.DataObject) -> None:
    work = data.draw(workloads())
    plan = PLANS[data.draw(st.sampled_from(sorted(PLANS)))]
    what = Faults(random=FaultRates(*[200.0] * 6))
    logs = []
    for _ in range(2):
        out = io.StringIO()
        world = build(problem(plan), work, settings=SimSettings(), log=out)
        world.external.plan(what, 3, float(work.arrival_s[-1]))
        world.run()
        assert check(world) == []
        logs.append(out.getvalue())
    assert logs[0] == logs[1]
    replayed = replay(logs[0].splitlines(), Brain)
    assert replayed.difference == ""
    assert replayed.events == logs[0].count("\n") - 1


def test_property_test_fleets_have_the_named_template_kinds() -> None:
    assert {t.kind for plan in PLANS.values() for t in plan.templates} == {"homogeneous", "combo", "pair"}
    assert FAST != SLOW


MIXED = mixed().name + "@east"


BLOCKS = 70  # For one prompt of 1,000 tokens at a time.


class PairedRouteBrain(FixedRouteBrain):
    """Each request is computed by one and answered by another, as told; who fails is run by one alone."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        super().__init__(lambda tokens: None)
        self.pairs = pairs
        self.failed: list[tuple[float, AttemptFailed]] = []

    def on(self, at_s: float, event: Event) -> list[Action]:
        if isinstance(event, RequestArrived):
            name, tokens = event.request.id, event.request.prompt_tokens
            first, second = (f"{MIXED}#{item}/0" for item in self.pairs[int(name)])
            return [Run(name, handed_over(first, second, tokens), 0, tokens, 0)]
        if isinstance(event, AttemptFailed):
            self.failed.append((at_s, event))
            return [Run(event.request, aggregated(event.where), 1, 1000, 0)]
        return super().on(at_s, event)


def run_pairs(
    pairs: list[tuple[int, int]], prompts: list[int], overlap: bool
) -> tuple[SimWorld, PairedRouteBrain]:
    mind = PairedRouteBrain(pairs)
    work = requests(*((0.01 * place, prompt, 20) for place, prompt in enumerate(prompts)))
    world = build(
        problem(closed_plan((mixed(), "east", 4))),
        work,
        settings=SimSettings(overlap=overlap),
        mind=lambda replica_models, policy: mind,
    )
    for key, replica_model in world.replica_models.replica_models.items():
        world.replica_models.replica_models[key] = replace(replica_model, total_blocks=BLOCKS)
    world.run()
    assert check(world) == []
    assert (result_of(world, 0).records.outcome == ANSWERED).all()
    return world, mind


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_ring_of_full_replicas_makes_progress(length: int, overlap: bool) -> None:
    pairs = [(place % length, (place + 1) % length) for place in range(40)]
    world, mind = run_pairs(pairs, [1000] * 40, overlap)
    assert world.handovers.waited
    assert mind.failed == []


graph = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda pair: (pair[0], (pair[0] + pair[1]) % 4)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=15, deadline=None)
@given(graph, st.booleans(), st.data())
def test_requests_over_any_transfer_pairs_are_answered(
    pairs: list[tuple[int, int]], overlap: bool, data: st.DataObject
) -> None:
    prompts = data.draw(st.lists(st.integers(200, 1080), min_size=len(pairs), max_size=len(pairs)))
    assert run_pairs(pairs, prompts, overlap)[1].failed == []


@pytest.mark.skipif(
    not handovers.__file__.endswith(".py"), reason="constants of compiled code stay as they are"
)
def test_request_blocked_on_a_full_transfer_ring_fails_and_is_retried_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handovers, "SEND_QUEUE_BYTES", 0)
    _, mind = run_pairs([(place % 3, (place + 1) % 3) for place in range(12)], [1000] * 12, overlap=False)
    assert {event.kind for _, event in mind.failed} == {"memory"}
    assert mind.failed[0][0] == pytest.approx(handovers.STUCK_AFTER_S, abs=1.5)
