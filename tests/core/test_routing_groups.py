"""Inside combos and pairs: opportunistic runs (CAUCHY 3.4.2) and split prompts (CRONUS)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import brain_builders as build
import pytest

from potluck.core.routing.opportunistic import PrefillUtilization, busier, in_place, step_seconds
from potluck.core.routing.split import partial_tokens, printed_tokens
from potluck.core.state.actions import Run
from potluck.core.state.events import (
    ReplicaReported,
    ReplicaStatus,
    RequestCancelled,
    SegmentComputed,
    SegmentDone,
)
from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.values.replica_spec import ReplicaSpec
from potluck.core.values.route import aggregated, handed_over

COMBO = build.template("combo", ("prefill", "decode", "decode"), "combo", closed=(2.0, 2.0))
COMBOS = build.plan((COMBO,), {("combo", "near"): 1}, {("combo", "near", "closed"): (1.0, 1.0)})
P, D0, D1 = (f"combo@near#0/{place}" for place in range(3))
PAIR = build.template("pair", ("prefill", "mixed"), "pair", closed=(2.0, 2.0))
PAIRS = build.plan((PAIR,), {("pair", "near"): 1}, {("pair", "near", "closed"): (1.0, 1.0)})
CRONUS = Policy(split_overflow=False, low_decodes=False)
"""To the letter of the paper."""
LOW, HIGH = "pair@near#0/0", "pair@near#0/1"


def sent(world: build.World, name: str, prompt: int = 1000) -> Run | None:
    """The route of a new request; None when it waits."""
    actions = world.arrive(build.request(name, prompt))
    if not actions:
        return None
    (run,) = actions
    assert isinstance(run, Run)
    return run


def test_figure_5b_idle_decode_replicas_take_what_the_prefill_replica_cannot() -> None:
    world = build.world(COMBOS)
    routes = [sent(world, name) for name in "abcd"]
    assert [run.route if run else None for run in routes] == [
        handed_over(P, D0, 1000),  # nothing to do anywhere: by the rule
        aggregated(D1),  # the prefill replica is busy, this one is not (D0 has a's decode to come)
        handed_over(P, D0, 1000),
        handed_over(P, D1, 1000),
    ]


def test_an_idle_prefill_replica_is_used_while_decode_replicas_are_busier() -> None:
    world = build.world(COMBOS)
    for number in range(6):
        sent(world, str(number))
    while any(job.done < len(job.run.route.segments) - 1 or not job.first for job in world.jobs.values()):
        for name, job in world.jobs.items():
            if job.done < len(job.run.route.segments) - 1 or not job.first:
                world.advance(name)
                break
    run = sent(world, "late")
    assert run is not None
    assert run.route == aggregated(P)  # all prompts are computed, both others decode three


def view(name: str, role: str, requests: int = 0, prompt: int = 0) -> ReplicaState:
    member = ReplicaSpec(name, "u", "t", 0, "combo", "m", role, "here")  # type: ignore[arg-type]
    return ReplicaState(member, "ready", role, open_requests=requests, open_prefill_tokens=prompt)  # type: ignore[arg-type]


def test_the_rules_of_running_in_place() -> None:
    def step(each: ReplicaState) -> float:
        return each.open_requests + 1.0

    idle_p, busy_p = view("p", "prefill"), view("p", "prefill", 1, 500)
    idle_d, busy_d, full_d = view("d", "decode"), view("d", "decode", 1), view("d", "decode", 5)
    assert in_place([idle_p], [idle_d], step, 0.0) is None
    assert in_place([busy_p], [busy_d, idle_d], step, 0.0) is idle_d
    assert in_place([idle_p], [busy_d], step, 0.0) is idle_p
    assert (
        in_place([idle_p], [busy_d], step, 0.5) is None
    )  # prefills would slow it down as much as it is faster
    assert in_place([busy_p], [full_d], step, 0.0) is None
    decoding_p = view("p", "prefill", 4)
    assert in_place([decoding_p], [full_d], step, 0.1) is decoding_p
    assert in_place([decoding_p], [full_d], step, 0.2) is None
    assert in_place([view("p", "prefill", 5)], [full_d], step, 0.0) is None
    reporting = view("d", "decode")
    reporting.status = ReplicaStatus(0, 2, 0, 100, 5, 10, 0.02)
    assert in_place([busy_p], [reporting], step, 0.0) is None  # others' work, by its own word


def test_a_step_is_a_line_through_its_two_known_batches() -> None:
    known = ReplicaFacts(1e-4, 0.0, 0.030, 11, 100, 1000, decode_first_s=0.010)
    assert [step_seconds(known, batch) for batch in (1, 6, 11, 22)] == pytest.approx(
        [0.010, 0.020, 0.030, 0.060]
    )
    assert step_seconds(replace(known, decode_first_s=0.0), 22) == pytest.approx(0.060)
    assert step_seconds(None, 7) == 7


def test_busy_is_the_share_of_arrivals_that_find_work() -> None:
    busy, idle, at_work = 0.0, view("p", "prefill"), view("p", "prefill", 1, 500)
    for number in range(1000):
        busy = busier(busy, [at_work if number % 4 == 0 else idle])
    assert busy == pytest.approx(0.25, abs=0.02)
    assert busier(0.0, [idle, at_work]) == pytest.approx(0.5 / 64)


def test_without_it_every_request_takes_its_turn_on_the_fixed_path() -> None:
    world = build.world(COMBOS, Policy(opportunistic=False))
    runs = [sent(world, str(number)) for number in range(20)]
    assert Counter(run.route for run in runs if run) == {
        handed_over(P, D0, 1000): 10,
        handed_over(P, D1, 1000): 10,
    }


def test_a_combo_that_lost_its_prefill_replica_still_answers() -> None:
    world = build.world(COMBOS)
    world.lose(P)
    run = sent(world, "a")
    assert run is not None
    assert run.route in (aggregated(D0), aggregated(D1))


def test_a_pair_takes_two_prompts_at_a_time_on_its_low_end() -> None:
    world = build.world(PAIRS, CRONUS)
    first, second, third, fourth = (sent(world, name) for name in "abcd")
    assert first is not None
    assert second is not None
    assert third is fourth is None
    assert [segment.replica for segment in first.route.segments] == [LOW, HIGH]
    (after,) = world.advance("a")  # its part is done: the next may come
    assert isinstance(after, Run)
    assert after.request == "c"
    world.tell(RequestCancelled("d"))
    world.requests.pop("d")
    for name in "abc":
        world.finish(name)
    build.assert_at_rest(world.brain)


def test_the_split_follows_the_high_end_replicas_report() -> None:
    world = build.world(PAIRS)
    world.tell(ReplicaReported(HIGH, ReplicaStatus(0, 40, 0, 60_000, 10_000, 20_000, 0.04)))
    run = sent(world, "a", 4000)
    assert run is not None
    expected = partial_tokens(4000, build.SPLIT, 40, 60_000.0, 10_000, 16)
    assert run.route == handed_over(LOW, HIGH, expected)
    assert 1 < expected < 4000
    world.tell(ReplicaReported(HIGH, ReplicaStatus(0, 40, 0, 60_000, 100, 20_000, 0.04)))
    whole = sent(world, "b", 4000)
    assert whole is not None
    assert whole.route == handed_over(LOW, HIGH, 4000)  # 100 blocks do not hold it


def test_without_splitting_the_low_end_takes_whole_prompts_and_any_number() -> None:
    world = build.world(PAIRS, Policy(split=False, low_decodes=False))
    runs = [sent(world, name) for name in "abcd"]
    assert [run.route if run else None for run in runs] == [handed_over(LOW, HIGH, 1000)] * 4


def decoding(world: build.World, count: int) -> Counter[str]:
    """Let so many requests come as far as decoding; where they do."""
    for number in range(count):
        sent(world, f"x{number}")
        for name, job in list(world.jobs.items()):
            while not job.first:
                world.advance(name)
    return Counter(job.run.route.decoder for job in world.jobs.values())


@pytest.mark.parametrize("keep", [True, False])
def test_decodes_stay_on_the_low_end_once_the_high_end_is_over_its_batch(keep: bool) -> None:
    counts = decoding(build.world(PAIRS, Policy(low_decodes=keep)), 24)  # both are planned for batches of 8
    assert counts == ({HIGH: 12, LOW: 12} if keep else {HIGH: 24})
    assert decoding(build.world(PAIRS), 8) == {HIGH: 8}


def test_a_prompt_that_finds_no_place_may_go_whole_to_the_high_end() -> None:
    world = build.world(PAIRS)
    for name in "ab":
        sent(world, name)
    whole = sent(world, "c")
    assert whole is not None
    assert whole.route == aggregated(HIGH)
    world.tell(ReplicaReported(HIGH, ReplicaStatus(0, 40, 0, 60_000, 10, 20_000, 0.04)))
    assert sent(world, "d") is None  # it has no blocks for it


def test_no_prompt_goes_whole_to_a_high_end_that_is_over_its_batch() -> None:
    world = build.world(PAIRS, Policy(low_decodes=False))
    decoding(world, 8)  # what it is planned for
    assert (
        sum(sent(world, name) is not None for name in "abcd") == 2
    )  # as many as have a place on the low end
    world.finish("x0")
    for name in ("x1", "x2", "x3"):
        world.finish(name)
    last = sent(world, "e")
    assert last is not None
    assert last.route == aggregated(HIGH)


def test_what_waits_for_a_pair_moves_on_when_the_pair_breaks() -> None:
    world = build.world(PAIRS, CRONUS)
    for name in "abcd":
        sent(world, name)
    world.lose(LOW)
    assert set(world.jobs) == set("abcd")
    assert {job.run.route.decoder for job in world.jobs.values()} == {HIGH}
    for name in "abcd":
        world.finish(name)
    build.assert_at_rest(world.brain)


def test_a_segment_is_done_once() -> None:
    world = build.world(PAIRS, CRONUS)
    for name in "abcd":
        sent(world, name)
    assert len(world.advance("a")) == 1
    assert world.tell(SegmentDone("a", 0, 0)) == []


def test_a_low_end_place_is_free_once_its_prefill_is_computed() -> None:
    """CRONUS's bound is on prompts in the low-end instance; KV on its way holds nobody up."""
    world = build.world(PAIRS, CRONUS)
    for name in "abcd":
        sent(world, name)
    assert set(world.jobs) == {"a", "b"}
    assert len(world.tell(SegmentComputed("a", 0, 0))) == 1  # c
    assert world.tell(SegmentComputed("a", 0, 0)) == []
    assert world.tell(SegmentComputed("a", 1, 0)) == []  # of another attempt
    assert world.advance("a") == []  # handed over: its place was given away already
    assert len(world.advance("b")) == 1  # d, though nobody said that b was computed
    for name in "abcd":
        world.finish(name)
    build.assert_at_rest(world.brain)


