"""PrfaaS's balance equals the planner's model; its two timescales."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_builders import fleet_of, observed, plan_of, template, traffic

from papers import prfaas_model as planner
from potluck.core.scaling.prfaas_scaling import (
    NEVER_TOKENS,
    ClusterBalance,
    PrfaasScaling,
    best_split,
    best_threshold,
    rate_per_s,
    split_lengths,
)
from potluck.core.scaling.roles import Flippable, decode_per_s, prefill_per_s
from potluck.core.scaling.rule import FlipRole, ScaleDecision, SetThreshold
from potluck.core.scaling.traffic_window import LengthCount, ModelTraffic, TrafficWindow
from potluck.core.state.events import LinkReported
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import LengthBucket, Plan, PlannedFlow
from potluck.core.values.types import Request, Role
from potluck.plan.assemble.columns import thresholds_of

POLICY = Policy(scaling="prfaas")
FAST = ReplicaFacts(5e-5, 0.2, 0.02, 64, 10**5, 10**6)
SLOW = ReplicaFacts(1.5e-4, 0.3, 0.03, 40, 10**5, 10**6)
CARGO = ModelFacts(kv_bytes_per_token=2e4, state_bytes=1e8)
OUTPUT = 1000.0


def local_replicas(count: int, prefills: int, facts: ReplicaFacts = SLOW) -> list[Flippable]:
    def one(place: int) -> Flippable:
        role: Role = "prefill" if place < prefills else "decode"
        rates = (prefill_per_s(facts, 20000), decode_per_s(facts, OUTPUT))
        return Flippable(f"l{place}", "here", role, 0, *rates, facts)

    return [one(place) for place in range(count)]


def cluster_balance(remote: int, here: list[Flippable], gbps: float = 100.0) -> ClusterBalance:
    return ClusterBalance(Counter({FAST: remote} if remote else {}), tuple(here), gbps * 1e9 / 8, CARGO)


def window_of(lengths: list[int]) -> ModelTraffic:
    window = TrafficWindow()
    for tokens in lengths:
        window.arrived(0.0, Request("r", "m", 0.0, tokens, 1))
    traffic = window.observed(1.0).of("m")
    assert traffic is not None
    return traffic


LENGTHS = [int(token) for token in planner.truncated_lognormal(9.9, 1.0, 128, 131072, 2000).tokens]
BINS = window_of(LENGTHS).lengths


@pytest.mark.parametrize(
    ("remote", "here", "gbps"), [(4, 8, 100.0), (4, 8, 5.0), (1, 6, 100.0), (2, 12, 2.0)]
)
def test_prfaas_optimum_equals_the_planner_model(remote: int, here: int, gbps: float) -> None:
    ends = (1.0, 2e5)

    def line(facts: ReplicaFacts) -> planner.Curve:
        return planner.Curve(ends, tuple(1 / prefill_per_s(facts, tokens) for tokens in ends))

    theirs = planner.Site(
        remote,
        here,
        gbps,
        line(FAST),
        line(SLOW),
        planner.Curve(ends, tuple(2e4 * tokens + 1e8 for tokens in ends)),
        1 / decode_per_s(SLOW, OUTPUT),
    )
    tokens = np.array([item.mean_tokens for item in BINS])
    share = np.array([item.count for item in BINS]) / len(LENGTHS)
    best = planner.optimum(theirs, planner.Lengths(tokens, share))
    rate, t, flips = best_split(cluster_balance(remote, local_replicas(here, 1), gbps), BINS, most=here)
    assert rate == pytest.approx(best.rate_per_s, rel=1e-9)
    prefills = 1 + len(flips) - 2 * sum(role == "decode" for _, role in flips)
    assert prefills == best.prefill
    p, long, short = split_lengths(BINS, t)
    assert (p, long, short) == pytest.approx((best.remote_share, best.long_tokens, best.short_tokens))


@given(
    st.lists(st.integers(1, 10**5), min_size=1, max_size=40),
    st.integers(0, 3),
    st.lists(st.sampled_from([FAST, SLOW]), min_size=2, max_size=5),
    st.floats(0.1, 100),
)
@settings(max_examples=30, deadline=None)
def test_prfaas_thresholds_and_role_splits_equal_the_best_of_all(
    lengths: list[int], remote: int, kinds: list[ReplicaFacts], gbps: float
) -> None:
    bins = window_of(lengths).lengths
    here = [
        replace(local_replicas(1, int(place == 0), facts)[0], replica=f"l{place}")
        for place, facts in enumerate(kinds)
    ]
    place = cluster_balance(
        remote, sorted(here, key=lambda each: -each.prefill_per_s / each.decode_per_s), gbps
    )
    tries = [0, *(item.high_tokens - 1 for item in bins), NEVER_TOKENS] if remote else [NEVER_TOKENS]
    now = [item.role == "decode" for item in place.local]
    rate, t = best_threshold(place, bins, now)
    assert rate == max(rate_per_s(place, bins, item, now) for item in tries)
    assert rate == rate_per_s(place, bins, t, now)
    every = [split for split in product((False, True), repeat=len(kinds)) if len(set(split)) == 2]
    best = max(rate_per_s(place, bins, item, split) for split in every for item in tries)
    result, _, _ = best_split(place, bins, most=9)
    if len(set(kinds)) == 1:
        assert result == pytest.approx(best)
    assert result <= best * (1 + 1e-9)
    assert result >= rate
    assert best_split(place, bins, most=0) == (rate, t, [])


def test_prfaas_role_split_keeps_both_roles_in_every_region() -> None:
    near, far = (
        local_replicas(4, 2),
        [replace(item, replica=f"x{item.replica}", region="far") for item in local_replicas(2, 1)],
    )
    both = sorted([*near, *far], key=lambda each: each.role == "decode")
    _, _, flips = best_split(cluster_balance(0, both), BINS, most=9)
    assert flips
    roles = {item.replica: item.role for item in both} | dict(flips)
    assert {(item.region, roles[item.replica]) for item in both} == set(
        product(("here", "far"), ("prefill", "decode"))
    )


def test_prfaas_threshold_stays_local_on_a_dead_link_and_sends_only_the_longest_on_a_thin_one() -> None:
    here, now = local_replicas(8, 3), [False] * 3 + [True] * 5
    assert best_threshold(cluster_balance(4, here, 0.0), BINS, now)[1] == NEVER_TOKENS
    wide = best_threshold(cluster_balance(4, here, 100.0), BINS, now)
    thin = best_threshold(cluster_balance(4, here, 3.0), BINS, now)
    assert thin[0] < wide[0]
    assert NEVER_TOKENS > thin[1] > wide[1]


# The rule

TEMPLATES = (
    template("far", prefill=1.0, roles=("prefill",)),
    template("pre", prefill=1.0, roles=("prefill",)),
    template("dec", decode=1.0, roles=("decode",)),
)
REPLICAS = {("far", 0): FAST, ("pre", 0): SLOW, ("dec", 0): SLOW}
FACTS = FleetFacts({"m": CARGO}, REPLICAS, links_gbps={("there", "here"): 100.0})


def plan(far: int = 4, pre: int = 3, dec: int = 5) -> Plan:
    return plan_of(TEMPLATES, {("far", "there"): far, ("pre", "here"): pre, ("dec", "here"): dec})


def scaled_traffic(scale: float = 1.0) -> ModelTraffic:
    bins = window_of([max(1, int(length * scale)) for length in LENGTHS])
    sure = traffic(20.0, output=int(OUTPUT))
    return replace(
        sure, lengths=bins.lengths, arrivals=bins.arrivals, mean_prompt_tokens=bins.mean_prompt_tokens
    )


def run_rule(
    rule: PrfaasScaling,
    there: Plan,
    model_traffic: ModelTraffic,
    from_s: int,
    to_s: int,
    links: tuple[LinkReported, ...] = (),
) -> list[tuple[int, ScaleDecision]]:
    made: list[tuple[int, ScaleDecision]] = []
    for at_s in range(from_s, to_s, 10):
        look = observed(float(at_s), model_traffic, links=links)
        for item in rule.on_tick(float(at_s), look, FLEETS[there], there):
            if isinstance(item, FlipRole):
                FLEETS[there].flip(item.replica, item.role)
            made.append((at_s, item))
    return made


FLEETS = {item: fleet_of(item) for item in (plan(), plan(4, 6, 2), plan(0))}


def test_prfaas_threshold_moves_only_with_lengths_and_link_bandwidth() -> None:
    rule, there = PrfaasScaling(POLICY, FACTS), plan()
    first = run_rule(rule, there, scaled_traffic(), 0, 600)
    assert [at_s for at_s, _ in first] == [120]
    assert isinstance(first[0][1], SetThreshold)
    assert "keeps" in rule.why()
    (second,) = run_rule(rule, there, scaled_traffic(0.3), 600, 1200)
    assert isinstance(second[1], SetThreshold)
    assert second[1].tokens < first[0][1].tokens  # shorter prompts: the same share crosses only if t falls
    slow = (LinkReported("there", "here", 0.9, 0.0, 0.5),)
    (third,) = run_rule(rule, there, scaled_traffic(0.3), 1200, 1700, slow)
    assert isinstance(third[1], SetThreshold)
    assert third[1].tokens > second[1].tokens


def test_prfaas_scaling_keeps_the_planned_threshold_unless_another_is_better() -> None:
    """It begins where the plan has it, and does not move for what the lengths' noise could feign."""
    best = best_threshold(
        cluster_balance(4, local_replicas(8, 3)),
        BINS,
        [item.role == "decode" for item in local_replicas(8, 3)],
    )[1]
    for cut, moves in ((best * 0.95, False), (best * 6.0, True)):
        buckets = [LengthBucket("m", 0, round(cut), 0.5), LengthBucket("m", 1, 10**6, 0.5)]
        flows = (PlannedFlow("m", 0, "here", "here", 0.5), PlannedFlow("m", 1, "there", "here", 0.5))
        counts = {("far", "there"): 4, ("pre", "here"): 3, ("dec", "here"): 5}
        there = replace(plan_of(TEMPLATES, counts, buckets), flows=flows)
        there = replace(there, thresholds=thresholds_of(there))
        FLEETS[there] = fleet_of(there)
        rule = PrfaasScaling(POLICY, FACTS)
        made = run_rule(rule, there, scaled_traffic(), 0, 600)
        assert bool(made) == moves
        assert moves or f"keeps {round(cut)} tokens" in rule.why()


