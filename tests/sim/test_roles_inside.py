"""Roles that change inside a combo, in simulation: what is left serves at once, and all is as planned after."""

from __future__ import annotations

from sim_fleets import closed_plan, combo, load, problem

from potluck.core.state.policy import Policy
from potluck.core.values.types import Role
from potluck.sim.results.records import OUTCOMES
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults


def test_a_combo_that_lost_a_side_goes_on_and_comes_back() -> None:
    plan = closed_plan((combo(1, 2), "east", 1))
    requests = load(1200, 8.0)
    gone = Faults((Fault(30.0, "replica", replica="*#0/0"),))
    result = simulate(problem(plan), requests, Policy(scaling="flips"), faults=gone)
    changes: dict[str, list[tuple[float, Role]]] = {}
    for each in result.replicas:
        changes[each.id] = [(at_s, role) for at_s, state, role in each.changes if state == "ready"]
    left = [roles for name, roles in changes.items() if name.endswith(("#0/1", "#0/2"))]
    assert any(role != "decode" for roles in left for _, role in roles), "somebody took over"
    first_s = min(at_s for roles in left for at_s, role in roles if role != "decode")
    assert 30.0 <= first_s <= 33.0, "at the next tick"
    assert all(roles[-1][1] == "decode" for roles in left), "the planned roles, once the other is back"
    answered = OUTCOMES.index("answered")
    assert (result.records.outcome == answered).all()