def test_the_printed_algorithm_is_a_switch() -> None:
    parts = []
    for rule in ("series", "printed"):
        world = build.world(PAIRS, replace(CRONUS, split_rule=rule))
        run = sent(world, "a")
        assert run is not None
        parts.append(run.route.segments[0].stop)
    assert parts[0] != parts[1]
    assert parts[1] == printed_tokens(1000, build.SPLIT, 0, 0.0, 1 << 30, 16)


def test_arrivals_in_turn_do_not_hide_how_busy_a_prefill_replica_is() -> None:
    """Prompts of 0.1 s come every 0.125 s: each finds the replica free, which is busy for 0.8 of the time."""
    fleet = build.plan(
        [build.template("c", ("prefill", "decode"), "combo", closed=(5.0, 5.0))],
        {("c", "near"): 1},
        {("c", "near", "closed"): (5.0, 5.0)},
    )
    there = build.world(fleet)
    prefill = [view for view in there.brain.fleet.views.values() if view.role == "prefill"]
    facts = prefill[0].facts
    assert facts is not None
    prompt_s = facts.prefill_fixed_s + 1000 * facts.prefill_s_per_token
    usage = PrefillUtilization()
    came = [build.request("r", 1000)._replace(arrival_s=number * prompt_s / 0.8) for number in range(200)]
    found = [usage.seen(each.arrival_s, each.prompt_tokens, prefill) for each in came]
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(0.8)


def test_copies_that_are_alike_have_alike_though_their_paces_scatter() -> None:
    there = build.world(
        build.plan(
            [build.template("one", closed=(5.0, 5.0))],
            {("one", "near"): 3},
            {("one", "near", "closed"): (5.0, 5.0)},
        )
    )
    targets = list(there.brain.table.singles.values())
    for number, target in enumerate(targets):
        assert target.view is not None
        target.view.pace = 1.0 + 0.03 * number
        target.timed()
    chooser = there.brain.table.ways(there.brain.table.models["m"], 0, 100).closed.prefills
    assert Counter(chooser.pick() for _ in range(30)) == dict.fromkeys(targets, 10)
    assert targets[2].view is not None
    targets[2].view.pace = 1.3
    targets[2].timed()
    targets[2].load = 1.0
    assert targets[2] not in [chooser.pick() for _ in range(30)]