def test_prfaas_roles_change_only_on_the_long_timescale_and_restore_the_balance() -> None:
    rule, there = PrfaasScaling(POLICY, FACTS), plan(4, 6, 2)
    made = run_rule(rule, there, scaled_traffic(), 0, 1800)
    assert not any(isinstance(item, FlipRole) for _, item in made)
    made = run_rule(rule, there, scaled_traffic(), 1800, 4000)
    flips = [item for _, item in made if isinstance(item, FlipRole)]
    assert {flip.role for flip in flips} == {"decode"}
    assert any(isinstance(item, SetThreshold) for _, item in made)
    place = cluster_balance(
        4, local_replicas(8, sum(v.role == "prefill" for v in FLEETS[there].views.values()) - 4)
    )
    now = [item.role == "decode" for item in place.local]
    assert best_threshold(place, BINS, now)[0] >= best_split(place, BINS, most=8)[0] / 1.1


def test_prfaas_scaling_explains_why_it_does_nothing() -> None:
    rule, there = PrfaasScaling(POLICY, FACTS), plan()
    rule.on_tick(0.0, observed(0.0), FLEETS[there], there)
    assert "looks again in 120 s" in rule.why()
    rule.on_tick(130.0, observed(130.0, traffic(0.1)), FLEETS[there], there)
    assert "fewer than 50 requests" in rule.why()
    untimed = PrfaasScaling(POLICY, replace(FACTS, replicas={("far", 0): FAST}))
    assert run_rule(untimed, there, scaled_traffic(), 0, 300) == []
    assert "no times are known of dec, pre" in untimed.why()
    alone = plan_of(TEMPLATES, {("dec", "here"): 2})
    FLEETS[alone] = fleet_of(alone)
    assert run_rule(rule, alone, scaled_traffic(), 0, 300) == []
    assert "no region both prefills and decodes" in rule.why()


