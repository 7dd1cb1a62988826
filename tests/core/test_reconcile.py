"""Reconciling wanted and running copies, in random worlds and in examples."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import brain_builders as build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_builders import World, plan_of, served, target_per_s, template

from potluck.core.scaling.copy_capacity import CopyKey, template_capacities
from potluck.core.scaling.reconcile import restored, wanted_counts
from potluck.core.state import actions as act
from potluck.core.state.events import OperatorOrdered, PlanReceived, ReplicaStatus, Tick
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Plan, PlannedReplica, ReplicaSpec, Template
from potluck.core.values.types import Role, Slo

TEMPLATES = (
    template("small", 3.0),
    template("large", 7.0, nodes={"n": 2}),
    template("combo", 5.0, roles=("prefill", "decode", "decode"), nodes={"n": 1, "k": 1}),
    template("pre", prefill=4.0, roles=("prefill",), nodes={"k": 1}),
    template("dec", decode=6.0, roles=("decode",)),
    template("dull"),
    template("other", 2.0, model="o"),
)
KNOWN = template_capacities(plan_of(TEMPLATES, {}))
places = [(t.name, region) for t in TEMPLATES for region in ("east", "west")]
counts = st.dictionaries(st.sampled_from(places), st.integers(0, 4), max_size=5)


def settle(world: World, rounds: int = 400) -> int:
    """Rounds until nothing is left to do."""
    for number in range(rounds):
        if world.call().settled:
            return number
        world.pass_time()
    raise AssertionError(f"not settled after {rounds} rounds: {world.fleet.units}")


def replace_wanted(world: World, wanted: dict[CopyKey, int]) -> None:
    world.wanted = {**dict.fromkeys(world.wanted, 0), **wanted}


@given(old=counts, new=counts, seed=st.integers(0, 2**32))
@settings(max_examples=68, deadline=None)
def test_reconciler_reaches_the_wanted_counts_without_capacity_below_old_and_new(
    old: dict[CopyKey, int], new: dict[CopyKey, int], seed: int
) -> None:
    world = World(KNOWN, old, random.Random(seed))
    settle(world)
    assert world.counts() == old
    models = ["m", "o"] if "dull" not in {name for name, _ in {**old, **new}} else ["o"]
    floors = {m: min(world.serving_per_s(m), target_per_s(KNOWN, new, m)) for m in models}
    replace_wanted(world, new)
    for _ in range(400):
        settled = world.call().settled
        for model, floor in floors.items():
            assert world.serving_per_s(model) >= floor - 1e-9
        if settled:
            break
        world.pass_time()
    assert world.counts() == {**dict.fromkeys(old, 0), **new}


@given(old=counts, new=counts, seed=st.integers(0, 2**32))
@settings(max_examples=27, deadline=None)
def test_reconciler_replaces_replicas_lost_during_a_change(
    old: dict[CopyKey, int], new: dict[CopyKey, int], seed: int
) -> None:
    world = World(KNOWN, old, random.Random(seed))
    for _ in range(20):
        world.call()
        world.pass_time(lose=0.1)
    replace_wanted(world, new)
    for _ in range(20):
        world.call()
        world.pass_time(lose=0.1)
    settle(world)
    assert world.counts() == {**dict.fromkeys(old, 0), **new}


@given(old=counts, new=counts, seed=st.integers(0, 2**32), rounds=st.integers(0, 12))
@settings(max_examples=27, deadline=None)
def test_repeated_reconcile_call_does_nothing(
    old: dict[CopyKey, int], new: dict[CopyKey, int], seed: int, rounds: int
) -> None:
    world = World(KNOWN, old, random.Random(seed))
    for number in range(rounds):
        if number == rounds // 2:
            replace_wanted(world, new)
        world.call()
        world.pass_time(lose=0.05)
    world.call()
    before = world.progress
    again = world.call()
    assert again.actions == ()
    assert world.progress == before


@given(old=counts, new=counts, seed=st.integers(0, 2**32), dip=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=45, deadline=None)
def test_reconciler_never_exceeds_available_nodes_and_a_full_dip_always_finishes(
    old: dict[CopyKey, int], new: dict[CopyKey, int], seed: int, dip: float
) -> None:
    world = World(KNOWN, old, random.Random(seed), dip=dip)
    settle(world)
    old_nodes = world.held_nodes()
    fresh = World(KNOWN, new, random.Random(seed))
    settle(fresh)
    new_nodes = fresh.held_nodes()
    world.available = {
        key: max(old_nodes.get(key, 0), new_nodes.get(key, 0)) for key in {*old_nodes, *new_nodes}
    }
    replace_wanted(world, new)
    models = ["m", "o"] if "dull" not in {name for name, _ in {**old, **new}} else ["o"]
    floors = {m: (1 - dip) * min(world.serving_per_s(m), target_per_s(KNOWN, new, m)) for m in models}
    notes: tuple[str, ...] = ()
    for _ in range(300):
        step = world.call()
        notes = step.notes
        held = world.held_nodes()
        assert all(count <= world.available[key] for key, count in held.items())
        for model, floor in floors.items():
            assert world.serving_per_s(model) >= floor - 1e-9
        if step.settled:
            break
        world.pass_time()
    if dip == 1.0 or not notes:
        assert world.counts() == {**dict.fromkeys(old, 0), **new}
    else:
        assert any("no nodes" in note for note in notes)


def mark_started(world: World) -> None:
    for view in list(world.fleet.views.values()):
        if view.state == "starting":
            world.fleet.ready(view.member.id)


def settled_world(
    wanted: dict[CopyKey, int], available: dict[tuple[str, str], int] | None = None, dip: float = 0.0
) -> World:
    world = World(KNOWN, wanted, random.Random(0), available, dip)
    world.call()
    mark_started(world)
    assert world.call().settled
    return world


def test_reconciler_starts_new_copies_first_and_drains_the_least_loaded_old_ones() -> None:
    world = settled_world({("small", "east"): 3})
    for load, view in zip((5, 0, 2), world.fleet.views.values(), strict=True):
        view.open_requests = load
    replace_wanted(world, {("large", "east"): 1, ("small", "east"): 1})
    first = world.call()
    assert [type(action) for action in first.actions] == [act.StartReplica]
    world.fleet.ready("large@east#3/0")
    assert world.call().actions == (act.DrainReplica("small@east#1/0"), act.DrainReplica("small@east#2/0"))
    world.progress = world.progress.drained("small@east#2/0")
    assert world.call().actions == (act.StopReplica("small@east#2/0"),)
    world.at_s += 29.9
    assert world.call().actions == ()
    world.at_s += 0.2
    assert world.call().actions == (act.StopReplica("small@east#1/0"),)
    assert world.call().settled


def test_copies_that_do_not_serve_yet_are_stopped_without_draining() -> None:
    world = World(KNOWN, {("combo", "east"): 2}, random.Random(0))
    world.call()
    for replica in ("combo@east#0/0", "combo@east#1/0", "combo@east#1/1", "combo@east#1/2"):
        world.fleet.ready(replica)
    world.wanted["combo", "east"] = 1
    stops = (act.StopReplica("combo@east#0/1"), act.StopReplica("combo@east#0/2"))
    assert world.call().actions == (act.DrainReplica("combo@east#0/0"), *stops)


def test_copy_that_lost_a_replica_gets_it_back_under_a_new_id() -> None:
    world = settled_world({("combo", "east"): 1})
    world.fleet.remove("combo@east#0/1")
    (start,) = world.call().actions
    assert isinstance(start, act.StartReplica)
    assert (start.member.unit, start.member.index, start.member.role) == ("combo@east#0", 1, "decode")
    assert start.member.id != "combo@east#0/1"


def test_failed_starts_are_retried_with_exponential_backoff() -> None:
    world = World(KNOWN, {("small", "east"): 1}, random.Random(0))
    tries = []
    while world.at_s < 2000:
        step = world.call()
        if step.actions:
            tries.append(world.at_s)
            for replica in list(world.fleet.views):
                world.fleet.remove(replica)
        else:
            assert step.due_s > world.at_s
            world.at_s = step.due_s
    gaps = [round(b - a) for a, b in pairwise(tries)]
    assert gaps[:7] == [10, 20, 40, 80, 160, 300, 300]
    world.call()
    mark_started(world)
    world.call()
    assert not world.progress.attempts


def test_reconciler_without_spare_nodes_notes_the_dip_it_needs() -> None:
    world = settled_world({("small", "east"): 4}, {("east", "n"): 4})
    replace_wanted(world, {("dec", "east"): 2, ("small", "east"): 2})
    assert world.call().actions[0] == act.DrainReplica(
        "small@east#3/0"
    )  # the decode copies bring nothing by themselves
    world = settled_world({("small", "east"): 4}, {("east", "n"): 5})
    world.known["better"] = KNOWN["small"]._replace(template=template("better", 3.0, nodes={"n": 2}))
    world.available = {("east", "n"): 4}
    replace_wanted(world, {("better", "east"): 2})
    step = world.call()
    # Four served 12, two are wanted.
    assert [type(action) for action in step.actions] == [act.DrainReplica] * 2
    for view in list(world.fleet.views.values()):
        if view.state == "draining":
            world.progress = world.progress.drained(view.member.id)
    kinds = [type(action) for action in world.call().actions]
    assert kinds == [act.StopReplica, act.StopReplica, act.StartReplica]
    mark_started(world)
    step = world.call()
    assert [type(action) for action in step.actions] == [act.DrainReplica]  # 3 + 3 + 3 serve, 6 are needed
    world.progress = world.progress.drained(step.actions[0][0])
    step = world.call()
    assert [type(action) for action in step.actions] == [act.StopReplica]
    assert "a dip of 50% would let" in step.notes[0]
    world.dip = 0.5
    step = world.call()
    assert [type(action) for action in step.actions] == [act.DrainReplica]
    assert "no spare nodes, so" in step.notes[0]


@given(
    old=st.integers(1, 6),
    new=st.integers(1, 6),
    rates=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dip=st.sampled_from([0.0, 0.2, 0.34, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=36, deadline=None)
def test_exchange_on_full_nodes_keeps_capacity_within_the_dip(
    old: int, new: int, rates: tuple[int, int], dip: float, seed: int
) -> None:
    known = template_capacities(plan_of((template("a", float(rates[0])), template("b", float(rates[1]))), {}))
    world = World(known, {("a", "east"): old}, random.Random(seed), dip=dip)
    settle(world)
    world.available = {("east", "n"): max(old, new)}
    floor = min(old * rates[0], new * rates[1])
    replace_wanted(world, {("b", "east"): new})
    least, step = float(floor), world.call()
    for _ in range(200):
        least = min(least, world.serving_per_s("m"))
        if step.settled:
            break
        world.pass_time()
        step = world.call()
    assert least >= (1 - dip) * floor - 1e-9
    if step.settled:
        assert world.counts() == {("a", "east"): 0, ("b", "east"): new}
    else:
        assert dip < 1
        assert "would let copies be exchanged" in step.notes[0]


def test_reconciler_waits_for_draining_nodes_before_using_the_dip() -> None:
    world = settled_world({("small", "east"): 2}, {("east", "n"): 2}, dip=1.0)
    world.known["same"] = KNOWN["small"]._replace(template=template("same", 3.0))
    replace_wanted(world, {("same", "east"): 1})
    assert len(world.call().actions) == 1
    assert world.call().actions == ()
    assert world.serving_per_s("m") == 3.0


def test_cancelled_start_does_not_count_as_a_failure() -> None:
    world = World(KNOWN, {("small", "east"): 1}, random.Random(0))
    world.call()
    world.wanted["small", "east"] = 0
    assert world.call().actions == (act.StopReplica("small@east#0/0"),)
    world.wanted["small", "east"] = 1
    assert [type(action) for action in world.call().actions] == [act.StartReplica]
    assert not world.progress.attempts


def test_replicas_outside_the_plan_are_left_alone() -> None:
    world = settled_world({("small", "east"): 1})
    stray = ReplicaSpec("mine", "mine#7", "handmade", 0, "homogeneous", "m", "mixed", "east")
    world.fleet.add(stray)
    world.fleet.ready("mine")
    assert world.call().actions == ()
    world.wanted = {("small", "east"): 0}
    world.call()
    assert world.fleet.views["mine"].state == "ready"
    world.wanted = {("never seen", "east"): 1}
    assert "not known" in world.call().notes[0]


def test_manually_drained_replica_takes_its_copy_out_and_is_replaced() -> None:
    world = settled_world({("combo", "east"): 1})
    world.fleet.drain("combo@east#0/1")
    actions = world.call().actions
    assert actions[:2] == (act.DrainReplica("combo@east#0/0"), act.DrainReplica("combo@east#0/2"))
    assert sum(isinstance(action, act.StartReplica) for action in actions) == 3


def test_copies_without_known_rates_are_reconciled_by_count() -> None:
    world = settled_world({("dull", "east"): 3})
    replace_wanted(world, {("dull", "west"): 2})
    step = world.call()
    drains = [action for action in step.actions if isinstance(action, act.DrainReplica)]
    assert len(drains) == 1
    mark_started(world)
    assert sum(isinstance(action, act.DrainReplica) for action in world.call().actions) == 2


def test_flipped_copy_does_not_count_as_its_original_role() -> None:
    world = settled_world({("pre", "east"): 1, ("dec", "east"): 2})
    world.fleet.flip("dec@east#0/0", "prefill")
    replace_wanted(world, {("pre", "east"): 1, ("dec", "east"): 1})
    drains = [action.replica for action in world.call().actions if isinstance(action, act.DrainReplica)]
    assert drains == ["dec@east#0/0"]


def test_new_plan_restores_flipped_roles() -> None:
    world = settled_world({("pre", "east"): 2, ("dec", "east"): 1})
    assert restored(world.fleet) == ()
    world.fleet.flip("pre@east#1/0", "decode")
    assert restored(world.fleet) == (act.FlipReplica("pre@east#1/0", "prefill"),)


def test_named_machine_is_freed_before_its_new_copy_starts() -> None:
    layout = Layout((Stage(1, (StageNode("n", 4, "rack-7"),)),))
    old, new = (
        replace(template(name, 3.0), replicas=(PlannedReplica(role, layout),))
        for name, role in (("old", "mixed"), ("new", "mixed"))
    )
    world = World(template_capacities(plan_of((old, new), {})), {("old", "east"): 1}, random.Random(0))
    world.call()
    mark_started(world)
    replace_wanted(world, {("new", "east"): 1})
    step = world.call()
    assert step.actions == ()
    assert "a dip of 100% would let" in step.notes[0]
    world.dip = 1.0
    assert [type(action) for action in world.call().actions] == [act.DrainReplica]
    world.progress = world.progress.drained("old@east#0/0")
    assert [type(action) for action in world.call().actions] == [act.StopReplica, act.StartReplica]


def test_drain_order_uses_open_requests_not_reported_load() -> None:
    world = settled_world({("small", "east"): 2})
    world.fleet.views["small@east#0/0"].status = ReplicaStatus(9, 9, 9, 9, 0, 1, 0.1)
    world.fleet.views["small@east#1/0"].open_requests = 1
    world.wanted["small", "east"] = 1
    assert world.call().actions == (act.DrainReplica("small@east#0/0"),)


def test_wanted_counts_set_templates_outside_the_plan_to_zero() -> None:
    plan = plan_of(TEMPLATES, {("small", "east"): 2, ("large", "west"): 1})
    wanted = wanted_counts(plan, {("small", "east"): 5, ("combo", "east"): 1})
    assert wanted == {("small", "east"): 2, ("large", "west"): 1, ("combo", "east"): 0}


@pytest.mark.parametrize(("names", "rate"), [(["small", "large"], 10.0), (["pre", "dec", "dec"], 4.0)])
def test_reference_capacity_of_templates_equals_known_values(names: list[str], rate: float) -> None:
    assert served(KNOWN, names, "m") == rate


# A plan that wants the same replicas in other roles changes roles, and starts nothing that is there.

FAR = single("another", 1, 8)


def one_role(role: Role, node: str = "node") -> Template:
    prefill, decode, closed = (4.0 if role == item else 0.0 for item in ("prefill", "decode", "mixed"))
    made = build.template(f"{role} {node}", (role,), prefill=(prefill,), decode=(decode,), closed=(closed,))
    return replace(made, replicas=(PlannedReplica(role, single(node, 1, 8)),))


def plan_of_recast(counts_recast: dict[tuple[Role, str], int]) -> Plan:
    made = {key: one_role(*key) for key in counts_recast}
    phases = {"mixed": "closed", "prefill": "prefill", "decode": "decode"}
    return build.plan(
        tuple(made.values()),
        {(made[key].name, "near"): n for key, n in counts_recast.items()},
        {(made[key].name, "near", phases[key[0]]): (float(n),) for key, n in counts_recast.items()},  # type: ignore[misc]
        {("m", "near", "near"): (1.0,)} if any(role != "mixed" for role, _ in counts_recast) else None,
        longest=(1000,),
    )


TEMPLATES_RECAST = tuple(
    one_role(role, node) for role in ("mixed", "prefill", "decode") for node in ("node", "another")
)  # type: ignore[arg-type]


def test_new_plan_reassigns_roles_in_place_and_starts_only_missing_replicas() -> None:
    world = build.world(
        plan_of_recast({("prefill", "node"): 1, ("decode", "node"): 3}), known=build.facts(TEMPLATES_RECAST)
    )
    names = set(world.brain.fleet.views)
    actions = world.plan(plan_of_recast({("prefill", "node"): 3, ("decode", "node"): 2}))
    assert [type(action) for action in actions] == [act.Reassign, act.StartReplica]
    assert names <= set(world.brain.fleet.views)
    roles = sorted(view.role for view in world.brain.fleet.views.values())
    assert roles == ["decode", "decode", "prefill", "prefill", "prefill"]
    for view in world.brain.fleet.views.values():
        assert view.member.template == f"{view.role} node"
        assert view.facts is world.brain.fleet.facts[view.member.template, 0]


def test_requests_follow_reassigned_roles_at_once() -> None:
    world = build.world(plan_of_recast({("mixed", "node"): 2}), known=build.facts(TEMPLATES_RECAST))
    world.plan(plan_of_recast({("prefill", "node"): 1, ("decode", "node"): 1}))
    (run,) = world.arrive(build.request("a"))
    first, second = run.route.segments  # type: ignore[union-attr]
    views = world.brain.fleet.views
    assert (views[first.replica].role, views[second.replica].role) == ("prefill", "decode")


def test_reassignment_prefers_flipped_replicas_and_keeps_manual_roles() -> None:
    previous_plan = plan_of_recast({("prefill", "node"): 2, ("decode", "node"): 3})
    world = build.world(previous_plan, known=build.facts(TEMPLATES_RECAST))
    decodes = [name for name, view in world.brain.fleet.views.items() if view.role == "decode"]
    world.tell(OperatorOrdered(decodes[2], "prefill"))
    world.brain.fleet.flip(decodes[1], "prefill")
    actions = world.plan(plan_of_recast({("prefill", "node"): 3, ("decode", "node"): 2}))
    assert [action.member.id for action in actions if isinstance(action, act.Reassign)] == [decodes[1]]
    assert world.brain.fleet.views[decodes[2]].role == "prefill"
    assert world.brain.fleet.views[decodes[2]].member.role == "decode"


def test_replicas_of_another_layout_or_a_combo_are_started_anew() -> None:
    combo = build.template("combo", ("prefill", "decode"), "combo", closed=(2.0,))
    together = build.plan((combo,), {("combo", "near"): 1}, {}, longest=(1000,))
    known = build.facts((*TEMPLATES_RECAST, combo))
    world = build.world(plan_of_recast({("mixed", "node"): 2}), known=known)
    assert not [item for item in world.plan(together) if isinstance(item, act.Reassign)]
    world = build.world(plan_of_recast({("mixed", "node"): 2}), known=known)
    message = world.plan(plan_of_recast({("mixed", "another"): 2}))
    assert not [item for item in message if isinstance(item, act.Reassign)]


counts_recast = st.dictionaries(
    st.tuples(st.sampled_from(["mixed", "prefill", "decode"]), st.sampled_from(["node", "another"])),
    st.integers(0, 3),
    min_size=1,
).filter(lambda each: sum(each.values()) > 0)


@given(counts_recast, counts_recast)
def test_reassignment_starts_only_as_many_replicas_as_a_layout_lacks(before: dict, after: dict) -> None:  # type: ignore[type-arg]
    """Per layout, what starts is what is wanted beyond what is there, whatever the roles."""
    world = build.world(plan_of_recast(before), known=build.facts(TEMPLATES_RECAST))
    actions = world.brain.on(1.0, PlanReceived(plan_of_recast(after)))
    for node in ("node", "another"):
        there = sum(n for (_, where), n in before.items() if where == node)
        wanted = sum(n for (_, where), n in after.items() if where == node)
        started = [a for a in actions if isinstance(a, act.StartReplica) and a.member.template.endswith(node)]
        assert len(started) == max(0, wanted - there)
    reassign = [action.member.id for action in actions if isinstance(action, act.Reassign)]
    assert len(reassign) == len(set(reassign))


# Models that nobody asks for sleep where they may, and wake with the next request, which is held meanwhile.

ONE = build.template("one", closed=(1.0, 1.0))
PLAN = build.plan((ONE,), {("one", "near"): 2}, {("one", "near", "closed"): (1.0, 1.0)})


def facts(idle_s: float | None, slo: Slo | None = None) -> build.Facts:
    made = build.facts((ONE,))
    return replace(
        made, models={name: replace(model, idle_s=idle_s, slo=slo) for name, model in made.models.items()}
    )


def pass_time(world: build.World, until_s: float) -> list[object]:
    result: list[object] = []
    while world.now_s < until_s:
        world.now_s += 1.0
        result += world.tell(Tick())
    return result


def test_idle_model_sleeps_and_wakes_for_the_first_request() -> None:
    world = build.world(PLAN, Policy(max_wait_s=120.0), known=facts(30.0, Slo(1.0, 0.1)))
    text = pass_time(world, 29.0)
    assert not [item for item in text if isinstance(item, act.OperatorNote | act.DrainReplica)]
    text = pass_time(world, 32.0)
    assert [item.what for item in text if isinstance(item, act.OperatorNote)] == ["m sleeps"]
    for name in [item.replica for item in text if isinstance(item, act.DrainReplica)]:
        world.drain_out(name)
    assert not world.brain.fleet.views
    assert world.arrive(build.request("a")) == []
    text = pass_time(world, 34.0)
    assert [item.what for item in text if isinstance(item, act.OperatorNote)] == ["m wakes"]
    starts = [item for item in text if isinstance(item, act.StartReplica)]
    assert len(starts) == 2
    pass_time(world, 60.0)
    actions = world.make_ready(starts[0].member.id)
    assert [type(action) for action in actions] == [act.Run], "late, but nobody could have been in time"
    assert not [item for _, _, made in world.log for item in made if isinstance(item, act.Refuse)]


def test_model_with_open_requests_or_without_sleep_time_stays_awake() -> None:
    world = build.world(PLAN, known=facts(10.0))
    world.arrive(build.request("a"))
    said = act.OperatorNote | act.DrainReplica | act.StopReplica
    assert not [item for item in pass_time(world, 30.0) if isinstance(item, said)]
    world.finish("a")
    assert [item for item in pass_time(world, 45.0) if isinstance(item, act.DrainReplica)]
    world = build.world(PLAN, known=facts(None))
    assert not pass_time(world, 200.0)
