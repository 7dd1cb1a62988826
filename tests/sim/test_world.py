"""The simulated world on small hand-computed cases and under faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import sim_fleets as fleets
from sim_brains import FixedRouteBrain, WrappedBrain, requests, ttft
from sim_fleets import (
    FAST,
    LLAMA,
    MODEL,
    NODES,
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

from potluck.catalog import nodes
from potluck.core.brain.brain import Brain
from potluck.core.errors import UnknownNameError
from potluck.core.state import events
from potluck.core.state.actions import Action, DrainReplica, Replan, Run, StopReplica
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan
from potluck.core.values.route import aggregated, handed_over
from potluck.core.values.types import Codec, LengthBin, Role, Slo, Traffic
from potluck.perf.estimate import estimate
from potluck.perf.memory import kv_bytes
from potluck.perf.phases import decode_step_s, prefill_s
from potluck.perf.startup import startup_s
from potluck.perf.throughput import best_operating
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import codec_ratio, link_alpha_beta
from potluck.plan.problem import model_demand
from potluck.plan.timing.replica_rates import replica_capacity
from potluck.runtime.brain_log import Decider
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.load.workload import PrefixBlocks, Workload, of_traffic
from potluck.sim.results.metrics import judge, summarise
from potluck.sim.results.records import ANSWERED, HANDED_OVER, OPEN, OUTCOMES, REFUSED, SPLIT, SimResult
from potluck.sim.run import build, check, reads_reports, result_of, simulate
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Fault, Faults, PriceChange, SupplyChange
from potluck.sim.world.sim_fleet import PlanQuestion

TIMER = roofline(LLAMA, next(node for node in NODES.values() if "H100" in node.name), 1)


FIRST = "chat: mixed 1xH100@east#0/0"


def simulate_one_request(
    plan: Plan, route: Callable[[int], object], prompt: int, output: int, **how: bool
) -> SimResult:
    mind = FixedRouteBrain(route)
    return simulate(
        problem(plan, gbps=10.0),
        requests((1.0, prompt, output)),
        settings=SimSettings(**how),
        mind=lambda *_: mind,
    )


def test_one_request_takes_its_prefill_and_decode_times() -> None:
    result = simulate_one_request(closed_plan((mixed(), "east", 1)), lambda _: aggregated(FIRST), 1000, 50)
    prefill = float(prefill_s(TIMER, 1000)[0]) + DEFAULT_HOST.request_s
    assert ttft(result) == pytest.approx(prefill, rel=1e-9)
    steps = sum(float(decode_step_s(TIMER, 1, 1000 + k)[0]) for k in range(1, 50))
    assert float(result.records.finish_s[0]) == pytest.approx(1.0 + prefill + steps, rel=2e-3)
    assert result.replicas[0].decode_tokens == 49
    assert result.replicas[0].prefill_tokens == 1000


def test_estimate_plan_and_simulation_have_the_same_ttft() -> None:
    """All count what a server adds to it outside of steps."""
    slo, node = Slo(2.0, 0.06), NODES[nodes.canonical(FAST)]
    told = estimate(LLAMA, node, input_tokens=1000, output_tokens=50, slo=slo)
    demand = model_demand(MODEL, LLAMA, slo, Traffic(MODEL, 1.0, (LengthBin(1000, 50, 1.0),)))
    (planned,) = replica_capacity(demand, single(node.name, 1, LLAMA.layer_count), NODES, "mixed", 0.8)
    assert told.operating is not None
    assert planned.ttft_s == pytest.approx(told.operating.ttft_s)
    bare = best_operating(TIMER, 1000, 50, told.max_batch, slo)
    assert bare is not None
    assert told.operating.ttft_s - bare.ttft_s == pytest.approx(DEFAULT_HOST.request_s)
    result = simulate_one_request(closed_plan((mixed(), "east", 1)), lambda _: aggregated(FIRST), 1000, 50)
    assert ttft(result) == pytest.approx(told.prefill_s + DEFAULT_HOST.request_s, rel=1e-9)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("codec", ["fp16", "int4"])
@pytest.mark.parametrize("prompt", [500, 2000])
def test_kv_transfer_over_a_link_adds_the_tail_that_perf_computes(
    overlap: bool, codec: Codec, prompt: int
) -> None:
    plan = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1), codec)
    route = handed_over("chat: prefill@west#0/0", "chat: decode@east#0/0", prompt)
    result = simulate_one_request(plan, lambda _: route, prompt, 10, overlap=overlap)
    path = link_alpha_beta(problem(plan, gbps=10.0).links[1])
    size = float(kv_bytes(LLAMA, float(prompt))) * codec_ratio(codec)
    prefill = float(prefill_s(TIMER, prompt)[0])
    stream = float(path.stream_s(size))
    layers = LLAMA.layer_count
    late = max(0.0, stream - prefill) / layers
    tail = stream / layers + (layers - 1) * late + path.alpha_s if overlap else float(path.time_s(size))
    step = float(decode_step_s(TIMER, 1, prompt)[0]) + DEFAULT_HOST.request_s
    assert ttft(result) == pytest.approx(prefill + tail + step, rel=1e-3)
    assert float(result.records.wire_bytes[0]) == pytest.approx(size)
    assert result.links[1].sent_bytes == pytest.approx(size)
    assert result.records.route[0] == HANDED_OVER


def test_split_prompt_continues_where_the_first_part_ended() -> None:
    plan = closed_plan((pair(), "east", 1))
    route = handed_over("chat: pair@east#0/0", "chat: pair@east#0/1", 300)
    result = simulate_one_request(plan, lambda _: route, 1000, 5)
    assert result.records.route[0] == SPLIT
    assert [replica.prefill_tokens for replica in result.replicas] == [300, 700]
    low = roofline(LLAMA, NODES["1xL4"], 1)
    least = float(prefill_s(low, 300)[0]) + float(prefill_s(TIMER, 700, 300)[0])
    assert least < ttft(result) < least * 1.5


def test_cached_prefix_shortens_prefill_and_transfer() -> None:
    same = PrefixBlocks(np.array([0, 4, 8]), np.array([1, 2, 3, 4, 1, 2, 3, 9]), 256)
    work = requests((0.0, 1024, 5), (5.0, 1024, 5), blocks=same)
    whole = simulate(problem(closed_plan((mixed(), "east", 1))), work)
    assert whole.records.cached_tokens.tolist() == [0, 768]
    assert whole.replicas[0].prefill_tokens == 1024 + 256
    plan = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1))
    sent = simulate(problem(plan), work).records.wire_bytes
    assert sent[1] == pytest.approx(sent[0] / 4)
    off = simulate(problem(plan), work, settings=SimSettings(caches=False))
    assert off.records.wire_bytes[1] == off.records.wire_bytes[0]


def test_cold_replica_is_ready_after_its_startup_time() -> None:
    plan, patient = closed_plan((mixed(), "east", 1)), Policy(max_wait_s=200.0)
    result = simulate(problem(plan), requests((0.0, 100, 2)), patient, settings=SimSettings(warm=False))
    assert result.replicas[0].ready_s == pytest.approx(startup_s(2 * 8.03e9).total_s, rel=0.01)
    assert float(result.records.first_token_s[0]) > result.replicas[0].ready_s  # type: ignore[operator]


def brain_events(
    plan: Plan, work: Workload, mind: FixedRouteBrain, faults: Faults | None = None
) -> list[tuple[float, events.Event]]:
    world = build(problem(plan, gbps=1.0), work, settings=SimSettings(reports=True), mind=lambda *_: mind)
    world.external.plan(faults or Faults(), 0, 100.0)
    world.run()
    assert check(world) == []
    return mind.told


def test_status_reports_arrive_periodically_with_delay_unless_lost() -> None:
    plan, work = closed_plan((mixed(), "east", 2)), load(40, 10.0)
    heard = brain_events(plan, work, FixedRouteBrain(lambda _: aggregated(FIRST)))
    times = [at_s for at_s, event in heard if isinstance(event, events.ReplicaReported)]
    assert times
    assert all((at_s - 0.05) % 0.25 == pytest.approx(0.0, abs=1e-9) or
               (at_s - 0.05) % 0.25 == pytest.approx(0.25, abs=1e-9) for at_s in times)  # fmt: skip
    assert {event.replica for _, event in heard if isinstance(event, events.ReplicaReported)} == {FIRST}
    mute = Faults((Fault(0.0, "reports", replica="*", duration_s=1000.0),))
    assert not any(
        isinstance(e, events.ReplicaReported)
        for _, e in brain_events(plan, work, FixedRouteBrain(lambda _: aggregated(FIRST)), mute)
    )


def test_links_report_their_load_and_caches_their_blocks() -> None:
    plan = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1))
    work = load(30, 5.0, blocks=2)
    heard = brain_events(
        plan,
        work,
        FixedRouteBrain(lambda n: handed_over("chat: prefill@west#0/0", "chat: decode@east#0/0", n)),
    )
    links = [event for _, event in heard if isinstance(event, events.LinkReported)]
    assert max(link.utilisation for link in links) > 0.5
    assert all(0 <= link.utilisation <= 1 and link.gbps == pytest.approx(1.0) for link in links)
    assert {event.replica for _, event in heard if isinstance(event, events.CacheReported)} == {
        "chat: prefill@west#0/0",
        "chat: decode@east#0/0",
    }


def test_drain_and_stop_are_carried_out() -> None:
    plan = closed_plan((mixed(), "east", 2))
    other = FIRST.replace("#0", "#1")
    work = requests((0.0, 512, 300), (30.0, 512, 2))
    steps: dict[float, list[Action]] = {
        1.0: [DrainReplica(FIRST)],
        20.0: [StopReplica(FIRST)],
    }
    mind = FixedRouteBrain(lambda _: aggregated(FIRST), steps)
    mind.route = lambda _: aggregated(FIRST if mind.more else other)
    world = build(problem(plan), work, mind=lambda *_: mind)
    world.run()
    assert check(world) == []
    drained = [at_s for at_s, event in mind.told if isinstance(event, events.ReplicaDrained)]
    result = result_of(world, 0)
    assert drained == [pytest.approx(float(result.records.finish_s[0]) - DEFAULT_HOST.request_s)]
    assert [state for _, state, _ in result.replicas[0].changes] == [
        "starting",
        "ready",
        "draining",
        "stopped",
    ]
    assert result.cost_rates[-1] == (20.0, 2.0)


def test_requested_plan_is_adopted_after_its_delay() -> None:
    plan = closed_plan((mixed(), "east", 1))
    bigger = closed_plan((mixed(), "east", 1), (mixed(SLOW), "east", 1))
    asked: list[float] = []

    def planner(plan_question: PlanQuestion) -> Plan:
        asked.append(plan_question.at_s)
        return bigger

    class Asking(WrappedBrain):
        def on(self, at_s: float, event: events.Event) -> list[Action]:
            more: list[Action] = (
                [Replan(((MODEL, 9.0),), "test")] if isinstance(event, events.Tick) and at_s == 3.0 else []
            )
            return self.brain.on(at_s, event) + more

    result = simulate(
        problem(plan),
        load(100, 0.5),
        planner=planner,
        mind=lambda replica_models, policy: Asking(replica_models.facts(), policy),
        settings=SimSettings(planner_s=7.0),
    )
    assert asked == [3.0]
    assert result.replicas[1].changes[0][0] == 10.0
    assert result.replicas[1].nodes == ("1xL4",)
    assert result.replicas[1].busy_s > 0


@pytest.mark.parametrize(
    "plan",
    [
        closed_plan((mixed(), "east", 2)),
        closed_plan((combo(1, 2), "east", 1)),
        flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1)),
    ],
    ids=["mixed", "combo", "flow"],
)
def test_fast_forward_does_not_change_request_times(plan: Plan) -> None:
    work = load(60, 8.0, seed=4, blocks=3)
    faults = Faults(
        (Fault(2.0, "replica", replica="*/0"), Fault(1.0, "slow", replica="*", factor=2.0, duration_s=1.0))
    )
    fast, slow = (
        simulate(problem(plan), work, faults=faults, settings=SimSettings(fast_forward=how)).records
        for how in (True, False)
    )
    np.testing.assert_allclose(fast.first_token_s, slow.first_token_s, rtol=1e-9)
    np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-9)
    assert (fast.attempts == slow.attempts).all()


def test_samples_cover_all_replicas_and_links() -> None:
    plan = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1))
    samples = simulate(problem(plan), load(50, 5.0), settings=SimSettings(samples=10)).samples
    assert samples is not None
    assert samples.busy_s.shape == (len(samples.at_s), 2)
    assert (np.diff(samples.busy_s, axis=0) >= 0).all()
    assert (np.diff(samples.link_bytes, axis=0) >= 0).all()
    assert samples.link_bytes[-1, 1] > 0
    assert samples.link_bytes.shape[1] == 2


def test_world_check_detects_corrupted_records() -> None:
    world = build(problem(closed_plan((mixed(), "east", 1))), load(20, 5.0))
    world.run()
    assert check(world) == []
    world.ledger.streamed_tokens[3] -= 1
    assert any("tokens asked for" in wrong for wrong in check(world))
    world.ledger.streamed_tokens[3] += 1
    world.ledger.outcome[4] = 0
    assert any("without an outcome" in wrong for wrong in check(world))
    world.ledger.outcome[4] = 1
    world.ledger.finish_s[5] = 0.0
    assert any("out of order" in wrong for wrong in check(world))
    world.ledger.finish_s[5] = 1e9
    world.ledger.outcome[6] = 2
    assert any("without a reason" in wrong for wrong in check(world))
    world.ledger.outcome[6] = 1
    assert check(world) == []
    replica = world.fleet.all_replicas[0]
    replica.replica.reserve(world.now_s, 99, 160)
    assert any("still uses 10 blocks" in wrong for wrong in check(world))
    world.network.pipes[-1].sent_bytes += 1e6
    assert any("carried" in wrong for wrong in check(world))
    assert FAST in replica.id


def test_ready_event_is_sent_for_every_replica() -> None:
    heard = brain_events(
        closed_plan((combo(1, 2), "east", 2)),
        load(1),
        FixedRouteBrain(lambda _: aggregated("chat: combo 1P2D@east#1/2")),
    )
    assert sum(isinstance(event, events.ReplicaReady) for _, event in heard) == 6


def test_unused_status_reports_are_omitted_without_effect() -> None:
    work = load(100, 10.0)
    plan = closed_plan((mixed(), "east", 2), (mixed(SLOW), "west", 1))
    assert not reads_reports(plan, work, Policy())
    silent, told_anyway = (
        simulate(problem(plan), work, settings=SimSettings(reports=how)).records for how in (None, True)
    )
    # A report cuts a run of steps in two, which rounds another way.
    np.testing.assert_allclose(silent.finish_s, told_anyway.finish_s, rtol=1e-9)
    assert reads_reports(plan, work, Policy(scaling="replan"))
    assert reads_reports(plan, load(5, blocks=1), Policy())
    assert reads_reports(closed_plan((combo(1, 1), "east", 1)), work, Policy())
    assert reads_reports(closed_plan((pair(), "east", 1)), work, Policy())


def test_run_cut_short_leaves_remaining_requests_open() -> None:
    work = load(100, 5.0)
    result = simulate(problem(closed_plan((mixed(), "east", 1))), work, settings=SimSettings(end_s=10.0))
    ended = result.records.outcome == ANSWERED
    assert 20 < ended.sum() < 60
    assert (result.records.finish_s[ended] <= 10.0).all()
    assert (result.records.outcome[work.arrival_s > 10.0] == OPEN).all()


def test_events_and_actions_built_without_constructors_have_all_fields() -> None:
    seen: set[type] = set()

    class Watching(WrappedBrain):
        def on(self, at_s: float, event: events.Event) -> list[Action]:
            actions = self.brain.on(at_s, event)
            for action in (event, *actions):
                seen.add(type(action))
                assert type(action)(*action) == action
                assert len(action) == len(action._fields)
            return actions

    simulate(
        problem(closed_plan((combo(), "east", 2))),
        load(40, 2.0, blocks=3),
        mind=lambda replica_models, policy: Watching(replica_models.facts(), policy),
    )
    assert seen >= {events.RequestArrived, events.SegmentDone, events.FirstToken, events.RequestFinished, Run}


MIXED = "chat: mixed 1xH100@east"


def test_request_of_a_lost_replica_resumes_elsewhere_from_its_streamed_tokens() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 1000, 400))
    calm = simulate(problem(plan), work).records
    half_s = float(calm.first_token_s[0] + calm.finish_s[0]) / 2
    result = simulate(problem(plan), work, faults=Faults((Fault(half_s, "replica", replica="*#0/0"),)))
    records = result.records
    assert (records.attempts[0], records.outcome[0], records.streamed_tokens[0]) == (2, ANSWERED, 400)
    assert records.first_token_s[0] == calm.first_token_s[0]
    assert float(records.finish_s[0]) > float(calm.finish_s[0])
    lost, other, _ = result.replicas
    # The third is the lost one's replacement, still starting.
    assert lost.changes[-1][:2] == (half_s, "lost")
    # What the user had is prompt there: nothing is made twice.
    again = other.prefill_tokens - 1000
    assert 150 < again < 250
    assert lost.decode_tokens + 1 == pytest.approx(again, abs=1)
    assert other.decode_tokens == 400 - again - 1


def test_spot_notice_gives_running_requests_time_to_finish() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 1000, 100), (1.0, 1000, 100))
    spot = Fault(0.5, "spot", region="east", node="1xH100-SXM", count=2, notice_s=30.0)
    result = simulate(problem(plan), work, faults=Faults((spot,)), policy=Policy(max_wait_s=1.0))
    assert result.records.outcome.tolist() == [ANSWERED, REFUSED]
    assert result.records.attempts.tolist() == [1, 0]


def test_node_cost_follows_the_price_over_time() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 100, 2), (3600.0, 100, 2))
    result = simulate(
        problem(plan), work, faults=Faults(prices=(PriceChange(1800.0, "east", "1xH100-SXM", 10.0),))
    )
    assert result.cost_rates == ((0.0, 4.0), (1800.0, 20.0))
    assert result.cost_usd == pytest.approx((4.0 + 20.0) / 2, rel=1e-3)


def test_falling_supply_removes_machines_and_prevents_new_starts() -> None:
    plan = closed_plan((mixed(), "east", 3))
    fall = SupplyChange(10.0, "east", "1xH100-SXM", 1, notice_s=2.0)
    result = simulate(problem(plan), load(100, 2.0), faults=Faults(availability=(fall,)))
    there = [replica for replica in result.replicas if replica.changes[-1][1] == "ready"]
    assert len(there) == 1
    assert (result.records.outcome == ANSWERED).all()
    assert result.cost_rates[-1] == (12.0, pytest.approx(2.0))
    assert len(result.replicas) == 3, "the Brain was told, so nothing is started that finds no machine"


LINKED = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1))
LINKED_WORK = requests((0.0, 4000, 5), (10.0, 4000, 5))
SLOW_LINK = Fault(0.0, "link", source="west", target="east", gbps=1.0)


def test_transfer_over_a_broken_link_fails_and_its_request_is_retried() -> None:
    down = Fault(0.05, "link", source="west", target="east", factor=0.0, duration_s=5.0)
    resolved = problem(LINKED, gbps=10.0)
    broken = simulate(resolved, LINKED_WORK, Policy(opportunistic=False), faults=Faults((down,)))
    assert broken.records.attempts[0] > 1


def test_slow_link_delays_the_first_token() -> None:
    resolved = problem(LINKED, gbps=10.0)
    straight = Policy(balance="goodput")  # the default goes around a slow link
    undisturbed = simulate(resolved, LINKED_WORK, straight)
    slowed = simulate(resolved, LINKED_WORK, straight, faults=Faults((SLOW_LINK,)))
    assert ttft(slowed) > 5 * ttft(undisturbed)


def test_fault_of_an_unknown_link_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="west->north"):
        simulate(problem(LINKED), LINKED_WORK, faults=Faults((replace(SLOW_LINK, target="north"),)))


def test_slow_fault_delays_a_replica_for_its_duration() -> None:
    plan, work = closed_plan((mixed(), "east", 1)), requests((0.0, 1000, 100), (60.0, 1000, 100))
    calm = simulate(problem(plan), work).records
    fault = Fault(0.0, "slow", replica="*", factor=4.0, duration_s=30.0)
    records = simulate(problem(plan), work, faults=Faults((fault,))).records
    added_s = DEFAULT_HOST.request_s
    slow_s = 4.0 * (float(calm.finish_s[0]) - added_s)
    assert float(records.finish_s[0]) - added_s == pytest.approx(slow_s, rel=1e-6)
    assert float(records.finish_s[1] - 60.0) == pytest.approx(float(calm.finish_s[1] - 60.0), rel=1e-6)


TRAFFIC = Traffic(
    "chat",
    4.0,
    (LengthBin(200, 30, 1.0),),
    classes=(("interactive", 0.3), ("batch", 0.2)),
    origins=(("europe", 0.75), ("asia", 0.25)),
)


def test_request_classes_and_origins_are_drawn_by_their_shares() -> None:
    workload = of_traffic([TRAFFIC], 4000, 7)
    labels = workload.labels
    assert labels is not None
    assert labels.classes == ("interactive", "batch", "standard")
    assert np.bincount(labels.request_class) / 4000 == pytest.approx([0.3, 0.2, 0.5], abs=0.03)
    assert np.bincount(labels.from_origin) / 4000 == pytest.approx([0.75, 0.25], abs=0.03)
    plain = of_traffic([replace(TRAFFIC, classes=(), origins=())], 4000, 7)
    assert plain.labels is None
    assert (plain.arrival_s == workload.arrival_s).all()
    assert (plain.prompt_tokens == workload.prompt_tokens).all()


def test_network_distance_of_users_delays_ttft() -> None:
    resolved = problem(closed_plan((mixed(), "east", 2)))
    workload = of_traffic([TRAFFIC], 300, 1)
    near = simulate(resolved, workload, Policy(admission=False), seed=1)
    rtt_s = {("europe", "east"): 0.1, ("asia", "east"): 0.3}
    far = simulate(replace(resolved, rtt_s=rtt_s), workload, Policy(admission=False), seed=1)
    labels = far.records.labels
    assert labels is not None
    later = np.where(labels.from_origin == 0, 0.1, 0.3)
    assert far.records.first_token_s == pytest.approx(near.records.first_token_s + later)
    assert far.records.finish_s == pytest.approx(near.records.finish_s + later)
    classes = {item.model: item for item in summarise(far).classes}
    assert set(classes) == {"interactive", "batch", "standard"}
    assert all(item.attainment is not None for item in classes.values())


FOUR = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 4)))


ACROSS = fleets.problem(
    fleets.flow_plan((fleets.prefill_only(), "west", 2), (fleets.decode_only(), "east", 2)), gbps=100.0
)


def attainment(result: SimResult) -> float:
    outcome = judge(result.records, result.slos, result.end_s)
    return float(outcome.met.sum() / outcome.judged.sum())


def test_learned_paces_converge_and_a_slow_replica_gets_fewer_requests() -> None:
    brains: list[Brain] = []

    def mind(replica_models: ReplicaModels, policy: Policy) -> Decider:
        brains.append(Brain(replica_models.facts(), policy))
        return brains[0]

    slow = Faults((Fault(0.0, "slow", replica="*#0/0", factor=3.0),))
    result = simulate(FOUR, fleets.load(1500, 40.0, seed=3), faults=slow, mind=mind)
    paces = {name: replica.pace for name, replica in brains[0].fleet.views.items()}
    hers = next(name for name in paces if "#0/" in name)
    others = [pace for name, pace in paces.items() if name != hers]
    assert 2.4 < paces[hers] / np.mean(others) < 3.6
    assert max(others) / min(others) < 1.2
    sent = np.bincount(result.records.decode_replica)
    assert sent[0] < 0.6 * sent[1:].mean()
    assert attainment(result) > 0.99
    assert (
        attainment(simulate(FOUR, fleets.load(1500, 40.0, seed=3), Policy(balance="goodput"), faults=slow))
        < 0.9
    )


def test_slow_link_lowers_attainment_no_more_than_a_dead_link() -> None:
    requests = fleets.load(400, 14.0, seed=2)
    result = {}
    for factor in (0.3, 0.1, 0.02, 0.0):
        fault = Fault(8.0, "link", source="west", target="east", factor=factor, duration_s=15.0)
        result[factor] = attainment(simulate(ACROSS, requests, faults=Faults((fault,))))
    assert min(result.values()) >= result[0.0] - 0.005, result
    assert result[0.0] > 0.99


def test_repeated_run_learns_the_same_paces() -> None:
    faults = Faults((Fault(1.0, "slow", replica="*", factor=2.0, duration_s=5.0),))
    once, again = (simulate(FOUR, fleets.load(300, 30.0, blocks=5), faults=faults) for _ in range(2))
    assert (once.records.finish_s == again.records.finish_s).all()
    assert (once.records.decode_replica == again.records.decode_replica).all()


def test_combo_that_lost_a_side_serves_and_recovers() -> None:
    plan = closed_plan((combo(1, 2), "east", 1))
    requests = load(1200, 8.0)
    gone = Faults((Fault(30.0, "replica", replica="*#0/0"),))
    result = simulate(problem(plan), requests, Policy(scaling="flips"), faults=gone)
    changes: dict[str, list[tuple[float, Role]]] = {}
    for item in result.replicas:
        changes[item.id] = [(at_s, role) for at_s, state, role in item.changes if state == "ready"]
    left = [roles for name, roles in changes.items() if name.endswith(("#0/1", "#0/2"))]
    assert any(role != "decode" for roles in left for _, role in roles), "somebody took over"
    first_s = min(at_s for roles in left for at_s, role in roles if role != "decode")
    assert 30.0 <= first_s <= 33.0, "at the next tick"
    assert all(roles[-1][1] == "decode" for roles in left), "the planned roles, once the other is back"
    assert (result.records.outcome == OUTCOMES.index("answered")).all()