def test_prfaas_scaling_without_a_remote_region_sends_no_prompts() -> None:
    made = run_rule(PrfaasScaling(POLICY, FACTS), plan(0), scaled_traffic(), 0, 600)
    assert [item.tokens for _, item in made if isinstance(item, SetThreshold)] == [NEVER_TOKENS]


def test_kv_codec_lowers_the_prfaas_threshold() -> None:
    there = plan()
    packed = replace(there, flows=(PlannedFlow("m", 0, "there", "here", 1.0, "int4"),))
    FLEETS[packed] = FLEETS[there]
    thin = (LinkReported("there", "here", 0.5, 0.0, 2.0),)
    plain, small = (
        run_rule(PrfaasScaling(POLICY, FACTS), item, scaled_traffic(), 0, 200, thin)
        for item in (there, packed)
    )
    assert isinstance(plain[0][1], SetThreshold)
    assert isinstance(small[0][1], SetThreshold)
    assert small[0][1].tokens < plain[0][1].tokens


def test_small_samples_do_not_move_the_prfaas_threshold() -> None:
    rule, there = PrfaasScaling(POLICY, FACTS), plan()
    run_rule(rule, there, scaled_traffic(), 0, 200)
    unsure = replace(scaled_traffic(0.8), prompt_error_tokens=0.2 * scaled_traffic().mean_prompt_tokens)
    assert run_rule(rule, there, unsure, 200, 600) == []


