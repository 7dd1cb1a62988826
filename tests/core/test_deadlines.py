"""Late requests: where they are dispatched before a refusal, and how they yield."""

from __future__ import annotations

from dataclasses import replace

from brain_builders import World, assert_idle, facts, plan, request, template, world

from potluck.core.routing.capacity import AHEAD
from potluck.core.state.actions import Action, Refuse, Run
from potluck.core.state.events import CacheReported, RequestCancelled, Tick
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.values.types import Slo

SLO = Slo(2.0, 0.06)
PROMPT_S = 1e-4  # Seconds of a prompt token, as `brain_builders.facts` says.


def deadline_world(count: int, policy: Policy | None = None, slo: Slo | None = SLO) -> World:
    one = template("one", closed=(5.0, 5.0))
    fleet = plan([one], {("one", "near"): count}, {("one", "near", "closed"): (5.0, 5.0)})
    known = facts(fleet.templates, batch=64)
    models = {name: replace(model, slo=slo) for name, model in known.models.items()}
    replicas = {key: replace(replica, decode_first_s=0.01) for key, replica in known.replicas.items()}
    return world(fleet, policy or Policy(), replace(known, models=models, replicas=replicas))


def world_after_long_prompt(count: int) -> World:
    """Prompts are known to be long, and nobody is left."""
    there = deadline_world(count)
    there.arrive(request("before", prompt=5000))
    there.now_s = 0.5
    there.advance("before")
    there.now_s = 0.5 + 99 * 0.01
    there.advance("before")
    there.now_s = 0.0
    return there


def first_replicas(actions: list[Action]) -> list[str]:
    return [action.route.segments[0].replica for action in actions if isinstance(action, Run)]


def refused(actions: list[Action]) -> list[str]:
    return [action.request for action in actions if isinstance(action, Refuse)]


def queued_prefill_s(there: World) -> list[float]:
    return [view.open_prefill_tokens * PROMPT_S for view in there.brain.fleet.views.values()]


def test_request_still_within_its_objective_is_dispatched_beyond_the_queue_limit() -> None:
    """A replica with 0.52 s of prompts is full, but 0.4 s more are in time when a second is left of the objective."""
    there = world_after_long_prompt(1)
    there.arrive(request("first", prompt=5200))
    there.arrive(request("second", prompt=4000))
    assert set(there.jobs) == {"first"}
    assert queued_prefill_s(there)[0] > AHEAD * SLO.ttft_s
    there.now_s = 1.0
    assert first_replicas(there.tell(Tick())) == ["one@near#0/0"]
    assert set(there.jobs) == {"first", "second"}
    while there.jobs:
        there.finish(next(iter(there.jobs)))
    assert_idle(there.brain)


def test_request_that_would_miss_its_objective_everywhere_is_refused() -> None:
    there = world_after_long_prompt(1)
    there.arrive(request("first", prompt=12_000))
    there.arrive(request("second", prompt=9000))
    there.now_s = 1.0
    assert refused(there.tell(Tick())) == ["second"]
    assert set(there.jobs) == {"first"}


def test_late_request_goes_to_the_replica_that_prefills_it_first_counting_its_cache() -> None:
    there = world_after_long_prompt(2)
    for name, prompt in (("a", 9000), ("b", 11_000)):
        there.arrive(request(name, prompt=prompt))
    blocks = tuple(range(500))
    late = request("c", prompt=8000, blocks=blocks)
    there.arrive(late)
    assert "c" not in there.jobs
    there.now_s = 1.0
    # 0.9 + 0.8 s are not left; the other replica has 1.1 s before it, but nearly all of the prompt.
    holder = there.jobs["b"].run.route.segments[0].replica
    there.tell(CacheReported(holder, 1, blocks[:440]))
    first = there.jobs["a"].run.route.segments[0].replica
    assert holder != first
    there.brain.fleet.prefilled(there.brain.fleet.views[holder], 3000)
    assert first_replicas(there.tell(Tick())) == [holder]


