"""What a person orders: it is done, what follows is done, and rules do not undo it."""

from __future__ import annotations

import brain_builders as build

from potluck.core.scaling import FlipRole
from potluck.core.state.actions import DrainReplica, FlipReplica, Run, StartReplica, StopReplica
from potluck.core.state.events import OperatorOrdered, ReplicaLost, Tick

ONE = build.template("one", closed=(1.0,))
PAIR = build.template("two", ("prefill", "decode"), "combo", closed=(1.0,))
P, D = build.template("p", ("prefill",), prefill=(2.0,)), build.template("d", ("decode",), decode=(2.0,))
FLOW = build.plan(
    (P, D),
    {("p", "near"): 2, ("d", "near"): 1},
    {("p", "near", "prefill"): (1.0,), ("d", "near", "decode"): (1.0,)},
    {("m", "near", "near"): (1.0,)},
    longest=(100_000,),
)


def _closed(template: build.Template, count: int) -> build.Plan:
    name = template.name
    return build.plan(
        (template,), {(name, "near"): count}, {(name, "near", "closed"): (1.0,)}, longest=(9_000,)
    )


def test_a_drained_replica_ends_what_it_has_and_another_takes_its_place() -> None:
    world = build.world(_closed(ONE, 2))
    (run,) = world.arrive(build.request("a"))
    replica = run.route.decoder
    actions = world.tell(OperatorOrdered(replica, "drain"))
    assert DrainReplica(replica) in actions
    (start,) = [each for each in actions if isinstance(each, StartReplica)]
    assert start.member.id != replica
    assert "a" in world.jobs, "what is open goes on"
    for number in range(4):
        (other,) = world.arrive(build.request(f"b{number}"))
        assert other.route.decoder != replica
    world.drain_out(replica)
    assert replica not in world.members
    assert world.ended["a"] == "answered"
    assert world.tell(OperatorOrdered(replica, "drain")) == [], "it is gone"


def test_a_cordoned_replica_keeps_what_it_has_and_gets_nothing_new_until_that_is_over() -> None:
    world = build.world(_closed(ONE, 2))
    (run,) = world.arrive(build.request("a"))
    replica = run.route.decoder
    assert world.tell(OperatorOrdered(replica, "cordon")) == [], "nobody is started in its place"
    assert "a" in world.jobs
    for number in range(4):
        (other,) = world.arrive(build.request(f"b{number}"))
        assert other.route.decoder != replica
    assert world.tell(Tick()) == []
    world.finish("a")
    assert world.ended["a"] == "answered"
    assert world.tell(OperatorOrdered(replica, "uncordon")) == []
    (last,) = world.arrive(build.request("c"))
    assert last.route.decoder == replica, "the other one has four"


def test_what_comes_while_all_are_cordoned_waits_until_one_is_not() -> None:
    world = build.world(_closed(ONE, 1))
    (replica,) = world.members
    world.tell(OperatorOrdered(replica, "cordon"))
    assert world.arrive(build.request("a")) == []
    (run,) = world.tell(OperatorOrdered(replica, "uncordon"))
    assert isinstance(run, Run)
    assert run.route.decoder == replica


def test_a_copy_of_which_one_is_cordoned_gets_nothing_new() -> None:
    world = build.world(_closed(PAIR, 2))
    away = sorted(world.members)[0]
    world.tell(OperatorOrdered(away, "cordon"))
    for number in range(4):
        (run,) = world.arrive(build.request(f"b{number}"))
        assert away not in [segment.replica for segment in run.route.segments]


def test_a_copys_replicas_go_together() -> None:
    world = build.world(_closed(PAIR, 1))
    first, second = sorted(world.members)
    assert {
        each.replica for each in world.tell(OperatorOrdered(first, "drain")) if isinstance(each, DrainReplica)
    } == {
        first,
        second,
    }
    for replica in (first, second):
        world.drain_out(replica)
    assert len(world.members) == 2
    assert not {first, second} & world.members.keys()


def test_a_replica_that_is_not_ready_takes_no_orders() -> None:
    world = build.world(_closed(ONE, 1), ready=False)
    (replica,) = world.members
    assert world.tell(OperatorOrdered(replica, "drain")) == []
    assert world.tell(OperatorOrdered("nobody", "decode")) == []


def test_a_role_by_hand_outlasts_rules_and_plans_until_it_is_given_back() -> None:
    world = build.world(FLOW)
    replica = next(name for name in world.members if name.startswith("p@"))
    assert world.tell(OperatorOrdered(replica, "decode")) == [FlipReplica(replica, "decode")]
    autoscaler = world.brain.autoscaler
    autoscaler.watches = True

    class Flips:
        def on_tick(self, *_: object) -> tuple[FlipRole, ...]:
            return (FlipRole(replica, "prefill", "a shift"),)

    autoscaler._scaler = Flips()  # type: ignore[assignment]
    assert not [each for each in world.tell(Tick()) if isinstance(each, FlipReplica)]
    assert not [each for each in world.plan(FLOW) if isinstance(each, FlipReplica | StopReplica)]
    assert world.brain.fleet.views[replica].role == "decode"
    assert world.tell(OperatorOrdered(replica, "prefill")) == [FlipReplica(replica, "prefill")]
    assert autoscaler.by_hand == {}
    world.brain.fleet.flip(replica, "decode")
    assert FlipReplica(replica, "prefill") in world.tell(Tick()), "the rules decide again"


def test_what_was_lost_just_before_an_order_is_replaced_all_the_same() -> None:
    world = build.world(FLOW)
    lost = next(name for name in world.members if name.startswith("d@"))
    flipped = next(name for name in world.members if name.startswith("p@"))
    world.tell(Tick())
    actions = world.tell(ReplicaLost(lost, "died"))
    actions += world.tell(OperatorOrdered(flipped, "decode"))
    for _ in range(3):
        actions += world.tell(Tick())
    assert [each.member.template for each in actions if isinstance(each, StartReplica)] == ["d"]
