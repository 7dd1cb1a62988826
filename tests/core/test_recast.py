"""A plan that wants the same replicas in other roles changes roles, and starts nothing that is there."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.state.actions import Reassign, StartReplica
from potluck.core.state.events import OperatorOrdered, PlanReceived
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan, PlannedReplica, Template
from potluck.core.values.types import Role

FAR = single("another", 1, 8)


def one_role(role: Role, node: str = "node") -> Template:
    prefill, decode, closed = (4.0 if role == each else 0.0 for each in ("prefill", "decode", "mixed"))
    made = build.template(f"{role} {node}", (role,), prefill=(prefill,), decode=(decode,), closed=(closed,))
    return replace(made, replicas=(PlannedReplica(role, single(node, 1, 8)),))


def plan_of(counts: dict[tuple[Role, str], int]) -> Plan:
    made = {key: one_role(*key) for key in counts}
    phases = {"mixed": "closed", "prefill": "prefill", "decode": "decode"}
    return build.plan(
        tuple(made.values()),
        {(made[key].name, "near"): n for key, n in counts.items()},
        {(made[key].name, "near", phases[key[0]]): (float(n),) for key, n in counts.items()},  # type: ignore[misc]
        {("m", "near", "near"): (1.0,)} if any(role != "mixed" for role, _ in counts) else None,
        longest=(1000,),
    )


TEMPLATES = tuple(
    one_role(role, node) for role in ("mixed", "prefill", "decode") for node in ("node", "another")
)  # type: ignore[arg-type]


def test_roles_change_in_place_and_only_what_is_missing_is_started() -> None:
    world = build.world(
        plan_of({("prefill", "node"): 1, ("decode", "node"): 3}), known=build.facts(TEMPLATES)
    )
    names = set(world.brain.fleet.views)
    actions = world.plan(plan_of({("prefill", "node"): 3, ("decode", "node"): 2}))
    assert [type(each) for each in actions] == [Reassign, StartReplica]
    assert names <= set(world.brain.fleet.views)
    roles = sorted(view.role for view in world.brain.fleet.views.values())
    assert roles == ["decode", "decode", "prefill", "prefill", "prefill"]
    for view in world.brain.fleet.views.values():
        assert view.member.template == f"{view.role} node"
        assert view.facts is world.brain.fleet.facts[view.member.template, 0]


def test_requests_go_by_the_new_roles_at_once() -> None:
    world = build.world(plan_of({("mixed", "node"): 2}), known=build.facts(TEMPLATES))
    world.plan(plan_of({("prefill", "node"): 1, ("decode", "node"): 1}))
    (run,) = world.arrive(build.request("a"))
    first, second = run.route.segments  # type: ignore[union-attr]
    views = world.brain.fleet.views
    assert (views[first.replica].role, views[second.replica].role) == ("prefill", "decode")


def test_flipped_replicas_are_taken_first_and_roles_by_hand_stay() -> None:
    before = plan_of({("prefill", "node"): 2, ("decode", "node"): 3})
    world = build.world(before, known=build.facts(TEMPLATES))
    decodes = [name for name, view in world.brain.fleet.views.items() if view.role == "decode"]
    world.tell(OperatorOrdered(decodes[2], "prefill"))
    world.brain.fleet.flip(decodes[1], "prefill")
    actions = world.plan(plan_of({("prefill", "node"): 3, ("decode", "node"): 2}))
    assert [each.member.id for each in actions if isinstance(each, Reassign)] == [decodes[1]]
    assert world.brain.fleet.views[decodes[2]].role == "prefill"
    assert world.brain.fleet.views[decodes[2]].member.role == "decode"


def test_other_layouts_and_copies_that_work_together_are_started_anew() -> None:
    combo = build.template("combo", ("prefill", "decode"), "combo", closed=(2.0,))
    together = build.plan((combo,), {("combo", "near"): 1}, {}, longest=(1000,))
    known = build.facts((*TEMPLATES, combo))
    world = build.world(plan_of({("mixed", "node"): 2}), known=known)
    assert not [each for each in world.plan(together) if isinstance(each, Reassign)]
    world = build.world(plan_of({("mixed", "node"): 2}), known=known)
    assert not [each for each in world.plan(plan_of({("mixed", "another"): 2})) if isinstance(each, Reassign)]


counts = st.dictionaries(
    st.tuples(st.sampled_from(["mixed", "prefill", "decode"]), st.sampled_from(["node", "another"])),
    st.integers(0, 3),
    min_size=1,
).filter(lambda each: sum(each.values()) > 0)


@given(counts, counts)
def test_no_more_is_started_than_layouts_lack(before: dict, after: dict) -> None:  # type: ignore[type-arg]
    """Per layout, what starts is what is wanted beyond what is there, whatever the roles."""
    world = build.world(plan_of(before), known=build.facts(TEMPLATES))
    actions = world.brain.on(1.0, PlanReceived(plan_of(after)))
    for node in ("node", "another"):
        there = sum(n for (_, where), n in before.items() if where == node)
        wanted = sum(n for (_, where), n in after.items() if where == node)
        started = [a for a in actions if isinstance(a, StartReplica) and a.member.template.endswith(node)]
        assert len(started) == max(0, wanted - there)
    recast = [each.member.id for each in actions if isinstance(each, Reassign)]
    assert len(recast) == len(set(recast))