def test_short_prompts_do_not_exceed_the_queue_limit_of_replicas() -> None:
    there = deadline_world(2)
    for number in range(200):
        there.arrive(request(str(number)))
    there.now_s = 1.0
    assert refused(there.tell(Tick()))
    assert all(item <= AHEAD * SLO.ttft_s + 1000 * PROMPT_S for item in queued_prefill_s(there))


def test_late_dispatch_goes_to_the_tenant_whose_turn_it_is() -> None:
    there = world_after_long_prompt(1)
    there.arrive(request("first", prompt=6000))
    there.arrive(request("second", prompt=6000)._replace(tenant="other"))
    there.now_s = 1.0
    assert refused(there.tell(Tick())) == ["second"]


def test_prompts_that_miss_their_objective_share_one_replica() -> None:
    there = deadline_world(3)
    (first,) = first_replicas(there.arrive(request("first", prompt=25_000)))
    (second,) = first_replicas(there.arrive(request("second", prompt=25_000)))
    assert second == first
    (short,) = first_replicas(there.arrive(request("short", prompt=1000)))
    assert short != first
    # Two of them are more than twice the objective.
    (third,) = first_replicas(there.arrive(request("third", prompt=25_000)))
    assert third != first


def test_late_prompt_goes_to_the_idle_prefill_replica_with_the_fewest_answers() -> None:
    there = deadline_world(2)
    there.arrive(request("a", prompt=20, output=2000))
    (first,) = first_replicas(there.arrive(request("b", prompt=3000, output=10)))
    (other,) = set(there.brain.fleet.views) - {first}
    there.arrive(request("c", prompt=20, output=10))
    for name in list(there.jobs):
        there.advance(name)
    counts = {name: view.open_requests for name, view in there.brain.fleet.views.items()}
    assert sorted(counts.values()) == [1, 2]
    (late,) = first_replicas(there.arrive(request("late", prompt=25_000)))
    assert counts[late] == 1, (counts, first, other)


def test_no_prompt_is_late_without_an_objective() -> None:
    there = deadline_world(2, slo=None)
    places = [first_replicas(there.arrive(request(str(number), prompt=25_000)))[0] for number in range(2)]
    assert len(set(places)) == 2


def test_cached_prefix_is_preferred_only_if_the_objective_allows_its_queue() -> None:
    """With an objective, a prompt is computed where fewer wait for it, though a little of it is cached elsewhere."""
    chosen = []
    for slo in (SLO, None):
        there = deadline_world(2, slo=slo)
        for number in range(24):
            there.arrive(request(str(number), prompt=16, output=100))
        for name in list(there.jobs):
            there.advance(name)
        views = there.brain.fleet.views
        busy, calm = sorted(views, key=lambda name: -views[name].open_requests)
        for name in [n for n, job in there.jobs.items() if job.run.route.segments[0].replica == calm]:
            there.ended[name] = "cancelled"
            there.tell(RequestCancelled(name))
        blocks = tuple(range(250))
        there.tell(CacheReported(busy, 1, blocks[:50]))
        (run,) = there.arrive(request("new", prompt=4000, blocks=blocks))
        assert isinstance(run, Run)
        chosen.append(run.route.decoder == busy)  # who lends what it holds does little
    assert chosen == [False, True]


def disaggregated_world(**known: float) -> World:
    """Prefill and decode on replicas of their own."""
    first = template("p", ("prefill",), prefill=(5.0, 5.0))
    second = template("d", ("decode",), decode=(5.0, 5.0))
    fleet = plan(
        [first, second],
        {("p", "near"): 1, ("d", "near"): 1},
        {("p", "near", "prefill"): (5.0, 5.0), ("d", "near", "decode"): (5.0, 5.0)},
        {("m", "near", "near"): (5.0, 5.0)},
    )
    made = facts(fleet.templates, batch=64)
    models = {name: replace(model, slo=SLO) for name, model in made.models.items()}
    replicas = {key: replace(replica, decode_first_s=0.01, **known) for key, replica in made.replicas.items()}
    return world(fleet, Policy(), replace(made, models=models, replicas=replicas))


