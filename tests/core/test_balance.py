"""The least-loaded index, round robin and copy weights of the balances."""

from __future__ import annotations

from collections import Counter
from math import inf

import brain_builders as build
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.core.routing.balance import LeastLoaded, decode_seconds, prefill_seconds
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.routing.template_weights import ModelWeights, merge_weights, model_weights
from potluck.core.state.actions import Run
from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.targets import PLAIN, Target
from potluck.core.values.plan import ReplicaSpec


def targets(count: int) -> list[Target]:
    members = [
        ReplicaSpec(f"r{i}", f"u{i}", "t", 0, "homogeneous", "m", "mixed", "here") for i in range(count)
    ]
    return [Target(PLAIN, replica_spec.unit, ReplicaState(replica_spec)) for replica_spec in members]


what = st.sampled_from(["pick", "heavier", "lighter", "set", "remove"])
steps = st.lists(st.tuples(what, st.integers(0, 5), st.floats(0.1, 9)), max_size=60)


@given(steps)
@settings(max_examples=80)
def test_least_loaded_index_picks_the_least_loaded_target(steps: list[tuple[str, int, float]]) -> None:
    index = LeastLoaded(lambda target, weight: 1.0 / weight)
    all_targets, weights = targets(6), dict[int, float]()
    for what, place, number in steps:
        target = all_targets[place]
        if what == "set":
            index.set(target, number)
            weights[place] = number
        elif what == "remove":
            index.set(target, 0.0)
            weights.pop(place, None)
        elif what == "heavier":
            target.load += number
        elif what == "lighter":
            target.remove_load(number)
        picked_target = index.pick()
        assert (picked_target is None) == (not weights)
        assert index.total == pytest.approx(sum(weights.values()))
        if picked_target is not None:
            best = min(all_targets[i].load + 1.0 / w for i, w in weights.items())
            chosen = all_targets.index(picked_target)
            assert picked_target.load + 1.0 / weights[chosen] == best


def test_request_seconds_are_its_prefill_and_its_share_of_decode_steps() -> None:
    known = ReplicaFacts(1e-3, 0.5, 0.02, 10, 100, 1000)
    assert prefill_seconds(known, 1000) == pytest.approx(1.5)
    assert decode_seconds(known, 100) == pytest.approx(0.2)


FAST = build.template("fast", closed=(3.0, 3.0))
SLOW = build.template("slow", closed=(1.0, 1.0))
TWO = build.plan(
    (FAST, SLOW),
    {("fast", "near"): 1, ("slow", "near"): 2},
    {("fast", "near", "closed"): (1.5, 1.5), ("slow", "near", "closed"): (1.0, 1.0)},
)


def replicas(world: build.World, count: int, finish: bool = False) -> Counter[str]:
    """Which template the next requests go to."""
    counts: Counter[str] = Counter()
    for number in range(count):
        (run,) = world.arrive(build.request(f"{len(world.requests)}-{number}"))
        assert isinstance(run, Run)
        counts[world.members[run.route.decoder].template] += 1
        if finish:
            world.finish(run.request)
    return counts


def test_goodput_balance_sends_requests_in_proportion_to_capacity() -> None:
    # By bucket half the time each: fast serves 1.5 + 1.5, two slow ones 1 + 1.
    assert replicas(build.world(TWO, Policy(balance="goodput")), 500) == {"fast": 300, "slow": 200}


def test_round_robin_balance_ignores_capacity() -> None:
    assert replicas(build.world(TWO, Policy(balance="round-robin")), 300) == {"fast": 100, "slow": 200}


def test_fixed_balance_sends_requests_by_planned_shares() -> None:
    plan = build.plan(
        (FAST, SLOW),
        {("fast", "near"): 1, ("slow", "near"): 2},
        {("fast", "near", "closed"): (0.2, 0.0), ("slow", "near", "closed"): (0.8, 0.0)},
    )
    assert replicas(build.world(plan, Policy(balance="fixed")), 100) == {"fast": 20, "slow": 80}