def test_prompt_lengths_are_split_within_bins() -> None:
    bins = (LengthCount(8, 9, 2, 16), LengthCount(16, 18, 1, 17), LengthCount(32, 36, 1, 33))
    assert split_lengths(bins, 8) == (0.5, 25.0, 8.0)
    assert split_lengths(bins, 0) == (1.0, 20.625 * 4 / 4 - 4.125, 0.0)
    assert split_lengths(bins, NEVER_TOKENS) == (0.0, 0.0, 16.5)


def test_prompts_are_timed_by_the_prefill_curve_where_it_is_known() -> None:
    curved = replace(FAST, prefill_curve=(0.1, 2e-5, 1e-9))
    assert curved.prompt_s(1000) == pytest.approx(0.1 + 0.02 + 0.001)
    assert curved.prompt_s(1000, 400) == pytest.approx(curved.prompt_s(1000) - curved.prompt_s(400) + 0.1)
    assert FAST.prompt_s(1000, 400) == pytest.approx(0.2 + 600 * 5e-5)
    here = tuple(local_replicas(8, 4))
    bent = ClusterBalance(Counter({curved: 2}), here, 1e12, CARGO)
    t = 20_000
    p, long, short = split_lengths(BINS, t)
    now = [item.role == "decode" for item in here]
    compute = 2 / (0.1 + 2e-5 * long + 1e-9 * long**2) / p
    home = 4 / (0.3 + 1.5e-4 * short) / (1 - p)
    assert rate_per_s(bent, BINS, t, now) == pytest.approx(min(compute, home, 4 * decode_per_s(SLOW, OUTPUT)))
    # What the line takes for as fast is slower for long prompts: more of them stay.
    steep = replace(FAST, prefill_curve=(0.2, 5e-5, 5e-9))
    assert (
        best_threshold(replace(bent, remote=Counter({steep: 2})), BINS, now)[1]
        >= best_threshold(replace(bent, remote=Counter({FAST: 2})), BINS, now)[1]
    )
