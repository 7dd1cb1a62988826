"""Groups: who hands to whom inside a copy, as planned and when it is not as planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brain_builders import World, plan, request, template
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.brain.brain import Brain
from potluck.core.errors import InputError
from potluck.core.routing.group_sharing import GroupRates, MeanLengths, rated
from potluck.core.routing.transportation import KvPair, orchestrated
from potluck.core.scaling.group_roles import ALIKE, ROLES, _Choices, _tabu, best_roles
from potluck.core.state.events import PlanReceived, RequestArrived, Tick
from potluck.core.state.facts import FleetFacts, GroupFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Template, TemplateFlow, plan_from_json, plan_to_json
from potluck.core.values.types import Role, Slo
from potluck.plan.search.orchestrate import transport

ROLES_OF: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode", "mixed")
FLOWS = ((0, 2, 0.4), (0, 3, 0.1), (1, 3, 0.3), (4, 4, 0.2))


def group(roles: tuple[Role, ...] = ROLES_OF) -> Template:
    made = template("g", roles, "group", closed=(10.0, 6.0))
    flows = tuple(TemplateFlow(b, i, j, share) for b in (0, 1) for i, j, share in FLOWS)
    return replace(made, flows=flows)


def facts_of(
    count: int,
    links: dict[tuple[int, int], float] | None = None,
    prefill: tuple[float, ...] = (),
    decode: tuple[float, ...] = (),
    ttft_s: float = 100.0,
) -> FleetFacts:
    """`links` have seconds for each byte, one of their own for each pair; rates are for 1000 and 100 tokens."""
    firsts, seconds = prefill or (5.0,) * count, decode or (5.0,) * count
    hops = tuple(
        (i, j, ((f"{i}->{j}", 0.0, (links or {}).get((i, j), 0.0)),))
        for i, j in product(range(count), repeat=2)
    )
    return FleetFacts(
        {"m": ModelFacts(1.0, slo=Slo(ttft_s, 1.0))},
        {
            # one answer at a time, so that a mixed one prefills and decodes by turns
            ("g", i): ReplicaFacts(1e-3 / firsts[i], 0.0, 0.01 / seconds[i], 1, 10**6, 10**6)
            for i in range(count)
        },
        groups={"g": GroupFacts("m", 1.0, hops, 1000.0, 100.0)},
    )


def world_of(facts: FleetFacts, policy: Policy | None = None, made: Template | None = None) -> World:
    made = made or group()
    world = World(Brain(facts, policy or Policy(admission=False)))
    world.tell(PlanReceived(plan([made], {("g", "near"): 1}, {("g", "near", "closed"): (5.0, 1.0)})))
    world.all_ready()
    return world


def ends(world: World, count: int, start: int = 0, prompt: int = 1000) -> Counter[tuple[int, int]]:
    """Where requests went: (who prefills, who decodes), by the places of the replicas."""
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(start, start + count):
        world.tell(RequestArrived(request(f"r{number}", prompt, at_s=world.now_s)))
        route = world.jobs[f"r{number}"].run.route
        first, last = (int(s.replica.rpartition("/")[2]) for s in (route.segments[0], route.segments[-1]))
        assert len(route.segments) == (1 if first == last else 2)
        seen[first, last] += 1
    return seen


@pytest.mark.parametrize("balance", ["learned", "goodput", "fixed"])
def test_requests_are_shared_as_planned_in_every_run_of_them(balance: str) -> None:
    world = world_of(facts_of(5), Policy(admission=False, balance=balance))  # type: ignore[arg-type]
    for start in (0, 40, 80):
        seen = ends(world, 40, start)
        for i, j, share in FLOWS:
            assert abs(seen[i, j] - 40 * share) <= 2
        assert set(seen) == {(i, j) for i, j, _ in FLOWS}


def test_when_a_replica_is_lost_the_others_share_anew() -> None:
    """Decoder 3 goes: its two prefillers hand to decoder 2, which was nobody's of replica 1."""
    world = world_of(facts_of(5))
    world.lose("g@near#0/3")
    seen = ends(world, 60)
    assert set(seen) <= {(0, 2), (1, 2), (4, 4)}
    # Prompts count as long as their bucket's longest, 2000 tokens: the mixed one prefills 2 and decodes 4 a second.
    alone = 1 / (1 / 2.0 + 1 / 4.0)
    assert abs(seen[4, 4] - 60 * alone / (4.0 + alone)) <= 2


def test_links_decide_who_hands_to_whom_when_it_is_decided_anew() -> None:
    facts = facts_of(5, {(0, 2): 1.0})
    world = world_of(facts)
    world.lose("g@near#0/3")
    seen = ends(world, 40)
    assert seen[0, 2] <= 1
    assert seen[1, 2] > 10