def test_token_balance_sends_the_next_request_to_the_most_free_tokens() -> None:
    world = build.world(TWO, Policy(balance="token"))
    assert replicas(world, 30) == {"fast": 10, "slow": 20}  # all have as many blocks, so they fill up alike
    busy = {name for name, job in world.jobs.items() if "fast" in job.run.route.decoder}
    for name in busy:
        world.finish(name)
    assert replicas(world, 10) == {"fast": 10}


def test_learned_balance_fills_the_faster_replica_first_and_follows_completions() -> None:
    world = build.world(TWO, Policy(balance="learned"))
    (run,) = world.arrive(build.request("first"))
    assert isinstance(run, Run)
    assert "fast" in run.route.decoder  # with nothing open it would be done first
    for job in list(world.jobs):
        world.finish(job)
    assert replicas(world, 10, finish=True) == {"fast": 10}
    build.assert_idle(world.brain)


@pytest.mark.parametrize("balance", ["learned", "token"])
def test_loads_return_to_zero_after_requests_over_a_flow_finish(balance: str) -> None:
    plan = build.plan(
        (
            build.template("p", ("prefill",), prefill=(2.0, 2.0)),
            build.template("d", ("decode",), decode=(2.0, 2.0)),
        ),
        {("p", "near"): 2, ("d", "near"): 2},
        {("p", "near", "prefill"): (1.0, 1.0), ("d", "near", "decode"): (1.0, 1.0)},
        {("m", "near", "near"): (1.0, 1.0)},
    )
    world = build.world(plan, Policy(balance=balance))  # type: ignore[arg-type]
    runs = [world.arrive(build.request(str(number)))[0] for number in range(4)]
    firsts = Counter(run.route.segments[0].replica for run in runs if isinstance(run, Run))
    assert set(firsts.values()) == {2}
    for number in range(4):
        world.finish(str(number))
    build.assert_idle(world.brain)


# Turns: shares hold after every pick, and changes of the members cause neither bursts nor starvation.

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)


def round_robin_of(each: list[float]) -> WeightedRoundRobin[int]:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    for member, weight in enumerate(each):
        turns.set(member, weight)
    return turns


@given(weights, st.integers(1, 300))
def test_round_robin_counts_stay_within_one_of_their_shares(each: list[float], picks: int) -> None:
    turns, counts, total = round_robin_of(each), Counter[int](), sum(each)
    for n in range(1, picks + 1):
        member = turns.pick()
        assert member is not None
        counts[member] += 1
        for i, weight in enumerate(each):
            assert abs(counts[i] - n * weight / total) < 1 + 1e-6


def nginx_counts(each: list[int], picks: int) -> list[list[int]]:
    """nginx's smooth weighted round robin, as its documentation describes it: the counts after every pick."""
    current, counts, seen = [0] * len(each), [0] * len(each), []
    for _ in range(picks):
        current = [now + weight for now, weight in zip(current, each, strict=True)]
        best = max(range(len(each)), key=current.__getitem__)
        current[best] -= sum(each)
        counts[best] += 1
        seen.append(list(counts))
    return seen


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_round_robin_spreads_at_least_as_evenly_as_nginx(each: list[int]) -> None:
    period, total = sum(each), sum(each)
    turns, counts = round_robin_of([float(w) for w in each]), [0] * len(each)
    worst = nginx_worst = 0.0
    for n, theirs in enumerate(nginx_counts(each, period), 1):
        counts[turns.pick()] += 1  # type: ignore[index]
        for i, weight in enumerate(each):
            worst = max(worst, abs(counts[i] - n * weight / total))
            nginx_worst = max(nginx_worst, abs(theirs[i] - n * weight / total))
    assert counts == each  # a whole period gives everyone exactly its weight
    assert worst <= max(nginx_worst, 1.0) + 1e-6