def test_request_over_a_flow_that_meets_its_objective_exceeds_the_queue_limit() -> None:
    """0.95 s of prompts are ahead, more than the 0.9 that leave room; 0.5 s more is in time, 1.1 s is not."""
    there = disaggregated_world(prefill_fixed_s=0.3)
    assert first_replicas(there.arrive(request("first", prompt=9500, output=10))) == ["p@near#1/0"]
    assert there.arrive(request("late", prompt=11_000, output=10)) == []
    (run,) = there.arrive(request("second", prompt=5000, output=10))
    assert isinstance(run, Run)
    assert [segment.replica for segment in run.route.segments] == ["p@near#1/0", "d@near#0/0"]


def test_late_prompt_yields_and_is_not_counted_in_the_wait_of_others() -> None:
    there = disaggregated_world(alone_s_per_token=2 * PROMPT_S)
    (late,) = there.arrive(request("late", prompt=12_000))  # alone 2.4 s, of a pipeline's pace 1.2 s
    (short,) = there.arrive(request("short", prompt=3000))
    (long,) = there.arrive(request("long", prompt=9900))
    assert [run.yields for run in (late, short, long) if isinstance(run, Run)] == [True, False, False]
    view = there.brain.fleet.views["p@near#1/0"]
    assert view.yielding_tokens == 12_000
    there.advance("late")  # handed over
    assert view.yielding_tokens == 0
    (again,) = there.arrive(request("again", prompt=12_000))
    assert isinstance(again, Run)
    assert again.yields
    there.tell(RequestCancelled("again"))
    there.ended["again"] = "cancelled"
    while there.jobs:
        there.finish(next(iter(there.jobs)))
    assert_idle(there.brain)


def test_lone_prompts_in_a_pipeline_do_not_make_later_prompts_late() -> None:
    """A lone prompt of 9,000 tokens takes 1.8 s, twice what a full pipeline takes for one: that is no pace of lone
    prompts besides. With 2.5 times as long for each token of a full one it is late."""
    for pace, yields in ((2.0, False), (2.5, True)):
        there = disaggregated_world(alone_s_per_token=2 * PROMPT_S)
        there.brain.fleet.views["p@near#1/0"].pace = pace
        (run,) = there.arrive(request("one", prompt=9000))
        assert isinstance(run, Run)
        assert run.yields is yields


def test_decode_replica_prefills_only_if_its_answers_keep_their_tpot() -> None:
    """Answers of 100 tokens at 12 ms, of which 54 are allowed: 4.2 s of a prompt make 42 more, 4.3 s too many."""
    there = disaggregated_world(max_tokens=200_000)
    view = there.brain.fleet.views["d@near#0/0"]
    new = RequestState(request("new", prompt=1000, output=100))
    assert there.brain.admission.room.bears(view, new, 100_000)  # nobody is there
    for number in range(10):
        there.arrive(request(str(number), prompt=160, output=100))
    assert there.brain.admission.room.bears(view, new, 42_000)
    assert not there.brain.admission.room.bears(view, new, 43_000)


def test_prefills_on_a_decode_replica_accumulate_over_the_time_of_an_answer() -> None:
    """As above, 4.2 s of prompts are borne in the time of an answer, which is 100 tokens of 60 ms."""
    there = disaggregated_world(max_tokens=200_000)
    view, room = there.brain.fleet.views["d@near#0/0"], there.brain.admission.room
    for number in range(10):
        there.arrive(request(str(number), prompt=160, output=100))
    first = RequestState(request("first", prompt=30_000, output=100))
    first.last_tokens = 30_000
    room.borne(view, first)
    for passed_s, tokens in ((0.0, 12_000), (3.0, 27_000), (6.0, 42_000)):
        later = RequestState(
            request("later", output=100)._replace(arrival_s=first.request.arrival_s + passed_s)
        )
        assert room.bears(view, later, tokens)
        assert not room.bears(view, later, tokens + 1000)
