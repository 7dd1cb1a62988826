"""Requests with a grammar are refused if the grammar may have crashed a replica, else retried."""

from __future__ import annotations

import brain_builders as build
import pytest

from potluck.core.state import actions as act
from potluck.core.state import events
from potluck.core.values.types import Request
from potluck.gateway.workers.brain_client import event_of, event_text
from potluck.runtime.log_lines import line, read_line

ONE = build.template("one", closed=(1.0,))
MANY = build.plan((ONE,), {("one", "near"): 4}, {("one", "near", "closed"): (4.0,)}, longest=(200_000,))
P = build.template("p", ("prefill",), prefill=(9.0,))
D = build.template("d", ("decode",), decode=(9.0,))
SPLIT = build.plan(
    (P, D),
    {("p", "near"): 2, ("d", "near"): 2},
    {("p", "near", "prefill"): (18.0,), ("d", "near", "decode"): (18.0,)},
    {("m", "near", "near"): (18.0,)},
    longest=(100_000,),
)


def with_grammar(name: str = "a") -> Request:
    return build.request(name)._replace(grammar=True)


def dispatched_run(actions: list[act.Action]) -> act.Run:
    (run,) = [action for action in actions if isinstance(action, act.Run)]
    return run


@pytest.mark.parametrize("kind", ["replica", "timeout"])
def test_request_with_grammar_lost_before_its_first_token_is_refused(kind: events.FailureKind) -> None:
    world = build.world(MANY)
    run = dispatched_run(world.arrive(with_grammar()))
    actions = world.fail("a", kind, run.route.decoder)
    assert not [item for item in actions if isinstance(item, act.Run)]
    (refusal,) = [item for item in actions if isinstance(item, act.Refuse)]
    assert (refusal.request, refusal.reason) == ("a", "grammar")
    assert "before the first token" in refusal.detail
    assert "\n" not in refusal.detail
    build.assert_idle(world.brain)


def test_other_requests_on_the_same_replica_are_retried() -> None:
    world = build.world(MANY)
    runs = {name: dispatched_run(world.arrive(build.request(name))) for name in ("b", "c", "d", "e")}
    bomb = dispatched_run(world.arrive(with_grammar()))
    lost = bomb.route.decoder
    fellows = [name for name, run in runs.items() if run.route.decoder == lost]
    assert fellows
    world.fail("a", "replica", lost)
    for name in fellows:
        again = dispatched_run(world.fail(name, "replica", lost))
        assert again.route.decoder != lost
    for name in runs:
        world.finish(name)
    build.assert_idle(world.brain)


@pytest.mark.parametrize(
    "how", ["streamed", "first token", "rejected", "link", "memory", "elsewhere", "no grammar"]
)
def test_request_whose_grammar_is_not_to_blame_is_retried(how: str) -> None:
    world = build.world(MANY)
    run = dispatched_run(world.arrive(with_grammar() if how != "no grammar" else build.request("a")))
    where = run.route.decoder
    if how == "first token":
        world.advance("a")
    streamed = 3 if how == "streamed" else 0
    kind: events.FailureKind = "replica"
    if how in ("link", "memory"):
        kind = how  # type: ignore[assignment]
    elif how == "elsewhere":
        where = "one@near#3/0" if where != "one@near#3/0" else "one@near#0/0"
    del world.jobs["a"]
    failed = events.AttemptFailed("a", run.attempt, kind, where, streamed, rejected=how == "rejected")
    assert dispatched_run(world.tell(failed)).attempt == 1
    world.finish("a")
    build.assert_idle(world.brain)


def test_replica_that_only_prefills_compiles_no_grammar() -> None:
    for lost_place, retried in ((0, True), (1, False)):
        world = build.world(SPLIT)
        run = dispatched_run(world.arrive(with_grammar()))
        assert len(run.route.segments) == 2
        actions = world.fail("a", "replica", run.route.segments[lost_place].replica)
        assert bool([item for item in actions if isinstance(item, act.Run)]) is retried
        assert bool([item for item in actions if isinstance(item, act.Refuse)]) is not retried


def test_retried_grammar_that_then_loses_its_replica_is_refused() -> None:
    world = build.world(MANY)
    run = dispatched_run(world.arrive(with_grammar()))
    del world.jobs["a"]
    again = dispatched_run(
        world.tell(events.AttemptFailed("a", 0, "replica", run.route.decoder, 0, rejected=True))
    )
    (refusal,) = [
        item for item in world.fail("a", "replica", again.route.decoder) if isinstance(item, act.Refuse)
    ]
    assert refusal.reason == "grammar"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("grammar", [False, True])
def test_logs_and_worker_events_keep_the_grammar_of_a_request(exact: bool, grammar: bool) -> None:
    request = build.request("a", blocks=(1, 2))._replace(exact=exact, grammar=grammar)
    for event in (
        events.RequestArrived(request),
        events.RequestAdopted(request, 1, 2, None),
        events.AttemptFailed("a", 1, "replica", "x", 0, grammar),
    ):
        assert read_line(line(1.0, event, ()), "log") == (1.0, event, [])
        assert event_of(event_text(event)) == event