changes = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.integers(1, 20), st.just(0.0)),
        st.tuples(st.just("set"), st.integers(0, 5), st.floats(0.1, 10.0)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0.0)),
    ),
    max_size=40,
)


@given(changes)
@settings(max_examples=75)
def test_round_robin_lags_sum_to_zero_and_stay_bounded(steps: list[tuple[str, int, float]]) -> None:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    present: dict[int, float] = {}
    removals = 0
    for what, number, weight in steps:
        if what == "pick":
            for _ in range(number):
                assert (turns.pick() is None) == (not present)
        else:
            removals += what == "remove" and number in present
            turns.set(number, weight)
            present.pop(number, None)
            if weight:
                present[number] = weight
        assert set(turns.members()) == set(present)
        assert turns.total == pytest.approx(sum(present.values()))
        lags = [turns.lag(member) for member in present]
        assert sum(lags) == pytest.approx(0.0, abs=1e-6)
        # Each removal hands on at most one turn of lag.
        assert all(abs(lag) <= 1 + removals + 1e-6 for lag in lags)


@given(weights, st.floats(0.01, 100.0), st.integers(0, 60))
def test_round_robin_gives_an_added_member_its_share_at_once(
    each: list[float], weight: float, before: int
) -> None:
    turns = round_robin_of(each)
    for _ in range(before):
        turns.pick()
    turns.set(99, weight)
    counts, share = Counter[int](), weight / (sum(each) + weight)
    for n in range(1, 100):
        counts[turns.pick()] += 1  # type: ignore[index]
        assert abs(counts[99] - n * share) < 2


def test_round_robin_follows_changed_weights() -> None:
    turns = round_robin_of([1.0, 1.0, 1.0])
    for _ in range(10):
        turns.pick()
    turns.set(0, 6.0)
    counts = Counter(turns.pick() for _ in range(80))
    assert abs(counts[0] - 60) < 2
    assert abs(counts[1] - 10) < 2


def test_swapped_round_robin_turn_counts_for_the_member_that_took_it() -> None:
    turns = round_robin_of([1.0, 1.0])
    for _ in range(4):
        picked = turns.pick()
        assert picked is not None
        turns.swap(picked, 0)
    assert Counter(turns.pick() for _ in range(4)) == {1: 4}


def test_round_robin_member_that_took_every_turn_is_picked_again_soon() -> None:
    turns = round_robin_of([1.0, 1.0])
    for _ in range(1000):
        picked = turns.pick()
        assert picked is not None
        turns.swap(picked, 0)
    assert 0 in [turns.pick() for _ in range(30)]


def test_round_robin_picks_each_of_a_thousand_members_once() -> None:
    turns = round_robin_of([1.0] * 1000)
    assert sorted(turns.pick() for _ in range(1000)) == list(range(1000))  # type: ignore[type-var]


def test_round_robin_without_members_picks_none() -> None:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    assert turns.pick() is None
    turns.set(1, 1.0)
    turns.set(1, 0.0)
    assert turns.pick() is None
    assert turns.total == 0


# What a plan offers to routing: goodput in the time the plan gives a bucket, and old plans that still serve.

A = build.template("a", closed=(1.0, 1.0))
B = build.template("b", closed=(1.0, 1.0))


def test_copy_weight_of_one_bucket_is_its_capacity_share_or_one_by_balance() -> None:
    template = build.template("a", closed=(4.0,))
    plan = build.plan((template,), {("a", "near"): 2}, {("a", "near", "closed"): (1.0,)}, longest=(1000,))
    assert model_weights(plan, "goodput")["m"].copies["a", "near"].closed == (4.0,)
    assert model_weights(plan, "fixed")["m"].copies["a", "near"].closed == (0.5,)
    assert model_weights(plan, "round-robin")["m"].copies["a", "near"].closed == (1.0,)


