"""Role changes inside combos: the best assignment, its gain, and the way back."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from scale_builders import fleet_of, observed, plan_of, template, traffic

from potluck.core.scaling.autoscaler import scaler_of
from potluck.core.scaling.roles import CALM_S, HOLD_S, CopyRoles, RoleRates, best_copy_roles, served_per_s
from potluck.core.scaling.rule import FlipRole
from potluck.core.state.facts import FleetFacts, ReplicaFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Role

PROMPT, OUTPUT = 1000, 100
PREFILL_S = 1e-4
"""A token; so a replica prefills 10 prompts a second, and at a batch of 50 and 50 ms decodes 10 answers a second."""
FACTS = ReplicaFacts(PREFILL_S, 0.0, 0.05, 50, 10**5, 10**6)
COMBO = template("combo", 20.0, roles=("prefill", "prefill", "decode", "decode"), nodes={"n": 4})
PLAN = plan_of((COMBO,), {("combo", "east"): 1})


def fleet(plan: Plan = PLAN) -> FleetState:
    made = fleet_of(plan)
    for view in made.views.values():
        view.facts = FACTS
    return made


def rule() -> CopyRoles:
    return CopyRoles(Policy(scaling="cauchy"), FleetFacts({}, {}))


def roles(fleet: FleetState) -> list[Role]:
    return [replica.role for replica in fleet.views.values()]


def role_flips(
    rule: CopyRoles, fleet: FleetState, at_s: float, rate: float, output: int = OUTPUT, **more: float
) -> list[FlipRole]:
    tick = rule.on_tick(
        at_s, observed(at_s, traffic(rate, prompt=PROMPT, output=output, **more)), fleet, PLAN
    )
    for item in tick:
        fleet.flip(item.replica, item.role)
    return tick


def test_growing_answers_flip_a_prefill_replica_to_decode_and_back_when_calm() -> None:
    there, copy_roles = fleet(), rule()
    assert role_flips(copy_roles, there, 0.0, 14.0) == [], "20 are served and 16 counted on"
    result = role_flips(
        copy_roles, there, 20.0, 12.0, output=300
    )  # decode does 3.3 each: 6.7 with two, 10 with three
    assert [item.role for item in result] == ["decode"]
    assert sorted(roles(there)) == ["decode", "decode", "decode", "prefill"]
    assert role_flips(copy_roles, there, 21.0, 12.0, output=300) == [], "that is the best there is"
    # Answers are short again: the planned roles serve more at once, so it goes back without waiting.
    assert [item.role for item in role_flips(copy_roles, there, 25.0, 12.0)] == ["prefill"]
    assert roles(there) == ["prefill", "prefill", "decode", "decode"]


def test_flipped_roles_stay_until_load_has_been_low_for_the_calm_time() -> None:
    there, copy_roles = fleet(), rule()
    assert role_flips(copy_roles, there, 0.0, 12.0, output=300)
    for at_s in (40.0, 60.0, 40.0 + CALM_S - 1):
        assert role_flips(copy_roles, there, at_s, 2.0, output=300) == []
    assert role_flips(copy_roles, there, 90.0, 12.0, output=300) == [], (
        "busy for a moment: it counts from the beginning"
    )
    for at_s in (100.0, 120.0, 100.0 + CALM_S - 1):
        assert role_flips(copy_roles, there, at_s, 2.0, output=300) == []
    assert len(role_flips(copy_roles, there, 100.0 + CALM_S, 2.0, output=300)) == 1
    assert roles(there) == ["prefill", "prefill", "decode", "decode"]


def test_lost_copy_replica_is_compensated_by_a_flip_until_it_returns() -> None:
    there, copy_roles = fleet(), rule()
    gone = list(there.views)[:2]
    for name in gone:
        there.remove(name)
    assert [item.role for item in role_flips(copy_roles, there, 0.0, 6.0)] == ["prefill"]
    assert sorted(roles(there)) == ["decode", "prefill"]
    one = next(replica for replica in there.views.values() if replica.role == "decode")
    there.remove(one.member.id)
    result = role_flips(copy_roles, there, 5.0, 6.0)
    assert [item.role for item in result] == ["mixed"], "less than HOLD_S later, as there are fewer now"
    for place in range(len(gone)):
        there.add(replace(one.member, id=f"new{place}", index=place, role="prefill"))
        there.views[f"new{place}"].facts = FACTS
        there.ready(f"new{place}")
    result = role_flips(copy_roles, there, 6.0, 6.0)
    assert [item.role for item in result] == ["decode"], "what is left is what was planned"
    assert sorted(roles(there)) == ["decode", "prefill", "prefill"]


def test_roles_do_not_flip_for_small_gains_sufficient_capacity_or_within_the_hold_time() -> None:
    there, copy_roles = fleet(), rule()
    assert role_flips(copy_roles, there, 0.0, 5.0, output=300) == [], "5.3 are counted on"
    next(iter(there.views.values())).pace = 1.05
    assert role_flips(copy_roles, there, 0.0, 100.0) == [], "no other roles serve a tenth more"
    assert role_flips(copy_roles, there, 0.0, 12.0, output=300)
    assert role_flips(copy_roles, there, 5.0, 12.0), "back, as answers are short"
    assert role_flips(copy_roles, there, 5.0 + HOLD_S - 1, 12.0, output=300) == []
    assert role_flips(copy_roles, there, 5.0 + HOLD_S, 12.0, output=300)


def test_queued_requests_count_as_demand_for_role_flips() -> None:
    there, copy_roles = fleet(), rule()
    assert role_flips(copy_roles, there, 0.0, 4.0, output=300) == []
    assert role_flips(copy_roles, there, 1.0, 4.0, output=300, held=500)


@pytest.mark.parametrize("seed", range(60))
def test_copy_roles_equal_the_best_of_all_role_assignments(seed: int) -> None:
    """Brute force over all roles that change replicas one way or, where some are gone, make all mixed."""
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    kinds = [RoleRates(chance.uniform(1, 20), chance.uniform(1, 20)) for _ in range(2)]
    there = fleet_of(
        plan_of((replace(COMBO, replicas=COMBO.replicas + COMBO.replicas[:1]),), {("combo", "east"): 1})
    )
    unit = next(iter(there.units.values()))
    for view in list(unit.views)[count:]:
        there.remove(view.member.id)
    able = {view.member.id: chance.choice(kinds) for view in unit.views}
    result, value = best_copy_roles(able, unit)
    assert value == pytest.approx(served_per_s(able, result))
    choices: list[tuple[Role, ...]] = [("mixed",) * count] if count < 5 else []
    for choice in product(("prefill", "decode"), repeat=count):
        changed = {role for role, view in zip(choice, unit.views, strict=True) if role != view.role}
        choices += [choice] if len(changed) < 2 else []
    best = max(served_per_s(able, dict(zip(able, choice, strict=True))) for choice in choices)
    assert value == pytest.approx(best)


def test_scaling_rules_that_flip_roles_explain_the_flip() -> None:
    there = fleet()
    for scaling in ("cauchy", "flips"):
        scaler = scaler_of(Policy(scaling=scaling), FleetFacts({}, {}))
        tick = scaler.on_tick(1000.0, observed(1000.0, traffic(12.0, output=300)), there, PLAN)
        assert any(isinstance(item, FlipRole) for item in tick)
        assert "as decode" in scaler.why()