def test_without_facts_of_its_machines_a_group_serves_on_with_what_is_left_of_its_flows() -> None:
    world = world_of(replace(facts_of(5), groups={}))
    world.lose("g@near#0/0")
    assert set(ends(world, 30)) == {(1, 3), (4, 4)}


def test_flows_are_checked_and_written_with_a_plan() -> None:
    made = plan([group()], {("g", "near"): 1}, {("g", "near", "closed"): (5.0, 1.0)})
    assert plan_from_json(plan_to_json(made)) == made
    with pytest.raises(InputError, match="beyond the 1"):
        replace(group(), replicas=group().replicas[:1])
    with pytest.raises(InputError, match="share"):
        TemplateFlow(0, 0, 1, 0.0)


@given(st.integers(0, 10**6))
def test_routing_is_the_transportation_problem_of_the_planner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, links = rng.integers(1, 5, 3)
    first, second = rng.uniform(0, 8, m), rng.uniform(0, 8, n)
    busy = rng.uniform(0, 0.6, (links, m, n)) * (rng.random((links, m, n)) < 0.5)
    value, _ = transport(first, second, np.ones((m, n)), links=busy)
    pairs = [
        KvPair(i, j, tuple((str(k), float(busy[k, i, j])) for k in range(links) if busy[k, i, j]), 0.0)
        for i, j in product(range(m), range(n))
    ]
    flows = orchestrated(first.tolist(), second.tolist(), pairs)
    assert sum(flows) == pytest.approx(value, rel=1e-6, abs=1e-6)
    for i, j in product(range(m), range(n)):
        assert sum(f for f, p in zip(flows, pairs, strict=True) if p.prefill == i) <= first[i] + 1e-6
        assert sum(f for f, p in zip(flows, pairs, strict=True) if p.decode == j) <= second[j] + 1e-6
    for k in range(links):
        used = sum(f * dict(p.busy_s).get(str(k), 0.0) for f, p in zip(flows, pairs, strict=True))
        assert used <= 1 + 1e-6


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_new_roles_serve_as_much_as_any_with_the_fewest_flips(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    links = {
        (i, j): float(rng.choice([0.0, 1e-4, 1e-3])) for i, j in product(range(count), repeat=2) if i != j
    }
    rates = [tuple(rng.uniform(1, 9, count).tolist()) for _ in range(2)]
    facts, lengths = facts_of(count, links, *rates), MeanLengths(1000.0, 100.0)
    now: dict[int, Role] = {i: ROLES[int(rng.integers(3))] for i in range(count)}

    def served(roles: dict[int, Role]) -> float:
        return sum(rate for *_, rate in rated(facts, "g", roles, lengths))

    def flips(roles: dict[int, Role]) -> int:
        return sum(roles[place] != role for place, role in now.items())

    every = [dict(enumerate(each)) for each in product(ROLES, repeat=count)]
    most = max(map(served, every))
    best, serves, before = best_roles(facts, "g", now, lengths, 0.0)
    assert before == pytest.approx(served(now))
    assert serves == pytest.approx(served(best))
    assert serves >= most * (1 - ALIKE) * (1 - 1e-9)
    enough = max(before, most * (1 - ALIKE)) * (1 + 1e-6)
    assert all(flips(roles) >= flips(best) for roles in every if served(roles) > enough)
    _, found = _tabu(_Choices(facts, "g", list(now), lengths), now, before)
    assert before - 1e-9 <= found <= most * (1 + 1e-9)


def test_roles_stay_for_less_than_the_gain_that_was_asked_for() -> None:
    facts, lengths = facts_of(2, prefill=(5.0, 5.0), decode=(5.0, 5.5)), MeanLengths(1000.0, 100.0)
    now: dict[int, Role] = {0: "decode", 1: "prefill"}
    assert best_roles(facts, "g", now, lengths, 0.5)[0] == now
    assert GroupRates(facts, "g", lengths).mixed(0) == pytest.approx(2.0)


def test_a_lost_replica_makes_others_flip_at_the_next_tick() -> None:
    roles: tuple[Role, ...] = ("prefill", "decode", "decode")
    made = replace(
        template("g", roles, "group", closed=(4.0,)),
        flows=(TemplateFlow(0, 0, 1, 0.5), TemplateFlow(0, 0, 2, 0.5)),
    )
    facts = facts_of(3, {(i, j): 1e-3 for i in range(3) for j in range(3)})
    world = world_of(facts, Policy(admission=False, scaling="flips", window_s=10.0), made)
    for number in range(60):
        world.now_s += 0.5
        ends(world, 1, number)
        world.finish(f"r{number}")
        if number % 2:
            world.tell(Tick())
    world.lose("g@near#0/0")
    world.now_s += 1.0
    world.tell(Tick())
    views = world.brain.fleet.views
    assert {views[f"g@near#0/{i}"].role for i in (1, 2)} == {"mixed"}
    assert set(ends(world, 10, 100)) == {(1, 1), (2, 2)}