def test_copy_planned_for_long_prompts_gets_few_short_ones() -> None:
    # Two copies of A: a tenth of their time for short prompts, the rest for long ones; B: short ones only.
    shares = {("a", "near", "closed"): (0.2, 1.8), ("b", "near", "closed"): (0.8, 0.0)}
    plan = build.plan((A, B), {("a", "near"): 2, ("b", "near"): 1}, shares)
    offer = model_weights(plan, "goodput")["m"]
    assert offer.copies["a", "near"].closed == pytest.approx((0.1, 0.9))
    assert offer.copies["b", "near"].closed == pytest.approx((1.0, 0.0))


rates = st.floats(0.0, 5.0)


@given(
    st.lists(st.tuples(rates, rates, rates, st.integers(1, 4)), min_size=1, max_size=5), st.floats(0.3, 1.0)
)
@example([(0.0, 5e-324, 0.0, 1)], 1.0)
def test_copy_weights_do_not_overload_a_copy_within_planned_demand(
    rows: list[tuple[float, float, float, int]], headroom: float
) -> None:
    """Any plan whose copies are at most `headroom` busy, under the very demand it was made for."""
    capacity = (3.0, 2.0, 1.0)
    templates = [build.template(f"t{i}", closed=capacity) for i in range(len(rows))]
    shares, counts = {}, {}
    for i, (*item, count) in enumerate(rows):
        busy = sum(rate / (c * count) for rate, c in zip(item, capacity, strict=True))
        scale = min(1.0, headroom / busy) if busy else 1.0
        counts[f"t{i}", "near"] = count
        shares[f"t{i}", "near", "closed"] = [rate * scale for rate in item]
    plan = build.plan(templates, counts, shares, longest=(1000, 4000, 90000))  # type: ignore[arg-type]
    if not plan.shares:
        return
    result = model_weights(plan, "goodput")["m"].copies
    demand = [sum(s.rate_per_s for s in plan.shares if s.bucket == b) for b in range(3)]
    total = [sum(result[key].closed[b] * count for key, count in counts.items()) for b in range(3)]
    for key in counts:
        sent = [demand[b] * result[key].closed[b] / total[b] if total[b] else 0.0 for b in range(3)]
        assert sum(rate / c for rate, c in zip(sent, capacity, strict=True)) <= 1 + 1e-6


def test_copy_weights_of_a_plan_without_shares_are_template_capacities() -> None:
    plan = build.plan((A,), {("a", "near"): 1}, {})
    assert model_weights(plan, "goodput")["m"].copies["a", "near"].closed == (1.0, 1.0)


def test_every_prompt_length_maps_to_a_bucket() -> None:
    offer = model_weights(build.plan((A,), {("a", "near"): 1}, {}, longest=(100, 1000)), "goodput")["m"]
    assert offer.longest_tokens == (100.0, inf)
    assert [offer.bucket(tokens) for tokens in (1, 100, 101, 1000, 10**9)] == [0, 0, 1, 1, 1]


def test_copies_of_the_previous_plan_keep_their_weights_by_length() -> None:
    before = build.plan((A,), {("a", "near"): 1}, {("a", "near", "closed"): (0.5, 0.0)}, longest=(1000, 9000))
    old_weights = model_weights(before, "goodput")["m"]
    shares = {("b", "near", "closed"): (1.0, 1.0, 1.0)}
    new_weights = model_weights(
        build.plan((B,), {("b", "near"): 1}, shares, longest=(500, 1000, 9000)), "goodput"
    )["m"]
    both = merge_weights(new_weights, old_weights, {("a", "near"), ("b", "near")})
    assert both.copies["a", "near"].closed == (1.0, 1.0, 0.0)
    assert both.copies["b", "near"] == new_weights.copies["b", "near"]
    assert merge_weights(new_weights, old_weights, {("b", "near")}) == new_weights  # its copies are gone
    assert isinstance(both, ModelWeights)
